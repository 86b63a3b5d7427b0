"""Answers that begin in the request, for every family: the prompt is what transformers writes with
``continue_final_message``, cut answers go on token by token, and what can't be continued is refused."""

from __future__ import annotations

from typing import Any

import pytest

from agentcore_rl_toolkit.errors import RenderError
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records
from gateway.support import client_of, serving

from .drift import ALLOWED
from .families import ARGUMENTS, LOOKUP, Family, Message, Said

BEGINNING = "The answer is"
USER = {"role": "user", "content": "What is 6 * 7?"}
MORE = {"role": "user", "content": "And 6 * 8?"}


def histories(family: Family) -> list[list[Message]]:
    """Conversations that end before an answer."""
    found = [
        [USER],
        [{"role": "system", "content": "Be brief."}, USER],
        [USER, Said("42.").message(arguments_as_text=False), MORE],
    ]
    if family.renders_calls:
        asked = Said(calls=(ARGUMENTS,)).message(arguments_as_text=family.arguments_as_text)
        result = {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "cloudy"}
        found.append([USER, asked, result])
    return found


def continued(family: Family, messages: list[Message]) -> tuple[str, str]:
    """The prompt for an answer, and what transformers writes where the answer has begun."""
    whole = family.reference.apply_chat_template(
        [*messages, {"role": "assistant", "content": BEGINNING}],
        tools=[LOOKUP] if family.calls else None,
        continue_final_message=True,
        tokenize=False,
    )
    return family.text(messages, tools=family.calls), whole


def added(family: Family) -> str | None:
    """What follows the generation prompt; None where the template asks for an answer otherwise than it writes one."""
    asked, whole = continued(family, [USER])
    return whole.removeprefix(asked) if whole.startswith(asked) else None


def test_the_prompt_is_the_templates_own(family: Family):
    tools = [LOOKUP] if family.calls else []
    for messages in histories(family):
        if added(family) is None:
            with pytest.raises(RenderError, match="can't continue"):
                family.renderer.render(messages, tools, prefill=BEGINNING)
            continue
        asked, right = continued(family, messages)
        if not right.startswith(asked):  # Nemo drops the system prompt when an assistant's message is the last
            right = asked + str(added(family))
        ids = family.renderer.render(messages, tools, prefill=BEGINNING)
        assert family.decode(ids) == right
        assert ids == family.encode(right)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_rest_is_handed_out_and_the_row_goes_on(family: Family, stream: bool):
    stop = family.encode(family.emission(Said("42.")))[-1]
    first, last = (family.encode(family.emission(Said(text))) for text in ("Six times seven.", "Bye."))
    backend = ScriptedBackend([first, [*family.encode(" 42, or\n\n 6 * 7."), stop], last], chunk=1)
    async with serving(backend, rendered_by=family.renderer) as gateway, client_of(gateway) as client:
        said = await client.ask([USER], stream=stream)
        held = [USER, said, MORE]
        request = {"messages": [*held, {"role": "assistant", "content": BEGINNING}], "stream": stream}
        status, data = await client.post(request)
        if added(family) is None:
            assert (status, data["error"]["param"]) == (400, "messages")
            assert len(await gateway.finish_session(client.session.session_id)) == 1
            return
        assert status == 200, data
        rest = text_of(data, stream)
        assert rest == " 42, or\n\n 6 * 7."
        await client.ask([*held, {"role": "assistant", "content": BEGINNING + rest}, USER], stream=stream)
        rows = await gateway.finish_session(client.session.session_id)
    assert {row.metadata["fork"] for row in rows[1:]} <= set(ALLOWED.get(family.name, ()))
    prompts = [prompt for prompt, _ in backend.calls]
    assert family.decode(prompts[1]).endswith(BEGINNING)
    assert check_records(rows) == sum(row_tokens(rows))


def row_tokens(rows: list[Any]) -> list[int]:
    return [turn["span"][1] - turn["span"][0] for row in rows for turn in row.metadata["turns"] if turn["trained"]]


def text_of(data: Any, stream: bool) -> str:
    if not stream:
        return data["choices"][0]["message"]["content"]
    return "".join(c["delta"].get("content") or "" for event in data[:-1] for c in event["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_answer_goes_on_token_by_token(family: Family, stream: bool):
    """Cut anywhere in its text, behind its reasoning where there is one, and replayed with or without that."""
    said = Said("Forty-two, which is\n\n six times  seven.", reasoning="Hmmm." if family.reasons else None)
    tokens = family.encode(family.emission(said))
    end = family.encode(family.emission(Said("Bye.")))
    for cut in range(len(tokens) - 1, max(1, len(tokens) - 10), -2):
        backend = ScriptedBackend([tokens, tokens[cut:], end], chunk=1)
        async with serving(backend, rendered_by=family.renderer) as gateway, client_of(gateway) as client:
            begun = await client.ask([USER], stream=stream, max_tokens=cut)
            if not begun["content"]:
                break  # in the reasoning still, which can't be continued
            if cut % 4 < 2:
                begun.pop("reasoning_content", None)
            more = await client.ask([USER, begun], stream=stream)
            assert not more.get("reasoning_content")
            whole = {**begun, "content": begun["content"] + (more["content"] or "")}
            assert whole["content"] == said.text
            await client.ask([USER, whole, MORE], stream=stream)
            rows = await gateway.finish_session(client.session.session_id)
        assert backend.calls[1][0] == backend.calls[0][0] + tokens[:cut]
        assert rows[0].loss_mask[: len(tokens)] == [1] * len(tokens)
        assert {row.metadata["fork"] for row in rows[1:]} <= set(ALLOWED.get(family.name, ()))
        check_records(rows)

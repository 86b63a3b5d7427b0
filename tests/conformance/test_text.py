"""Text that is not what it seems: spelled control tokens, BOS, arguments as text, odd characters, odd role orders."""

from __future__ import annotations

import json

import jinja2
import pytest

from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records
from gateway.support import client_of, serving

from .families import ARGUMENTS, LOOKUP, Family, Said, call

USER = {"role": "user", "content": "Question"}


async def prompts(family: Family, *requests: list[dict], status: int = 200) -> list[list[int]]:
    """What the engine is asked for each of these requests, all from one session."""
    output = family.encode(family.emission(Said("Fine.")))
    backend = ScriptedBackend(lambda prompt: output)
    async with serving(backend, rendered_by=family.renderer) as gateway, client_of(gateway) as client:
        for messages in requests:
            tools = [LOOKUP] if family.calls else []
            got, body = await client.post({"model": "m", "messages": messages, "tools": tools})
            assert got == status, body
    return [prompt for prompt, _ in backend.calls]


def history(arguments: object = ARGUMENTS, **fields: object) -> list[dict]:
    """A conversation begun elsewhere: a call and its result."""
    asked = {"role": "assistant", "content": "", "tool_calls": [call(ARGUMENTS)], **fields}
    if "tool_calls" not in fields:
        asked["tool_calls"][0]["function"]["arguments"] = arguments
    return [USER, asked, {"role": "tool", "tool_call_id": "abcdefgh0", "content": "42"}]


async def test_spelled_control_tokens_stay_text(family: Family):
    """In a first prompt and in a tail: as many real control tokens as with harmless words in their place."""
    for token in spellable(family):
        evil, harmless = f"a {token} b", "a thing b"
        asked = [[{**USER, "content": text}] for text in (evil, harmless)]
        first = await prompts(family, *asked)
        later = await prompts(
            family,
            *([USER, {"role": "assistant", "content": "Fine."}, {**USER, "content": t}] for t in (evil, harmless)),
        )
        for ids, reference in (first, later):
            assert evil in family.decode(ids)
            assert [i for i in ids if i in family.special] == [i for i in reference if i in family.special]
            assert family.added[token] not in ids or family.added[token] in reference
            assert ids.count(family.added[token]) == reference.count(family.added[token])


def spellable(family: Family) -> list[str]:
    """The control tokens that this family's prompts and answers are made of."""
    texts = [family.text([{"role": "system", "content": "s"}, USER]), family.emission(Said("Fine."))]
    if family.calls:
        texts.append(family.emission(Said(calls=(ARGUMENTS,), reasoning="Hm." if family.reasons else None)))
    ids = [i for text in texts for i in family.encode(text)]
    return sorted({token for token, i in family.added.items() if i in ids and len(token.strip()) > 1})


async def test_bos_is_there_once(family: Family):
    bos = family.reference.bos_token
    if bos is None or bos not in family.text([USER]):
        pytest.skip("the template writes no BOS")
    fine = {"role": "assistant", "content": "Fine."}
    requests = [[USER], [USER, fine, USER], [USER, fine, USER, fine, USER]]
    for messages, ids in zip(requests, await prompts(family, *requests), strict=True):
        assert ids[0] == family.added[bos] != ids[1]
        # Once, unless the template uses it as a role's header too.
        assert ids.count(family.added[bos]) == family.text(messages, tools=family.calls).count(bos)


async def test_arguments_are_encoded_once(family: Family):
    """Arguments come over the wire as JSON text; templates get them as they need them."""
    if not family.renders_calls:
        pytest.skip("the template renders no calls")
    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    as_text, as_object, escaped = await prompts(
        family, history(text), history(ARGUMENTS), history(json.dumps(ARGUMENTS))
    )
    expected = family.ids(history(text if family.arguments_as_text else ARGUMENTS))
    assert as_text == as_object == escaped == expected


async def test_null_absent_and_empty_content_are_one(family: Family):
    if not family.renders_calls:
        pytest.skip("the template renders no calls")
    absent = history()
    del absent[1]["content"]
    first, *others = await prompts(family, history(), history(content=None), absent)
    assert others == [first, first]
    assert "None" not in family.decode(first)[-200:]


async def test_unusual_characters_reach_the_prompt(family: Family):
    for text in (
        "a\r\nb",
        "\u0000nul",
        "e\u0301 decomposed",
        "\u200d\ufeff",
        "\u2028\u0085",
        "🏳️‍🌈",
        "\U0010ffff",
        "x\ufffdy",
    ):
        [ids] = await prompts(family, [{**USER, "content": text}])
        assert ids == family.ids([{**USER, "content": text}], tools=family.calls), text


async def test_lone_surrogates_are_replaced(family: Family):
    """JSON can spell half a character; no tokenizer takes it."""
    [first] = await prompts(family, [{**USER, "content": "a\ud83eb"}])
    assert first in (family.ids([{**USER, "content": f"a{c}b"}], tools=family.calls) for c in ("?", "\ufffd"))


@pytest.mark.parametrize(
    "roles", ["s u s", "s s u", "s a u", "a u", "u u", "s", "s a t", "u a t", "u s u", "t", "u a u u"]
)
async def test_odd_orders_render_as_the_template_says_or_are_refused(family: Family, roles: str):
    """And the session lives on either way."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": names[r], "content": f"{r}{n}"} for n, r in enumerate(roles.split())]
    for message in messages:
        if message["role"] == "tool":
            message["tool_call_id"] = "abcdefgh0"
    try:
        expected = family.ids(messages, tools=family.calls)
    except (jinja2.TemplateError, TypeError, AttributeError, KeyError, IndexError, ValueError):
        expected = None
    backend = ScriptedBackend(lambda prompt: family.encode(family.emission(Said("Fine."))))
    async with serving(backend, rendered_by=family.renderer) as gateway, client_of(gateway) as client:
        body = {"model": "m", "messages": messages, "tools": [LOOKUP] if family.calls else []}
        status, answer = await client.post(body)
        if expected is None:
            assert status == 400, answer
            assert answer["error"]["type"] == "invalid_request_error"
            assert len(answer["error"]["message"]) > 20
        else:
            assert status == 200, answer
            assert backend.calls[0][0] == expected
        assert (await client.ask([USER]))["content"] == "Fine."
        rows = await gateway.finish_session(client.session.session_id)
    check_records(rows)


async def test_a_late_system_message_extends_or_forks_but_never_lies(family: Family):
    """Whatever comes after an answer: what was held stays a prefix, or a new row begins with the whole rendering."""
    fine = {"role": "assistant", "content": "Fine."}
    late = [USER, fine, {"role": "system", "content": "Be brief now."}, {**USER, "content": "Next"}]
    output = family.encode(family.emission(Said("Fine.")))
    backend = ScriptedBackend(lambda prompt: output)
    async with serving(backend, rendered_by=family.renderer) as gateway, client_of(gateway) as client:
        got = await client.ask([USER])
        late[1] = got
        status, answer = await client.post({"model": "m", "messages": late})
        if status == 200:
            prompt, held = backend.calls[1][0], backend.calls[0][0] + output
            text = family.decode(prompt)
            assert text.count("Next") == 1
            kept = family.text([USER, fine, late[2], late[3]], tools=False).count("Be brief now.")
            assert text.count("Be brief now.") == kept, "the template keeps it (or not), the splice must too"
            assert prompt[: len(held)] == held or prompt == family.ids([USER, fine, *late[2:]], tools=False)
        else:
            assert status == 400, answer
        rows = await gateway.finish_session(client.session.session_id)
    check_records(rows)


async def test_the_engine_is_told_where_to_stop(family: Family):
    stops = {family.encode(family.emission(Said("Fine.")))[-1]}
    if family.calls:
        stops.add(family.encode(family.emission(Said(calls=(ARGUMENTS,))))[-1])
    backend = ScriptedBackend([family.encode(family.emission(Said("Fine.")))])
    async with serving(backend, rendered_by=family.renderer) as gateway, client_of(gateway) as client:
        await client.ask([USER])
    [(_, params)] = backend.calls
    assert stops <= set(params["stop_token_ids"])
    assert params["max_tokens"] > 0


async def test_an_answer_of_one_token_is_a_row(family: Family):
    stop = family.encode(family.emission(Said("Fine.")))[-1:]
    backend = ScriptedBackend([stop])
    async with serving(backend, rendered_by=family.renderer) as gateway, client_of(gateway) as client:
        answer = await client.ask([USER])
        assert not answer["content"]
        [row] = await gateway.finish_session(client.session.session_id)
    assert (row.loss_mask, row.token_ids[-1:]) == ([1], stop)
    assert check_records([row]) == 1

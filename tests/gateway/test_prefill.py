"""An assistant's message at the end of a request is continued. Prompts are compared with transformers' rendering."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer, Status
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records

from .support import CALCULATOR, TINY, client_of, encode, renderer, serving
from .wires import WIRES

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 1+1?"}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression":  "1+1"}}\n</tool_call><|im_end|>'
OPEN_REASONING = r"""{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content -%}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif -%}
{{ m.content + '<|im_end|>\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}"""


def scripted(*answers: str | list[int]) -> ScriptedBackend:
    return ScriptedBackend([encode(a) if isinstance(a, str) else a for a in answers], chunk=1)


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@functools.cache
def _reference() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(TINY)


def continued(messages: list[dict[str, Any]], **fields: Any) -> list[int]:
    """The prompt by transformers."""
    return _reference().apply_chat_template(
        messages, tools=fields.get("tools"), continue_final_message=True, tokenize=True, return_dict=False
    )


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("history", ["preserve", "template"])
async def test_the_answer_goes_on_and_its_replay_continues_the_row(wire, stream, history):
    said = ["Hi.", " 2, of course.", "Bye."]
    backend = scripted(*(f"{text}<|im_end|>" for text in said))
    asked = [SYSTEM, USER, assistant("The answer is")]
    async with serving(backend, history=history) as gateway, client_of(gateway) as client:
        talker = WIRES[wire](client)
        first = await talker.ask([SYSTEM, USER], stream=stream)
        held = [SYSTEM, USER, first, USER]
        rest = await talker.ask([*held, assistant("The answer is")], stream=stream)
        assert rest["content"] == said[1]
        whole = [*held, assistant("The answer is" + rest["content"])]
        last = await talker.ask([*whole, USER], stream=stream)
        assert last["content"] == "Bye."
        [row] = await gateway.finish_session(client.session.session_id)
    prompts = [prompt for prompt, _ in backend.calls]
    assert prompts[1] == continued([*held, assistant("The answer is")])
    assert prompts[2] == prompts[1] + encode(f"{said[1]}<|im_end|>") + encode(
        "\n<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert row.metadata["fork"] is None
    assert check_records([row]) == sum(len(encode(f"{text}<|im_end|>")) for text in said)
    # What the client wrote is context, what was sampled behind it is trained.
    [_, second, _] = row.metadata["turns"]
    start, end = second["span"]
    assert row.token_ids[row.prompt_length + start :][: end - start] == encode(f"{said[1]}<|im_end|>")
    assert row.loss_mask[start - len(encode("The answer is")) : start] == [0] * len(encode("The answer is"))
    assert asked[-1]["content"] in gateway.renderer.decode(prompts[1])


@pytest.mark.parametrize("beginning", ["The answer is", "The answer is ", "  two", "é\n\n", "<", "a <|im_end|> b", "{"])
async def test_a_first_prompt_is_the_templates_own(wire, stream, beginning):
    backend = scripted(" yes <b> {}<|im_end|>", "ok<|im_end|>")
    async with serving(backend) as gateway, client_of(gateway) as client:
        talker = WIRES[wire](client)
        messages = [SYSTEM, USER, assistant(beginning)]
        rest = await talker.ask(messages, tools=[CALCULATOR], stream=stream)
        whole = beginning + rest["content"]
        await talker.ask([SYSTEM, USER, assistant(whole), USER], tools=[CALCULATOR], stream=stream)
        rows = await gateway.finish_session(client.session.session_id)
    prompt = backend.calls[0][0]
    asked = _reference().apply_chat_template(
        [SYSTEM, USER], tools=[CALCULATOR], add_generation_prompt=True, tokenize=False
    )
    assert gateway.renderer.decode(prompt) == asked + beginning
    if "<|im_end|>" not in beginning:  # there, it is ordinary text
        assert prompt == continued(messages, tools=[CALCULATOR])
    assert prompt.count(encode("<|im_end|>")[0]) == 2
    assert rest["content"].strip() == "yes <b> {}"
    assert [row.metadata["fork"] for row in rows] == [None]
    check_records(rows)


async def test_what_is_sampled_keeps_the_space_it_begins_with(stream):
    backend = scripted("\n\n  indented<|im_end|>")
    async with serving(backend) as gateway, client_of(gateway) as client:
        rest = await client.ask([USER, assistant("def f():")], stream=stream)
    assert rest["content"] == "\n\n  indented"


async def test_a_call_may_follow_the_beginning(wire, stream):
    backend = scripted(CALL, "It is 2.<|im_end|>")
    async with serving(backend) as gateway, client_of(gateway) as client:
        talker = WIRES[wire](client)
        messages = [USER, assistant("Let me see.")]
        answer = await talker.ask(messages, tools=[CALCULATOR], stream=stream)
        assert not answer.get("content")
        [call] = answer["tool_calls"]
        answer["content"] = "Let me see."
        result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
        final = await talker.ask([USER, answer, result], tools=[CALCULATOR], stream=stream)
        assert final["content"] == "It is 2."
        [row] = await gateway.finish_session(client.session.session_id)
    assert check_records([row]) == len(encode(CALL)) + len(encode("It is 2.<|im_end|>"))


async def test_a_cut_answer_goes_on_token_by_token(wire, stream):
    # Sampled letter by letter: its text, tokenized again, would be other tokens.
    odd = [token for letter in "hello there" for token in encode(letter)]
    assert odd != encode("hello there")
    rest = encode(", you.<|im_end|>")
    backend = scripted(odd + rest, rest, "Bye.<|im_end|>")
    async with serving(backend) as gateway, client_of(gateway) as client:
        talker = WIRES[wire](client)
        cut = await talker.ask([USER], stream=stream, max_tokens=len(odd))
        assert cut["content"] == "hello there"
        more = await talker.ask([USER, cut], stream=stream)
        assert more["content"] == ", you."
        await talker.ask([USER, assistant("hello there, you."), USER], stream=stream)
        [row] = await gateway.finish_session(client.session.session_id)
    first, second, third = (prompt for prompt, _ in backend.calls)
    assert second == first + odd
    assert third[: len(second + rest)] == second + rest
    assert row.metadata["fork"] is None
    assert row.status == Status.COMPLETED
    assert row.loss_mask[: len(odd + rest)] == [1] * len(odd + rest)
    assert check_records([row]) == len(odd + rest) + len(encode("Bye.<|im_end|>"))


async def test_an_answer_that_is_cut_again_and_again_is_one_row(stream):
    tokens = encode("one two three four five six<|im_end|>")
    cuts = [tokens[i : i + 3] for i in range(0, len(tokens), 3)]
    backend = scripted(*([*cut, 0] if cut is not cuts[-1] else cut for cut in cuts))
    async with serving(backend) as gateway, client_of(gateway) as client:
        said = ""
        for _ in cuts:
            beginning = [assistant(said)] if said else []
            said += (await client.ask([USER, *beginning], stream=stream, max_tokens=3))["content"]
        assert said == "one two three four five six"
        [row] = await gateway.finish_session(client.session.session_id)
    assert row.token_ids[row.prompt_length :] == tokens
    assert row.loss_mask == [1] * len(tokens)
    check_records([row])


async def test_a_cut_answer_whose_text_was_changed_is_a_beginning_like_any_other(stream):
    backend = scripted("hello there<|im_end|>", " more<|im_end|>")
    async with serving(backend) as gateway, client_of(gateway) as client:
        await client.ask([USER], stream=stream, max_tokens=2)
        await client.ask([USER, assistant("something else")], stream=stream)
        rows = await gateway.finish_session(client.session.session_id)
    assert backend.calls[1][0] == continued([USER, assistant("something else")])
    assert [row.status for row in rows] == [Status.TRUNCATED, Status.COMPLETED]
    check_records(rows)


@pytest.mark.parametrize(
    ("sampled", "fields"), [("Two.<|im_end|>", {}), ("Two. END", {"stop": "END"})], ids=["complete", "stopped"]
)
async def test_only_an_answer_that_a_limit_cut_goes_on_by_its_tokens(stream, sampled, fields):
    """Behind a stop token, or a stop string that the client never saw, there is nothing to go on with."""
    backend = scripted(sampled, " Or so.<|im_end|>")
    async with serving(backend) as gateway, client_of(gateway) as client:
        said = await client.ask([USER], stream=stream, **fields)
        assert said["content"].strip() == "Two."
        rest = await client.ask([USER, said], stream=stream)
        assert rest["content"] == " Or so."
        rows = await gateway.finish_session(client.session.session_id)
    assert backend.calls[1][0] == continued([USER, said])
    assert len(rows) == 2
    check_records(rows)


@pytest.mark.parametrize("beginning", ["It is", "  It is", "\n\nIt is ", " ", "\n"])
async def test_space_that_a_format_owns_is_not_counted_twice(stream, beginning):
    """This template closes the reasoning in front of every answer; what stands there is no part of the text."""
    source = OPEN_REASONING.replace("m.reasoning_content -", "m.role == 'assistant' -").replace(
        "m.reasoning_content +", "(m.reasoning_content or '') +"
    )
    closing = HfTemplateRenderer(TINY, chat_template=source)
    backend = scripted("two, so.<|im_end|>", "Hm.\n</think>\n\nBye.<|im_end|>")
    async with serving(backend, rendered_by=closing) as gateway, client_of(gateway) as client:
        rest = await client.ask([USER, assistant(beginning)], stream=stream)
        assert rest == {"role": "assistant", "content": "two, so."}
        await client.ask([USER, assistant(beginning + rest["content"]), USER], stream=stream)
        [row] = await gateway.finish_session(client.session.session_id)
    assert gateway.renderer.decode(backend.calls[0][0]).endswith(f"<think>\n\n</think>\n\n{beginning}")
    assert len(row.metadata["turns"]) == 2
    check_records([row])


async def test_a_retry_gets_the_same_rest_again(wire, stream):
    backend = scripted(" two.<|im_end|>")
    async with serving(backend) as gateway, client_of(gateway) as client:
        talker = WIRES[wire](client)
        body = talker.body([USER, assistant("It is")], stream=stream)
        first = await talker.post(body)
        again = await talker.post(body, headers={"x-stainless-retry-count": "1"})
        rows = await gateway.finish_session(client.session.session_id)
    assert [talker.message(data)["content"] for _, data in (first, again)] == [" two."] * 2
    assert len(backend.calls) == len(rows) == 1


FIELD = {"chat": "messages", "anthropic": "messages", "responses": "input"}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([USER, assistant("a"), assistant("b")], "follow each other"),
        ([assistant("a")], "continued"),
        ([USER, {**assistant("a"), "reasoning_content": "Hm."}], "reasoning"),
        (
            [
                USER,
                {
                    **assistant("a"),
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": "{}"}}
                    ],
                },
            ],
            "no tool calls",
        ),
    ],
)
async def test_what_cannot_be_continued_names_the_field(wire, stream, messages, words):
    async with serving(scripted("a<|im_end|>")) as gateway, client_of(gateway) as client:
        talker = WIRES[wire](client)
        if wire == "responses" and messages[1:-1]:
            pytest.skip("items that follow each other are one message there")
        await talker.ask([USER])  # the second case then finds its first part held
        status, data = await talker.post(talker.body(messages, stream=stream))
        assert (status, words in talker.error(data)) == (400, True), data
        assert FIELD[wire] in talker.error(data)
        assert data["error"].get("param", FIELD[wire]) == FIELD[wire]
        assert len(await gateway.finish_session(client.session.session_id)) == 1


async def test_a_template_that_opens_reasoning_cannot(wire, stream):
    opening = HfTemplateRenderer(TINY, chat_template=OPEN_REASONING)
    backend = scripted("Hm.\n</think>\n\nTwo.<|im_end|>", "Hm.\n</think>\n\nThree.<|im_end|>")
    async with serving(backend, rendered_by=opening) as gateway, client_of(gateway) as client:
        talker = WIRES[wire](client)
        status, data = await talker.post(talker.body([USER, assistant("It is")], stream=stream))
        assert (status, "template" in talker.error(data)) == (400, True), data
        assert data["error"].get("param", FIELD[wire]) == FIELD[wire]
        assert (await talker.ask([USER], stream=stream))["content"] == "Two."
        assert len(await gateway.finish_session(client.session.session_id)) == 1


async def test_reasoning_before_the_cut_is_replayed_or_not(stream):
    """Where the cut came in the text, the reasoning before it is no part of what follows."""
    thinking = HfTemplateRenderer(TINY, chat_template=OPEN_REASONING)
    begun, rest = encode("Hm.\n</think>\n\nIt is"), encode(" two.<|im_end|>")
    for replayed in (True, False):
        backend = scripted(begun + rest, rest, "Hm.\n</think>\n\nBye.<|im_end|>")
        async with serving(backend, rendered_by=thinking) as gateway, client_of(gateway) as client:
            cut = await client.ask([USER], stream=stream, max_tokens=len(begun))
            assert cut == {"role": "assistant", "content": "It is", "reasoning_content": "Hm."}
            if not replayed:
                del cut["reasoning_content"]
            more = await client.ask([USER, cut], stream=stream)
            assert more == {"role": "assistant", "content": " two."}
            await client.ask([USER, {**cut, "content": "It is two."}, USER], stream=stream)
            [row] = await gateway.finish_session(client.session.session_id)
        assert row.token_ids[row.prompt_length :][: len(begun + rest)] == begun + rest
        assert len(row.metadata["turns"]) == 3
        check_records([row])


async def test_what_is_counted_is_the_prompt_that_is_sent(stream):
    backend = scripted("x<|im_end|>")
    async with serving(backend) as gateway, client_of(gateway) as client:
        talker = WIRES["anthropic"](client)
        body = talker.body([USER, assistant("It is")], stream=stream)
        status, counted = await talker.post(body, path="/messages/count_tokens")
        assert status == 200
        await talker.post(body)
    assert counted["input_tokens"] == len(backend.calls[0][0])
    assert renderer(TINY).decode(backend.calls[0][0]).endswith("assistant\nIt is")

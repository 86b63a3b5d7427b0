"""Completions over real HTTP: prompts that the client rendered itself, as text or as token ids."""

from __future__ import annotations

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcore_rl_toolkit.rollout_gateway.completions import PlainText
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records, oracle_logprobs

from .support import TINY, client_of, encode, renderer, serving
from .test_wire_anthropic import scripted
from .wires import Chat, Talker

PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


class Completions(Talker):
    path = "/completions"


async def test_whole_and_streamed_answers():
    output = encode("one é two<|im_end|>")
    backend = ScriptedBackend([output] * 2, chunk=1)
    request = {"model": "m", "prompt": PROMPT, "max_tokens": 50, "logprobs": 0, "return_token_ids": True}
    async with serving(backend) as gateway, client_of(gateway) as client:
        _, whole = await Completions(client).post(request)
        request |= {"stream": True, "stream_options": {"include_usage": True}}
        _, stream = await Completions(client).post(request)
    assert backend.calls[0][0] == encode(PROMPT)
    usage = {"prompt_tokens": len(encode(PROMPT)), "completion_tokens": len(output)}
    usage["total_tokens"] = sum(usage.values())
    [choice] = whole.pop("choices")
    assert whole == {
        "id": whole["id"],
        "object": "text_completion",
        "created": whole["created"],
        "model": "m",
        "usage": usage,
    }
    logprobs = choice.pop("logprobs")
    assert choice == {"index": 0, "text": "one é two", "finish_reason": "stop", "token_ids": output}
    assert logprobs["token_logprobs"] == oracle_logprobs(encode(PROMPT), output)
    assert "".join(logprobs["tokens"][:3]) == renderer(TINY).decode(output[:3])
    *chunks, end, last, done = stream
    assert done == {"done": True}
    assert last["usage"] == usage
    assert last["choices"] == []
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one é two"
    assert len(chunks) > 3
    assert end["choices"] == [
        {"index": 0, "text": "", "finish_reason": "stop", "token_ids": output, "logprobs": logprobs}
    ]


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_goes_on_from_held_tokens_continues_the_row(as_text, stream):
    # Sampled another way than the tokenizer would write it: tokenizing its text again would be wrong.
    odd = [token for letter in "hello there" for token in encode(letter)]
    assert odd != encode("hello there")
    backend = ScriptedBackend([[*odd, *encode("<|im_end|>")], odd, encode("end<|im_end|>")])
    async with serving(backend) as gateway, client_of(gateway) as client:
        prompt = PROMPT if as_text else encode(PROMPT)
        for turn in range(3):
            limit = {"max_tokens": 3} if turn == 1 else {}
            _, data = await Completions(client).post(
                {"prompt": prompt, "stream": stream, "return_token_ids": True, **limit}
            )
            if stream:
                choices = [choice for event in data[:-1] for choice in event["choices"]]
                text, end = "".join(choice["text"] for choice in choices), choices[-1]
            else:
                [end] = data["choices"]
                text = end["text"]
            assert end["finish_reason"] == ("length" if limit else "stop")
            if as_text:
                prompt += text + NEXT
            else:
                ids = end["token_ids"]
                closing = [] if ids[-1] == encode("<|im_end|>")[0] else encode("<|im_end|>")
                prompt = prompt + ids + closing + encode(NEXT.removeprefix("<|im_end|>"))
        rows = await gateway.finish_session(client.session.session_id)
    [row] = rows
    assert row.metadata["fork"] is None
    assert row.token_ids[len(encode(PROMPT)) :][: len(odd)] == odd
    assert check_records(rows) == len(odd) + 1 + 3 + len(encode("end<|im_end|>"))


async def test_other_prompts_are_rows_of_their_own_beside_chats():
    backend = ScriptedBackend(lambda prompt: encode(f"n{len(prompt)}<|im_end|>"))
    async with serving(backend) as gateway, client_of(gateway) as client:
        said = await Chat(client).ask([{"role": "user", "content": "hi"}])
        await Completions(client).post({"prompt": "unlike"})
        await Completions(client).post({"prompt": ["unlike"]})
        chat_ids = backend.calls[0][0] + encode(f"{said['content']}<|im_end|>")
        await Completions(client).post({"prompt": [[*chat_ids, *encode(NEXT)]]})
        rows = await gateway.finish_session(client.session.session_id)
    assert [row.metadata["fork"] for row in rows] == ["new_conversation", "retry", None]
    assert rows[2].token_ids[: len(chat_ids)] == chat_ids
    assert check_records(rows, sampled_twice=True) == sum(len(encode(f"n{len(p)}<|im_end|>")) for p, _ in backend.calls)


async def test_several_choices_stop_strings_and_retries():
    backend = scripted("one END x<|im_end|>", "two END x<|im_end|>")
    request = {"prompt": PROMPT, "n": 2, "stop": "END"}
    async with serving(backend) as gateway, client_of(gateway) as client:
        _, data = await Completions(client).post(request)
        _, again = await Completions(client).post(request, headers={"x-stainless-retry-count": "2"})
        rows = await gateway.finish_session(client.session.session_id)
    assert [(c["index"], c["text"], c["finish_reason"]) for c in data["choices"]] == [
        (0, "one ", "stop"),
        (1, "two ", "stop"),
    ]
    assert again["choices"] == data["choices"]
    assert len(rows) == 2
    assert check_records(rows) == len(encode("one END x<|im_end|>") + encode("two END x<|im_end|>"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": [1]}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
async def test_bad_requests_name_the_field(fields, param):
    async with serving(ScriptedBackend([])) as gateway, client_of(gateway) as client:
        status, data = await Completions(client).post({"prompt": "hi"} | fields)
        assert (status, data["error"]["param"]) == (400, param)
        assert await gateway.finish_session(client.session.session_id) == []


async def test_a_prompt_over_the_window():
    async with serving(ScriptedBackend([])) as gateway, client_of(gateway, max_context_tokens=5) as client:
        status, data = await Completions(client).post({"prompt": [1] * 5})
        assert (status, data["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 5 tokens" in data["error"]["message"]


async def test_the_vendors_sdk_talks_to_it():
    async with (
        serving(scripted("x y<|im_end|>", "x y<|im_end|>")) as gateway,
        client_of(gateway) as client,
        openai.AsyncOpenAI(base_url=client.session.base_url, api_key="EMPTY") as sdk,
    ):
        whole = await sdk.completions.create(model="m", prompt=[1, 2, 3])
        stream = await sdk.completions.create(model="m", prompt="hi", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        models = await sdk.models.list()
    assert whole.choices[0].text == text == "x y"
    assert models.data[0].id == "policy"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=20), st.lists(st.integers(1, 5), min_size=20, max_size=20))
def test_text_in_pieces_is_the_whole_text(ids, cuts):
    parser, position, text = PlainText(renderer(TINY)), 0, ""
    for cut in cuts:
        for delta in parser.feed(ids[position : position + cut]):
            text += delta.text
        position += cut
    deltas, message = parser.finish("stop")
    text += "".join(delta.text for delta in deltas)
    stops = renderer(TINY).stop_token_ids
    whole = renderer(TINY).decode(ids[:-1] if ids and ids[-1] in stops else ids)
    assert text == message.content == whole

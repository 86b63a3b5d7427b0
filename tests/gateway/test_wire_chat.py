"""OpenAI chat completions over real HTTP: what becomes of every field, exact events, other paths and methods."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import aiohttp
import pytest

from agentcore_rl_toolkit.errors import EngineError
from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer, endpoints, server
from agentcore_rl_toolkit.rollout_gateway.parsed import ContentDelta
from agentcore_rl_toolkit.rollout_gateway.render.base import Renderer
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records
from agentcore_rl_toolkit.rollout_gateway.wires.base import RESERVED

from .support import CALCULATOR, TINY, GenerateOnly, client_of, encode, serving
from .test_wire_anthropic import THINKING, call, scripted
from .wires import WIRES, Chat

USER = {"role": "user", "content": "What is 1+1?"}


async def test_streamed_answers_in_every_event():
    text = f"<think>\nadd\n</think>\n\nSure.\n{call('{}')}\n{call('{}')}<|im_end|>"
    rendered_by = HfTemplateRenderer(TINY, chat_template=THINKING)
    request = {"model": "m", "messages": [USER], "tools": [CALCULATOR], "stream": True}
    request |= {"stream_options": {"include_usage": True}}
    async with serving(scripted(text, chunk=100), rendered_by=rendered_by) as gateway, client_of(gateway) as client:
        status, stream = await Chat(client).post(request)
    assert status == 200
    *chunks, last, done = stream
    assert done == {"done": True}
    head = {k: chunks[0][k] for k in ("id", "object", "created", "model")}
    assert (head["object"], head["model"], head["id"][:9]) == ("chat.completion.chunk", "m", "chatcmpl-")
    output = len(encode(text))
    prompt = last["usage"]["prompt_tokens"]
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    assert last == {**head, "choices": [], "usage": usage}
    deltas = []
    for chunk in chunks:
        [choice] = chunk.pop("choices")
        assert chunk == head
        assert choice == {"index": 0, "delta": choice["delta"], "logprobs": None, "finish_reason": None} or (
            choice == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"} and chunk is chunks[-1]
        )
        deltas.append(choice["delta"])
    one, two = (d["tool_calls"][0]["id"] for d in deltas if "id" in d.get("tool_calls", [{}])[0])
    assert one != two
    begins = {"type": "function", "function": {"name": "calculator", "arguments": ""}}
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "add"},
        {"content": "Sure."},
        {"tool_calls": [{"index": 0, "id": one, **begins}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {"tool_calls": [{"index": 1, "id": two, **begins}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]


async def test_every_shape_of_a_message_is_read():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None, "refusal": "I can't."},
        {"role": "user", "content": None},
        {"role": "assistant", "content": None, "reasoning": "why", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "7"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "go on"},
    ]
    backend = scripted("ok<|im_end|>")
    rendered_by = HfTemplateRenderer(TINY, chat_template=THINKING)
    async with serving(backend, rendered_by=rendered_by) as gateway, client_of(gateway) as client:
        status, data = await Chat(client).post({"messages": messages})
    assert status == 200, data
    assert rendered_by.decode(backend.calls[0][0]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nI can't.<|im_end|>\n<|im_start|>user\n<|im_end|>\n"
        '<|im_start|>assistant\n<think>\nwhy\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
        "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_every_parameter_reaches_the_engine():
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": -3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "stop": ["END"],
        "stop_token_ids": [7],
    }
    backend = ScriptedBackend(lambda _: encode("x<|im_end|>"))
    async with serving(backend) as gateway, client_of(gateway) as client:
        await Chat(client).post({"messages": [USER], **asked, "max_completion_tokens": 9})
        neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1}
        without_effect = {"logit_bias": {}, "response_format": {"type": "text"}, "n": 1}
        await Chat(client).post({"messages": [USER], **neutral, **without_effect})
        rows = await gateway.finish_session(client.session.session_id)
    params = backend.calls[0][1]
    assert {k: params[k] for k in asked} == {**asked, "stop_token_ids": sorted([7, *encode("<|im_end|>")])}
    assert params["max_tokens"] == 9
    assert {k: backend.calls[1][1][k] for k in neutral} == neutral
    assert not backend.calls[1][1].keys() & without_effect.keys()
    assert [row.metadata["exact_logprobs"] for row in rows] == [False, True]


@pytest.mark.parametrize("streaming_engine", [True, False])
@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_are_branches_of_one_prompt(stream, streaming_engine):
    answers = iter(["one<|im_end|>", f"{call('{}')}<|im_end|>", "three and more<|im_end|>", "on<|im_end|>"])
    backend: Any = ScriptedBackend(lambda _: encode(next(answers)), chunk=1)
    engine = backend if streaming_engine else GenerateOnly(backend)
    request = {"messages": [USER], "tools": [CALCULATOR], "n": 3, "stream": stream, "max_tokens": 30}
    request |= {"stream_options": {"include_usage": True}}
    retry = {"x-stainless-retry-count": "1"}
    async with serving(engine) as gateway, client_of(gateway, max_turns=4) as client:
        status, data = await Chat(client).post(request)
        assert status == 200, data
        if stream:
            usage = data[-2]["usage"]
            ends = [c for event in data[:-1] for c in event["choices"] if c["finish_reason"]]
            assert [(c["index"], c["finish_reason"]) for c in ends] == [(0, "stop"), (1, "tool_calls"), (2, "stop")]
            texts = ["", "", ""]
            for event in data[:-1]:
                for c in event["choices"]:
                    texts[c["index"]] += c["delta"].get("content") or ""
        else:
            usage = data["usage"]
            assert [choice["index"] for choice in data["choices"]] == [0, 1, 2]
            assert [choice["finish_reason"] for choice in data["choices"]] == ["stop", "tool_calls", "stop"]
            texts = [choice["message"]["content"] or "" for choice in data["choices"]]
            _, again = await Chat(client).post(request, headers=retry)
            assert [c["message"] for c in again["choices"]] == [c["message"] for c in data["choices"]]
        assert texts == ["one", "", "three and more"]
        assert len(backend.calls) == 3
        assert usage["completion_tokens"] == sum(
            len(encode(t)) for t in ("one<|im_end|>", f"{call('{}')}<|im_end|>", "three and more<|im_end|>")
        )
        third = {"role": "assistant", "content": texts[2]}
        await Chat(client).post({"messages": [USER, third, USER], "tools": [CALCULATOR]})
        status, error = await Chat(client).post(request)
        assert (status, error["error"]["code"]) == (400, "turn_limit_exceeded")
        rows = await gateway.finish_session(client.session.session_id)
    assert len(rows) == 3
    assert [row.metadata["abandoned"] for row in rows] == [True, True, False]
    assert check_records(rows) == len(encode("three and more<|im_end|>") + encode("on<|im_end|>"))


async def test_when_one_choice_fails_none_is_kept():
    class Fails(ScriptedBackend):
        async def generate(self, **request):
            if len(self.calls) == 2:
                raise EngineError("out of memory", retry_after=1.0)
            return await super().generate(**request)

    async with serving(GenerateOnly(Fails(lambda _: encode("x<|im_end|>")))) as gateway, client_of(gateway) as client:
        async with client.http.post(
            f"{client.session.base_url}/chat/completions", json={"messages": [USER], "n": 3}
        ) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert "out of memory" in (await response.json())["error"]["message"]
        assert not client.session.in_flight
        assert await gateway.finish_session(client.session.session_id) == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "message"),
    [
        ("one END two", ["END"], {"content": "one "}),
        ("one END", ["END"], {"content": "one "}),
        ("one EN", ["END"], {"content": "one EN"}),
        ("one ENEND two", ["END"], {"content": "one EN"}),
        ("ENDone", ["END"], {"content": ""}),
        ("one two", ["two", "one t"], {"content": ""}),
        ("é✓ x", ["✓ "], {"content": "é"}),
        ("<think>\na STOP b\n</think>\n\nc", ["STOP"], {"content": "", "reasoning_content": "a "}),
        ("<think>\na ST\n</think>\n\nOP", ["STOP"], {"content": "OP", "reasoning_content": "a ST"}),
        ("a " + call('{"x": "a STOP b"}'), ["STOP"], {"content": "a ", "arguments": '{"x": "a '}),
        ("a " + call("{}") + "\n" + call('{"STOP": 1}'), ["}"], {"content": "a ", "arguments": "{"}),
    ],
)
async def test_a_stop_string_never_leaks_and_the_tokens_stay(text, stop, message, stream):
    backend = scripted(text + "<|im_end|>", "ok<|im_end|>")
    rendered_by = HfTemplateRenderer(TINY, chat_template=THINKING)
    async with serving(backend, rendered_by=rendered_by) as gateway, client_of(gateway) as client:
        answer = await Chat(client).ask([USER], tools=[CALCULATOR], stop=stop, stream=stream)
        found = {"content": answer.get("content") or ""}
        if "reasoning_content" in answer:
            found["reasoning_content"] = answer["reasoning_content"]
        for called in answer.get("tool_calls", ()):
            found["arguments"] = called["function"]["arguments"]
        assert {**found, "content": found["content"].rstrip()} == {**message, "content": message["content"].rstrip()}
        await Chat(client).ask([USER, answer, USER], tools=[CALCULATOR])
        [row] = await gateway.finish_session(client.session.session_id)
    sampled = encode(text + "<|im_end|>")
    assert row.token_ids[row.prompt_length :][: len(sampled)] == sampled
    assert check_records([row]) == len(sampled) + len(encode("ok<|im_end|>"))


async def test_an_engine_that_stops_before_the_string_is_fine_too():
    class Excludes(GenerateOnly):
        async def generate(self, **request):
            record = await super().generate(**request)
            record.finish_reason = "stop"
            return record

    async with serving(Excludes(ScriptedBackend([encode("one ")]))) as gateway, client_of(gateway) as client:
        _, data = await Chat(client).post({"messages": [USER], "stop": "END"})
    assert data["choices"][0]["message"]["content"].rstrip() == "one"
    assert data["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 1.5}, "n"),
        ({"n": 1000}, "n"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": float("inf")}, "max_tokens"),
        ({"temperature": True}, "temperature"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"guided_json": {}, "guided_regex": "x"}, "guided_regex"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template_kwargs": {"prefill": "x"}}, "chat_template_kwargs.prefill"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
        ({"parallel_tool_calls": "x"}, "parallel_tool_calls"),
        ({"model": 3}, "model"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "audio": {"id": "x"}}, USER]}, "messages[0].audio"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages[0].content[0]"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(fields, param):
    async with serving(ScriptedBackend([])) as gateway, client_of(gateway) as client:
        status, data = await Chat(client).post({"messages": [USER]} | fields)
        assert (status, data["error"]["param"], data["error"]["type"]) == (400, param, "invalid_request_error")
        assert await gateway.finish_session(client.session.session_id) == []


async def test_unknown_fields_are_named_once_a_session(caplog):
    backend = ScriptedBackend(lambda _: encode("x<|im_end|>"))
    async with serving(backend) as gateway, client_of(gateway) as client:
        for extra in ({"surprise": 1}, {"surprise": 1, "another": 2}, {"user": "u", "store": True, "metadata": {}}):
            status, _ = await Chat(client).post({"messages": [USER], **extra})
            assert status == 200
    said = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert said == ["ignored without effect: surprise", "ignored without effect: another"]
    assert client.session.api_key not in caplog.text


@pytest.mark.parametrize("wire", WIRES)
async def test_silence_on_a_stream_is_filled_with_comments(wire, monkeypatch):
    monkeypatch.setattr(endpoints, "KEEP_ALIVE", 0.1)

    class Queues(ScriptedBackend):
        async def stream(self, **request):
            await asyncio.sleep(0.35)
            async for chunk in super().stream(**request):
                yield chunk

    async with serving(Queues([encode("x<|im_end|>")])) as gateway, client_of(gateway) as client:
        talker = WIRES[wire](client)
        url = client.session.base_url + talker.path
        async with client.http.post(url, json=talker.body([USER], stream=True)) as response:
            text = await response.text()
        comments, _, rest = text.partition("event: " if wire != "chat" else "data: ")
        assert comments.count(": keep-alive\n\n") in (2, 3)
        assert comments.replace(": keep-alive\n\n", "") == ""
        assert ": keep-alive" not in rest
        rows = await gateway.finish_session(client.session.session_id)
    assert check_records(rows) == len(encode("x<|im_end|>"))


@pytest.mark.parametrize("wire", WIRES)
async def test_the_first_delta_leaves_within_a_token_time(wire):
    backend = ScriptedBackend([encode("one two three four five six seven eight<|im_end|>")], chunk=1, delay=0.05)
    async with serving(backend) as gateway, client_of(gateway) as client:
        talker = WIRES[wire](client)
        url = client.session.base_url + talker.path
        async with client.http.post(url, json=talker.body([USER], stream=True)) as response:
            loop = asyncio.get_running_loop()
            async for line in response.content:
                if b"one" in line or b'"o' in line:
                    break
            first = loop.time()
            await response.content.read()
            assert loop.time() - first > 0.2


async def test_every_path_is_answered_in_json():
    async with serving(ScriptedBackend([])) as gateway, aiohttp.ClientSession() as http:
        gateway.model = "tiny/policy"
        session = gateway.create_session(max_context_tokens=512)
        for method, path, status in (
            ("GET", "/", 404),
            ("POST", "/v1/nothing", 404),
            ("GET", f"{'/sessions/' + session.api_key}/v1/nothing", 404),
            ("POST", "/chat/completions", 404),
            ("GET", "/v1/chat/completions", 405),
            ("PUT", "/sessions/x/v1/chat/completions", 405),
            ("DELETE", "/healthz", 405),
            ("GET", "/v1/models/other", 404),
            ("GET", "/healthz", 200),
            ("GET", "/v1/models", 200),
            ("GET", "/v1/models/tiny/policy", 200),
            ("HEAD", "/", 200),
        ):
            async with http.request(method, gateway.base_url + path) as response:
                assert response.status == status, path
                if method != "HEAD":
                    data = await response.json()
                    assert ("error" in data) == (status != 200)
                    if path == "/chat/completions":
                        assert "/v1" in data["error"]["message"]
        async with http.get(f"{session.base_url}/models") as response:
            data = await response.json()
        assert (data["object"], data["data"][0]["id"]) == ("list", "tiny/policy")
        assert data["data"][0]["max_model_len"] == 512


@pytest.mark.parametrize("wire", WIRES)
async def test_bodies_that_are_no_requests(wire):
    async with serving(ScriptedBackend([])) as gateway, client_of(gateway) as client:
        talker = WIRES[wire](client)
        nested = b"[" * 100_000 + b"]" * 100_000
        for body in (b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe{", nested, b'{"a": ' + nested + b"}"):
            status, data = await talker.post(body)
            assert status == 400, data
            assert "body" in talker.error(data)
        status, data = await talker.post(b"{}", headers={"Content-Encoding": "gzip", "Connection": "close"})
        assert status == 400, data
        assert "body: can't be read as gzip" in talker.error(data)
        schema: Any = {}
        for _ in range(600):
            schema = {"properties": schema}
        tool = {**CALCULATOR, "function": {**CALCULATOR["function"], "parameters": schema}}
        status, data = await talker.post(talker.body([USER], tools=[tool]))
        assert status in (400, 502), data  # too deep, or the scripted engine has nothing to say


@pytest.mark.parametrize("wire", WIRES)
async def test_a_body_over_the_limit_is_a_413(wire, monkeypatch):
    monkeypatch.setattr(server, "MAX_BODY", 1000)
    async with serving(ScriptedBackend([])) as gateway, client_of(gateway) as client:
        talker = WIRES[wire](client)
        status, data = await talker.post(b" " * 1001)
        assert status == 413
        assert "bytes" in talker.error(data)


@pytest.mark.parametrize("wire", WIRES)
async def test_half_characters_of_utf16_do_no_harm(wire):
    text = call('{"k": "\\ud800"}') + "<|im_end|>"
    backend = ScriptedBackend(lambda _: encode(text))
    async with serving(backend) as gateway, client_of(gateway) as client:
        talker = WIRES[wire](client)
        for stream in (False, True):
            said = {"role": "user", "content": "a \ud800 b"}
            answer = await talker.ask([said], tools=[CALCULATOR], stream=stream)
            result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "\udfff"}
            await talker.ask([said, answer, result], tools=[CALCULATOR], stream=stream)


@pytest.mark.parametrize("wire", WIRES)
async def test_a_fault_of_our_own_in_the_middle_ends_the_stream_in_the_wires_words(wire, caplog):
    class Faulty:
        """A parser of somebody's own with a bug."""

        def __init__(self, **_: Any) -> None:
            self.fed = 0

        def feed(self, ids: Any) -> list[Any]:
            self.fed += 1
            if self.fed == 2:
                raise KeyError("secret detail")
            return [ContentDelta("one")]

    backend = ScriptedBackend([encode("one two three<|im_end|>")] * 2, chunk=1)
    async with (
        serving(backend, rendered_by=HfTemplateRenderer(TINY, parser=Faulty)) as gateway,
        client_of(gateway) as client,
    ):
        talker = WIRES[wire](client)
        for stream in (False, True):
            status, data = await talker.post(talker.body([USER], stream=stream))
            assert (status, isinstance(data, list)) == (200 if stream else 500, stream)
            assert talker.error(data) == "internal error of the gateway; see its log"
        assert backend.aborted == 2
        assert await gateway.finish_session(client.session.session_id) == []
    assert len(caplog.records) == 2


async def test_choices_keep_their_order_though_the_last_ends_first():
    texts = ["first and long, longer than the others", "second, shorter", "third"]
    answers = iter(["ok", *texts])
    backend = ScriptedBackend(lambda _: encode(next(answers) + "<|im_end|>"), chunk=1, delay=0.002)
    async with serving(backend) as gateway, client_of(gateway) as client:
        history = [USER, await Chat(client).ask([USER]), USER]
        for headers in ({}, {"x-stainless-retry-count": "1"}):
            _, data = await Chat(client).post({"messages": history, "n": 3}, headers=headers)
            assert [choice["message"]["content"] for choice in data["choices"]] == texts
        assert len(backend.calls) == 4
        assert backend.calls[1][0] == backend.calls[2][0] == backend.calls[3][0]
        rows = await gateway.finish_session(client.session.session_id)
    assert [row.metadata["turns"][1]["choice"] for row in rows] == [0, 1, 2]
    assert check_records(rows) == sum(len(encode(text + "<|im_end|>")) for text in ["ok", *texts])


@pytest.mark.parametrize("renderer", [Renderer, HfTemplateRenderer])
def test_no_template_variable_takes_the_place_of_a_renderers_parameter(renderer):
    taking = [
        inspect.signature(method).parameters.keys() - {"variables"}
        for name, method in inspect.getmembers(renderer, inspect.isfunction)
        if "variables" in inspect.signature(method).parameters and not name.startswith("_")
    ]
    assert len(taking) >= 4
    assert set().union(*taking) <= RESERVED

"""Anthropic messages over real HTTP: exact requests, exact events, exact tokens."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records

from .support import CALCULATOR, TINY, client_of, encode, serving
from .wires import Anthropic

HELLO = {"role": "user", "content": "What is 1+1?"}
TOOL = {"name": "calculator", "description": "Evaluate an expression.", "input_schema": {"type": "object"}}
THINKING = (  # the tiny model's template, with reasoning
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def call(arguments: str, name: str = "calculator") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 100, "messages": list(messages), **fields}


def scripted(*texts: str, chunk: int = 1) -> ScriptedBackend:
    return ScriptedBackend([encode(text) for text in texts], chunk=chunk)


async def test_whole_and_streamed_answers_in_every_event():
    arguments = '{"expression":  "1+1", "digits": 2}'
    text = f"<think>\nadd\n</think>\n\nSure.\n{call(arguments)}\n{call('{}')}<|im_end|>"
    backend = scripted(text, text)
    async with (
        serving(backend, rendered_by=HfTemplateRenderer(TINY, chat_template=THINKING)) as gateway,
        client_of(gateway) as client,
    ):
        talker = Anthropic(client)
        _, whole = await talker.post(body(HELLO, tools=[TOOL]))
        status, stream = await talker.post(body(HELLO, tools=[TOOL], stream=True))
    assert status == 200
    prompt, output = len(backend.calls[0][0]), len(encode(text))
    usage = {"input_tokens": prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    one, two = (block["id"] for block in whole["content"][2:])
    assert one != two
    assert whole == {
        "id": whole["id"],
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "add", "signature": whole["content"][0]["signature"]},
            {"type": "text", "text": "Sure."},
            {"type": "tool_use", "id": one, "name": "calculator", "input": {"expression": "1+1", "digits": 2}},
            {"type": "tool_use", "id": two, "name": "calculator", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": output},
    }
    assert whole["content"][0]["signature"]

    again = Anthropic.assemble(stream)
    ids = [block["id"] for block in again["content"][2:]]
    assert len(set(ids)) == 2
    for block, same in zip(again["content"][2:], (one, two), strict=True):
        block["id"] = same
    assert {**again, "id": whole["id"]} == whole

    first = stream[0]["message"]
    assert first["id"].startswith("msg_")
    assert first["usage"] == {**usage, "output_tokens": 0}
    assert (first["content"], first["stop_reason"], first["stop_sequence"]) == ([], None, None)
    kinds = [event["delta"]["type"] if "delta" in event and "index" in event else event["type"] for event in stream]
    order = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert order == [
        *("message_start", "ping"),
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert kinds.count("input_json_delta") >= 3  # a member at a time
    starts = [event["content_block"] for event in stream if event["type"] == "content_block_start"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[1] == {"type": "text", "text": ""}
    assert starts[2] == {"type": "tool_use", "id": ids[0], "name": "calculator", "input": {}}
    assert stream[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {**usage, "output_tokens": output},
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_with_everything_in_it_is_one_row(stream):
    outputs = [
        "<think>\nboth\n</think>\n\n"
        + call('{"expression": "1+1"}')
        + "\n"
        + call('{"expression": "2"}')
        + "<|im_end|>",
        call('{"expression": 1+}') + "<|im_end|>",  # no JSON
        call('{"expression": "1", "digits": [1,'),  # cut
        "Four.<|im_end|>",
    ]
    backend = scripted(*outputs)
    rendered_by = HfTemplateRenderer(TINY, chat_template=THINKING)
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    system.append({"type": "text", "text": "Be right."})
    history: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "What"}, {"type": "text", "text": "is 1+1?"}]}
    ]
    async with serving(backend, rendered_by=rendered_by) as gateway, client_of(gateway) as client:
        talker = Anthropic(client)
        for turn in range(4):
            request = body(*history, system=system, tools=[TOOL], stream=stream, metadata={"user_id": "u"})
            status, answer = await talker.post(request)
            assert status == 200, answer
            content = (Anthropic.assemble(answer) if stream else answer)["content"]
            if turn == 0:
                content.insert(0, {"type": "redacted_thinking", "data": "AAAA"})
            history.append({"role": "assistant", "content": content})
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": str(turn)}]}
                for block in content
                if block["type"] == "tool_use"
            ]
            if results:
                results[-1]["is_error"] = turn == 1
                results[-1]["cache_control"] = {"type": "ephemeral"}
            extra = [{"type": "text", "text": "<system-reminder>go on</system-reminder>"}] if turn == 0 else []
            history.append({"role": "user", "content": [*results, *extra]})
        rows = await gateway.finish_session(client.session.session_id)
    inputs = [b["input"] for m in history for b in m["content"] if b["type"] == "tool_use"]
    assert inputs[:2] == [{"expression": "1+1"}, {"expression": "2"}]
    assert inputs[2]["INVALID_JSON"] == '{"expression": 1+}'
    assert inputs[3]["INVALID_JSON"].startswith('{"expression": "1", "digits": [1,')
    assert [row.metadata["fork"] for row in rows] == [None]
    assert check_records(rows) == sum(len(encode(text)) for text in outputs)
    start = "<|im_start|>system\nBe brief.\nBe right.<|im_end|>\n<|im_start|>user\nWhat\nis 1+1?<|im_end|>\n"
    assert rendered_by.decode(backend.calls[0][0]) == start + "<|im_start|>assistant\n"
    tail = "<|im_start|>tool\n0<|im_end|>\n<|im_start|>tool\n0<|im_end|>\n<|im_start|>user\n<system-reminder>go on"
    assert tail in rendered_by.decode(backend.calls[1][0])
    assert "<|im_start|>tool\nError: 1<|im_end|>" in rendered_by.decode(backend.calls[2][0])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thread_is_continued_by_what_is_new(stream):
    outputs = [f"<think>\nadd\n</think>\n\n{call('{}')}<|im_end|>", call("{}") + "<|im_end|>", "Two.<|im_end|>"]
    backend = scripted(*outputs)
    rendered_by = HfTemplateRenderer(TINY, chat_template=THINKING)
    async with serving(backend, rendered_by=rendered_by) as gateway, client_of(gateway) as client:
        talker = Anthropic(client)
        first = body(HELLO, system="Be brief.", tools=[TOOL], stream=stream, thread={"type": "create"})
        new: dict[str, Any] = first
        for turn in range(3):
            status, answer = await talker.post(new)
            assert status == 200, answer
            answer = Anthropic.assemble(answer) if stream else answer
            thread = {"type": "continue", "previous_message_id": answer["id"]}
            if turn < 2:
                call_id = answer["content"][-1]["id"]
                result = {"type": "tool_result", "tool_use_id": call_id, "content": str(turn)}
                new = body({"role": "user", "content": [result]}, stream=stream, thread=thread)
        for field in ({"system": "Be long."}, {"tools": [TOOL]}):
            status, answer = await talker.post(new | field)
            assert (status, answer["error"]["message"].partition(":")[0]) == (400, *field)
        rows = await gateway.finish_session(client.session.session_id)
    assert answer["type"] == "error"
    assert len(rows) == 1
    assert check_records(rows) == sum(len(encode(text)) for text in outputs)
    assert rows[0].token_ids[: rows[0].prompt_length] == backend.calls[0][0]
    assert "<|im_start|>system\nBe brief.<|im_end|>" in rendered_by.decode(backend.calls[2][0])


async def test_a_thread_that_is_not_there_is_named_as_the_vendors_sdk_expects():
    async with serving(ScriptedBackend([])) as gateway, client_of(gateway) as client:
        thread = {"type": "continue", "previous_message_id": "msg_0"}
        status, answer = await Anthropic(client).post(body(HELLO, thread=thread))
    error = answer["error"]
    assert (status, error["type"], error["details"]) == (
        400,
        "invalid_request_error",
        {"error_code": "thread_not_found"},
    )
    assert error["message"].startswith("thread.previous_message_id: ")


async def test_count_tokens_is_the_prompts_length_and_keeps_nothing():
    backend = scripted("<|im_end|>", "<|im_end|>")
    async with serving(backend) as gateway, client_of(gateway) as client:
        talker = Anthropic(client)
        request = body(HELLO, system="Be brief.", tools=[TOOL])
        counts = []
        for turn in range(2):
            counting = {k: v for k, v in request.items() if k != "max_tokens"}
            status, count = await talker.post(counting, path="/messages/count_tokens?beta=true")
            assert (status, set(count)) == (200, {"input_tokens"})
            counts.append(count["input_tokens"])
            assert len(backend.calls) == turn
            await talker.post(request)
            request = body(HELLO, {"role": "assistant", "content": []}, HELLO, system="Be brief.", tools=[TOOL])
        rows = await gateway.finish_session(client.session.session_id)
    assert counts == [len(prompt) for prompt, _ in backend.calls]
    assert counts[1] > counts[0] > len(encode("What is 1+1?Be brief.Evaluate an expression."))
    assert len(rows) == 1


async def test_stop_sequences_are_cut_out_of_the_text_not_out_of_the_tokens():
    text = "one END two<|im_end|>"
    backend = scripted(text, text, text, "max <|im_end|>")
    async with serving(backend) as gateway, client_of(gateway) as client:
        talker = Anthropic(client)
        fields = {"stop_sequences": ["STOP", "END"], "temperature": 0.5, "top_p": 0.9, "top_k": 5}
        _, whole = await talker.post(body(HELLO, **fields))
        _, stream = await talker.post(body(HELLO, **fields, stream=True))
        assert whole["content"] == Anthropic.assemble(stream)["content"] == [{"type": "text", "text": "one "}]
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")
        assert stream[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
        replay = {"role": "assistant", "content": "one"}
        _, last = await talker.post(body(HELLO, replay, HELLO, max_tokens=1))
        assert last["stop_reason"] == "max_tokens"
        rows = await gateway.finish_session(client.session.session_id)
    params = backend.calls[0][1]
    sent = {name: params[name] for name in ("stop", "temperature", "top_p", "top_k", "max_tokens")}
    assert sent == {"stop": ["STOP", "END"], "temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_tokens": 100}
    assert backend.calls[2][0][: len(backend.calls[0][0]) + len(encode(text))] == backend.calls[0][0] + encode(text)
    assert check_records(rows, sampled_twice=True) == len(encode(text)) + 1  # the other sample is abandoned


@pytest.mark.parametrize("parallel", [True, False])
async def test_parallel_tool_use_can_be_switched_off(parallel):
    text = f"{call('{}')}\n{call('{}')}<|im_end|>"
    backend = scripted(text, text, "ok<|im_end|>")
    choice = {"type": "auto", "disable_parallel_tool_use": not parallel}
    async with serving(backend) as gateway, client_of(gateway) as client:
        talker = Anthropic(client)
        _, whole = await talker.post(body(HELLO, tools=[TOOL], tool_choice=choice))
        _, stream = await talker.post(body(HELLO, tools=[TOOL], tool_choice=choice, stream=True))
        content = Anthropic.assemble(stream)["content"]
        assert len(content) == len(whole["content"]) == 1 + parallel
        results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "2"} for block in content]
        answered = [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
        await talker.post(body(HELLO, *answered, tools=[TOOL], tool_choice=choice))
        rows = await gateway.finish_session(client.session.session_id)
    assert [row.metadata["fork"] for row in rows] == [None, "retry"]
    assert check_records(rows) == len(encode(text)) + len(encode("ok<|im_end|>"))


@pytest.mark.parametrize(
    ("thinking", "ending"),
    [
        (None, "assistant\n"),
        ({"type": "enabled", "budget_tokens": 1024}, "assistant\n"),
        ({"type": "adaptive"}, "assistant\n"),
        ({"type": "disabled"}, "assistant\n<think>\n\n</think>\n\n"),
    ],
)
async def test_thinking_is_a_template_variable_where_given(thinking, ending):
    backend = scripted("ok<|im_end|>")
    rendered_by = HfTemplateRenderer(TINY, chat_template=THINKING)
    async with serving(backend, rendered_by=rendered_by) as gateway, client_of(gateway) as client:
        status, _ = await Anthropic(client).post(body(HELLO, thinking=thinking))
    assert status == 200
    assert rendered_by.decode(backend.calls[0][0]).endswith(ending)


async def test_the_key_counts_in_every_position():
    async with serving(ScriptedBackend(lambda _: encode("x<|im_end|>"))) as gateway, aiohttp.ClientSession() as http:
        session = gateway.create_session()

        async def post(path: str, **headers: str) -> int:
            async with http.post(gateway.base_url + path, json=body(HELLO), headers=headers) as response:
                data = await response.json()
                if response.status != 200:
                    assert (data["type"], data["error"]["type"]) == ("error", "authentication_error")
                return response.status

        key = session.api_key
        assert await post("/v1/messages?beta=true", **{"x-api-key": key}) == 200
        assert await post("/v1/messages", Authorization=f"Bearer {key}") == 200
        assert await post("/v1/messages", Authorization="Bearer other", **{"x-api-key": key}) == 200
        assert await post("/v1/messages", Authorization=f"Bearer {key}", **{"x-api-key": "other"}) == 200
        assert await post(f"/sessions/{key}/v1/messages?beta=true", **{"x-api-key": "EMPTY"}) == 200
        assert await post(f"/sessions/{key}/v1/v1/messages") == 200
        assert session.anthropic_base_url + "/v1/messages" == f"{gateway.base_url}/sessions/{key}/v1/messages"
        assert await post("/v1/messages") == 401
        assert await post("/v1/messages", **{"x-api-key": "other"}) == 401
        for path in ("/", f"/sessions/{key}", "/v1/messages"):
            async with http.head(gateway.base_url + path) as response:
                assert response.status == 200
        await gateway.drop_session(session.session_id)
        async with http.post(f"{session.base_url}/messages", json=body(HELLO)) as response:
            assert response.status == 410
            assert (await response.json())["type"] == "error"
        headers = {"anthropic-version": "2023-06-01"}
        for method, path, status in (("GET", "/v1/messages", 405), ("POST", "/v1/nothing", 404)):
            async with http.request(method, gateway.base_url + path, headers=headers) as response:
                assert (response.status, response.content_type) == (status, "application/json")
                assert (await response.json())["type"] == "error"
                if status == 405:
                    assert response.headers["Allow"] == "POST"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": float("inf")}, "max_tokens"),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [HELLO, {"role": "user"}]}, "messages[1].content"),
        ({"system": "x", "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 1}]}, HELLO]},
            "messages[0].content[0].input",
        ),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "calculator"}}, "tool_choice.type"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stream": 1}, "stream"),
        ({"thread": "x"}, "thread"),
        ({"thread": {"type": "fork"}}, "thread.type"),
        ({"thread": {"type": "continue"}}, "thread.previous_message_id"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
async def test_bad_requests_name_the_field(fields, path):
    async with serving(ScriptedBackend([])) as gateway, client_of(gateway) as client:
        status, data = await Anthropic(client).post(body(HELLO) | fields)
        assert (status, data["type"], data["error"]["type"]) == (400, "error", "invalid_request_error")
        assert data["error"]["message"].startswith(f"{path}: ")
        assert await gateway.finish_session(client.session.session_id) == []


async def test_a_prompt_that_is_too_long_is_said_in_the_vendors_words():
    backend = ScriptedBackend([])
    async with serving(backend) as gateway, client_of(gateway, max_context_tokens=11) as client:
        talker = Anthropic(client)
        _, count = await talker.post(body(HELLO), path="/messages/count_tokens")
        status, data = await talker.post(body(HELLO))
    message = f"prompt is too long: {count['input_tokens']} tokens > 10 maximum"
    assert (status, data["error"]) == (400, {"type": "invalid_request_error", "message": message})


async def test_fields_without_effect_are_named_once_a_session(caplog):
    backend = ScriptedBackend(lambda _: encode("x<|im_end|>"))
    tools = [TOOL, {"type": "web_search_20250305", "name": "web_search"}]
    async with serving(backend) as gateway:
        for _ in range(2):
            async with client_of(gateway) as client:
                for _ in range(3):
                    status, _ = await Anthropic(client).post(body(HELLO, tools=tools, betas={}))
                    assert status == 200
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(m.endswith(": ignored without effect: betas, tool web_search_20250305") for m in said)


@pytest.mark.parametrize("stream", [False, True])
async def test_long_arguments_arrive_whole_whatever_they_hold(stream):
    value = {"text": "a,}" * 3000 + '"\\ \u2028 é', "n": -1.5e3, "deep": {"x": [1, {"y": None}]}, "last": True}
    text = f"{call(json.dumps(value))}<|im_end|>"
    async with serving(scripted(text, chunk=7)) as gateway, client_of(gateway) as client:
        answer = await Anthropic(client).ask([HELLO], tools=[CALCULATOR], stream=stream, max_tokens=100_000)
        assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == value

"""OpenAI Responses over real HTTP: exact requests, exact events, exact tokens."""

from __future__ import annotations

from typing import Any

import aiohttp
import openai
import pytest

from agentcore_rl_toolkit.errors import EngineError
from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records

from .support import TINY, client_of, encode, serving
from .test_wire_anthropic import THINKING, call, scripted
from .wires import Responses

TOOL = {
    "type": "function",
    "name": "calculator",
    "description": "Evaluate an expression.",
    "parameters": {"type": "object"},
    "strict": False,
}
USER = {"role": "user", "content": "What is 1+1?"}


def outline(stream: list[dict[str, Any]]) -> list[str]:
    """The types of events, equal neighbours once."""
    kinds = [event["type"].removeprefix("response.") for event in stream]
    return [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]


async def test_whole_and_streamed_answers_in_every_event():
    arguments = '{"expression":  "1+1"}'
    text = f"<think>\nadd\n</think>\n\nSure.\n{call(arguments)}\n{call('{}')}<|im_end|>"
    backend = scripted(text, text)
    rendered_by = HfTemplateRenderer(TINY, chat_template=THINKING)
    request = {"model": "m", "input": [USER], "tools": [TOOL], "instructions": "Be brief.", "store": False}
    request |= {"max_output_tokens": 100, "temperature": 0.5, "metadata": {"a": "b"}, "reasoning": {"effort": "low"}}
    async with serving(backend, rendered_by=rendered_by) as gateway, client_of(gateway) as client:
        _, whole = await Responses(client).post(request)
        status, stream = await Responses(client).post({**request, "stream": True})
    assert status == 200
    prompt, output = len(backend.calls[0][0]), len(encode(text))
    reasoning, message, one, two = whole["output"]
    assert whole == {
        "id": whole["id"],
        "object": "response",
        "created_at": whole["created_at"],
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": "Be brief.",
        "max_output_tokens": 100,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": "m",
        "output": [
            {
                "id": reasoning["id"],
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "add"}],
            },
            {
                "id": message["id"],
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Sure.", "annotations": [], "logprobs": []}],
            },
            {
                "id": one["id"],
                "type": "function_call",
                "status": "completed",
                "call_id": one["call_id"],
                "name": "calculator",
                "arguments": arguments,
            },
            {
                "id": two["id"],
                "type": "function_call",
                "status": "completed",
                "call_id": two["call_id"],
                "name": "calculator",
                "arguments": "{}",
            },
        ],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": "low", "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [TOOL],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + output,
        },
        "user": None,
    }
    assert len({item["id"] for item in whole["output"]}) == 4
    assert one["call_id"] != two["call_id"]

    again = Responses.assemble(stream)

    def anonymous(response: dict[str, Any]) -> dict[str, Any]:
        items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
        return {**response, "output": items, "id": "", "created_at": 0}

    assert anonymous(again) == anonymous(whole)
    for event in stream[:2]:
        assert event["response"] == {**again, "status": "in_progress", "output": [], "usage": None}
    call_events = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    assert outline(stream) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *(*call_events, "output_item.done"),
        *(*call_events, "output_item.done"),
        "completed",
    ]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in stream:
        by_kind.setdefault(event.pop("type").removeprefix("response."), []).append(event)
        del event["sequence_number"]
    first, second, third, _ = again["output"]
    at = {"item_id": second["id"], "output_index": 1}
    assert by_kind["output_item.added"][:3] == [
        {"output_index": 0, "item": {**first, "content": []}},
        {"output_index": 1, "item": {**second, "content": [], "status": "in_progress"}},
        {"output_index": 2, "item": {**third, "arguments": "", "status": "in_progress"}},
    ]
    empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert by_kind["content_part.added"][1] == {**at, "content_index": 0, "part": empty}
    assert by_kind["output_text.done"] == [{**at, "content_index": 0, "text": "Sure.", "logprobs": []}]
    assert by_kind["content_part.done"][1] == {**at, "content_index": 0, "part": {**empty, "text": "Sure."}}
    delta = by_kind["output_text.delta"][0]
    assert delta == {**at, "content_index": 0, "delta": delta["delta"], "logprobs": []}
    assert by_kind["reasoning_text.done"] == [
        {"item_id": first["id"], "output_index": 0, "content_index": 0, "text": "add"}
    ]
    assert by_kind["function_call_arguments.done"][0] == {
        "item_id": third["id"],
        "output_index": 2,
        "name": "calculator",
        "arguments": arguments,
    }
    assert len(by_kind["function_call_arguments.delta"]) > 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
async def test_a_tool_loop_is_one_row_by_items_and_by_previous_response(stream, stored):
    outputs = [
        f"<think>\nboth\n</think>\n\nOk.\n{call('{}')}\n{call('{}')}<|im_end|>",
        "<|im_end|>",
        call('{"a": ')[:40],
        "<think>\nnever ends",
        "Four.<|im_end|>",
    ]
    backend = scripted(*outputs)
    rendered_by = HfTemplateRenderer(TINY, chat_template=THINKING)
    base: dict[str, Any] = {"instructions": "Be brief.", "tools": [TOOL], "stream": stream, "store": stored}
    history: list[dict[str, Any]] = []
    new: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    previous = None
    async with serving(backend, rendered_by=rendered_by) as gateway, client_of(gateway) as client:
        for turn in range(5):
            history += new
            sent = {"input": new, "previous_response_id": previous} if stored and turn else {"input": history}
            if turn == 0 and stored:
                sent = {"input": "hi"}
            status, answer = await Responses(client).post(base | sent)
            assert status == 200, answer
            answer = Responses.assemble(answer) if stream else answer
            previous = answer["id"]
            history += answer["output"]
            calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
            new = [{"type": "function_call_output", "call_id": c, "output": str(turn)} for c in calls] or [USER]
        assert bool(client.session.responses) == stored
        rows = await gateway.finish_session(client.session.session_id)
    assert [row.metadata["fork"] for row in rows] == [None]
    assert check_records(rows) == sum(len(encode(text)) for text in outputs)
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered_by.decode(backend.calls[0][0]) == start
    assert "<|im_start|>tool\n0<|im_end|>\n<|im_start|>tool\n0<|im_end|>" in rendered_by.decode(backend.calls[1][0])


async def test_every_shape_of_an_item_is_read():
    backend = scripted("ok<|im_end|>")
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be "}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "why"}]},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "function_call", "call_id": "c1", "id": "fc", "name": "calculator", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "7"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "AAAA"},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "go on"},
    ]
    rendered_by = HfTemplateRenderer(TINY, chat_template=THINKING)
    async with serving(backend, rendered_by=rendered_by) as gateway, client_of(gateway) as client:
        status, _ = await Responses(client).post({"input": items})
    assert status == 200
    assert rendered_by.decode(backend.calls[0][0]) == (
        "<|im_start|>system\nBe <|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nwhy\n</think>\n\nno"
        '<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\nso<|im_end|>\n"
        "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_answer_is_incomplete(stream):
    async with serving(scripted("one two three<|im_end|>")) as gateway, client_of(gateway) as client:
        _, data = await Responses(client).post({"input": "hi", "max_output_tokens": 2, "stream": stream})
        if stream:
            assert data[-1]["type"] == "response.incomplete"
            data = Responses.assemble(data)
    assert (data["status"], data["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert data["output"][-1]["status"] == "incomplete"


async def test_an_engine_that_fails_in_the_middle_ends_the_stream_with_a_failed_response():
    class Fails(ScriptedBackend):
        async def stream(self, **request):
            async for chunk in super().stream(**request):
                if chunk.finish_reason:
                    raise EngineError("out of memory")
                yield chunk

    async with serving(Fails([encode("one two<|im_end|>")], chunk=1)) as gateway, client_of(gateway) as client:
        status, stream = await Responses(client).post({"input": "hi", "stream": True})
        assert await gateway.finish_session(client.session.session_id) == []
    assert (status, stream[-1]["type"]) == (200, "response.failed")
    response = stream[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "the engine failed: out of memory"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [USER, {"type": "web_search_call"}]}, "input[1].type"),
        ({"input": [USER, {"type": 3}]}, "input[1].type"),
        ({"instructions": "x", "input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [USER, {"type": "function_call", "name": "f", "call_id": "c"}]}, "input[1].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"instructions": ["x"]}, "instructions"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "calculator"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"max_output_tokens": 1.5}, "max_output_tokens"),
        ({"store": "no"}, "store"),
    ],
)
async def test_bad_requests_name_the_field(fields, param):
    async with serving(ScriptedBackend([])) as gateway, client_of(gateway) as client:
        status, data = await Responses(client).post({"input": "hi"} | fields)
        assert (status, data["error"]["param"], data["error"]["type"]) == (400, param, "invalid_request_error")
        assert param in data["error"]["message"]
        assert await gateway.finish_session(client.session.session_id) == []


async def test_responses_are_not_shared_between_sessions():
    backend = ScriptedBackend(lambda _: encode("x<|im_end|>"))
    async with serving(backend) as gateway, client_of(gateway) as one, client_of(gateway) as two:
        _, answer = await Responses(one).post({"input": "hi"})
        status, data = await Responses(two).post({"input": "hi", "previous_response_id": answer["id"]})
        assert (status, data["error"]["code"]) == (400, "previous_response_not_found")


async def test_vendor_tools_and_unknown_fields_are_named_once_a_session(caplog):
    backend = ScriptedBackend(lambda _: encode("x<|im_end|>"))
    request = {"input": "hi", "tools": [TOOL, {"type": "custom", "name": "apply_patch"}], "surprise": 1}
    request |= {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "service_tier": "auto"}
    async with serving(backend) as gateway, client_of(gateway) as client:
        for _ in range(3):
            assert (await Responses(client).post(request))[0] == 200
    [record] = caplog.records
    assert record.getMessage().endswith(": ignored without effect: surprise, tool custom")


async def test_the_key_counts_in_every_position():
    async with serving(ScriptedBackend(lambda _: encode("x<|im_end|>"))) as gateway, aiohttp.ClientSession() as http:
        key = gateway.create_session().api_key
        for path, headers, expected in (
            ("/v1/responses", {"Authorization": f"Bearer {key}"}, 200),
            ("/v1/responses", {"x-api-key": key}, 200),
            (f"/sessions/{key}/v1/responses", {}, 200),
            (f"/sessions/{key}/v1/v1/responses", {"Authorization": "Bearer EMPTY"}, 200),
            ("/v1/responses", {}, 401),
        ):
            async with http.post(gateway.base_url + path, json={"input": "hi"}, headers=headers) as response:
                assert response.status == expected
                assert ("error" in await response.json()) == (expected != 200) or expected == 200


@pytest.mark.skipif(not hasattr(openai.AsyncOpenAI, "responses"), reason="this SDK is older than the protocol")
async def test_the_vendors_sdk_talks_to_it():
    outputs = [f"<think>\nadd\n</think>\n\n{call('{}')}<|im_end|>", "It is 2.<|im_end|>"]
    rendered_by = HfTemplateRenderer(TINY, chat_template=THINKING)
    async with serving(scripted(*outputs), rendered_by=rendered_by) as gateway, client_of(gateway) as client:
        async with openai.AsyncOpenAI(base_url=client.session.base_url, api_key="EMPTY") as sdk:
            first = await sdk.responses.create(model="m", input="hi", tools=[TOOL])
            reasoning, called = first.output
            assert reasoning.content[0].text == "add"
            result = {"type": "function_call_output", "call_id": called.call_id, "output": "2"}
            async with sdk.responses.stream(
                model="m", input=[result], previous_response_id=first.id, tools=[TOOL]
            ) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
        assert kinds[-1] == "response.completed"
        assert final.output_text == "It is 2."
        [row] = await gateway.finish_session(client.session.session_id)
    assert check_records([row]) == sum(len(encode(text)) for text in outputs)

"""An answer as a response object, and the items it consists of."""

from __future__ import annotations

from typing import Any

from ..base import Answer, WireRequest, obj

ID_PREFIX = "resp_"


def response_head(request: WireRequest, answer_id: str, created: int, model: str) -> dict[str, Any]:
    body = request.body
    asked = {
        name: body.get(name)
        for name in ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "user")
    }
    return {
        "id": answer_id,
        "object": "response",
        "created_at": created,
        "background": False,
        "error": None,
        "incomplete_details": None,
        **asked,
        "metadata": body.get("metadata") or {},
        "model": model,
        "parallel_tool_calls": not request.one_call,
        "reasoning": {"effort": None, "summary": None, **obj(body, "reasoning")},
        "service_tier": "default",
        "store": request.kept_items is not None,
        "temperature": request.sampling.get("temperature", 1.0),
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": 0,
        "top_p": request.sampling.get("top_p", 1.0),
        "truncation": "disabled",
    }


def response_end(answer: Answer, output: list[dict[str, Any]]) -> dict[str, Any]:
    cut = answer.choices[0].finish_reason == "length"
    completion = answer.completion_tokens
    return {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + completion,
        },
    }


def output_items(answer: Answer) -> list[dict[str, Any]]:
    """An answer's items. One without calls has a message, be it empty: else a replay of the items would lose it."""
    [choice] = answer.choices
    parsed = choice.message
    items: list[dict[str, Any]] = []
    if parsed.reasoning:
        items.append(reasoning_item(new_item_id("rs", answer.id, 0), parsed.reasoning))
    if parsed.content or not parsed.tool_calls:
        items.append(message_item(new_item_id("msg", answer.id, len(items)), parsed.content))
    for call_id, call in zip(choice.call_ids, parsed.tool_calls, strict=True):
        items.append(call_item(new_item_id("fc", answer.id, len(items)), call_id, call.name, call.arguments))
    if choice.finish_reason == "length" and "status" in items[-1]:
        items[-1]["status"] = "incomplete"
    return items


def new_item_id(prefix: str, answer_id: str, index: int) -> str:
    return f"{prefix}_{answer_id.removeprefix(ID_PREFIX)}{index:02d}"


def reasoning_item(item_id: str, text: str) -> dict[str, Any]:
    return {"id": item_id, "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def message_item(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": [part]}


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    called = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"id": item_id, "type": "function_call", "status": status, **called}

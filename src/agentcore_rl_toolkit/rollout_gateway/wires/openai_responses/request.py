"""A request's fields: which are honoured, refused or without effect, and what they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...messages import Tool
from ..base import (
    JSON,
    SAMPLING,
    Numbers,
    WireRequest,
    a_list,
    a_string,
    an_object,
    bad_request,
    flag,
    ignored,
    model_name,
    numbers,
    obj,
    stop_strings,
    template_variables,
)
from .items import decode_groups, grouped, input_items

_NUMBERS: Numbers = {"max_output_tokens": ("max_tokens", int, 1, 2**31), **SAMPLING}
_CANNOT = {"background", "context_management", "conversation", "prompt", "top_logprobs"}
_NO_EFFECT = {
    "client_metadata", "include", "max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_retention",
    "safety_identifier", "service_tier", "stream_options", "user",
}  # fmt: skip
_HONOURED = {
    "chat_template_kwargs", "input", "instructions", "model", "parallel_tool_calls", "previous_response_id",
    "reasoning", "stop", "store", "stream", "text", "tool_choice", "tools", "truncation",
}  # fmt: skip
_KNOWN = frozenset(_HONOURED | _NUMBERS.keys() | _CANNOT | _NO_EFFECT)


def decode(body: JSON, earlier: Sequence[Any] = ()) -> WireRequest:
    """``earlier``: what was kept of the answer that the request goes on from."""
    _refuse_what_we_cannot_do(body)
    before = [*earlier[0], *earlier[1]["output"]] if earlier else []
    items = [*before, *input_items(body.get("input"))]
    if not items:
        raise bad_request("input", "a string or a non-empty list is required")
    raw = grouped(items)
    instructions = body.get("instructions")
    if instructions is not None:
        # Not an item, and of this request alone; in front of the items it is compared like one.
        raw.insert(0, [{"role": "system", "content": a_string(instructions, "instructions")}])
    offset = -len(before) - (instructions is not None)
    tools, other_tools = _tools(body.get("tools"))
    variables = template_variables(body)
    effort = obj(body, "reasoning").get("effort")
    if effort is not None:
        variables.setdefault("reasoning_effort", a_string(effort, "reasoning.effort"))
    sampling = numbers(body, _NUMBERS)
    if body.get("stop"):
        sampling["stop"] = stop_strings(body["stop"], "stop")
    return WireRequest(
        raw_messages=raw,
        decode_messages=lambda start: decode_groups(raw, start, offset),
        list_name="input",
        tools=[] if body.get("tool_choice") == "none" else tools,
        sampling=sampling,
        variables=variables,
        model=model_name(body),
        stream=flag(body, "stream"),
        one_call=not flag(body, "parallel_tool_calls", default=True),
        ignored=[*ignored(body, _KNOWN), *other_tools],
        body=body,
        kept_items=[items] if flag(body, "store", default=True) else None,
    )


def _tools(raw: object) -> tuple[list[Tool], list[str]]:
    """The functions in the canonical form; and the vendor's own tools, which nobody here could run."""
    tools: list[Tool] = []
    others: list[str] = []
    for i, tool in enumerate(a_list([] if raw is None else raw, "tools")):
        path = f"tools[{i}]"
        kind = a_string(an_object(tool, path).get("type"), f"{path}.type")
        if kind != "function":
            others.append(f"tool {kind}")
            continue
        function: dict[str, Any] = {"name": a_string(tool.get("name"), f"{path}.name")}
        if tool.get("description") is not None:
            function["description"] = a_string(tool["description"], f"{path}.description")
        function["parameters"] = obj(tool, "parameters", f"{path}.parameters") or {"type": "object", "properties": {}}
        tools.append({"type": "function", "function": function})
    return tools, others


def _refuse_what_we_cannot_do(body: JSON) -> None:
    """A field that changes the answer is honoured or refused, never silently ignored."""
    for name in _CANNOT & body.keys():
        if body[name]:
            raise bad_request(name, "not supported")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise bad_request("tool_choice", "only 'auto' and 'none' are supported")
    if (form := obj(obj(body, "text"), "format", "text.format")) and form.get("type") != "text":
        raise bad_request("text.format", "only {'type': 'text'} is supported")
    if body.get("truncation") not in (None, "disabled"):
        raise bad_request("truncation", "only 'disabled' is supported")
    if "message.output_text.logprobs" in a_list(body.get("include") or [], "include"):
        raise bad_request("include", "logprobs are to be had from chat completions")

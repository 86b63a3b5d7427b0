"""OpenAI Responses (https://platform.openai.com/docs/api-reference/responses): decode, encode, stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import GatewayError
from ..messages import Message, Tool, parse_arguments
from ..parsed import CallArgumentsDelta, CallStartDelta, ContentDelta, Delta, ReasoningDelta
from .base import (
    JSON,
    SAMPLING,
    Answer,
    CallIds,
    Numbers,
    WireRequest,
    a_list,
    a_string,
    an_object,
    bad_request,
    event,
    flag,
    ignored,
    model_name,
    numbers,
    obj,
    stop_strings,
    template_variables,
)
from .openai_chat import encode_error

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
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text", "refusal")

_Group = list[Any]
"""Items that follow each other and are one message: what an assistant said, or one item of another kind."""


class OpenAIResponses:
    """The wire of ``POST /v1/responses``."""

    id_prefix = "resp_"
    growing_list: str | None = None

    def decode(self, body: JSON, earlier: Sequence[Any] = ()) -> WireRequest:
        """``earlier``: what was kept of the answer that :meth:`earlier_id` names."""
        _refuse_what_we_cannot_do(body)
        before = [*earlier[0], *earlier[1]["output"]] if earlier else []
        items = [*before, *_items(body.get("input"))]
        if not items:
            raise bad_request("input", "a string or a non-empty list is required")
        raw: list[_Group] = _groups(items)
        instructions = body.get("instructions")
        if instructions is not None:
            # Not an item, and of this request alone; in front of the items it is compared like one.
            raw.insert(0, [{"role": "system", "content": a_string(instructions, "instructions")}])
        offset = -len(before) - (instructions is not None)

        def decode_messages(start: int) -> list[Message]:
            first = offset + sum(map(len, raw[:start]))
            messages = []
            for group in raw[start:]:
                messages.append(_decode_group(group, first))
                first += len(group)
            return messages

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
            decode_messages=decode_messages,
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

    def earlier_id(self, body: JSON) -> object:
        """The id of the answer that a request goes on from without repeating what was before it, else None."""
        return body.get("previous_response_id")

    def encode(self, request: WireRequest, answer: Answer) -> dict[str, Any]:
        return {**_head(request, answer.id, answer.created, answer.model), **_ending(answer, _output(answer))}

    def encode_error(self, error: GatewayError) -> dict[str, Any]:
        return encode_error(error)

    def stream(self, answer_id: str, created: int, request: WireRequest, call_ids: Sequence[CallIds]) -> _Stream:
        return _Stream(_head(request, answer_id, created, request.model), call_ids[0])


class _Stream:
    """Events in the documented order; each item ends where the next one begins."""

    def __init__(self, head: dict[str, Any], call_id: CallIds) -> None:
        self._head, self._call_id = head, call_id
        self._number = 0
        self._done: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        """The open item, and below what it says so far."""
        self._text: list[str] = []

    def start(self, prompt_tokens: int) -> bytes:
        response = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def deltas(self, deltas: Iterable[Delta], choice: int = 0) -> bytes:
        return b"".join(self._delta(delta) for delta in deltas)

    def finish(self, answer: Answer) -> bytes:
        [choice] = answer.choices
        said = {item["type"] for item in (*self._done, self._item) if item}
        events = b""
        if not said & {"message", "function_call"}:
            events += self._open(_message(self._next_id("msg"), "", "in_progress"))
        events += self._close("incomplete" if choice.finish_reason == "length" else "completed")
        ending = _ending(answer, self._done)
        return events + self._event(f"response.{ending['status']}", response={**self._head, **ending})

    def error(self, error: GatewayError) -> bytes:
        code = "server_error" if error.status >= 500 else error.kind
        failure = {"status": "failed", "error": {"code": code, "message": str(error)}}
        response = {**self._head, **failure, "output": self._done, "usage": None}
        return self._event("response.failed", response=response)

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case ReasoningDelta(text):
                events = self._open_unless("reasoning", _reasoning(self._next_id("rs"), ""))
                return events + self._say("response.reasoning_text.delta", text, content_index=0)
            case ContentDelta(text):
                events = self._open_unless("message", _message(self._next_id("msg"), "", "in_progress"))
                return events + self._say("response.output_text.delta", text, content_index=0, logprobs=[])
            case CallStartDelta(index, name, parsed_id):
                call_id = self._call_id(index, parsed_id)
                return self._open(_call(self._next_id("fc"), call_id, name, "", "in_progress"))
            case CallArgumentsDelta(_, text):
                return self._say("response.function_call_arguments.delta", text)

    def _say(self, kind: str, text: str, **more: Any) -> bytes:
        self._text.append(text)
        return self._at(kind, delta=text, **more)

    def _open_unless(self, kind: str, item: dict[str, Any]) -> bytes:
        return b"" if self._item is not None and self._item["type"] == kind else self._open(item)

    def _open(self, item: dict[str, Any]) -> bytes:
        events = self._close("completed")
        self._item, self._text = item, []
        if "content" not in item:
            return events + self._added(item)
        [part] = item["content"]
        events += self._added({**item, "content": []})
        return events + self._at("response.content_part.added", content_index=0, part=part)

    def _close(self, status: str) -> bytes:
        item, text = self._item, "".join(self._text)
        if item is None:
            return b""
        if item["type"] == "function_call":
            item |= {"arguments": text, "status": status}
            events = self._at("response.function_call_arguments.done", arguments=text, name=item["name"])
        else:
            [part] = item["content"]
            part["text"] = text
            if item["type"] == "message":
                item["status"] = status
                events = self._at("response.output_text.done", content_index=0, text=text, logprobs=[])
            else:
                events = self._at("response.reasoning_text.done", content_index=0, text=text)
            events += self._at("response.content_part.done", content_index=0, part=part)
        events += self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._item = None
        return events

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._done), item=item)

    def _at(self, kind: str, **data: Any) -> bytes:
        """An event of the open item."""
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=len(self._done), **data)

    def _event(self, kind: str, **data: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **data}, kind)

    def _next_id(self, prefix: str) -> str:
        return _item_id(prefix, self._head["id"], len(self._done) + (self._item is not None))


# -- requests --------------------------------------------------------------------------------------------


def _items(given: object) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return a_list(given, "input")


def _kind(item: object) -> str | None:
    """An item's type; messages may leave it out."""
    if not isinstance(item, Mapping):
        return None
    kind = item.get("type", "message" if "role" in item else None)
    return kind if isinstance(kind, str) else None


def _groups(items: Iterable[Any]) -> list[_Group]:
    groups: list[_Group] = []
    saying = False
    for item in items:
        kind = _kind(item)
        answer = kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")
        if answer and saying:
            groups[-1].append(item)
        else:
            groups.append([item])
        saying = answer
    return groups


def _decode_group(group: _Group, first: int) -> Message:
    """A group as one canonical message. ``first``: which item of ``input`` it begins with."""
    message: Message | None = None
    for i, item in enumerate(group, first):
        path = f"input[{i}]" if i >= 0 else "previous_response_id"
        kind = _kind(an_object(item, path))
        if kind == "function_call_output":
            return {
                "role": "tool",
                "content": _text(item.get("output"), f"{path}.output"),
                "tool_call_id": a_string(item.get("call_id"), f"{path}.call_id"),
            }
        if kind == "message" and item.get("role") != "assistant":
            return _decode_message(item, path)
        message = message or {"role": "assistant", "content": ""}
        match kind:
            case "message":
                message["content"] += _text(item.get("content"), f"{path}.content")
            case "reasoning":
                if text := _reasoning_text(item, path):
                    message["reasoning_content"] = message.get("reasoning_content", "") + text
            case "function_call":
                message.setdefault("tool_calls", []).append(_decode_call(item, path))
            case _:
                raise bad_request(f"{path}.type", f"items of type {item.get('type')!r} are not supported")
    assert message is not None
    return message


def _decode_message(item: JSON, path: str) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"{path}.role", f"one of {', '.join(_ROLES)} is required, got {role!r}")
    return {"role": _ROLES[role], "content": _text(item.get("content"), f"{path}.content")}


def _decode_call(item: JSON, path: str) -> dict[str, Any]:
    arguments = parse_arguments(a_string(item.get("arguments"), f"{path}.arguments"))
    function = {"name": a_string(item.get("name"), f"{path}.name"), "arguments": arguments}
    return {"type": "function", "id": a_string(item.get("call_id"), f"{path}.call_id"), "function": function}


def _reasoning_text(item: JSON, path: str) -> str:
    """The reasoning itself, else its summary. Encrypted reasoning is another model's."""
    for name, separator in (("content", ""), ("summary", "\n")):
        parts = a_list(item.get(name) or [], f"{path}.{name}")
        texts = [an_object(part, f"{path}.{name}[{i}]").get("text") for i, part in enumerate(parts)]
        if texts:
            return separator.join(a_string(text, f"{path}.{name}[{i}].text") for i, text in enumerate(texts))
    return ""


def _text(content: object, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(a_list(content, path)):
        kind = an_object(part, f"{path}[{i}]").get("type")
        if not isinstance(kind, str) or kind not in _TEXTS:
            raise bad_request(f"{path}[{i}]", f"parts of type {kind!r} are not supported, only text")
        name = "refusal" if kind == "refusal" else "text"
        texts.append(a_string(part.get(name), f"{path}[{i}].{name}"))
    return "".join(texts)


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


# -- answers ---------------------------------------------------------------------------------------------


def _head(request: WireRequest, answer_id: str, created: int, model: str) -> dict[str, Any]:
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


def _ending(answer: Answer, output: list[dict[str, Any]]) -> dict[str, Any]:
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


def _output(answer: Answer) -> list[dict[str, Any]]:
    """An answer's items. One without calls has a message, be it empty: else a replay of the items would lose it."""
    [choice] = answer.choices
    parsed = choice.message
    items: list[dict[str, Any]] = []
    if parsed.reasoning:
        items.append(_reasoning(_item_id("rs", answer.id, 0), parsed.reasoning))
    if parsed.content or not parsed.tool_calls:
        items.append(_message(_item_id("msg", answer.id, len(items)), parsed.content))
    for call_id, call in zip(choice.call_ids, parsed.tool_calls, strict=True):
        items.append(_call(_item_id("fc", answer.id, len(items)), call_id, call.name, call.arguments))
    if choice.finish_reason == "length" and "status" in items[-1]:
        items[-1]["status"] = "incomplete"
    return items


def _item_id(prefix: str, answer_id: str, index: int) -> str:
    return f"{prefix}_{answer_id.removeprefix(OpenAIResponses.id_prefix)}{index:02d}"


def _reasoning(item_id: str, text: str) -> dict[str, Any]:
    return {"id": item_id, "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def _message(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": [part]}


def _call(item_id: str, call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    called = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"id": item_id, "type": "function_call", "status": status, **called}

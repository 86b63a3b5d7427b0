"""OpenAI chat completions (https://platform.openai.com/docs/api-reference/chat): decode, encode, stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...errors import GatewayError
from ..messages import Message, Tool, parse_arguments
from ..parsed import CallArgumentsDelta, CallStartDelta, ContentDelta, Delta, ReasoningDelta
from .base import Answer, CallIds, WireRequest, bad_request

_NUMBERS: dict[str, tuple[str, type, float, float]] = {
    # field: name for the engine, type, smallest and largest value
    "max_tokens": ("max_tokens", int, 1, 2**31),
    "max_completion_tokens": ("max_tokens", int, 1, 2**31),
    "temperature": ("temperature", float, 0.0, 100.0),
    "top_p": ("top_p", float, 0.0, 1.0),
    "top_k": ("top_k", int, -1, 2**31),
    "min_p": ("min_p", float, 0.0, 1.0),
    "seed": ("seed", int, -(2**63), 2**63),
}
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class OpenAIChat:
    """The wire of ``POST /v1/chat/completions``."""

    def decode(self, body: Mapping[str, Any]) -> WireRequest:
        raw = body.get("messages")
        if not isinstance(raw, list) or not raw:
            raise bad_request("messages", "a non-empty list is required")
        _refuse_what_we_cannot_do(body)
        options = body.get("stream_options") or {}
        if not isinstance(options, Mapping):
            raise bad_request("stream_options", "an object is required")
        variables = body.get("chat_template_kwargs") or {}
        if not isinstance(variables, Mapping):
            raise bad_request("chat_template_kwargs", "an object is required")
        if isinstance(body.get("reasoning_effort"), str):
            variables = {"reasoning_effort": body["reasoning_effort"], **variables}
        return WireRequest(
            raw_messages=raw,
            decode_messages=lambda start: [
                decode_message(message, f"messages[{i}]") for i, message in enumerate(raw[start:], start)
            ],
            tools=[] if body.get("tool_choice") == "none" else _tools(body.get("tools")),
            sampling=_sampling(body),
            variables=dict(variables),
            model=body["model"] if isinstance(body.get("model"), str) else "",
            stream=_flag(body, "stream"),
            stream_usage=_flag(options, "include_usage", "stream_options.include_usage"),
            logprobs=_flag(body, "logprobs"),
        )

    def encode(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.message.content or None}
        if answer.message.reasoning:
            message["reasoning_content"] = answer.message.reasoning
        if answer.message.tool_calls:
            message["tool_calls"] = [
                _call(call_id, call.name, call.arguments)
                for call_id, call in zip(answer.call_ids, answer.message.tool_calls, strict=True)
            ]
        else:
            message["content"] = answer.message.content
        choice = {"index": 0, "message": message, "finish_reason": _finish_reason(answer), "logprobs": None}
        if answer.tokens is not None:
            choice["logprobs"] = {"content": [_token(text, lp) for text, lp in answer.tokens]}
        return {
            "id": answer.id,
            "object": "chat.completion",
            "created": answer.created,
            "model": answer.model,
            "choices": [choice],
            "usage": _usage(answer),
        }

    def encode_error(self, error: GatewayError) -> dict[str, Any]:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {
            "error": {"message": str(error), "type": kind, "param": error.param, "code": error.kind},
        }

    def stream(self, answer_id: str, created: int, request: WireRequest, call_id: CallIds) -> _Stream:
        head = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": request.model,
        }
        return _Stream(head, request.stream_usage, call_id, self.encode_error)


class _Stream:
    """``data: {chunk}`` events, closed by ``data: [DONE]``."""

    def __init__(
        self,
        head: dict[str, Any],
        usage: bool,
        call_id: CallIds,
        encode_error: Callable[[GatewayError], dict[str, Any]],
    ) -> None:
        self._head, self._usage, self._call_id, self._encode_error = head, usage, call_id, encode_error

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def deltas(self, deltas: Iterable[Delta]) -> bytes:
        return b"".join(self._chunk(self._delta(delta)) for delta in deltas)

    def finish(self, answer: Answer) -> bytes:
        logprobs = None
        if answer.tokens is not None:
            logprobs = {"content": [_token(text, lp) for text, lp in answer.tokens]}
        events = self._chunk({}, _finish_reason(answer), logprobs)
        if self._usage:
            events += _event({**self._head, "choices": [], "usage": _usage(answer)})
        return events + b"data: [DONE]\n\n"

    def error(self, error: GatewayError) -> bytes:
        return _event(self._encode_error(error))

    def _delta(self, delta: Delta) -> dict[str, Any]:
        match delta:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning_content": text}
            case CallStartDelta(index, name, parsed_id):
                return {"tool_calls": [{"index": index, **_call(self._call_id(index, parsed_id), name, "")}]}
            case CallArgumentsDelta(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return _event({**self._head, "choices": [choice]})


# -- requests --------------------------------------------------------------------------------------------


def decode_message(raw: object, path: str) -> Message:
    """One wire message as a canonical message."""
    if not isinstance(raw, Mapping):
        raise bad_request(path, "an object is required")
    role = raw.get("role")
    if role not in _ROLES:
        raise bad_request(f"{path}.role", f"one of {', '.join(_ROLES)} is required, got {role!r}")
    message: Message = {"role": _ROLES[role], "content": text_of(raw.get("content"), f"{path}.content")}
    if role == "assistant":
        reasoning = raw.get("reasoning_content") or raw.get("reasoning")
        if reasoning is not None and not isinstance(reasoning, str):
            raise bad_request(f"{path}.reasoning_content", "a string is required")
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = raw.get("tool_calls") or []
        if not isinstance(calls, list):
            raise bad_request(f"{path}.tool_calls", "a list is required")
        if calls:
            message["tool_calls"] = [_decode_call(c, f"{path}.tool_calls[{i}]") for i, c in enumerate(calls)]
    for name in ("tool_call_id", "name"):
        if raw.get(name) is not None:
            if not isinstance(raw[name], str):
                raise bad_request(f"{path}.{name}", "a string is required")
            message[name] = raw[name]
    return message


def text_of(content: object, path: str) -> str:
    """Message content as text: a string, null, or a list of text parts joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(path, "a string or a list of parts is required")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in ("text", "refusal"):
            raise bad_request(f"{path}[{i}]", f"parts of type {kind!r} are not supported, only text")
        if not isinstance(text, str):
            raise bad_request(f"{path}[{i}].text", "a string is required")
        texts.append(text)
    return "".join(texts)


def _decode_call(raw: object, path: str) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(raw, Mapping) or not isinstance(function, Mapping):
        raise bad_request(f"{path}.function", "an object is required")
    name, arguments, call_id = function.get("name"), function.get("arguments"), raw.get("id")
    if not isinstance(name, str):
        raise bad_request(f"{path}.function.name", "a string is required")
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        arguments = parse_arguments(arguments)
    if not isinstance(arguments, str | dict):
        raise bad_request(f"{path}.function.arguments", "a string of JSON is required")
    call_id = call_id if isinstance(call_id, str) else ""
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def _tools(raw: object) -> list[Tool]:
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise bad_request("tools", "a list is required")
    for i, tool in enumerate(raw):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise bad_request(f"tools[{i}].function.name", "a string is required")
    return raw


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for name, (engine_name, kind, low, high) in _NUMBERS.items():
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or kind(value) != value:
            raise bad_request(name, f"a number ({kind.__name__}) is required, got {value!r}")
        if not low <= value <= high:
            raise bad_request(name, f"{value} is not between {low:g} and {high:g}")
        params[engine_name] = kind(value)
    stop = body.get("stop")
    if stop:
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
            raise bad_request("stop", "a string or a list of non-empty strings is required")
        params["stop"] = stop
    ids = body.get("stop_token_ids")
    if ids:
        if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
            raise bad_request("stop_token_ids", "a list of token ids is required")
        params["stop_token_ids"] = ids
    return params


def _refuse_what_we_cannot_do(body: Mapping[str, Any]) -> None:
    """A field that changes the answer is honoured or refused, never silently ignored."""
    if body.get("n") not in (None, 1):
        raise bad_request("n", "only 1 is supported: send several requests")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise bad_request("tool_choice", "only 'auto' and 'none' are supported")
    response_format = body.get("response_format")
    if response_format is not None and (
        not isinstance(response_format, Mapping) or response_format.get("type") != "text"
    ):
        raise bad_request("response_format", "only {'type': 'text'} is supported")
    for name in ("presence_penalty", "frequency_penalty"):
        if body.get(name) not in (None, 0):
            raise bad_request(name, "penalties are not supported")


def _flag(body: Mapping[str, Any], name: str, path: str = "") -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_request(path or name, f"true or false is required, got {value!r}")
    return bool(value)


# -- answers ---------------------------------------------------------------------------------------------


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _finish_reason(answer: Answer) -> str:
    if answer.finish_reason == "length":
        return "length"
    return "tool_calls" if answer.message.tool_calls else "stop"


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }

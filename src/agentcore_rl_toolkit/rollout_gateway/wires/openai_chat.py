"""OpenAI chat completions (https://platform.openai.com/docs/api-reference/chat): decode, encode, stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import GatewayError
from ..body import RawMessages
from ..messages import Message, Tool, parse_arguments
from ..parsed import CallArgumentsDelta, CallStartDelta, ContentDelta, Delta, ReasoningDelta
from .base import (
    JSON,
    SAMPLING,
    Answer,
    CallIds,
    Choice,
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

MAX_CHOICES = 128
_NUMBERS: Numbers = {
    "max_tokens": ("max_tokens", int, 1, 2**31),
    "max_completion_tokens": ("max_tokens", int, 1, 2**31),
    "n": ("n", int, 1, MAX_CHOICES),
    **SAMPLING,
}
_ROLES = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # what tools were called at first
}
_CANNOT = {
    "audio", "functions", "function_call", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "logit_bias", "structured_outputs", "web_search_options",
}  # fmt: skip
"""Fields that ask for what an engine of tokens can't do, or not yet; their empty values ask for nothing."""
_NO_EFFECT = {
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "store", "user",
}  # fmt: skip
_HONOURED = {
    "chat_template_kwargs", "logprobs", "messages", "modalities", "model", "parallel_tool_calls", "reasoning_effort",
    "response_format", "stream", "stream_options", "tool_choice", "tools", "top_logprobs",
}  # fmt: skip
FIELDS_OF_SAMPLING = {"stop", "stop_token_ids", *_NUMBERS}
_KNOWN = frozenset(_HONOURED | FIELDS_OF_SAMPLING | _CANNOT | _NO_EFFECT)


class OpenAIChat:
    """The wire of ``POST /v1/chat/completions``."""

    id_prefix = "chatcmpl-"
    growing_list: str | None = "messages"

    def decode(self, body: JSON) -> WireRequest:
        raw = body.get("messages")
        if not isinstance(raw, list | RawMessages) or not len(raw):
            raise bad_request("messages", "a non-empty list is required")
        _refuse_what_we_cannot_do(body)
        options = obj(body, "stream_options")
        variables = template_variables(body)
        if body.get("reasoning_effort") is not None:
            variables = {"reasoning_effort": a_string(body["reasoning_effort"], "reasoning_effort"), **variables}
        sampling = sampling_of(body)
        return WireRequest(
            raw_messages=raw,
            decode_messages=lambda start: [
                decode_message(message, f"messages[{i}]") for i, message in enumerate(raw[start:], start)
            ],
            n=sampling.pop("n", 1),
            tools=[] if body.get("tool_choice") == "none" else _tools(body.get("tools")),
            sampling=sampling,
            variables=variables,
            model=model_name(body),
            stream=flag(body, "stream"),
            stream_usage=flag(options, "include_usage", "stream_options.include_usage"),
            logprobs=flag(body, "logprobs"),
            top_logprobs=_top_logprobs(body),
            one_call=not flag(body, "parallel_tool_calls", default=True),
            ignored=ignored(body, _KNOWN),
        )

    def encode(self, request: WireRequest, answer: Answer) -> dict[str, Any]:
        return {
            "id": answer.id,
            "object": "chat.completion",
            "created": answer.created,
            "model": answer.model,
            "choices": [
                {
                    "index": index,
                    "message": _message(choice),
                    "finish_reason": _finish_reason(choice),
                    "logprobs": _logprobs(choice),
                }
                for index, choice in enumerate(answer.choices)
            ],
            "usage": usage(answer),
        }

    def encode_error(self, error: GatewayError) -> dict[str, Any]:
        return encode_error(error)

    def stream(self, answer_id: str, created: int, request: WireRequest, call_ids: Sequence[CallIds]) -> _Stream:
        head = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": request.model,
        }
        return _Stream(head, request.stream_usage, call_ids)


class _Stream:
    """``data: {chunk}`` events, closed by ``data: [DONE]``."""

    def __init__(self, head: dict[str, Any], usage: bool, call_ids: Sequence[CallIds]) -> None:
        self._head, self._usage, self._call_ids = head, usage, call_ids

    def start(self, prompt_tokens: int) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice, first) for choice in range(len(self._call_ids)))

    def deltas(self, deltas: Iterable[Delta], choice: int = 0) -> bytes:
        return b"".join(self._chunk(choice, self._delta(delta, choice)) for delta in deltas)

    def finish(self, answer: Answer) -> bytes:
        events = b"".join(
            self._chunk(index, {}, _finish_reason(choice), _logprobs(choice))
            for index, choice in enumerate(answer.choices)
        )
        if self._usage:
            events += event({**self._head, "choices": [], "usage": usage(answer)})
        return events + b"data: [DONE]\n\n"

    def error(self, error: GatewayError) -> bytes:
        return event(encode_error(error))

    def _delta(self, delta: Delta, choice: int) -> dict[str, Any]:
        match delta:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning_content": text}
            case CallStartDelta(index, name, parsed_id):
                call_id = self._call_ids[choice](index, parsed_id)
                return {"tool_calls": [{"index": index, **_call(call_id, name, "")}]}
            case CallArgumentsDelta(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return event({**self._head, "choices": [choice]})


# -- requests --------------------------------------------------------------------------------------------


def decode_message(raw: object, path: str) -> Message:
    """One wire message as a canonical message."""
    if not isinstance(raw, Mapping):
        raise bad_request(path, "an object is required")
    role = raw.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"{path}.role", f"one of {', '.join(_ROLES)} is required, got {role!r}")
    message: Message = {"role": _ROLES[role], "content": text_of(raw.get("content"), f"{path}.content")}
    if role == "assistant":
        _decode_answer(raw, message, path)
    for name in ("tool_call_id", "name"):
        if raw.get(name) is not None:
            message[name] = a_string(raw[name], f"{path}.{name}")
    return message


def _decode_answer(raw: JSON, message: Message, path: str) -> None:
    """What only an assistant's message has: reasoning (under either name), calls, a refusal."""
    reasoning = raw.get("reasoning_content") or raw.get("reasoning")
    if reasoning:
        message["reasoning_content"] = a_string(reasoning, f"{path}.reasoning_content")
    calls = a_list(raw.get("tool_calls") or [], f"{path}.tool_calls")
    if calls:
        message["tool_calls"] = [_decode_call(c, f"{path}.tool_calls[{i}]") for i, c in enumerate(calls)]
    elif raw.get("function_call"):
        call = {"function": raw["function_call"]}
        message["tool_calls"] = [_decode_call(call, path, "function_call")]
    if raw.get("refusal") and not message["content"]:
        message["content"] = a_string(raw["refusal"], f"{path}.refusal")
    if raw.get("audio"):
        raise bad_request(f"{path}.audio", "audio is not supported, only text")


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
        if kind not in ("text", "refusal"):
            raise bad_request(f"{path}[{i}]", f"parts of type {kind!r} are not supported, only text")
        texts.append(a_string(part.get(kind), f"{path}[{i}].{kind}"))
    return "".join(texts)


def _decode_call(raw: object, path: str, name: str = "function") -> dict[str, Any]:
    raw = an_object(raw, path)
    function = an_object(raw.get("function"), f"{path}.{name}")
    arguments, call_id = function.get("arguments"), raw.get("id")
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        arguments = parse_arguments(arguments)
    if not isinstance(arguments, str | dict):
        raise bad_request(f"{path}.{name}.arguments", "a string of JSON is required")
    return {
        "type": "function",
        "id": call_id if isinstance(call_id, str) else "",
        "function": {"name": a_string(function.get("name"), f"{path}.{name}.name"), "arguments": arguments},
    }


def _tools(raw: object) -> list[Tool]:
    if raw is None:
        return []
    tools = a_list(raw, "tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise bad_request(f"tools[{i}].function.name", "a string is required")
    return tools


def sampling_of(body: JSON) -> dict[str, Any]:
    """What an engine is asked for, and ``n``."""
    params = numbers(body, _NUMBERS)
    if body.get("stop"):
        params["stop"] = stop_strings(body["stop"], "stop")
    if ids := body.get("stop_token_ids"):
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise bad_request("stop_token_ids", "a list of token ids is required")
        params["stop_token_ids"] = ids
    return params


def _top_logprobs(body: JSON) -> int:
    top = numbers(body, {"top_logprobs": ("top_logprobs", int, 0, 20)}).get("top_logprobs", 0)
    if top and not body.get("logprobs"):
        raise bad_request("top_logprobs", "goes with logprobs: true")
    return int(top)


def _refuse_what_we_cannot_do(body: JSON) -> None:
    """A field that changes the answer is honoured or refused, never silently ignored."""
    for name in _CANNOT & body.keys():
        if body[name]:
            raise bad_request(name, "not supported")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise bad_request("tool_choice", "only 'auto' and 'none' are supported")
    if (response_format := obj(body, "response_format")) and response_format.get("type") != "text":
        raise bad_request("response_format", "only {'type': 'text'} is supported")
    if body.get("modalities") not in (None, [], ["text"]):
        raise bad_request("modalities", "only ['text'] is supported")


# -- answers ---------------------------------------------------------------------------------------------


def encode_error(error: GatewayError) -> dict[str, Any]:
    """OpenAI's shape of an error, on all of its wires."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.kind}}


def _message(choice: Choice) -> dict[str, Any]:
    parsed = choice.message
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            _call(call_id, call.name, call.arguments)
            for call_id, call in zip(choice.call_ids, parsed.tool_calls, strict=True)
        ]
    return message


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _finish_reason(choice: Choice) -> str:
    if choice.finish_reason == "length":
        return "length"
    return "tool_calls" if choice.message.tool_calls else "stop"


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    if choice.tokens is None:
        return None
    return {
        "content": [
            {**_logprob(token.text, token.logprob), "top_logprobs": [_logprob(*top) for top in token.top]}
            for token in choice.tokens
        ]
    }


def _logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def usage(answer: Answer) -> dict[str, int]:
    completion = answer.completion_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": answer.prompt_tokens + completion,
    }

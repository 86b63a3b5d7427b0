"""Anthropic messages (https://docs.anthropic.com/en/api/messages): decode, encode, stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import ContextLengthExceeded, GatewayError
from ..messages import Message, Tool, parse_arguments
from ..parsed import CallArgumentsDelta, CallStartDelta, ContentDelta, Delta, ReasoningDelta
from .arguments import INVALID_JSON, ObjectText, object_of
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

SIGNATURE = "sampled-here"
"""Thinking blocks carry a signature that clients send back; nothing depends on it here."""

_NUMBERS: Numbers = {
    "max_tokens": ("max_tokens", int, 1, 2**31),
    **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k")},
}
_CANNOT = {"container", "mcp_servers", "output_format"}
_HONOURED = {
    "chat_template_kwargs", "context_management", "messages", "metadata", "model", "output_config", "service_tier",
    "stop_sequences", "stream", "system", "thinking", "thread", "tool_choice", "tools",
}  # fmt: skip
_OF_THREAD = ("system", "tools")
"""What a thread's later requests leave out, besides the messages before."""
_KNOWN = frozenset(_HONOURED | _NUMBERS.keys() | _CANNOT)
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    410: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicMessages:
    """The wire of ``POST /v1/messages``."""

    id_prefix = "msg_"
    growing_list: str | None = None

    def decode(self, body: JSON, earlier: Sequence[Any] = (), *, counting: bool = False) -> WireRequest:
        """``earlier``: what was kept of the answer that :meth:`earlier_id` names. ``counting``: the request is for
        ``/count_tokens``, which needs no ``max_tokens``."""
        thread = obj(body, "thread")
        body = _continued(body, earlier) if thread.get("type") == "continue" else body
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise bad_request("messages", "a non-empty list is required")
        if body.get("max_tokens") is None and not counting:
            raise bad_request("max_tokens", "a number is required")
        one_call = _refuse_what_we_cannot_do(body)
        tools, other_tools = _tools(body.get("tools"))
        sampling = numbers(body, _NUMBERS)
        if body.get("stop_sequences"):
            sampling["stop"] = stop_strings(a_list(body["stop_sequences"], "stop_sequences"), "stop_sequences")
        # The system prompt is no message on this wire; in front of them it is compared like one.
        first = 1 if body.get("system") else 0
        raw = [{"role": "system", "content": body["system"]}] if first else []
        raw += map(_without_cache_control, messages)

        def decode_messages(start: int) -> list[Message]:
            decoded = []
            for i, message in enumerate(raw[start:], start):
                path = f"messages[{i - first}]" if i >= first else "system"
                decoded += decode_message(message, path) if i >= first else [_system(message["content"])]
            return decoded

        return WireRequest(
            raw_messages=raw,
            decode_messages=decode_messages,
            tools=[] if obj(body, "tool_choice").get("type") == "none" else tools,
            sampling=sampling,
            variables=_variables(body),
            model=model_name(body),
            stream=flag(body, "stream"),
            one_call=one_call,
            ignored=[*ignored(body, _KNOWN), *other_tools],
            kept_items=[{name: body[name] for name in _OF_THREAD if name in body}, messages] if thread else None,
        )

    def earlier_id(self, body: JSON) -> object:
        """The id of the answer that a request goes on from without repeating what was before it, else None."""
        return obj(body, "thread").get("previous_message_id")

    def encode(self, request: WireRequest, answer: Answer) -> dict[str, Any]:
        [choice] = answer.choices
        parsed = choice.message
        content: list[dict[str, Any]] = []
        if parsed.reasoning:
            content.append({"type": "thinking", "thinking": parsed.reasoning, "signature": SIGNATURE})
        if parsed.content:
            content.append({"type": "text", "text": parsed.content})
        for call_id, call in zip(choice.call_ids, parsed.tool_calls, strict=True):
            arguments = object_of(call.arguments)
            value = {INVALID_JSON: call.arguments} if arguments is None else arguments
            content.append({"type": "tool_use", "id": call_id, "name": call.name, "input": value})
        return {
            **_head(answer.id, answer.model),
            "content": content,
            "stop_reason": _stop_reason(choice),
            "stop_sequence": choice.stop_sequence,
            "usage": _usage(answer.prompt_tokens, choice.completion_tokens),
        }

    def encode_error(self, error: GatewayError) -> dict[str, Any]:
        told: dict[str, Any] = {"type": _ERROR_TYPES.get(error.status, "api_error"), "message": str(error)}
        if isinstance(error, ContextLengthExceeded):
            told["message"] = f"prompt is too long: {error.prompt_tokens} tokens > {error.maximum} maximum"
        elif error.kind == "context_length_exceeded":  # in the words of an engine that counts for itself
            told["message"] = f"prompt is too long: {error}"
        elif error.kind == "previous_response_not_found":  # the vendor's SDK then sends the whole conversation again
            told["message"] = "thread.previous_message_id: this session has no such message to go on from (any more)"
            told["details"] = {"error_code": "thread_not_found"}
        return {"type": "error", "error": told, "request_id": None}

    def stream(self, answer_id: str, created: int, request: WireRequest, call_ids: Sequence[CallIds]) -> _Stream:
        return _Stream(self, _head(answer_id, request.model), call_ids[0])


class _Stream:
    """``message_start``, for each block ``content_block_start/delta/stop``, then ``message_delta``, ``message_stop``.

    A block ends where the next one begins.
    """

    def __init__(self, wire: AnthropicMessages, head: dict[str, Any], call_id: CallIds) -> None:
        self._wire, self._head, self._call_id = wire, head, call_id
        self._index = 0
        self._open: tuple[str, int] | None = None
        """Type of the open block, and which call it is."""
        self._arguments = ObjectText()

    def start(self, prompt_tokens: int) -> bytes:
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**message, "usage": _usage(prompt_tokens, 0)}) + _event("ping")

    def deltas(self, deltas: Iterable[Delta], choice: int = 0) -> bytes:
        return b"".join(self._delta(delta) for delta in deltas)

    def finish(self, answer: Answer) -> bytes:
        [choice] = answer.choices
        ended = {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stop_sequence}
        usage = _usage(answer.prompt_tokens, choice.completion_tokens)
        return self._close() + _event("message_delta", delta=ended, usage=usage) + _event("message_stop")

    def error(self, error: GatewayError) -> bytes:
        return event(self._wire.encode_error(error), "error")

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case ReasoningDelta(text):
                events = self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return events + self._piece({"type": "thinking_delta", "thinking": text})
            case ContentDelta(text):
                events = self._block("text", {"type": "text", "text": ""})
                return events + self._piece({"type": "text_delta", "text": text})
            case CallStartDelta(index, name, parsed_id):
                call_id = self._call_id(index, parsed_id)
                return self._block("tool_use", {"type": "tool_use", "id": call_id, "name": name, "input": {}}, index)
            case CallArgumentsDelta(_, text):
                return self._json_piece(self._arguments.feed(text))

    def _block(self, kind: str, block: dict[str, Any], call: int = 0) -> bytes:
        """Open a block, unless this one is open already."""
        if self._open == (kind, call):
            return b""
        events = self._close()
        self._open = (kind, call)
        return events + _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        kind, events = self._open[0], b""
        if kind == "thinking":
            events = self._piece({"type": "signature_delta", "signature": SIGNATURE})
        elif kind == "tool_use":
            events, self._arguments = self._json_piece(self._arguments.rest()), ObjectText()
        events += _event("content_block_stop", index=self._index)
        self._open = None
        self._index += 1
        return events

    def _piece(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _json_piece(self, text: str) -> bytes:
        return self._piece({"type": "input_json_delta", "partial_json": text}) if text else b""


# -- requests --------------------------------------------------------------------------------------------


def _continued(body: JSON, earlier: Sequence[Any]) -> dict[str, Any]:
    """A request that sends only what is new in its thread, as the whole conversation."""
    if not earlier:
        raise bad_request("thread.previous_message_id", "the id of the thread's last message is required")
    for name in _OF_THREAD:
        if body.get(name):
            raise bad_request(name, "a thread keeps what it was created with; leave it out to continue")
    kept, messages, answer = earlier
    new = a_list(body.get("messages") or [], "messages")
    return {**body, **kept, "messages": [*messages, {"role": "assistant", "content": answer["content"]}, *new]}


def _without_cache_control(message: Any) -> Any:
    """Clients move the mark to the newest message, and an earlier request would no longer be the beginning."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not any(isinstance(b, Mapping) and "cache_control" in b for b in content):
        return message
    blocks = [{k: v for k, v in b.items() if k != "cache_control"} if isinstance(b, Mapping) else b for b in content]
    return {**message, "content": blocks}


def _system(content: object) -> Message:
    return {"role": "system", "content": _text(content, "system")}


def decode_message(raw: object, path: str) -> list[Message]:
    """One wire message as canonical messages: tool results come inside of a user's message here."""
    raw = an_object(raw, path)
    role, content = raw.get("role"), raw.get("content")
    if role == "system":
        return [{"role": "system", "content": _text(content, f"{path}.content")}]
    if role not in ("user", "assistant"):
        raise bad_request(f"{path}.role", f"one of user, assistant is required, got {role!r}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = a_list(content, f"{path}.content")
    return (_user if role == "user" else _assistant)(blocks, f"{path}.content")


def _user(blocks: list[Any], path: str) -> list[Message]:
    messages: list[Message] = []
    texts: list[str] = []

    def close() -> None:
        if texts:
            messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for i, block in enumerate(blocks):
        where = f"{path}[{i}]"
        match an_object(block, where).get("type"):
            case "text":
                texts.append(a_string(block.get("text"), f"{where}.text"))
            case "tool_result":
                close()
                messages.append(_tool_result(block, where))
            case other:
                raise bad_request(where, f"blocks of type {other!r} are not supported, only text and tool_result")
    close()
    return messages or [{"role": "user", "content": ""}]


def _tool_result(block: JSON, path: str) -> Message:
    text = _text(block.get("content"), f"{path}.content")
    if flag(block, "is_error", f"{path}.is_error") and not text.lower().lstrip("<").startswith(
        ("error", "tool_use_error")
    ):
        text = f"Error: {text}"  # templates know no failed tools, so the text has to say it
    call_id = a_string(block.get("tool_use_id"), f"{path}.tool_use_id")
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def _assistant(blocks: list[Any], path: str) -> list[Message]:
    reasoning, content = "", ""
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        where = f"{path}[{i}]"
        match an_object(block, where).get("type"):
            case "thinking":
                reasoning += a_string(block.get("thinking"), f"{where}.thinking")
            case "redacted_thinking":
                pass  # another model's, and no one can read it
            case "text":
                content += a_string(block.get("text"), f"{where}.text")
            case "tool_use":
                calls.append(_decode_call(block, where))
            case other:
                raise bad_request(where, f"blocks of type {other!r} are not supported in an assistant's message")
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return [message]


def _decode_call(block: JSON, path: str) -> dict[str, Any]:
    arguments: Any = dict(an_object(block.get("input"), f"{path}.input"))
    if isinstance(arguments.get(INVALID_JSON), str):
        arguments = parse_arguments(arguments[INVALID_JSON])
    function = {"name": a_string(block.get("name"), f"{path}.name"), "arguments": arguments}
    return {"type": "function", "id": a_string(block.get("id"), f"{path}.id"), "function": function}


def _text(content: object, path: str) -> str:
    """Text blocks, one below the other."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, block in enumerate(a_list(content, path)):
        kind = an_object(block, f"{path}[{i}]").get("type")
        if kind != "text":
            raise bad_request(f"{path}[{i}]", f"blocks of type {kind!r} are not supported, only text")
        texts.append(a_string(block.get("text"), f"{path}[{i}].text"))
    return "\n".join(texts)


def _tools(raw: object) -> tuple[list[Tool], list[str]]:
    """The tools in the canonical form; and the vendor's own, which nobody here could run."""
    tools: list[Tool] = []
    others: list[str] = []
    for i, tool in enumerate(a_list([] if raw is None else raw, "tools")):
        path = f"tools[{i}]"
        name = a_string(an_object(tool, path).get("name"), f"{path}.name")
        if tool.get("type") not in (None, "custom"):
            others.append(f"tool {tool['type']}")
            continue
        function: dict[str, Any] = {"name": name}
        if tool.get("description") is not None:
            function["description"] = a_string(tool["description"], f"{path}.description")
        function["parameters"] = an_object(tool.get("input_schema"), f"{path}.input_schema")
        tools.append({"type": "function", "function": function})
    return tools, others


def _variables(body: JSON) -> dict[str, Any]:
    variables = template_variables(body)
    if thinking := obj(body, "thinking"):
        variables.setdefault("enable_thinking", thinking.get("type") != "disabled")
    effort = obj(body, "output_config").get("effort")
    if effort is not None:
        variables.setdefault("reasoning_effort", a_string(effort, "output_config.effort"))
    return variables


def _refuse_what_we_cannot_do(body: JSON) -> bool:
    """A field that changes the answer is honoured or refused. Returns whether one call is the most."""
    for name in _CANNOT & body.keys():
        if body[name]:
            raise bad_request(name, "not supported")
    if obj(body, "output_config").get("format"):
        raise bad_request("output_config.format", "not supported")
    kind = obj(body, "thinking").get("type")
    if body.get("thinking") and kind not in ("enabled", "disabled", "adaptive"):
        raise bad_request("thinking.type", f"enabled, disabled or adaptive is required, got {kind!r}")
    if body.get("thread") and obj(body, "thread").get("type") not in ("create", "continue"):
        raise bad_request("thread.type", "create or continue is required")
    edits = a_list(obj(body, "context_management").get("edits") or [], "context_management.edits")
    for i, edit in enumerate(edits):
        edit = an_object(edit, f"context_management.edits[{i}]")
        # The one that keeps everything is what Claude Code sends; any other would change what the model sees.
        if edit.get("keep") != "all":
            raise bad_request(f"context_management.edits[{i}]", "only an edit that keeps all is supported")
    choice = obj(body, "tool_choice")
    if choice and choice.get("type") not in ("auto", "none"):
        raise bad_request("tool_choice.type", "only 'auto' and 'none' are supported")
    return flag(choice, "disable_parallel_tool_use", "tool_choice.disable_parallel_tool_use")


# -- answers ---------------------------------------------------------------------------------------------


def _head(answer_id: str, model: str) -> dict[str, Any]:
    return {"id": answer_id, "type": "message", "role": "assistant", "model": model}


def _stop_reason(choice: Choice) -> str:
    if choice.stop_sequence is not None:
        return "stop_sequence"
    if choice.finish_reason == "length":
        return "max_tokens"
    return "tool_use" if choice.message.tool_calls else "end_turn"


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "input_tokens": prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": completion,
    }


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)

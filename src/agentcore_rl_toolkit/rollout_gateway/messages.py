"""The one message shape inside the gateway: what wires decode to, trees compare and templates render.

A canonical message is a plain dict in the shape chat templates expect:

- ``{"role": "system" | "user", "content": str}``
- ``{"role": "assistant", "content": str, "reasoning_content"?: str, "tool_calls"?: [call, …]}`` with
  ``call = {"type": "function", "id": str, "function": {"name": str, "arguments": dict | str}}``; arguments are
  a dict wherever the JSON text is an object, else the text itself
- ``{"role": "tool", "content": str, "tool_call_id"?: str, "name"?: str}``

``content`` is always a string (``null``, absent and ``""`` are one thing); ``tool_calls`` is absent when empty.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from .parsed import ParsedMessage

Message = dict[str, Any]
Tool = dict[str, Any]

EMPTY_KEY = bytes(16)


def parse_arguments(text: str) -> dict[str, Any] | str:
    """The arguments of a call as a dict, or the text itself where it is not a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def assistant_message(parsed: ParsedMessage, call_ids: Sequence[str]) -> Message:
    """The canonical message of a parsed answer; ``call_ids`` are the ids the client was given."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": call_id,
                "function": {"name": call.name, "arguments": parse_arguments(call.arguments)},
            }
            for call, call_id in zip(parsed.tool_calls, call_ids, strict=True)
        ]
    return message


def chain(messages: Sequence[Message], tools: Sequence[Tool], start: bytes | None = None) -> list[bytes]:
    """One key per message, each standing for everything up to and including it.

    Two histories have equal keys exactly where a client may have written the same thing differently: key order
    and spacing of arguments, number forms, wire ids, space around an assistant's text. Reasoning is left out
    (clients may drop it); :meth:`TokenTree.match` compares it where it is present.
    """
    key = tools_key(tools) if start is None else start
    keys = []
    for message in messages:
        key = blake2b(key + _content_bytes(message), digest_size=16).digest()
        keys.append(key)
    return keys


def tools_key(tools: Sequence[Tool]) -> bytes:
    """Where a chain starts: the tools are part of every prompt."""
    if not tools:
        return EMPTY_KEY
    return blake2b(_canonical_json(list(tools)).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _content_bytes(message: Message) -> bytes:
    role, content = message["role"], message["content"]
    if role == "assistant":
        parts = [role, content.strip()]
        for call in message.get("tool_calls", ()):
            function = call["function"]
            parts += [function["name"], _canonical_json(function["arguments"])]
    else:
        parts = [role, content, message.get("name") or ""]
    # Lengths first, so that no two different lists of parts give the same bytes.
    text = ",".join(str(len(part)) for part in parts) + ":" + "".join(parts)
    return text.encode("utf-8", "surrogatepass")


def _canonical_json(value: Any) -> str:
    return json.dumps(_plain_numbers(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _plain_numbers(value: Any) -> Any:
    """``1000.0`` and ``1e3`` come back from a JavaScript client as ``1000``, and an integer of more than 53 bits
    rounded: make them one number."""
    if isinstance(value, int) and 2**53 < abs(value) < 2**1000:
        return int(float(value))
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    return value

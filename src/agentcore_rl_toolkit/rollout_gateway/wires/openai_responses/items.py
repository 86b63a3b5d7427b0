"""The items of a request's ``input`` as messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...messages import Message, parse_arguments
from ..base import JSON, a_list, a_string, an_object, bad_request

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text", "refusal")

Group = list[Any]
"""Items that follow each other and are one message: what an assistant said, or one item of another kind."""


def input_items(given: object) -> list[Any]:
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


def grouped(items: Iterable[Any]) -> list[Group]:
    groups: list[Group] = []
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


def decode_groups(groups: Sequence[Group], start: int, offset: int) -> list[Message]:
    """``groups[start:]``, each as one canonical message. ``offset``: which item of ``input`` the first of all groups
    begins with; below 0 where items from elsewhere are in front."""
    first = offset + sum(map(len, groups[:start]))
    messages = []
    for group in groups[start:]:
        messages.append(_decode_group(group, first))
        first += len(group)
    return messages


def _decode_group(group: Group, first: int) -> Message:
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

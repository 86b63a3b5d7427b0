"""Text in system prompts that a harness changes with every request, and that would make each one a new conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .base import JSON

Patterns = Sequence[re.Pattern[str]]


def without_volatile(body: JSON, patterns: Patterns) -> dict[str, Any]:
    """The request of any wire without what ``patterns`` match in its system prompts, wherever the wire has them."""
    clean = dict(body)
    for name in ("system", "instructions"):
        if name in body:
            clean[name] = _clean(body[name], patterns)
    for name in ("messages", "input"):
        if isinstance(body.get(name), list):
            clean[name] = [_clean_message(message, patterns) for message in body[name]]
    return clean


def _clean_message(message: Any, patterns: Patterns) -> Any:
    if not isinstance(message, Mapping) or message.get("role") not in ("system", "developer"):
        return message
    return {**message, "content": _clean(message.get("content"), patterns)}


def _clean(content: Any, patterns: Patterns) -> Any:
    """Text, or a list of parts with text; a part of which nothing is left goes too."""
    if isinstance(content, str):
        for pattern in patterns:
            content = pattern.sub("", content)
        return content
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if isinstance(text, str) and (rest := _clean(text, patterns)) != text:
            if not rest.strip():
                continue
            part = {**part, "text": rest}
        parts.append(part)
    return parts

"""JSON as sampled: where a value ends, what it says, its members as raw text."""

from __future__ import annotations

import json
import re

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SPACE = re.compile(r"[ \t\n\r]*")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def is_object(text: str) -> bool:
    """Whether ``text`` is one JSON object and nothing else."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        _DECODER.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def is_value(text: str) -> bool:
    try:
        _DECODER.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def string(text: str) -> str:
    """The string that a JSON literal says, ``""`` where it is no string."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


def members(text: str) -> dict[str, str] | None:
    """The members of the JSON object ``text``, values as raw text, the first of equal keys; None if it is none."""
    try:
        found, end = _members(text)
    except (ValueError, RecursionError, IndexError):
        return None
    return None if text[end:].strip() else found


def _members(text: str) -> tuple[dict[str, str], int]:
    position = _after_space(text, 0)
    if text[position] != "{":
        raise ValueError("no object")
    position = _after_space(text, position + 1)
    found: dict[str, str] = {}
    while text[position] != "}":
        key, position = _DECODER.raw_decode(text, position)
        position = _after_space(text, position)
        if not isinstance(key, str) or text[position] != ":":
            raise ValueError("no key")
        start = _after_space(text, position + 1)
        position = _DECODER.raw_decode(text, start)[1]
        found.setdefault(key, text[start:position])
        position = _after_space(text, position)
        if text[position] == ",":
            position = _after_space(text, position + 1)
            if text[position] == "}":
                raise ValueError("trailing comma")
        elif text[position] != "}":
            raise ValueError("no comma")
    return found, position + 1


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


class ObjectScanner:
    """Finds where a JSON object ends that arrives in pieces. Brackets are counted, nothing is checked."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find_end(self, text: str, position: int = 0, limit: int | None = None) -> int | None:
        """The index after the object's last bracket, None if it goes on after ``text[:limit]``."""
        limit = len(text) if limit is None else limit
        if self._escaped and position < limit:
            self._escaped = False
            position += 1
        while match := (_IN_STRING if self._in_string else _OUTSIDE).search(text, position, limit):
            position = match.end()
            match match[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = position == limit
                    position += 1
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return position
        return None

"""The arguments of a call for a client that parses them as an object, streamed or not: text that is none is wrapped."""

from __future__ import annotations

import json
from typing import Any

INVALID_JSON = "INVALID_JSON"
"""Arguments that are no JSON object travel as ``{"INVALID_JSON": "<text as sampled>"}``, the vendor's own advice."""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


class ObjectText:
    """The text of a call's arguments on its way out, one whole member at a time, as the vendor does it: the client
    parses it as an object, so text that turns out to be none must not have been sent."""

    def __init__(self) -> None:
        self._text = ""
        self._sent = 0
        self._try_at = 0

    def feed(self, text: str) -> str:
        """What may be sent now that ``text`` was sampled."""
        self._text += text
        # Looking again only after the unsent text has grown by half keeps this linear for long values.
        if len(self._text) < self._try_at or not ("," in text or "}" in text):
            return ""
        end = _whole_members(self._text, self._sent)
        piece, self._sent = self._text[self._sent : end], end
        self._try_at = end + (len(self._text) - end) * 3 // 2
        return piece

    def rest(self) -> str:
        """What is left to send at the end; all pieces together are a JSON object."""
        if object_of(self._text) is not None:
            return self._text[self._sent :]
        return ("," if self._sent else "{") + f'"{INVALID_JSON}":{json.dumps(self._text, ensure_ascii=False)}}}'


def _whole_members(text: str, start: int) -> int:
    """How far an object's text consists of whole members, from ``start``, which is such a place (or 0)."""
    position = _skip_space(text, start)
    if start == 0:
        if text[position : position + 1] != "{":
            return 0
        position = _skip_space(text, position + 1)
    elif text[position : position + 1] == ",":
        position = _skip_space(text, position + 1)
    end = start
    try:
        while text[position : position + 1] == '"':
            position = _skip_space(text, _DECODER.raw_decode(text, position)[1])
            if text[position : position + 1] != ":":
                break
            after = _DECODER.raw_decode(text, _skip_space(text, position + 1))[1]
            position = _skip_space(text, after)
            if text[position : position + 1] not in (",", "}"):  # a number may go on
                break
            end = after
            if text[position] == "}":
                break
            position = _skip_space(text, position + 1)
    except (ValueError, RecursionError):
        pass
    return end


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\t", "\n", "\r"):
        position += 1
    return position


def object_of(text: str) -> dict[str, Any] | None:
    """A JSON object, or None for any other text."""
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None

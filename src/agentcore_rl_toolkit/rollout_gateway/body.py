"""Request bodies whose list of messages grows: what an earlier request began with is not read again.

An agent sends its whole history with every request, and nearly always the body begins, byte by byte, like the one
before. Then only the rest is parsed; a beginning that was valid JSON once is so again.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from .fastjson import loads

_COMMA = re.compile(rb"[ \t\r\n]*,")
_DECODER = json.JSONDecoder()
_MARK = secrets.token_hex(16)
"""Stands for the list while the rest of a body is parsed; nobody outside can know it."""


class RawMessages(Sequence[Any]):
    """The messages of a body: its text up to the end of the last of them.

    ``opening``: where the list opens. ``items``: the parsed messages from number ``start`` on; those before are the
    text of an earlier request, and are parsed only if somebody looks.
    """

    __slots__ = ("_items", "_start", "length", "opening", "text")

    def __init__(self, text: bytes, opening: int, length: int, items: list[Any]) -> None:
        self.text, self.opening, self.length = text, opening, length
        self._items, self._start = items, length - len(items)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice) and at.step is None and at.stop is None and 0 <= self._start <= (at.start or 0):
            return self._items[(at.start or 0) - self._start :]
        self._read_all()
        return self._items[at]

    def _read_all(self) -> None:
        if self._start:
            self._items, self._start = loads(self.text[self.opening :] + b"]"), 0

    def forget(self) -> None:
        """Keep the text alone."""
        self._items, self._start = [], self.length

    def begins(self, body: bytes) -> bool:
        """Whether these messages, and then more of them, are the beginning of ``body``."""
        end = len(self.text)
        # The last bytes tell branches apart cheaply.
        return (
            body[end - 32 : end] == self.text[-32:]
            and body.startswith(self.text)
            and _COMMA.match(body, end) is not None
        )


def goes_on(messages: Sequence[Any], earlier: Sequence[Any]) -> bool:
    """Whether ``messages`` are ``earlier`` and more, both as they came."""
    n = len(earlier)
    if not 0 < n < len(messages):
        return False
    if isinstance(messages, RawMessages):
        return isinstance(earlier, RawMessages) and messages.text.startswith(earlier.text)
    # The last message tells branches apart cheaply.
    return isinstance(earlier, list) and earlier[-1] == messages[n - 1] and earlier == messages[:n]


def read_body(data: bytes, name: str, earlier: Iterable[RawMessages]) -> Any:
    """The parsed body, its list ``name`` as :class:`RawMessages`. ``earlier``: the messages that it may go on from.

    A body that is odd in any way is parsed as a whole, and its list is a plain one. Raises ``ValueError`` or
    ``RecursionError`` for what is not JSON.
    """
    known = max((e for e in earlier if e.begins(data)), key=len, default=None)
    try:
        body = _read(data, name, known)
    except (ValueError, RecursionError):
        body = None
    return loads(data) if body is None else body


def _read(data: bytes, name: str, known: RawMessages | None) -> dict[str, Any] | None:
    if known is not None:
        opening, count, comma = known.opening, known.length, _COMMA.match(data, len(known.text))
        assert comma is not None
        position = comma.end()
    else:
        match = re.search(b'"%s"[ \t\r\n]*:[ \t\r\n]*\\[' % name.encode(), data)
        if match is None:
            return None
        opening, count, position = match.end() - 1, 0, match.end()
    rest = data[position:].decode()
    items, end = _DECODER.raw_decode("[" + rest)
    body = loads(data[:opening] + f'"{_MARK}"{rest[end - 1 :]}'.encode())
    if not items or not isinstance(body, dict) or body.get(name) != _MARK:
        return None
    text = data[: position + len(rest[: end - 2].rstrip(" \t\r\n").encode())]
    body[name] = RawMessages(text, opening, count + len(items), items)
    return body

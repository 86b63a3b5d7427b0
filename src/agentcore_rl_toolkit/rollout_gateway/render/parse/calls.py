"""The inside of one tool call, per notation: text in, name and argument text out."""

from __future__ import annotations

import re

from ...parsed import CallStatus
from .jsontext import ObjectScanner, is_object, members, string

NAME_WITHIN = 512
"""A name is looked for in so many characters of a call while it arrives; a later one is found when the call ends."""


class Call:
    """One call while it is read.

    ``name``: ``""`` until it is known. ``feed`` and ``close`` return argument text that is certain, and only after
    the name is known. ``close`` sets ``status``; ``text`` is all that was fed.
    """

    def __init__(self) -> None:
        self.name = ""
        self.id: str | None = None
        self.status: CallStatus = "ok"
        self.text = ""

    def feed(self, text: str) -> str:
        raise NotImplementedError

    def close(self, *, closed: bool) -> str:
        """The rest of the arguments. ``closed``: the format's end marker was there."""
        raise NotImplementedError


class JsonCall(Call):
    """``{"name": …, "arguments": {…}}``; in the usual order of keys the arguments pass through as they come."""

    _HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
    _NAME = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")')

    def __init__(self) -> None:
        super().__init__()
        self._scanner: ObjectScanner | None = None
        self._arguments: list[str] = []
        self._after: str | None = None

    def feed(self, text: str) -> str:
        if self._after is not None:
            self._after += text
            return ""
        if self._scanner is None:
            self.text += text
            header = self._HEADER.match(self.text, 0, NAME_WITHIN)
            name = string(header[1]) if header else ""
            if not header or not name:
                return ""
            self.name = name
            self._scanner = ObjectScanner()
            text = self.text[header.end() :]
        end = self._scanner.find_end(text)
        if end is not None:
            self._after = text[end:]
            text = text[:end]
        self._arguments.append(text)
        return text

    def close(self, *, closed: bool) -> str:
        arguments = ""
        if self._scanner is not None:
            whole = self._after is not None and members('{"":0' + self._after) is not None
            ok = whole and is_object("".join(self._arguments))
        else:
            arguments, ok = self._whole()
        self.status = "unclosed" if not closed else "ok" if ok else "invalid_json"
        return arguments

    def _whole(self) -> tuple[str, bool]:
        found = members(self.text)
        if found is None:
            name = self._NAME.search(self.text)
            self.name = string(name[1]) if name else ""
            return self.text.strip(), False
        self.name = string(found.get("name", ""))
        arguments = found.get("arguments") or found.get("parameters") or "{}"
        return ("{}", True) if arguments == "null" else (arguments, is_object(arguments))

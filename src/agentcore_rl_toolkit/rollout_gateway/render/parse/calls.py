"""The inside of one tool call, per notation: text in, name and argument text out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ...parsed import CallStatus
from .jsontext import ObjectScanner, is_object, members, string

Tools = Sequence[dict[str, Any]]
"""OpenAI tool schemas."""

NAME_WITHIN = 512
"""A name is looked for in so many characters of a call while it arrives; a later one is found when the call ends."""


class Call:
    """One call while it is read.

    ``name``: ``""`` until it is known. ``feed`` and ``close`` return argument text that is certain, and only after
    the name is known. ``close`` sets ``status``; a call that has no name then is no call but ``text``.
    """

    def __init__(self) -> None:
        self.name = ""
        self.id: str | None = None
        self.status: CallStatus = "ok"
        self.text = ""
        """What was fed, at least until the name was known."""

    def feed(self, text: str) -> str:
        raise NotImplementedError

    def close(self, *, closed: bool) -> str:
        """The rest of the arguments. ``closed``: the format's end marker was there."""
        raise NotImplementedError

    def _find_name(self, pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
        """Add ``text`` to the text so far and look for the name at its beginning."""
        searched = len(self.text)
        self.text += text
        return pattern.match(self.text, 0, NAME_WITHIN) if searched < NAME_WITHIN else None

    def _set_status(self, *, closed: bool, ok: bool) -> None:
        self.status = "unclosed" if not closed else "ok" if ok else "invalid_json"


CallFactory = Callable[[Tools], Call]

_STRING = r'"(?:[^"\\]|\\.)*"'


class JsonCall(Call):
    """``{"name": …, "arguments": {…}}``; in the usual order of keys the arguments pass through as they come.

    ``hold``: all at the end, for notations with members after the arguments (an id). ``strict``: only an object with
    name and arguments is a call (anything else is an answer in JSON).
    """

    _HEADER = re.compile(rf'\s*\{{\s*"(?:tool_)?name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
    _NAME = re.compile(rf'"(?:tool_)?name"\s*:\s*({_STRING})')

    def __init__(self, *, hold: bool = False, strict: bool = False) -> None:
        super().__init__()
        self._hold = hold
        self._strict = strict
        self._scanner: ObjectScanner | None = None
        self._arguments: list[str] = []
        self._after: str | None = None
        """What follows the arguments, once they ended."""

    def feed(self, text: str) -> str:
        if self._after is not None:
            self._after += text
            return ""
        if self._scanner is None:
            header = self._find_name(self._HEADER, text)
            if self._hold or not header or not (name := string(header[1])):
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
            arguments, ok = self._read_whole()
        self._set_status(closed=closed, ok=ok)
        return arguments

    def _read_whole(self) -> tuple[str, bool]:
        found = members(self.text)
        if found is None:
            return self._recover(), False
        arguments = found.get("arguments") or found.get("parameters")
        if self._strict and arguments is None:
            return "", False
        self.name = string(found.get("name") or found.get("tool_name") or "")
        self.id = string(found.get("id", "")) or None
        if arguments in (None, "null"):
            return "{}", True
        return arguments or "", is_object(arguments or "")

    def _recover(self) -> str:
        """The name of an object that is no JSON, where it can be made out."""
        header = self._HEADER.match(self.text)
        name = header or (None if self._strict else self._NAME.search(self.text))
        self.name = string(name[1]) if name else ""
        return self.text[header.end() :] if header else self.text.strip()


class RawCall(Call):
    """A header with the name, then the argument text as it is.

    ``header``: ends where the arguments begin; groups ``name`` and perhaps ``id``. ``padding``: characters around
    the arguments that the format puts there.
    """

    def __init__(self, header: re.Pattern[str] | None = None, *, name: str = "", padding: str = " \t\r\n") -> None:
        super().__init__()
        self.name = name
        self._header = header
        self._padding = padding
        self._held = ""
        self._arguments: list[str] = []

    def feed(self, text: str) -> str:
        if not self.name and self._header is not None:
            match = self._find_name(self._header, text)
            if not match:
                return ""
            self.name = match["name"]
            self.id = match.groupdict().get("id") or None
            text = self.text[match.end() :]
        if not self._arguments:
            text = text.lstrip()
        certain = text.rstrip(self._padding)
        if not certain:
            self._held += text
            return ""
        certain, self._held = self._held + certain, text[len(certain) :]
        self._arguments.append(certain)
        return certain

    def close(self, *, closed: bool) -> str:
        arguments = "".join(self._arguments)
        self._set_status(closed=closed, ok=not arguments or is_object(arguments))
        if not closed:
            return self._held
        return "" if arguments else "{}"

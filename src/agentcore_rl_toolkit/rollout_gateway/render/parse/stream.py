"""The parts of a parser: find markers, hold back what is not certain, hand out deltas."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ...parsed import (
    CallArgumentsDelta,
    CallStartDelta,
    ContentDelta,
    Delta,
    ParsedCall,
    ParsedMessage,
    ReasoningDelta,
)
from .calls import Call, Tools
from .jsontext import ObjectScanner
from .vocabulary import TokenReader, Vocabulary, has_mark


class Scanner:
    """Finds the first of some markers in text that arrives in pieces."""

    def __init__(self, markers: Iterable[str], ends: str) -> None:
        found = sorted({m for m in markers if m}, key=len, reverse=True)
        starts = sorted({m[:n] for m in found for n in range(1, len(m))}, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, found)) or r"(?!)")
        self._start = re.compile(f"(?:{'|'.join(map(re.escape, starts))})\\Z") if starts else None
        self._longest = max(map(len, starts), default=0)
        self._ends = ends

    def find(self, text: str, position: int) -> tuple[int, str]:
        """``(where, marker)``; without a marker, ``where`` is how far the text certainly belongs to none."""
        if match := self._marker.search(text, position):
            return match.start(), match[0]
        end = max(position, _before_ends(text, self._ends))
        if end == len(text) and self._start and (m := self._start.search(text, max(position, end - self._longest))):
            end = m.start()
        return end, ""


_MOST_ENDS = 8
"""End tokens that may follow each other at the end of an answer; more are text."""


def _before_ends(text: str, ends: str) -> int:
    tail = text[-_MOST_ENDS:]
    return len(text) - len(tail) + len(tail.rstrip(ends))


class ObjectEnd:
    """Finds the bracket that ends a JSON object, as if it were a marker (a ``Scanner`` for one object)."""

    def __init__(self, opening: str, ends: str) -> None:
        self._scanner = ObjectScanner()
        self._scanner.find_end(opening)
        self._ends = ends

    def find(self, text: str, position: int) -> tuple[int, str]:
        limit = max(position, _before_ends(text, self._ends))
        end = self._scanner.find_end(text, position, limit)
        return (limit, "") if end is None else (end - 1, text[end - 1])


class Deltas:
    """What an answer says, in the order it was said: handed out once as deltas and kept as the message."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._new: list[Delta] = []
        self._kind: type[ReasoningDelta] | type[ContentDelta] = ContentDelta
        self._pending: list[str] = []
        """Text of ``_kind`` that will be one delta."""
        self._raw: list[str] = []
        self._texts: dict[type, list[str]] = {ReasoningDelta: [], ContentDelta: []}
        self.calls: list[ParsedCall] = []
        self._arguments: list[list[str]] = []
        self.ill_formed = False

    def sampled(self, text: str) -> str:
        """Keep ``text`` as part of the raw output."""
        self._raw.append(text)
        return text

    def text(self, kind: type[ReasoningDelta] | type[ContentDelta], text: str) -> None:
        if not text:
            return
        if has_mark(text):  # a control token where the format has no place for one
            text, self.ill_formed = self._vocabulary.spell(text), True
        self._texts[kind].append(text)
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._pending.append(text)

    def said(self, kind: type[ReasoningDelta] | type[ContentDelta]) -> bool:
        return bool(self._texts[kind])

    def call(self, name: str, call_id: str | None) -> None:
        self._flush()
        name = self._vocabulary.spell(name)
        self.calls.append(ParsedCall(name, "", id=call_id))
        self._arguments.append([])
        self._new.append(CallStartDelta(len(self.calls) - 1, name, call_id))

    def arguments(self, text: str) -> None:
        if text:
            text = self._vocabulary.spell(text)
            self._arguments[-1].append(text)
            self._new.append(CallArgumentsDelta(len(self.calls) - 1, text))

    def _flush(self) -> None:
        if self._pending:
            self._new.append(self._kind("".join(self._pending)))
            self._pending = []

    def end_call(self, call: Call, tools: Tools) -> None:
        """Settle the status of the last call. Where a request has no tools, there are no names to check."""
        status = call.status
        names = {(tool.get("function") or tool).get("name") for tool in tools}
        if status == "ok" and names and call.name not in names:
            status = "unknown_tool"
        self.calls[-1].status = status
        self.ill_formed |= status in ("invalid_json", "unclosed")

    def take(self) -> list[Delta]:
        self._flush()
        new, self._new = self._new, []
        return new

    def message(self) -> ParsedMessage:
        for call, arguments in zip(self.calls, self._arguments, strict=True):
            call.arguments = "".join(arguments)
        reasoning, content = ("".join(texts) for texts in self._texts.values())
        return ParsedMessage(
            reasoning, content, self.calls, self.ill_formed, self._vocabulary.spell("".join(self._raw))
        )


class Reader:
    """The loop of a parser (an ``OutputParser``): text up to a marker, the marker, and so on.

    Subclasses say what ``_scanner`` looks for and what ``_text``, ``_marker`` and ``_end`` do with what it finds.
    """

    _scanner: Scanner | ObjectEnd

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens = TokenReader(vocabulary)
        self._buffer = ""
        """What is not certain yet: perhaps the beginning of a marker, perhaps the end tokens."""
        self._out = Deltas(vocabulary)

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        self._read(self._out.sampled(self._tokens.read(ids)))
        return self._out.take()

    def finish(self, finish_reason: str) -> tuple[list[Delta], ParsedMessage]:
        self._read(self._out.sampled(self._tokens.rest()))
        if rest := self._buffer.rstrip(self._vocabulary.ends):
            self._text(rest)
        self._end(cut=finish_reason == "length")
        return self._out.take(), self._out.message()

    def _read(self, text: str) -> None:
        text, position = self._buffer + text, 0
        while True:
            end, marker = self._scanner.find(text, position)
            if end > position:
                self._text(text[position:end])
            position = end + len(marker)
            if not marker:
                break
            self._marker(marker)
        self._buffer = text[position:]

    def _text(self, text: str) -> None:
        raise NotImplementedError

    def _marker(self, marker: str) -> None:
        raise NotImplementedError

    def _end(self, *, cut: bool) -> None:
        """The answer is over. ``cut``: by the length limit."""
        raise NotImplementedError


class Newlines:
    """Passes text on without the newlines that a format puts at its ends: at most ``skip`` and ``hold``."""

    def __init__(self, skip: int, hold: int) -> None:
        self._skip = skip
        self._hold = hold
        self.held = ""

    def feed(self, text: str) -> str:
        if self._skip:
            count = min(self._skip, len(text) - len(text.lstrip("\n")))
            self._skip = self._skip - count if count == len(text) else 0
            text = text[count:]
        if not text:
            return ""
        text, cut = self.held + text, len(self.held) + len(text)
        lowest = max(0, cut - self._hold)
        while cut > lowest and text[cut - 1] == "\n":
            cut -= 1
        self.held = text[cut:]
        return text[:cut]

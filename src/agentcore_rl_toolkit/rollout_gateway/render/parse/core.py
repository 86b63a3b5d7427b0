"""One answer, read incrementally: reasoning, content and calls, told apart by a format's markers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from ...parsed import (
    CallArgumentsDelta,
    CallStartDelta,
    ContentDelta,
    Delta,
    ParsedCall,
    ParsedMessage,
    ReasoningDelta,
)
from .calls import Call
from .vocabulary import TokenReader, Vocabulary, has_mark

Schemas = dict[str, Any]
"""The tools of a request: name to JSON schema of its parameters."""


@dataclass(frozen=True)
class Think:
    """How a model marks its reasoning. The numbers are newlines that the format itself puts: after the opening
    marker, before the closing one, and after it."""

    open: str = "<think>"
    close: str = "</think>"
    after_open: int = 1
    before_close: int = 1
    after_close: int = 2


@dataclass(frozen=True)
class Format:
    """How a model marks tool calls.

    ``call``: makes the reader of one call's inside. ``section``: markers around all the calls of an answer, or None.
    ``before_call``: newlines that the format itself puts between content and the first marker.
    """

    name: str
    open: str = ""
    close: str = ""
    call: Callable[[Vocabulary, Schemas], Call] | None = None
    section: tuple[str, str] | None = None
    before_call: int = 1
    think: Think | None = None

    def markers(self) -> list[str]:
        think = [self.think.open, self.think.close] if self.think else []
        return [marker for marker in (self.open, self.close, *(self.section or ()), *think) if marker]


class Grammar:
    """A format over a vocabulary: makes the parser of one answer (a ``ParserFactory``)."""

    def __init__(self, tokenizer: Tokenizer, form: Format) -> None:
        self.form = form
        self.name = form.name
        self.vocabulary = Vocabulary(tokenizer, form.markers())
        mark, ends = self.vocabulary.compile, self.vocabulary.ends
        self.open, self.close = mark(form.open), mark(form.close)
        self.section = (mark(form.section[0]), mark(form.section[1])) if form.section else ("", "")
        self.think = (mark(form.think.open), mark(form.think.close)) if form.think else ("", "")
        # A call outside its section counts only where its marker can't be forged by ordinary text.
        bare = self.open if not form.section or has_mark(self.open) else ""
        self.in_content = Scanner([self.think[0], *self.section, bare], ends)
        self.in_section = Scanner([self.open, self.section[1]], ends)
        self.in_reasoning = Scanner([self.think[1]], ends)
        self.in_call = Scanner([self.close, self.open, self.section[1]], ends)

    def __call__(self, *, prompt_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> Parser:
        return Parser(self, tools, self._thinking(prompt_ids))

    def _thinking(self, prompt_ids: Sequence[int]) -> int | None:
        """Newlines after the thinking marker that the prompt ends with, None where it opens no reasoning."""
        if not self.think[0]:
            return None
        end = TokenReader(self.vocabulary, at_start=False).read(prompt_ids[-16:])
        stripped = end.rstrip()
        return len(end) - len(stripped) if stripped.endswith(self.think[0]) else None


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
        end = len(text)
        if not text.isascii():
            end = max(position, len(text.rstrip(self._ends)))
        if end == len(text) and self._start and (m := self._start.search(text, max(position, end - self._longest))):
            end = m.start()
        return end, ""


class Deltas:
    """What an answer says, in the order it was said: handed out once as deltas and kept as the message."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._new: list[Delta] = []
        self._texts: dict[type, list[str]] = {ReasoningDelta: [], ContentDelta: []}
        self.calls: list[ParsedCall] = []
        self._arguments: list[list[str]] = []
        self.ill_formed = False

    def text(self, kind: type[ReasoningDelta] | type[ContentDelta], text: str) -> None:
        if not text:
            return
        if has_mark(text):  # a control token where the format has no place for one
            text, self.ill_formed = self._vocabulary.spell(text), True
        self._texts[kind].append(text)
        if self._new and isinstance(last := self._new[-1], kind):
            self._new[-1] = kind(last.text + text)
        else:
            self._new.append(kind(text))

    def said(self, kind: type[ReasoningDelta] | type[ContentDelta]) -> bool:
        return bool(self._texts[kind])

    def call(self, name: str, call_id: str | None) -> None:
        self.calls.append(ParsedCall(name, "", id=call_id))
        self._arguments.append([])
        self._new.append(CallStartDelta(len(self.calls) - 1, name, call_id))

    def arguments(self, text: str) -> None:
        if text:
            text = self._vocabulary.spell(text)
            self._arguments[-1].append(text)
            self._new.append(CallArgumentsDelta(len(self.calls) - 1, text))

    def take(self) -> list[Delta]:
        new, self._new = self._new, []
        return new

    def message(self, raw: str) -> ParsedMessage:
        for call, arguments in zip(self.calls, self._arguments, strict=True):
            call.arguments = "".join(arguments)
        reasoning, content = ("".join(texts) for texts in self._texts.values())
        return ParsedMessage(reasoning, content, self.calls, self.ill_formed, raw)


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


class Parser:
    """Reads one answer (an ``OutputParser``).

    Only what is certain is handed out: held back are half characters, beginnings of markers, newlines that a
    marker may turn out to own, white space around calls, and control tokens that may be the last.
    """

    def __init__(self, grammar: Grammar, tools: Sequence[dict[str, Any]], thinking: int | None) -> None:
        self._grammar = grammar
        self._tools = tools
        self._reader = TokenReader(grammar.vocabulary)
        self._ids: list[int] = []
        self._buffer = ""
        self._out = Deltas(grammar.vocabulary)
        self._blank: str | None = ""
        """White space since the start or the last call; None once there is content after it."""
        self._call: Call | None = None
        self._call_started = False
        self._call_opening = ""
        if thinking is None:
            self._scanner = grammar.in_content
            self._run = Newlines(0, grammar.form.before_call)
        else:
            self._reason(thinking)

    # -- the seam ----------------------------------------------------------------------------------------

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        self._ids += ids
        self._read(self._reader.read(ids))
        return self._out.take()

    def finish(self, finish_reason: str) -> tuple[list[Delta], ParsedMessage]:
        self._read(self._reader.rest())
        rest, self._buffer = self._buffer.rstrip(self._grammar.vocabulary.ends), ""
        if rest:
            self._text(rest)
        if self._call is not None:
            self._close_call("", closed=False)
        elif self._scanner is self._grammar.in_reasoning:
            self._out.text(ReasoningDelta, self._run.held)
            self._out.ill_formed = True  # it never got to an answer
        self._end_content()
        vocabulary = self._grammar.vocabulary
        raw = vocabulary.spell(_read_all(vocabulary, self._ids))
        return self._out.take(), self._out.message(raw)

    # -- the loop ------------------------------------------------------------------------------------------

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
        if self._call is not None:
            self._advance_call(self._call.feed(text))
        elif self._scanner is self._grammar.in_reasoning:
            self._out.text(ReasoningDelta, self._run.feed(text))
        else:
            self._content(text)

    def _marker(self, marker: str) -> None:
        grammar = self._grammar
        if self._call is not None:
            self._close_call(marker, closed=marker == grammar.close)
            if marker == grammar.open:
                self._open_call(marker)
            elif marker == grammar.section[1]:
                self._scanner = grammar.in_content
        elif self._scanner is grammar.in_reasoning:
            self._scanner = grammar.in_content
            after = grammar.form.think.after_close if grammar.form.think else 0
            self._run = Newlines(after, grammar.form.before_call)
        elif marker == grammar.think[0]:
            self._open_think(marker)
        elif marker == grammar.open:
            self._open_call(marker)
        else:
            self._drop_separator()
            self._scanner = grammar.in_section if marker == grammar.section[0] else grammar.in_content

    # -- content and reasoning -------------------------------------------------------------------------------

    def _content(self, text: str) -> None:
        text = self._run.feed(text)
        if self._blank is not None and text:
            if text.isspace():
                self._blank += text
                return
            if not self._out.calls or self._out.said(ContentDelta):
                text = self._blank + text
            self._blank = None
        self._out.text(ContentDelta, text)

    def _end_content(self) -> None:
        """Hand out what was held back; white space between or after calls is the format's."""
        if not self._out.calls:
            self._out.text(ContentDelta, (self._blank or "") + self._run.held)
        elif self._blank is None:
            self._out.text(ContentDelta, self._run.held)
        self._run.held = ""

    def _drop_separator(self) -> str:
        """Before a marker that stands apart from the content: forget the white space that is the format's."""
        dropped = (self._blank or "") + self._run.held
        self._blank, self._run = "", Newlines(0, self._grammar.form.before_call)
        return dropped

    def _open_think(self, marker: str) -> None:
        if not has_mark(marker) and self._blank is None:
            self._content(marker)  # ordinary text may quote it
            return
        if self._blank is None:
            self._out.text(ContentDelta, self._run.held)
        if self._out.said(ReasoningDelta):
            self._out.text(ReasoningDelta, "\n")
        self._reason(0)

    def _reason(self, newlines: int) -> None:
        think = self._grammar.form.think or Think()
        self._scanner = self._grammar.in_reasoning
        self._run = Newlines(max(0, think.after_open - newlines), think.before_close)

    # -- calls -------------------------------------------------------------------------------------------------

    def _open_call(self, marker: str) -> None:
        assert self._grammar.form.call is not None
        self._call_opening = self._drop_separator() + marker
        self._call = self._grammar.form.call(self._grammar.vocabulary, {})
        self._call_started = False
        self._scanner = self._grammar.in_call

    def _advance_call(self, arguments: str) -> None:
        assert self._call is not None
        if self._call.name and not self._call_started:
            self._call_started = True
            self._out.call(self._grammar.vocabulary.spell(self._call.name), self._call.id)
        self._out.arguments(arguments)

    def _close_call(self, marker: str, *, closed: bool) -> None:
        call = self._call
        assert call is not None
        arguments = call.close(closed=closed)
        if call.name:
            self._advance_call(arguments)
            self._out.calls[-1].status = self._checked(call)
        else:  # nobody can be called: it stays what it is, text
            self._out.text(ContentDelta, self._call_opening + call.text + (marker if closed else ""))
            self._out.ill_formed = True
        self._call = None
        self._scanner = self._grammar.in_section if self._grammar.section[0] else self._grammar.in_content
        self._blank, self._run = "", Newlines(0, self._grammar.form.before_call)

    def _checked(self, call: Call) -> Any:
        if call.status != "ok":
            self._out.ill_formed = True
            return call.status
        names = {(tool.get("function") or tool).get("name") for tool in self._tools}
        return "unknown_tool" if names and call.name not in names else "ok"


def _read_all(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    reader = TokenReader(vocabulary)
    return reader.read(ids) + reader.rest()

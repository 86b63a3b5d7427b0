"""One answer, read incrementally: reasoning, content and calls, told apart by a format's markers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from ...parsed import ContentDelta, ReasoningDelta
from .calls import Call, CallFactory, Tools
from .stream import Newlines, ObjectEnd, Reader, Scanner
from .vocabulary import TokenReader, Vocabulary, has_mark

_SPACE = " \t\r\n"
_PROMPT_END = 16
"""Tokens at a prompt's end that are looked at for an open reasoning block."""


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

    ``open``, ``close``: around one call; without ``close`` it lasts to the next call or the end.
    ``call``: the reader of a call's inside, for a vocabulary.
    ``section``: around all the calls of an answer; its end may be ``""``.
    ``objects``: a call is a bare JSON object. ``bare``: how an answer begins that is one, without any marker.
    ``separators``: characters besides white space that stand between calls.
    ``inner``: markers inside of a call. ``before_call``: newlines that the format puts between content and the first
    marker.
    """

    name: str
    open: str = ""
    close: str = ""
    call: Callable[[Vocabulary], CallFactory] | None = None
    section: tuple[str, str] | None = None
    objects: bool = False
    bare: tuple[str, ...] = ()
    separators: str = ""
    inner: tuple[str, ...] = ()
    before_call: int = 1
    think: Think | None = None

    def markers(self) -> list[str]:
        think = [self.think.open, self.think.close] if self.think else []
        return [marker for marker in (self.open, self.close, *(self.section or ()), *self.inner, *think) if marker]


class Grammar:
    """A format over a vocabulary: makes the parser of one answer (a ``ParserFactory``)."""

    def __init__(self, tokenizer: Tokenizer, form: Format) -> None:
        self.form = form
        self.name = form.name
        self.vocabulary = vocabulary = Vocabulary(tokenizer, form.markers())
        mark, ends = vocabulary.compile, vocabulary.ends
        self.open, self.close = mark(form.open), mark(form.close)
        self.section = (mark(form.section[0]), mark(form.section[1])) if form.section else ("", "")
        self.think = (mark(form.think.open), mark(form.think.close)) if form.think else ("", "")
        self._think_ids = {i for i, mark in vocabulary.marks.items() if mark in self.think}
        self._thinks_by_token = all(map(has_mark, self.think))
        self.call = form.call(vocabulary) if form.call else None
        # Without its section, and inside another call, a marker counts only if ordinary text can't forge it.
        sure = self.open if has_mark(self.open) else ""
        self.in_content = Scanner([self.think[0], *self.section, sure if form.section else self.open], ends)
        self.at_start = Scanner([self.think[0], *self.section, *form.bare], ends)
        self.in_section = Scanner([self.open, *self.section], ends)
        self.in_reasoning = Scanner([self.think[1]], ends)
        self.in_call = Scanner([self.close, sure, self.section[1]], ends)

    def __call__(self, *, prompt_ids: Sequence[int], tools: Tools) -> Parser:
        return Parser(self, tools, *self._prompt_end(prompt_ids))

    def _prompt_end(self, prompt_ids: Sequence[int]) -> tuple[str, int]:
        """The thinking marker that the prompt ends with (``""``: none of the two), and the newlines after it."""
        if not self.think[0] or (self._thinks_by_token and self._think_ids.isdisjoint(prompt_ids[-_PROMPT_END:])):
            return "", 0
        end = TokenReader(self.vocabulary, at_start=False).read(prompt_ids[-_PROMPT_END:])
        stripped = end.rstrip()
        marker = next((m for m in self.think if stripped.endswith(m)), "")
        return marker, len(end) - len(stripped)


class Parser(Reader):
    """Reads one answer.

    Only what is certain is handed out: held back are half characters, beginnings of markers, newlines that a
    marker may turn out to own, white space around calls, and control tokens that may be the last.
    """

    def __init__(self, grammar: Grammar, tools: Tools, prompt_end: str, newlines: int) -> None:
        super().__init__(grammar.vocabulary)
        self._grammar = grammar
        self._tools = tools
        self._scanner = self._content_scanner()
        self._run = Newlines(0, grammar.form.before_call)
        self._blank: str | None = ""
        """What only separates, since the start or the last marker; None once there is content after it."""
        self._space = _SPACE
        self._call: Call | None = None
        self._call_started = False
        self._call_opening = ""
        self._in_section = False
        if prompt_end and prompt_end == grammar.think[0]:
            self._open_reasoning(newlines)
        elif prompt_end:
            self._close_reasoning(newlines)

    # -- what the loop finds ---------------------------------------------------------------------------------

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
            self._close_call(marker, closed=marker == grammar.close or not grammar.close)
            if marker == grammar.open:
                self._open_call(marker)
            elif marker == grammar.section[1]:
                self._enter(self._content_scanner())
        elif self._scanner is grammar.in_reasoning:
            self._close_reasoning(0)
        elif marker == grammar.think[0]:
            self._open_think(marker)
        elif marker == grammar.section[0]:
            self._drop_separator()
            self._enter(grammar.in_section)
        elif marker == grammar.section[1]:
            self._drop_separator()
            self._enter(self._content_scanner())
        elif self._scanner is grammar.at_start and self._blank is None:
            self._content(marker)  # an object in the middle of a sentence
        else:
            self._open_call(marker)

    def _end(self, *, cut: bool) -> None:
        if self._call is not None:
            # Where the format has no marker for it, the end of the answer ends a call.
            self._close_call("", closed=not self._grammar.close and not cut)
        elif self._scanner is self._grammar.in_reasoning:
            self._out.text(ReasoningDelta, self._run.held)
            self._out.ill_formed = True  # it never got to an answer
        else:
            self._end_content()

    def _enter(self, scanner: Scanner) -> None:
        self._scanner = scanner
        separate = scanner is self._grammar.in_section or self._out.calls
        self._space = _SPACE + self._grammar.form.separators if separate else _SPACE

    def _content_scanner(self) -> Scanner:
        """What to look for outside of calls: with tools, an answer may begin with a bare call."""
        if self._grammar.form.bare and self._tools and not self._out.said(ContentDelta):
            return self._grammar.at_start
        return self._grammar.in_content

    # -- content and reasoning -------------------------------------------------------------------------------

    def _content(self, text: str) -> None:
        text = self._run.feed(text)
        if self._blank is not None and text:
            if not text.strip(self._space):
                self._blank += text
                return
            text = self._blank + text
            if self._out.calls and not self._out.said(ContentDelta):
                text = text.lstrip(self._space)
            self._blank = None
            self._out.ill_formed |= self._scanner is self._grammar.in_section
        self._out.text(ContentDelta, text)

    def _end_content(self) -> None:
        """Hand out what was held back, but for white space after calls: that is the format's."""
        if not self._out.calls:
            self._out.text(ContentDelta, (self._blank or "") + self._run.held)
        elif self._blank is None:
            self._out.text(ContentDelta, self._run.held)

    def _drop_separator(self) -> str:
        """Before a marker that stands apart from the content: take away the white space that is the format's."""
        dropped = (self._blank or "") + self._run.held
        self._blank, self._run = "", Newlines(0, self._grammar.form.before_call)
        return dropped

    def _open_think(self, marker: str) -> None:
        if not has_mark(marker) and self._blank is None:
            self._content(marker)  # ordinary text may quote it
            return
        if self._blank is None:
            self._out.text(ContentDelta, self._run.held)
        else:
            self._blank = ""
        if self._out.said(ReasoningDelta):
            self._out.text(ReasoningDelta, "\n")
        self._open_reasoning(0)

    def _open_reasoning(self, newlines: int) -> None:
        """``newlines``: those that stand after the marker already."""
        think = self._grammar.form.think or Think()
        self._scanner = self._grammar.in_reasoning
        self._run = Newlines(max(0, think.after_open - newlines), think.before_close)

    def _close_reasoning(self, newlines: int) -> None:
        think = self._grammar.form.think or Think()
        self._scanner = self._content_scanner()
        self._run = Newlines(max(0, think.after_close - newlines), self._grammar.form.before_call)

    # -- calls -------------------------------------------------------------------------------------------------

    def _open_call(self, marker: str) -> None:
        grammar = self._grammar
        assert grammar.call is not None
        opening = self._drop_separator()
        self._in_section = self._scanner is grammar.in_section
        self._call = grammar.call(self._tools)
        self._call_started = False
        if grammar.form.objects:  # the marker is the object's own beginning
            self._scanner = ObjectEnd(marker, grammar.vocabulary.ends)
            self._call.feed(marker)
            self._call_opening = opening
        else:
            self._scanner = grammar.in_call
            self._call_opening = opening + marker

    def _advance_call(self, arguments: str) -> None:
        call = self._call
        assert call is not None
        if call.name and not self._call_started:
            self._call_started = True
            self._out.call(call.name, call.id)
        self._out.arguments(arguments)

    def _close_call(self, marker: str, *, closed: bool) -> None:
        grammar, call = self._grammar, self._call
        assert call is not None
        if grammar.form.objects:
            call.feed(marker)
        arguments = call.close(closed=closed)
        if call.name:
            self._advance_call(arguments)
            self._out.end_call(call, self._tools)
        self._call = None
        self._blank, self._run = "", Newlines(0, grammar.form.before_call)
        if not call.name:  # nothing can be called: it stays what it is, text
            own = marker if closed and not grammar.form.objects and marker == grammar.close else ""
            self._out.text(ContentDelta, self._call_opening + call.text + own)
            self._out.ill_formed |= self._in_section or not grammar.form.bare
            self._blank = None
        self._enter(grammar.in_section if self._in_section else self._content_scanner())

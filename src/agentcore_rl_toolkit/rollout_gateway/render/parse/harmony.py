"""gpt-oss: an answer is a chain of messages, each with a channel and perhaps a recipient in its header."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from ...parsed import ContentDelta, ReasoningDelta
from .calls import RawCall, Tools
from .stream import Reader, Scanner
from .vocabulary import TokenReader, Vocabulary

_HEADER_LIMIT = 64
"""Tokens of the prompt's end in which its open header is looked for."""


class HarmonyGrammar:
    """``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>``; a call is a
    message with a recipient (``to=functions.NAME``) that ends with ``<|call|>``. (A ``ParserFactory``.)"""

    name = "harmony"

    def __init__(self, tokenizer: Tokenizer) -> None:
        names = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"]
        self.vocabulary = vocabulary = Vocabulary(tokenizer, names)
        self.start, self.channel, self.message, _, end, self.called, returned = map(vocabulary.compile, names)
        self.stops = (end, self.called, returned)
        self.in_header = Scanner([self.message, *self.stops], vocabulary.ends)
        self.in_message = Scanner([*self.stops, self.start, self.channel], vocabulary.ends)
        self.find_channel = re.compile(re.escape(self.channel) + r"\s*(\w+)")
        self.find_recipient = re.compile("\\bto=([^\\s\ud800-\udfff]+)")

    def __call__(self, *, prompt_ids: Sequence[int], tools: Tools) -> HarmonyParser:
        end = TokenReader(self.vocabulary, at_start=False).read(prompt_ids[-_HEADER_LIMIT:])
        return HarmonyParser(self, tools, end.rpartition(self.start)[2] if self.start in end else "")


class HarmonyParser(Reader):
    """Reads one answer. ``opened``: the prompt's text after its last ``<|start|>``."""

    def __init__(self, grammar: HarmonyGrammar, tools: Tools, opened: str) -> None:
        super().__init__(grammar.vocabulary)
        self._grammar = grammar
        self._tools = tools
        self._header = ""
        self._scanner = grammar.in_header
        self._kind: type[ReasoningDelta] | type[ContentDelta] = ContentDelta
        self._call: RawCall | None = None
        self._fresh = False
        """Whether the current message has said nothing yet."""
        self._read(opened)

    def _text(self, text: str) -> None:
        if self._scanner is self._grammar.in_header:
            self._header += text
        elif self._call is not None:
            self._out.arguments(self._call.feed(text))
        else:
            if self._fresh and self._out.said(self._kind):
                self._out.text(self._kind, "\n")
            self._fresh = False
            self._out.text(self._kind, text)

    def _marker(self, marker: str) -> None:
        grammar = self._grammar
        if marker == grammar.message:
            self._open_message()
            return
        if self._call is not None:
            self._close_call(closed=marker in grammar.stops)
        elif self._scanner is grammar.in_header and self._header.strip(" \n"):
            self._out.ill_formed = True  # a message that ends before it began
        self._header = marker if marker == grammar.channel else ""
        self._scanner = grammar.in_header

    def _end(self, *, cut: bool) -> None:
        if self._call is not None:
            self._close_call(closed=False)
        elif self._scanner is self._grammar.in_message:
            self._out.ill_formed |= self._kind is ReasoningDelta  # it never got to an answer
        elif (header := self._header.removeprefix("assistant")).strip():
            self._out.ill_formed = True
            if not header.lstrip().startswith(self._grammar.channel):
                self._out.text(ContentDelta, header)  # no header at all, but an answer in plain text

    def _open_message(self) -> None:
        grammar = self._grammar
        channel = grammar.find_channel.search(self._header)
        recipient = grammar.find_recipient.search(self._header)
        self._scanner, self._header, self._fresh = grammar.in_message, "", True
        if recipient and recipient[1] not in ("assistant", "user", "all"):
            self._call = RawCall(name=recipient[1].removeprefix("functions.") or recipient[1])
            self._out.call(self._call.name, None)
            return
        self._out.ill_formed |= channel is None
        self._kind = ReasoningDelta if channel and channel[1] == "analysis" else ContentDelta

    def _close_call(self, *, closed: bool) -> None:
        call = self._call
        assert call is not None
        self._out.arguments(call.close(closed=closed))
        self._out.end_call(call, self._tools)
        self._call = None

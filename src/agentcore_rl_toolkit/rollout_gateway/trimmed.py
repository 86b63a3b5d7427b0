"""What of an answer is not handed out: its beginning where the client has that, a stop string and what follows it,
calls past the first where one was asked for.

The tokens stay as they were sampled; only what the client is given, and what the tree compares its replay with,
begins later or ends earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os.path import commonprefix

from .parsed import CallArgumentsDelta, CallStartDelta, ContentDelta, Delta, OutputParser, ParsedMessage, ReasoningDelta


class Trimmed:
    """An ``OutputParser`` around another. ``stop_sequence``: the stop string found, or None. ``trimmed``: whether less
    was handed out than the other parser found.

    The end of a text that may be the beginning of a stop string is held back until it is clear.
    """

    def __init__(self, parser: OutputParser, stops: Sequence[str], *, one_call: bool) -> None:
        self._parser, self._stops, self._one_call = parser, stops, one_call
        self._idle = not stops and not one_call
        self._held: ReasoningDelta | ContentDelta | CallArgumentsDelta | None = None
        self._kept = ParsedMessage()
        self._arguments: list[str] = []
        self.stop_sequence: str | None = None
        self.trimmed = False

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        deltas = self._parser.feed(ids)
        return deltas if self._idle else self._trim(deltas)

    def finish(self, finish_reason: str) -> tuple[list[Delta], ParsedMessage]:
        deltas, message = self._parser.finish(finish_reason)
        if self._idle:
            return deltas, message
        deltas = self._trim(deltas) + self._release()
        self.trimmed = self.stop_sequence is not None or (self._one_call and len(message.tool_calls) > 1)
        if self.stop_sequence:
            calls = message.tool_calls[: len(self._arguments)]
            for call, arguments in zip(calls, self._arguments, strict=True):
                if call.arguments != arguments:
                    call.arguments, call.status = arguments, "unclosed"
            message = replace(message, reasoning=self._kept.reasoning, content=self._kept.content, tool_calls=calls)
        elif self._one_call:
            message = replace(message, tool_calls=message.tool_calls[:1])
        return deltas, message

    def _trim(self, deltas: Sequence[Delta]) -> list[Delta]:
        out: list[Delta] = []
        for delta in deltas:
            if self.stop_sequence:
                break
            if not isinstance(delta, ReasoningDelta | ContentDelta) and delta.index > 0 and self._one_call:
                continue
            if not isinstance(delta, CallStartDelta) and _same_text(self._held, delta):
                assert self._held is not None
                delta, self._held = replace(delta, text=self._held.text + delta.text), None
            else:
                out += self._release()
            if isinstance(delta, CallStartDelta):
                self._arguments.append("")
                out.append(delta)
            else:
                out += self._search(delta)
        return out

    def _search(self, delta: ReasoningDelta | ContentDelta | CallArgumentsDelta) -> list[Delta]:
        text = delta.text
        # The first to be complete counts, however the text was cut into pieces.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, end, self.stop_sequence = min(found)
        else:
            end = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
            if end < len(text):
                self._held = replace(delta, text=text[end:])
        return self._keep(replace(delta, text=text[:end])) if end else []

    def _release(self) -> list[Delta]:
        held, self._held = self._held, None
        return self._keep(held) if held else []

    def _keep(self, delta: ReasoningDelta | ContentDelta | CallArgumentsDelta) -> list[Delta]:
        match delta:
            case ReasoningDelta(text):
                self._kept.reasoning += text
            case ContentDelta(text):
                self._kept.content += text
            case CallArgumentsDelta(index, text):
                self._arguments[index] += text
        return [delta]


class Continued:
    """An ``OutputParser`` around another, for an answer that begins in the prompt: with the tokens ``ids``, which the
    client knows as ``text``. That part is read, so that what follows is not taken for a beginning, but not handed out.
    """

    def __init__(self, parser: OutputParser, ids: Sequence[int], text: str) -> None:
        self._parser = parser
        said, thought = "", ""
        for delta in parser.feed(ids):
            if isinstance(delta, ContentDelta):
                said += delta.text
            elif isinstance(delta, ReasoningDelta):
                thought += delta.text
        if said and said[0] != text[0]:  # a parser that takes no space at the beginning of a text
            text = text.lstrip()
        self._thought, self._said = len(thought), len(said)
        self._held = text[len(said) :]
        """What the client has, but the parser may hold back."""

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        return self._rest(self._parser.feed(ids))

    def finish(self, finish_reason: str) -> tuple[list[Delta], ParsedMessage]:
        deltas, message = self._parser.finish(finish_reason)
        deltas = self._rest(deltas)
        rest = replace(message, reasoning=message.reasoning[self._thought :], content=message.content[self._said :])
        return deltas, rest

    def _rest(self, deltas: Sequence[Delta]) -> list[Delta]:
        out: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta) and self._held:
                known = len(commonprefix([delta.text, self._held]))  # noqa: RUF071 - of texts it is what we want
                self._said += known
                rest = delta.text[known:]
                self._held = "" if rest else self._held[known:]
                if not rest:
                    continue
                delta = ContentDelta(rest)
            out.append(delta)
        return out


def _same_text(held: Delta | None, delta: Delta) -> bool:
    """Whether ``delta`` goes on with the text of ``held``."""
    if held is None or type(held) is not type(delta):
        return False
    return not isinstance(held, CallArgumentsDelta) or held.index == getattr(delta, "index", None)


def _overlap(text: str, stop: str) -> int:
    """How much of the end of ``text`` is the beginning of ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)

"""Prompts that the client rendered itself: where they stand in the tree, and their answers as plain text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from .parsed import ContentDelta, Delta, ParsedMessage
from .render.base import Renderer
from .traces import Turn


def place_prompt(
    renderer: Renderer, tips: Sequence[tuple[Turn, list[int]]], prompt: str | list[int]
) -> tuple[Turn | None, list[int]]:
    """``(parent, new ids)``: the tip whose tokens, or whose text, this prompt goes on from, and what is new since.

    Text that says the same as held tokens is not tokenized again.
    """
    parent: Turn | None = None
    length = 0
    for turn, held in tips:
        # Last things first: it tells most turns apart at once.
        if isinstance(prompt, str):
            text = renderer.decode(held)
            if length < len(text) < len(prompt) and prompt.startswith(text):
                parent, length = turn, len(text)
        elif (n := len(held)) > length and n < len(prompt) and prompt[n - 1] == held[-1] and prompt[:n] == held:
            parent, length = turn, n
    new = prompt[length:]
    return parent, renderer.encode(new) if isinstance(new, str) else new


def prompt_key(ids: Sequence[int]) -> bytes:
    """The chain key of a prompt without messages."""
    return blake2b(b"prompt" + array("i", ids).tobytes(), digest_size=16).digest()


class PlainText:
    """An ``OutputParser`` that parses nothing: all tokens as text, but for the stop token at the end."""

    def __init__(self, renderer: Renderer) -> None:
        self._decode, self._stops = renderer.decode, frozenset(renderer.stop_token_ids)
        self._ids: list[int] = []
        self._start = self._read = 0
        """Text up to ``read`` is handed out; what comes next is decoded from ``start``, with a few tokens before it,
        because a token's text may depend on its left neighbour."""
        self._texts: list[str] = []

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        self._ids += ids
        return self._take(last=False)

    def finish(self, finish_reason: str) -> tuple[list[Delta], ParsedMessage]:
        deltas = self._take(last=True)
        return deltas, ParsedMessage(content="".join(self._texts), raw=self._decode(self._ids))

    def _take(self, *, last: bool) -> list[Delta]:
        end = len(self._ids)
        if end and self._ids[-1] in self._stops:
            end -= 1
        if end <= self._read:
            return []
        before = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start : end])
        if text.endswith("\ufffd") and not last:  # half a character
            return []
        self._start, self._read = self._read, end
        self._texts.append(text[len(before) :])
        return [ContentDelta(self._texts[-1])] if self._texts[-1] else []

"""Text to token ids, with control tokens that somebody merely spelled kept as ordinary text."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer

from .words import Words, entangled, samples, words_of

logger = logging.getLogger(__name__)

# Put after the first character of a control token spelled in content, so that neither the template nor the
# tokenizer takes it for the real one; taken out again before encoding. U+10FFFD is private use.
GUARD = "\U0010fffd"
# Characters with a meaning of their own in here (the other one marks the stubs of splice.py) are no content.
_RESERVED = re.compile("[\U0010fffc\U0010fffd]")

LONG_TEXT = 4096
"""Characters from which a text is worth a worker thread (about 2 ms of encoding)."""

_HUGE_TEXT = 32_768
"""Characters from which one call that holds the interpreter lock would be felt by others (1 to 2 ms)."""


class TextEncoder:
    """Encodes rendered conversations.

    ``special``: added tokens flagged special; ``control``: every added token, also those a template uses as
    markers (``<tool_call>``, ``<think>``).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._fast = _fast_encoder(tokenizer)
        self._words = words_of(tokenizer) if self._fast is None else None
        added = tokenizer.get_added_tokens_decoder()
        # Runs of spaces that some vocabularies add are no markers, and a single character can't be guarded.
        control = {i: token for i, token in added.items() if len(token.content.strip()) > 1}
        self.control = {token.content: i for i, token in control.items()}
        self.special = {token.content: i for i, token in control.items() if token.special}
        self.find_control = _any_of(self.control)
        self._find_special = _any_of(self.special)
        self._take_left = {token.content for token in control.values() if token.lstrip}
        self._take_right = {token.content for token in control.values() if token.rstrip}
        self._plain: tuple[Tokenizer, dict[int, int]] | None = None

    def guard(self, text: str, *, special_only: bool = False) -> str:
        """``text`` with every control token in it broken by :data:`GUARD` (and stray guards removed)."""
        text = _RESERVED.sub("", text)
        pattern = self._find_special if special_only else self.find_control
        return pattern.sub(lambda m: m[0][0] + GUARD + m[0][1:], text)

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; guarded control tokens come out as ordinary text."""
        text = text.encode("utf-8", "replace").decode("utf-8") if _has_surrogate(text) else text
        if GUARD in text:
            return self._encode_guarded(text)
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=False).ids)
        if len(text) < _HUGE_TEXT and self._words is not None and text.isascii():
            return self._by_words(text, self._words)
        if len(text) < LONG_TEXT:
            return list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        # encode() holds the interpreter lock, encode_batch() doesn't: long texts come from worker threads.
        return list(self.tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)

    def _by_words(self, text: str, words: Words) -> list[int]:
        ids: list[int] = []
        position = 0
        for match in self.find_control.finditer(text):
            ids += words.ids(text[position : match.start()])
            ids.append(self.control[match[0]])
            position = match.end()
        return ids + words.ids(text[position:])

    def _encode_guarded(self, text: str) -> list[int]:
        ids: list[int] = []
        position = 0
        before = None
        for match in self.find_control.finditer(text):
            ids += self._encode_gap(before, text[position : match.start()], match[0])
            ids.append(self.control[match[0]])
            position, before = match.end(), match[0]
        return ids + self._encode_gap(before, text[position:], None)

    def _encode_gap(self, before: str | None, text: str, after: str | None) -> list[int]:
        """The text between two control tokens, which may take blanks beside them; None: it begins or ends there."""
        text = text.replace(GUARD, "")
        if before in self._take_right:
            text = text.lstrip()
        if after in self._take_left:
            text = text.rstrip()
        if not text:
            return []
        plain, own_ids = self._without_control()
        if before is None:
            ids = plain.encode(text, add_special_tokens=False).ids
        else:  # some vocabularies treat the very beginning in another way
            ids = plain.encode(GUARD + text, add_special_tokens=False).ids[1:]
        return [own_ids.get(i, i) for i in ids]

    def _without_control(self) -> tuple[Tokenizer, dict[int, int]]:
        """The same vocabulary with one control token, the guard, made when first needed; and what the ids of its other
        added tokens (they close up) are in the whole vocabulary."""
        if self._plain is None:
            spec = json.loads(self.tokenizer.to_str())
            spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] not in self.control]
            spec["post_processor"] = None
            plain = Tokenizer.from_str(json.dumps(spec))
            own_ids = {int(plain.token_to_id(t["content"]) or 0): int(t["id"]) for t in spec["added_tokens"]}
            plain.add_special_tokens([AddedToken(GUARD, normalized=False)])
            self._plain = plain, own_ids
        return self._plain


_SAMPLES = [
    "plain words, and more: don't!", " leading\n\n  and\ttrailing \r\n ", "1234567890 3.14 1e-9 0x7f",
    "Ünï ©ødé ✓ 日本語 \U0001f600\u200d",
    'def f(x):\n    return {"a": [1, 2], "b": None}\n', "aaaaaaaaaaaaaaaa <b>&amp;</b> ====",
    "e\u0301 \u1100\u1161 \u00a0 \u2028", "",
]  # fmt: skip


def _fast_encoder(tokenizer: Tokenizer) -> Any:
    """fastokens over the same vocabulary where it is installed and gives the same ids, else None."""
    try:
        import fastokens
    except ModuleNotFoundError:
        return None
    try:
        if entangled(tokenizer, json.loads(tokenizer.to_str())["added_tokens"]):
            return None
        fast = fastokens.Tokenizer.from_json_str(tokenizer.to_str())
        control = "".join(token.content + "x" for token in tokenizer.get_added_tokens_decoder().values())
        for text in [*_SAMPLES, "".join(_SAMPLES), control, *samples()]:
            if (
                list(fast.encode(text, add_special_tokens=False).ids)
                != tokenizer.encode(text, add_special_tokens=False).ids
            ):
                logger.warning("fastokens gives other ids for this vocabulary; tokenizers is used")
                return None
    except Exception as error:  # noqa: BLE001 - foreign code and an optional speed-up: the other encoder serves
        logger.warning("fastokens can't load this vocabulary (%s); tokenizers is used", error)
        return None
    return fast


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of these tokens, the longest first; it never matches where there are none.

    A trie, not a flat alternation: vocabularies have up to a thousand control tokens with one common prefix.
    """
    trie: dict[str, Any] = {}
    for token in tokens:
        node = trie
        for char in token:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_trie_pattern(trie) if trie else r"(?!)")


def _trie_pattern(node: dict[str, Any]) -> str:
    branches = [re.escape(char) + _trie_pattern(child) for char, child in node.items() if char]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")


def _has_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False

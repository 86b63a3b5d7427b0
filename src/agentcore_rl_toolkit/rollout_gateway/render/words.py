"""ASCII text to token ids through a memory of words.

A byte-level BPE vocabulary first cuts text into words with a regular expression, then encodes each word on its own.
Tool results are mostly ASCII and repeat their words, so for ASCII text the cutting is done here by the vocabulary's own
expression, and the vocabulary's model is asked once for each word: several times cheaper than the whole pipeline, which
also keeps track of offsets and normal forms. Over ASCII the expression means the same in Python once its Unicode
classes are spelled out. A vocabulary that cuts in another way, and any text that is not ASCII, is left to the whole
pipeline.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

_MAX_WORDS = 1 << 16
_MAX_WORD = 24
"""Longer pieces (encoded data, ruled lines) seldom come back."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BYTE_CHARS = {**{i: 256 + i for i in range(33)}, 127: 289}
"""How byte-level vocabularies spell what is not printable (https://github.com/openai/gpt-2, encoder.py)."""

Cut = Callable[[str], list[str]]


class Words:
    """``ids(text)`` of ASCII text without added tokens; the same ids as the tokenizer's."""

    def __init__(self, tokenizer: Tokenizer, cuts: Sequence[Cut]) -> None:
        self._tokenizer, self._cuts = tokenizer, cuts
        self._known: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        words = self._cut(text)
        known = self._known
        ids: list[int] = []
        for word in words:
            try:
                ids += known[word]
            except KeyError:
                ids += self._learn(word)
        return ids

    def cuts_alike(self, text: str) -> bool:
        """Whether ``text`` is cut as the tokenizer cuts it."""
        pieces = [piece for piece, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return pieces == [word.translate(_BYTE_CHARS) for word in self._cut(text)]

    def _cut(self, text: str) -> list[str]:
        words = [text]
        for cut in self._cuts:
            words = cut(text) if len(words) == 1 else [piece for word in words for piece in cut(word)]
        return words

    def _learn(self, word: str) -> list[int]:
        ids = [token.id for token in self._tokenizer.model.tokenize(word.translate(_BYTE_CHARS))]
        if len(word) <= _MAX_WORD:
            if len(self._known) >= _MAX_WORDS:
                self._known.clear()
            self._known[word] = ids
        return ids


def words_of(tokenizer: Tokenizer) -> Words | None:
    """The words of a vocabulary, or None where it does not cut text in a way that is known here."""
    spec = json.loads(tokenizer.to_str())
    model, normalizer = spec["model"], spec["normalizer"]
    odd = any(
        t["lstrip"] or t["rstrip"] or t["single_word"] or len(t["content"].strip()) < 2 for t in spec["added_tokens"]
    )
    if model["type"] != "BPE" or model.get("dropout") or model.get("continuing_subword_prefix") or odd:
        return None
    if model.get("end_of_word_suffix") or not _keeps_ascii(normalizer) or entangled(tokenizer, spec["added_tokens"]):
        return None
    try:
        cuts = _cuts(spec["pre_tokenizer"])
    except (ValueError, KeyError, TypeError, re.error):
        return None
    words = Words(tokenizer, cuts)
    return words if all(map(words.cuts_alike, samples())) else None


def samples() -> Iterator[str]:
    """Texts that hold every pair of ASCII characters, and that begin and end in all of them."""
    chars = [chr(i) for i in range(128)]
    text = "".join(a + b for a in chars for b in chars)
    return (text[start : start + 97] for start in range(0, len(text), 97))


def entangled(tokenizer: Tokenizer, added: Sequence[dict[str, Any]]) -> bool:
    """Whether added tokens are not simply found from left to right, the longest first: those that are looked for in
    normalized text come second, and may be spelled in other characters."""
    second = {t["content"] for t in added if t["normalized"]}
    normalizer = tokenizer.normalizer
    if normalizer is not None and any(normalizer.normalize_str(token) != token for token in second):
        return True
    first = {t["content"] for t in added if not t["normalized"] and t["content"].isascii()}
    begins = {token[:n] for token in first for n in range(1, len(token) + 1)}
    ends = {token[-n:] for token in first for n in range(1, len(token) + 1)}
    return any(
        token[n:] in begins or token[: n + 1] in ends or any(token[n:m] in first for m in range(n, len(token)))
        for token in filter(str.isascii, second)
        for n in range(len(token))
    )


def _keeps_ascii(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None or normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD"):
        return True
    return normalizer["type"] == "Sequence" and all(map(_keeps_ascii, normalizer["normalizers"]))


def _cuts(spec: dict[str, Any]) -> list[Cut]:
    """The steps of a pre-tokenizer that ends byte-level; ``ValueError`` for one that is not known."""
    steps = spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    *splits, last = steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise ValueError("not byte-level")
    patterns = []
    for step in splits:
        if step["type"] == "Digits" and step["individual_digits"]:
            patterns.append(r"\p{N}")
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            patterns.append(step["pattern"]["Regex"])
        else:
            raise ValueError(f"{step['type']} is not known")
    if last["use_regex"]:
        patterns.append(_GPT2)
    return [_cut(pattern) for pattern in patterns]


def _cut(pattern: str) -> Cut:
    """Matches and what lies between them, in order."""
    expression = over_ascii(pattern)
    find, split = re.compile(expression, re.ASCII), re.compile(f"({expression})", re.ASCII)
    if find.groups:
        raise ValueError("a pattern with groups is not known")

    def cut(text: str) -> list[str]:
        words: list[str] = find.findall(text)
        if not words:
            return [text]
        if sum(map(len, words)) == len(text):  # most patterns match everything
            return words
        return [piece for piece in split.split(text) if piece]

    return cut


def over_ascii(pattern: str) -> str:
    """An expression of the ``tokenizers`` library (Oniguruma's) that Python matches alike in ASCII text.

    With ``re.ASCII`` only Unicode properties differ; ``ValueError`` for set operations inside a class, and for what
    Oniguruma reads as Ruby does: anchors of lines, marks behind an interval.
    """
    out: list[str] = []
    in_class = False
    for token in _REGEX_TOKEN.findall(pattern):
        if not in_class and (token in ("^", "$", r"\Z") or (out[-1:] == ["}"] and token in ("+", "?"))):
            raise ValueError(f"{token} has another meaning here")
        if prop := _PROPERTY.fullmatch(token):
            members = _ascii_of(prop[3], negated=(prop[1] == "P") != (prop[2] == "^"))
            out.append(members if in_class else f"[{members}]")
            continue
        if in_class and token in ("[", "&&", "[^"):
            raise ValueError("nested classes are not known")
        if token in ("[", "[^"):
            in_class = True
        elif token == "]":
            in_class = False
        out.append(token)
    return "".join(out)


_REGEX_TOKEN = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[\^?|&&|.", re.DOTALL)
_PROPERTY = re.compile(r"\\([pP])\{(\^?)(\w+)\}")


def _ascii_of(category: str, *, negated: bool) -> str:
    """The ASCII characters of a Unicode category (``L``, ``Lu``, …), escaped for a class. A script has none known
    here, so its name raises ``ValueError``."""
    if len(category) > 2 or category[0] not in "LMNPSZC":
        raise ValueError(f"the property {category} is not known")
    chars = [c for c in map(chr, range(128)) if unicodedata.category(c).startswith(category) != negated]
    return "".join(map(re.escape, chars)) or "\uffff"  # which ASCII text does not hold

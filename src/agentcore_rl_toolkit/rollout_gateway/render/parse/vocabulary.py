"""Token ids as text in which every control token is one character that no sampled text can contain.

A control token (``<tool_call>``, ``<|im_end|>``) becomes a *mark*: a lone surrogate, which no valid UTF-8 decodes to.
So a marker that the model merely spelled out of ordinary tokens differs from the real one, and grammars are
written over plain strings.
"""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence

from tokenizers import Tokenizer

_Utf8Decoder = getincrementaldecoder("utf-8")
_MARKS = range(0xD800, 0xE000)
_MARK = re.compile("[\ud800-\udfff]")

# Tokens that end an answer but are not flagged special in every vocabulary.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|user|>", "<|observation|>", "<turn|>", "<end_of_turn>", "<|end|>")


class Vocabulary:
    """What the parsers need to know of a tokenizer.

    ``markers``: the texts that a grammar looks for. ``ends``: the marks that mean nothing but the end when they come
    last, as one string.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Iterable[str]) -> None:
        markers = list(markers)
        added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
        flagged = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        inside = [t for t in added if len(t) > 1 and any(t in marker for marker in markers)]
        ending = [t for t in added if (t in flagged or t in _ENDS) and t not in inside]
        names = [*sorted(inside, key=len, reverse=True), *ending][: len(_MARKS)]
        self._mark_of = {name: chr(code) for name, code in zip(names, _MARKS, strict=False)}
        self._name_of = {mark: name for name, mark in self._mark_of.items()}
        self._inside = inside
        self.marks = {added[name]: mark for name, mark in self._mark_of.items()}
        self.ends = "".join(self._mark_of[name] for name in ending if name in self._mark_of)
        self.pieces = _Pieces(tokenizer)

    def compile(self, marker: str) -> str:
        """``marker`` with the control tokens in it as marks."""
        for name in sorted(self._inside, key=len, reverse=True):
            marker = marker.replace(name, self._mark_of[name])
        return marker

    def spell(self, text: str) -> str:
        """``text`` with its marks spelled out."""
        return text if text.isascii() else _MARK.sub(lambda m: self._name_of.get(m[0], ""), text)


def has_mark(text: str) -> bool:
    return not text.isascii() and _MARK.search(text) is not None


class TokenReader:
    """The ids of one answer as text with marks, as far as characters are complete."""

    def __init__(self, vocabulary: Vocabulary, *, at_start: bool = True) -> None:
        self._vocabulary = vocabulary
        self._utf8 = _Utf8Decoder("replace")
        self._at_start = at_start and vocabulary.pieces.drops_first_space

    def read(self, ids: Sequence[int]) -> str:
        pieces, marks = self._vocabulary.pieces, self._vocabulary.marks
        if marks.keys().isdisjoint(ids):
            return self._decode(b"".join(map(pieces.__getitem__, ids)))
        parts, start = [], 0
        for position, token in enumerate(ids):
            if token in marks:
                parts += [self._decode(b"".join(map(pieces.__getitem__, ids[start:position])), final=True)]
                parts += [marks[token]]
                start, self._at_start = position + 1, False
        return "".join(parts) + self._decode(b"".join(map(pieces.__getitem__, ids[start:])))

    def rest(self) -> str:
        """Half a character at the end, as U+FFFD."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        return text


class _Pieces(dict[int, bytes]):
    """The bytes of each token, looked up when first needed.

    Bytes, not text: characters are often split over tokens. ``drops_first_space``: the decoder strips the space
    that SentencePiece puts before the first word.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._read, self.drops_first_space = _piece_reader(tokenizer)

    def __missing__(self, token: int) -> bytes:
        try:
            name = self._tokenizer.id_to_token(token)
        except OverflowError:  # no id at all
            name = None
        piece = b"" if name is None else self._read(token, name)
        if name is not None:
            self[token] = piece
        return piece


def _piece_reader(tokenizer: Tokenizer) -> tuple[Callable[[int, str], bytes], bool]:
    """``(reader of (id, name), drops_first_space)`` for the tokenizer's kind of decoder."""
    spec = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {"type": None}
    steps = {step["type"]: step for step in spec.get("decoders", [spec])}
    if "ByteLevel" in steps:
        return (lambda _, name: _byte_level(name)), False
    if "ByteFallback" in steps or "Metaspace" in steps:
        strips = "Metaspace" in steps and steps["Metaspace"].get("prepend_scheme") != "never"
        return (lambda _, name: _sentencepiece(name)), strips or "Strip" in steps

    anchor = next(iter(tokenizer.get_vocab(with_added_tokens=False).values()), 0)
    before = tokenizer.decode([anchor], skip_special_tokens=False)

    def by_difference(token: int, name: str) -> bytes:
        # Any other decoder: what the token adds after another one.
        text = tokenizer.decode([anchor, token], skip_special_tokens=False)
        return text.removeprefix(before).encode()

    return by_difference, False


def _byte_level(name: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in name)
    except KeyError:  # an added token is its own text
        return name.encode("utf-8", "replace")


def _sentencepiece(name: str) -> bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes.fromhex(name[3:5])
    return name.replace("▁", " ").encode("utf-8", "replace")


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_characters()

"""The tokenizer inside a GGUF file of SmolLM2, as a checkpoint folder has it. Pure standard library."""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

_CONTROL = 3  # token type
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9


def read_metadata(file: BinaryIO) -> dict[str, Any]:
    """The metadata at the front of a GGUF file (version 2 or 3). Raises ``ValueError`` for anything else."""
    magic, version, _, count = struct.unpack("<4sIQQ", file.read(24).ljust(24))
    if magic != b"GGUF" or not 2 <= version <= 3:
        raise ValueError("not a GGUF file of version 2 or 3")
    try:
        return {_text(file): _value(file, *struct.unpack("<I", file.read(4))) for _ in range(count)}
    except (struct.error, KeyError) as error:
        raise ValueError(f"the GGUF file is damaged, or cut off ({error})") from None


def _text(file: BinaryIO) -> str:
    return file.read(struct.unpack("<Q", file.read(8))[0]).decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _TEXT:
        return _text(file)
    if kind == _LIST:
        item, length = struct.unpack("<IQ", file.read(12))
        return [_value(file, item) for _ in range(length)]
    form = "<" + _FORMS[kind]
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def tokenizer_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """What ``tokenizer.json`` holds: byte-level BPE, single digits. Raises ``ValueError`` for other vocabularies."""
    if metadata.get("tokenizer.ggml.pre") != "smollm":
        raise ValueError(f"a vocabulary of kind {metadata.get('tokenizer.ggml.pre')!r} is not known, only 'smollm'")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **plain} for i, kind in enumerate(types) if kind == _CONTROL],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }

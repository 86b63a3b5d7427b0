"""JSON of requests and answers: orjson where it is installed (the ``[fast]`` extra), else the standard library."""

from __future__ import annotations

import contextlib
import json
from importlib import import_module
from typing import Any

_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 19
"""An integer of more than 64 bits, perhaps: orjson would round it."""

orjson: Any = None
with contextlib.suppress(ModuleNotFoundError):
    orjson = import_module("orjson")


def loads(data: bytes) -> Any:
    """Parse a body. Raises ``ValueError`` (or ``RecursionError``) for what is not JSON."""
    if orjson is not None and _LONG_NUMBER not in data.translate(_DIGITS):
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            pass  # it refuses a few things that clients of the standard library do send: let that one judge
    return json.loads(data)


def dumps(value: Any) -> bytes:
    """Compact JSON. Where a text holds half a surrogate pair, which UTF-8 can't say, everything is escaped."""
    if orjson is not None:
        try:
            return bytes(orjson.dumps(value))
        except TypeError:
            pass  # half a surrogate pair, an integer of more than 64 bits
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()

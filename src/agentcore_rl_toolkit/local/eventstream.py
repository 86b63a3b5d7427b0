"""Frames of ``application/vnd.amazon.eventstream``, as InvokeAgentRuntimeCommand answers them."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

CONTENT_TYPE = "application/vnd.amazon.eventstream"
_STRING = 7  # header value type


def event(name: str, body: Mapping[str, Any]) -> bytes:
    """One event frame: type ``name``, ``body`` as JSON."""
    return _frame({":event-type": name, ":message-type": "event"}, body)


def exception(error_type: str, message: str) -> bytes:
    """An exception frame, e.g. ``throttlingException``; botocore raises it as ``EventStreamError``."""
    return _frame({":exception-type": error_type, ":message-type": "exception"}, {"message": message})


def _frame(headers: Mapping[str, str], body: Mapping[str, Any]) -> bytes:
    payload = json.dumps(body, ensure_ascii=False).encode()
    head = b"".join(
        struct.pack("!B", len(name)) + name.encode() + struct.pack("!BH", _STRING, len(value)) + value.encode()
        for name, value in {**headers, ":content-type": "application/json"}.items()
    )
    prelude = struct.pack("!II", 16 + len(head) + len(payload), len(head))
    message = prelude + struct.pack("!I", zlib.crc32(prelude)) + head + payload
    return message + struct.pack("!I", zlib.crc32(message))

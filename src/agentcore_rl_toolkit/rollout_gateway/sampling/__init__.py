"""Sampling engines: token ids -> token ids + logprobs."""

from .base import (
    NEUTRAL,
    ChatBackend,
    ChatChunk,
    SamplingBackend,
    SamplingParams,
    StreamingBackend,
    StreamingEngine,
    TokenChunk,
    TurnRecord,
    add_versions,
    check_output,
    collect,
    not_honoured,
)

__all__ = [
    "NEUTRAL",
    "ChatBackend",
    "ChatChunk",
    "SamplingBackend",
    "SamplingParams",
    "StreamingBackend",
    "StreamingEngine",
    "TokenChunk",
    "TurnRecord",
    "add_versions",
    "check_output",
    "collect",
    "not_honoured",
]

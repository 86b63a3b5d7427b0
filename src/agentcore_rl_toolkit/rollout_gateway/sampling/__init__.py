"""Sampling engines: token ids -> token ids + logprobs."""

from .base import (
    ChatBackend,
    ChatChunk,
    SamplingBackend,
    SamplingParams,
    StreamingBackend,
    TokenChunk,
    TurnRecord,
    add_versions,
    collect,
)

__all__ = [
    "ChatBackend",
    "ChatChunk",
    "SamplingBackend",
    "SamplingParams",
    "StreamingBackend",
    "TokenChunk",
    "TurnRecord",
    "add_versions",
    "collect",
]

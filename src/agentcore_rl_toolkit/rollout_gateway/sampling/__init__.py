"""Sampling engines: token ids -> token ids + logprobs."""

from .base import SamplingBackend, SamplingParams, StreamingBackend, TokenChunk, TurnRecord, add_versions, collect

__all__ = [
    "SamplingBackend",
    "SamplingParams",
    "StreamingBackend",
    "TokenChunk",
    "TurnRecord",
    "add_versions",
    "collect",
]

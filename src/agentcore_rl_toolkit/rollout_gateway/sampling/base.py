"""The engine seam: token ids in, token ids and logprobs out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict, runtime_checkable


class SamplingParams(TypedDict, total=False):
    """What an engine is asked for. ``max_tokens`` and ``max_new_tokens`` (the same number under the
    original toolkit's name) are always set by the gateway; the rest only where somebody asked for it."""

    max_tokens: int
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    stop: list[str]
    stop_token_ids: list[int]


@dataclass(slots=True)
class TurnRecord:
    """One answer of an engine.

    ``prompt_ids``: the tokens the engine was conditioned on, as sent to it.
    ``output_ids``: the sampled tokens in order, the stop token included where one was sampled.
    ``finish_reason``: ``"stop"`` or ``"length"``; anything else (``"abort"``) is no turn but an engine error.
    ``output_log_probs``: one float per output token, ``log_softmax(logits / temperature)[token]``,
    before truncation (top-k/p, min-p), penalties and grammar.
    ``ill_formed``: set by the gateway when the output doesn't parse.
    ``policy_version``: version of the weights, one int or one per token; None if the engine has none.
    ``extra``: anything else the engine reports.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    finish_reason: str
    output_log_probs: list[float]
    ill_formed: bool = False
    policy_version: int | list[int] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class TokenChunk:
    """Some tokens of a streamed answer. Exactly one chunk, the last, has a ``finish_reason``."""

    output_ids: list[int]
    output_log_probs: list[float]
    policy_version: int | None = None
    finish_reason: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class SamplingBackend(Protocol):
    """A token-in/token-out engine. Implement :meth:`generate`; add ``stream`` to stream for real."""

    async def generate(
        self,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        **media: Any,
    ) -> TurnRecord:
        """Sample one answer. Cancelling the call must abort the engine's work."""
        ...


@runtime_checkable
class StreamingBackend(SamplingBackend, Protocol):
    """An engine that also hands tokens out while it samples. ``aclose()`` on the iterator aborts it."""

    def stream(
        self,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        **media: Any,
    ) -> AsyncIterator[TokenChunk]: ...

"""The engine seam: token ids in, token ids and logprobs out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Container, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Protocol, TypedDict, runtime_checkable

from ...errors import EngineError
from ..messages import Message, Tool
from ..parsed import Delta

RETRY_AFTER = 1.0
"""Seconds named to the client where the engine names none."""

NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""The parameters that change the distribution sampled from, and the values with which they don't. Servers are sent
these where nobody asked for anything else: they fill gaps from the checkpoint's ``generation_config.json``, which
would change the distribution behind the trainer's back."""

_NOTHING: dict[str, tuple[Any, ...]] = {
    **{name: (value,) for name, value in NEUTRAL.items() if name != "temperature"},
    "top_k": (-1, 0),
    "min_new_tokens": (0, 1),
    "stop": ([],),
    "top_logprobs": (0,),
}
"""Values that ask for nothing."""

NO_LOGPROB = -9998.0
"""JSON has no -inf: vLLM writes -9999, SGLang the smallest float. No sampled token is that unlikely."""
_IDS = 2**31
ROUNDING = 1e-3
"""Some engines round log(1) to a little above 0."""


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
    adapter: str
    """Name of the LoRA adapter to sample with; the engine's own default without."""
    top_logprobs: int
    """How many of the most likely tokens to tell beside each sampled one; only to engines that declare it."""


@dataclass(slots=True)
class TurnRecord:
    """One answer of an engine.

    ``prompt_ids``: the tokens the engine was conditioned on, as sent to it.
    ``output_ids``: the sampled tokens in order, the stop token included where one was sampled.
    ``finish_reason``: ``"stop"`` or ``"length"``; anything else (``"abort"``) is no turn but an engine error.
    ``output_log_probs``: one float per output token, ``log_softmax(logits / temperature)[token]``,
    before truncation (top-k/p, min-p), penalties and grammar. A sampled token whose logprob is -inf, NaN or missing
    is an ``EngineError``.
    ``ill_formed``: nothing here reads it (the gateway parses for itself); engines written for the original toolkit set
    it.
    ``policy_version``: version of the weights, one int or one per token; None if the engine has none.
    ``extra``: anything else the engine reports; ``top_logprobs``: for each output token the most likely ones,
    ``[(token, logprob), …]``, best first; ``routed_experts``: an integer array, tokens of prompt and answer first.
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
    """Some tokens of a streamed answer. Exactly one chunk, the last, has a ``finish_reason``.

    ``policy_version``: one int, or one per token of this chunk; the last chunk's list may also cover the whole answer,
    since some engines say it only at the end.
    """

    output_ids: list[int]
    output_log_probs: list[float]
    policy_version: int | list[int] | None = None
    finish_reason: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ChatChunk(TokenChunk):
    """Some tokens of a chat engine's answer, and what the engine reads in them.

    ``prompt_ids``: the tokens the engine was conditioned on; in the first chunk that has any tokens, or before it.
    ``deltas``: what is new of the message. ``extra["texts"]``: the text of tokens by their id.
    """

    prompt_ids: list[int] | None = None
    deltas: list[Delta] = field(default_factory=list)


@runtime_checkable
class SamplingBackend(Protocol):
    """A token-in/token-out engine. Implement :meth:`generate`; add ``stream`` to stream for real.

    An engine may declare itself by attributes. ``min_new_tokens``: the smallest ``max_tokens`` it takes (1), and the
    gateway asks for. ``stop_kind``: which stops it honours, for the conformance suite: ``"ids"``, ``"strings"`` or
    ``"both"`` (the default). ``top_logprobs``: True if it can tell the most likely tokens.
    """

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


@runtime_checkable
class ChatBackend(Protocol):
    """An engine that renders and parses by itself: messages in, token ids with their logprobs and deltas out.

    ``messages``: canonical (:mod:`..messages`), the last one never the assistant's. ``tools``: OpenAI schemas.
    ``variables``: chat template variables. ``top_logprobs`` as for a :class:`SamplingBackend`.
    """

    def chat(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        sampling_params: dict[str, Any],
        variables: Mapping[str, Any],
        session_id: str | None = None,
    ) -> AsyncGenerator[ChatChunk]:
        """One answer, in one or more chunks; the last one has the finish reason. ``aclose()`` aborts it. Raises
        ``EngineError``."""
        ...

    async def count_tokens(
        self, *, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any]
    ) -> int:
        """The length of the prompt that these would give. Raises ``EngineError``."""
        ...

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens spelled out. Raises ``EngineError``."""
        ...


async def collect(chunks: AsyncIterator[TokenChunk], prompt_ids: list[int]) -> TurnRecord:
    """A streamed answer in one piece: what ``generate`` of an engine that streams returns."""
    record = TurnRecord(prompt_ids=prompt_ids, output_ids=[], finish_reason="", output_log_probs=[])
    versions: list[int | None] = []
    async for chunk in chunks:
        record.output_ids += chunk.output_ids
        record.output_log_probs += chunk.output_log_probs
        record.finish_reason = chunk.finish_reason or record.finish_reason
        tops = record.extra.get("top_logprobs", [])
        record.extra.update(chunk.extra)
        if "top_logprobs" in record.extra:
            record.extra["top_logprobs"] = tops + list(chunk.extra.get("top_logprobs", ()))
        add_versions(versions, chunk)
    known = [version for version in versions if version is not None]
    record.policy_version = known if len(set(known)) > 1 else known[0] if known else None
    return record


class StreamingEngine(ABC):
    """An engine that streams; a whole answer is all of its stream."""

    async def generate(
        self,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        **media: Any,
    ) -> TurnRecord:
        """One answer. Raises ``EngineError``."""
        request: dict[str, Any] = {"sampling_params": sampling_params, "session_id": session_id, **media}
        async with aclosing(self.stream(prompt_ids=prompt_ids, **request)) as chunks:
            return await collect(chunks, prompt_ids)

    @abstractmethod
    def stream(
        self,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        **media: Any,
    ) -> AsyncGenerator[TokenChunk]:
        """One answer while it is sampled. Raises ``EngineError``."""


def not_honoured(params: Mapping[str, Any], honoured: Container[str]) -> dict[str, Any]:
    """Of these sampling parameters those that ask for something that an engine does not do."""
    return {
        name: value
        for name, value in params.items()
        if name not in honoured and value is not None and value not in _NOTHING.get(name, ())
    }


def check_output(output_ids: Sequence[Any], logprobs: Sequence[Any]) -> str | None:
    """What is wrong with (a piece of) an answer, to be read after "gave"; or None. Never padded, cut or guessed."""
    if len(output_ids) != len(logprobs):
        return f"{len(logprobs)} logprobs for {len(output_ids)} tokens"
    if not set(map(type, output_ids)) <= {int} or min(output_ids, default=0) < 0 or max(output_ids, default=0) >= _IDS:
        for token in output_ids:
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < _IDS:
                return f"{token!r} for a token id"
    with suppress(TypeError):  # a null or a text among them
        good = all(map(math.isfinite, logprobs))
        if good and min(logprobs, default=0.0) >= NO_LOGPROB and max(logprobs, default=0.0) <= ROUNDING:
            return None
    for logprob in logprobs:
        # No comparison holds for NaN.
        if not isinstance(logprob, Real) or not NO_LOGPROB <= float(logprob) <= ROUNDING:
            return f"a sampled token the logprob {logprob}, which can't be trained"
    return None


def add_versions(versions: list[int | None], chunk: TokenChunk | TurnRecord) -> None:
    """Append the policy versions of a chunk's tokens; a list that covers the whole answer replaces them all."""
    version, total = chunk.policy_version, len(versions) + len(chunk.output_ids)
    if not isinstance(version, list):
        versions += [version] * len(chunk.output_ids)
    elif len(version) == total:
        versions[:] = version
    elif len(version) == len(chunk.output_ids):
        versions += version
    else:
        raise EngineError(f"policy_version has {len(version)} entries for {len(chunk.output_ids)} tokens of {total}")

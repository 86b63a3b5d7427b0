"""An engine that says what it is told, and the proof of what becomes of it.

:class:`ScriptedBackend` says what it is told to say. Its logprobs come from :func:`oracle_logprobs`, a hash of every
token before and the token itself: a trained token with a wrong prefix, a shifted mask or a second copy shows as a
wrong number, whatever path led there (:func:`check_records`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from ...errors import EngineError
from ..sampling import TokenChunk, TurnRecord, collect
from ..traces.record import TraceRecord

Script = Callable[[list[int]], Sequence[int]] | Iterable[Sequence[int]]


def oracle_logprobs(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[float]:
    """The logprob of each output token: a negative number fixed by all tokens before it and by itself."""
    state = blake2b(np.asarray(prompt_ids, np.int64).tobytes(), digest_size=8)
    logprobs = []
    for token in output_ids:
        state.update(int(token).to_bytes(8, "little"))
        logprobs.append(-1e-6 - int.from_bytes(state.digest()[:6], "little") / 2**46)
    return logprobs


def check_records(records: Sequence[TraceRecord], *, sampled_twice: bool = False) -> int:
    """Assert that every trained token of these rows carries its oracle logprob; returns how many there are.

    ``sampled_twice``: allow one (prefix, token) to be trained twice, where two equal answers were really sampled.
    """
    seen: set[float] = set()
    trained = 0
    for row in records:
        start = row.prompt_length
        expected = oracle_logprobs(row.token_ids[:start], row.token_ids[start:])
        for i, (mask, logprob, oracle) in enumerate(zip(row.loss_mask, row.logprobs, expected, strict=True)):
            if not mask:
                assert logprob == 0.0, f"token {i}: mask 0 but logprob {logprob}"
                continue
            assert logprob == oracle, f"token {i}: logprob {logprob}, the engine said {oracle}"
            assert sampled_twice or oracle not in seen, f"token {i} is trained twice"
            seen.add(oracle)
            trained += 1
    return trained


@dataclass
class ScriptedBackend:
    """An engine that answers with the given token ids.

    ``script``: a function of the prompt ids, or an iterable of answers used in turn. ``chunk``: tokens per streamed
    chunk. ``delay``: seconds between chunks. Outputs are cut at ``max_tokens`` (finish reason ``"length"``).
    ``calls``: ``(prompt_ids, sampling_params)`` of every request; ``aborted``: how many were closed early.
    """

    script: Script
    chunk: int = 4
    delay: float = 0.0
    policy_version: int | None = None
    calls: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)
    aborted: int = 0

    def __post_init__(self) -> None:
        self._answers = None if callable(self.script) else iter(self.script)

    async def generate(
        self,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        **media: Any,
    ) -> TurnRecord:
        """The whole answer in one piece, for engines that cannot stream."""
        return await collect(self.stream(prompt_ids=prompt_ids, sampling_params=sampling_params), prompt_ids)

    async def stream(
        self,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        **media: Any,
    ) -> AsyncIterator[TokenChunk]:
        self.calls.append((prompt_ids, sampling_params))
        answer = self.script(prompt_ids) if callable(self.script) else next(self._answers or iter(()), None)
        if not answer:
            raise EngineError("the script has no more answers" if answer is None else "the script's answer is empty")
        answer = list(answer)
        output = answer[: sampling_params["max_tokens"]]
        reason = "stop" if len(output) == len(answer) else "length"
        logprobs = oracle_logprobs(prompt_ids, output)
        done = False
        try:
            for start in range(0, len(output), self.chunk):
                if self.delay:
                    await asyncio.sleep(self.delay)
                end = start + self.chunk
                done = end >= len(output)
                yield TokenChunk(
                    output_ids=output[start:end],
                    output_log_probs=logprobs[start:end],
                    policy_version=self.policy_version,
                    finish_reason=reason if done else None,
                )
        finally:
            self.aborted += not done

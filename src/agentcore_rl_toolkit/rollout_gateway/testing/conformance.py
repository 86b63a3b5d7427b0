"""The conformance suite of engines: what the gateway, and every row it writes, relies on.

``await check_engine(backend, vocabulary_size=…)`` runs it all and raises one ``AssertionError`` that names every check
that failed. In pytest, one test per check::

    @pytest.mark.parametrize("name", ENGINE_CHECKS)
    async def test_my_engine(name):
        await ENGINE_CHECKS[name](EngineUnderTest(backend, vocabulary_size=32_000))  # may raise Skipped

Works with any engine, real or fake, that is deterministic at the given ``sampling`` parameters (temperature 0, or a
seed).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ..sampling import SamplingBackend, TokenChunk, TurnRecord, collect

Logprobs = Callable[[Sequence[int], Sequence[int]], Sequence[float]]

_SETTLE = 5.0
"""Seconds in which a cancelled request must have left the engine."""


class Skipped(Exception):
    """This check does not apply to the engine; the message says why."""


@dataclass
class EngineUnderTest:
    """An engine, and what the suite must know about it.

    ``backend``: the engine. ``vocabulary_size``: ids are in ``range(vocabulary_size)``. ``prompts``: at least two
    token lists; random ones if None. ``max_tokens``: length of most answers. ``sampling``: parameters that make the
    engine deterministic. ``stop_token_ids``: sent with every request, as the gateway does. ``oracle``: the right
    logprobs of ``(prompt_ids, output_ids)``, e.g. of a second implementation, compared within ``tolerance``.
    ``decode``: token ids to text, for stop strings. ``running``: how many requests the engine is working on, plain or
    async; without it only the client's side of a cancellation is checked. ``concurrency``: requests side by side.
    ``long``: a ``max_tokens`` whose answer takes long enough to be cancelled on the way.
    """

    backend: SamplingBackend
    vocabulary_size: int
    prompts: Sequence[Sequence[int]] | None = None
    max_tokens: int = 16
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    stop_token_ids: Sequence[int] = ()
    oracle: Logprobs | None = None
    tolerance: float = 1e-3
    decode: Callable[[list[int]], str] | None = None
    running: Callable[[], int | Awaitable[int]] | None = None
    concurrency: int = 8
    long: int = 256

    def __post_init__(self) -> None:
        if self.prompts is None:
            rng = random.Random(0)
            self.prompts = [[rng.randrange(self.vocabulary_size) for _ in range(n)] for n in (3, 8, 21)]
        self.max_tokens = max(self.max_tokens, getattr(self.backend, "min_new_tokens", 1))

    @property
    def prompt(self) -> list[int]:
        return list((self.prompts or [[0]])[0])

    def request(self, prompt: Sequence[int] | None = None, **params: Any) -> dict[str, Any]:
        """The arguments of one engine call."""
        sampling = {"max_tokens": self.max_tokens, "stop_token_ids": list(self.stop_token_ids), **self.sampling}
        sampling.update(params)
        sampling["max_new_tokens"] = sampling["max_tokens"]
        return {
            "prompt_ids": list(self.prompt if prompt is None else prompt),
            "sampling_params": sampling,
            "session_id": "conformance",
        }

    async def generate(self, prompt: Sequence[int] | None = None, **params: Any) -> TurnRecord:
        """One answer, checked as every answer must be."""
        request = self.request(prompt, **params)
        record = await self.backend.generate(**request)
        self.check(record, request)
        return record

    def open(self, prompt: Sequence[int] | None = None, **params: Any) -> AsyncIterator[TokenChunk]:
        """The same, streamed; raises ``Skipped`` where the engine does not stream."""
        stream = getattr(self.backend, "stream", None)
        if stream is None:
            raise Skipped("the engine does not stream")
        chunks: AsyncIterator[TokenChunk] = stream(**self.request(prompt, **params))
        return chunks

    def check(self, record: TurnRecord, request: Mapping[str, Any]) -> None:
        """What holds for every answer. Raises ``AssertionError``."""
        ids, logprobs = record.output_ids, record.output_log_probs
        params = request["sampling_params"]
        limit, stops = params["max_tokens"], set(params["stop_token_ids"])
        assert list(record.prompt_ids) == request["prompt_ids"], "prompt_ids is not the prompt that was sent"
        assert ids, "no tokens: an answer has at least one"
        assert len(ids) == len(logprobs), f"{len(ids)} output_ids, {len(logprobs)} output_log_probs"
        for i, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            assert type(token) is int, f"output_ids[{i}] is {token!r}: a plain int is required"
            assert 0 <= token < self.vocabulary_size, f"output_ids[{i}] is {token}: not in the vocabulary"
            assert isinstance(logprob, float), f"output_log_probs[{i}] is {logprob!r}: a float is required"
            assert math.isfinite(logprob), f"output_log_probs[{i}] is {logprob}: raise EngineError instead"
            assert logprob <= 1e-6, f"output_log_probs[{i}] is {logprob}: logits, or probabilities?"
        assert len(ids) <= limit, f"{len(ids)} tokens, max_tokens was {limit}"
        reason = record.finish_reason
        assert reason in ("stop", "length"), f"finish_reason {reason!r}: 'stop', 'length' or an EngineError"
        assert reason == "stop" or len(ids) == limit, f"'length' after {len(ids)} of {limit} tokens"
        early = [token for token in ids[:-1] if token in stops]
        assert not early, f"went on after stop token {early[0]}"
        assert ids[-1] not in stops or reason == "stop", "ends with a stop token, but finish_reason is 'length'"
        versions = record.policy_version
        assert not isinstance(versions, list) or len(versions) == len(ids), "policy_version: one int, or one per token"
        if self.oracle is not None:
            expected = self.oracle(request["prompt_ids"], ids)
            for i, (logprob, right) in enumerate(zip(logprobs, expected, strict=True)):
                assert abs(logprob - right) <= self.tolerance, f"output_log_probs[{i}] is {logprob}, right is {right}"


# -- checks ------------------------------------------------------------------------------------------------


async def _answers(engine: EngineUnderTest) -> None:
    """Lengths agree, ids are in range, logprobs are finite and <= 0, the finish reason is one of two."""
    for prompt in engine.prompts or ():
        await engine.generate(prompt)


async def _budget(engine: EngineUnderTest) -> None:
    """Never more than ``max_tokens``; cut there, the finish reason is ``length``; one token is an answer."""
    least = getattr(engine.backend, "min_new_tokens", 1)
    for limit in {least, engine.max_tokens}:
        await engine.generate(max_tokens=limit)


async def _stop_token(engine: EngineUnderTest) -> None:
    """A sampled stop token ends the answer and is part of it, with its logprob."""
    _needs_stop(engine, "ids")
    whole = await engine.generate()
    for stop in dict.fromkeys((whole.output_ids[0], whole.output_ids[len(whole.output_ids) // 2])):
        first = whole.output_ids.index(stop)
        stopped = await engine.generate(stop_token_ids=[*engine.stop_token_ids, stop])
        assert stopped.output_ids == whole.output_ids[: first + 1], (
            f"stop token {stop}: got {stopped.output_ids}, right is {whole.output_ids[: first + 1]}, the stop included"
        )
        assert stopped.finish_reason == "stop", f"stop token {stop}: finish_reason {stopped.finish_reason!r}"


async def _stop_string(engine: EngineUnderTest) -> None:
    """A stop string ends the answer at the token that completes it; that token stays, with its logprob."""
    _needs_stop(engine, "strings")
    if engine.decode is None:
        raise Skipped("no decode given")
    whole = await engine.generate()
    texts = [engine.decode(whole.output_ids[: i + 1]) for i in range(len(whole.output_ids))]
    middle = len(texts) // 2
    stop = texts[middle][len(texts[middle - 1]) :] if middle else texts[0]
    if not stop or "\ufffd" in stop:
        raise Skipped("the answer has no text to stop at")
    end = next(i for i, text in enumerate(texts) if stop in text)
    stopped = await engine.generate(stop=[stop])
    assert stopped.output_ids == whole.output_ids[: end + 1], (
        f"stop {stop!r}: got {stopped.output_ids}, right is {whole.output_ids[: end + 1]}, the stop included"
    )
    assert stopped.finish_reason == "stop", f"stop {stop!r}: finish_reason {stopped.finish_reason!r}"


async def _streaming(engine: EngineUnderTest) -> None:
    """Streamed and whole answers are the same; exactly one chunk, the last, has a finish reason."""
    for prompt in engine.prompts or ():
        chunks = [chunk async for chunk in engine.open(prompt)]
        finals = [i for i, chunk in enumerate(chunks) if chunk.finish_reason is not None]
        assert finals == [len(chunks) - 1], f"finish_reason in chunks {finals} of {len(chunks)}: only the last has one"
        for i, chunk in enumerate(chunks):
            assert len(chunk.output_ids) == len(chunk.output_log_probs), f"chunk {i}: ids and logprobs differ in number"
        streamed = await collect(_replay(chunks), list(prompt))
        engine.check(streamed, engine.request(prompt))
        whole = await engine.generate(prompt)
        assert streamed.output_ids == whole.output_ids, f"streamed {streamed.output_ids}, whole {whole.output_ids}"
        assert streamed.finish_reason == whole.finish_reason, f"{streamed.finish_reason} != {whole.finish_reason}"
        apart = [abs(a - b) for a, b in zip(streamed.output_log_probs, whole.output_log_probs, strict=True)]
        assert max(apart) <= engine.tolerance, f"streamed and whole logprobs differ by {max(apart)}"


async def _real_streaming(engine: EngineUnderTest) -> None:
    """The first chunk is handed out before the last token is sampled."""
    async with aclosing(_generator(engine.open(max_tokens=engine.long))) as chunks:
        first = await anext(chunks)
        if first.finish_reason == "stop":
            raise Skipped("the answer is too short to see")
        assert first.finish_reason is None, f"all {len(first.output_ids)} tokens came in one chunk"


async def _cancellation(engine: EngineUnderTest) -> None:
    """Closing the stream, or cancelling the call, ends the engine's work; the next request is served."""
    before = await _running(engine)
    if hasattr(engine.backend, "stream"):
        async with aclosing(_generator(engine.open(max_tokens=engine.long))) as chunks:
            await anext(chunks)
        await _settled(engine, before, "after aclose()")
    call = asyncio.ensure_future(engine.backend.generate(**engine.request(max_tokens=engine.long)))
    await asyncio.sleep(0.05)
    call.cancel()
    await asyncio.wait([call], timeout=_SETTLE)
    assert call.done(), "a cancelled generate() goes on"
    await _settled(engine, before, "after cancel()")
    await engine.generate()


async def _isolation(engine: EngineUnderTest) -> None:
    """Requests side by side get the answers they get alone."""
    prompts = engine.prompts or ()
    alone = [await engine.generate(prompt) for prompt in prompts]
    order = [i % len(prompts) for i in range(engine.concurrency)]
    together = await asyncio.gather(*(engine.generate(prompts[i]) for i in order))
    for i, record in zip(order, together, strict=True):
        assert record.output_ids == alone[i].output_ids, f"prompt {i}: another answer beside other requests"


async def _inputs_kept(engine: EngineUnderTest) -> None:
    """The engine changes neither the prompt nor the parameters it is given."""
    request = engine.request()
    await engine.backend.generate(**request)
    assert request == engine.request(), "the engine changed its arguments"


ENGINE_CHECKS: dict[str, Callable[[EngineUnderTest], Awaitable[None]]] = {
    "answers": _answers,
    "budget": _budget,
    "stop_token": _stop_token,
    "stop_string": _stop_string,
    "streaming": _streaming,
    "real_streaming": _real_streaming,
    "cancellation": _cancellation,
    "isolation": _isolation,
    "inputs_kept": _inputs_kept,
}
"""Every check by name. Each raises ``AssertionError`` (or lets the engine's own error through), or ``Skipped``."""


async def check_engine(backend: SamplingBackend, *, vocabulary_size: int, **options: Any) -> dict[str, str]:
    """Run every check; ``options`` are the other fields of :class:`EngineUnderTest`.

    Returns ``{check: "passed" | "skipped: why"}``. Raises one ``AssertionError`` naming every check that failed.
    """
    engine = EngineUnderTest(backend, vocabulary_size, **options)
    results: dict[str, str] = {}
    failures: list[str] = []
    for name, check in ENGINE_CHECKS.items():
        try:
            await check(engine)
            results[name] = "passed"
        except Skipped as reason:
            results[name] = f"skipped: {reason}"
        except Exception as error:  # noqa: BLE001 (an engine may raise anything; the report says what)
            results[name] = "failed"
            failures.append(f"{name}: {type(error).__name__}: {error}")
    if failures:
        raise AssertionError(f"{len(failures)} of {len(results)} engine checks failed:\n" + "\n".join(failures))
    return results


# -- helpers -----------------------------------------------------------------------------------------------


def _needs_stop(engine: EngineUnderTest, kind: str) -> None:
    declared = getattr(engine.backend, "stop_kind", "both")
    if declared not in ("both", kind):
        raise Skipped(f"the engine declares stop_kind={declared!r}")


async def _replay(chunks: Sequence[TokenChunk]) -> AsyncIterator[TokenChunk]:
    for chunk in chunks:
        yield chunk


def _generator(chunks: AsyncIterator[TokenChunk]) -> Any:
    assert hasattr(chunks, "aclose"), "stream() must return an async generator, or another iterator with aclose()"
    return chunks


async def _running(engine: EngineUnderTest) -> int | None:
    if engine.running is None:
        return None
    count = engine.running()
    return await count if inspect.isawaitable(count) else count


async def _settled(engine: EngineUnderTest, before: int | None, when: str) -> None:
    if before is None:
        return
    deadline = asyncio.get_running_loop().time() + _SETTLE
    while (now := await _running(engine)) is not None and now > before:
        assert asyncio.get_running_loop().time() < deadline, f"{when} the engine still works on {now - before} requests"
        await asyncio.sleep(0.05)

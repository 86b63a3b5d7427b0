"""``run_rollouts()``: sessions, rewards and traces joined into one typed :class:`Rollout` each.

Every training backend and every evaluation goes through here, so that "the agent failed" or "there is no
reward" means the same everywhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from ._redact import Redactor
from .errors import ContractError, Outcome, RolloutError, SetupError
from .protocol import dumps, make_input_id, make_session_id, result_outcome, result_reward

if TYPE_CHECKING:
    from .client import RolloutClient
    from .rollout_gateway.traces.record import TraceRecord

__all__ = ["Rollout", "run_rollouts", "session_seed"]

logger = logging.getLogger("agentcore_rl_toolkit.rollouts")

_FINISH_TIMEOUT = 60.0  # seconds; only a gateway that is gone takes longer


class _Session(Protocol):
    session_id: str
    api_key: str
    base_url: str


class Gateway(Protocol):
    """What is asked of a gateway: ``RolloutGateway`` in this event loop, or ``ThreadedGatewayServer``."""

    def create_session(self, session_id: str | None = None, **options: Any) -> Any: ...

    async def finish_session(self, session_id: str, *, reward: float | None = None) -> list[TraceRecord]: ...

    async def drop_session(self, session_id: str) -> None: ...


@dataclass(slots=True)
class Rollout:
    """One attempt at one payload, whatever became of it.

    ``outcome``: how it ended. ``reward``: a finite float; None if the agent gave none, and for every rollout
    that failed. ``records``: its training rows, which carry the same reward; empty for a rollout that failed
    and without a gateway. ``result``: the agent's result object, also that of an agent that failed; None if
    there is none. ``error``: what went wrong, None if nothing did.
    ``timings``: seconds: ``invoke`` (until the session had accepted the payload), ``run`` (until its result),
    ``finish`` (stop the session, collect the records), ``total``; ``started_at`` is Unix time.
    ``payload_index``, ``sample_index``: position in ``payloads`` and in its group, from 0.
    ``run``, ``input_id``, ``session_id``: identity, see :func:`run_rollouts`.
    """

    outcome: Outcome
    payload_index: int
    sample_index: int
    run: str
    input_id: str
    session_id: str
    reward: float | None = None
    records: list[TraceRecord] = field(default_factory=list)
    result: dict[str, Any] | None = None
    error: str | None = None
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether it can be neither trained on nor counted: every outcome but succeeded and truncated."""
        return self.outcome not in (Outcome.SUCCEEDED, Outcome.TRUNCATED)

    def to_json(self) -> str:
        """All fields in one line of strict JSON. Raises ``ContractError`` if one can't be JSON."""
        return dumps(self)


@dataclass(frozen=True, slots=True)
class _Slot:
    """One place in the batch: a payload and which of its samples."""

    run: str
    payload: Mapping[str, Any]
    payload_index: int
    sample_index: int

    @property
    def input_id(self) -> str:
        return make_input_id(self.run, self.payload_index, self.sample_index)

    @property
    def session_id(self) -> str:
        return make_session_id(self.run, self.input_id)


@dataclass(slots=True)
class _Verdict:
    """How the agent's part ended, before the gateway has its say."""

    outcome: Outcome
    reward: float | None = None
    result: dict[str, Any] | None = None
    error: str | None = None


async def run_rollouts(
    client: RolloutClient,
    gateway: Gateway | None,
    payloads: Iterable[Mapping[str, Any]],
    *,
    samples: int = 1,
    timeout: float | None = 900.0,
    max_concurrent: int = 64,
    run: str | None = None,
    seed: int | None = None,
    sampling_overrides: Mapping[str, Any] | None = None,
    **rollout_config: Any,
) -> AsyncGenerator[Rollout, None]:
    """Run the agent ``samples`` times on every payload and yield each :class:`Rollout` as it completes.

    ``gateway``: each rollout gets a session of it, and its records; None evaluates without one, against the
    client's own ``base_url``. ``timeout``: seconds from the accepted payload to its result; None: no limit.
    ``max_concurrent``: sessions at a time; as many finished rollouts wait for a slow consumer, then no more
    start. ``run``: names the batch within the client's experiment; ``input_id``
    (``{run}-{payload:08d}-{sample:03d}``), session id and result key follow from it. Default: a new name.
    ``seed``: for sampling, each rollout gets one of its own by :func:`session_seed`; ``sampling_overrides``: other
    parameters the gateway enforces. ``rollout_config``: further fields of ``_rollout`` (``model_id`` …).

    One bad rollout never ends the batch: it is yielded with its outcome. ``SetupError`` ends it, because all
    others would fail the same way. Cancelling, or closing the generator (``contextlib.aclosing`` does it at
    once when a loop is left early), stops the sessions that run and forgets their gateway sessions.
    """
    if samples < 1 or max_concurrent < 1:
        raise ValueError(f"samples and max_concurrent must be at least 1, got {samples} and {max_concurrent}")
    batch = _Batch(client, gateway, timeout, seed, dict(sampling_overrides or {}), rollout_config)
    slots = _slots(run or f"run-{uuid.uuid4().hex[:12]}", payloads, samples)
    finished: asyncio.Queue[Rollout | BaseException | None] = asyncio.Queue(max_concurrent)

    async def work() -> None:
        end: BaseException | None = None
        try:
            for slot in slots:
                await finished.put(await batch.rollout(slot))
        except Exception as error:  # noqa: BLE001 - raised again in the consumer
            slots.close()  # nobody starts another one
            end = error
        await finished.put(end)

    workers = [asyncio.create_task(work()) for _ in range(max_concurrent)]
    try:
        working = len(workers)
        while working:
            item = await finished.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                working -= 1
            else:
                yield item
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def session_seed(seed: int, payload_index: int, sample_index: int) -> int:
    """The sampling seed of one rollout, in ``[0, 2**31)``: the same for the same three numbers."""
    digest = sha256(f"{seed}/{payload_index}/{sample_index}".encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


def _slots(run: str, payloads: Iterable[Mapping[str, Any]], samples: int) -> Generator[_Slot, None, None]:
    for payload_index, payload in enumerate(payloads):
        for sample_index in range(samples):
            yield _Slot(run, payload, payload_index, sample_index)


@dataclass(slots=True)
class _Batch:
    """What all rollouts of one call share."""

    client: RolloutClient
    gateway: Gateway | None
    timeout: float | None
    seed: int | None
    sampling_overrides: dict[str, Any]
    rollout_config: dict[str, Any]

    async def rollout(self, slot: _Slot) -> Rollout:
        started_at, clock = time.time(), _Clock()
        session = self._open(slot)
        try:
            verdict = await self._run_agent(slot, session, clock)
            records = await self._finish(slot, session, verdict)
            if session is not None:  # an agent may have put its key into a result or an error
                redactor = Redactor([session.api_key])
                verdict.result = redactor.values(verdict.result)
                verdict.error = redactor.values(verdict.error)
        except BaseException:
            await self._discard(session)
            raise
        timings = {"started_at": started_at, **clock.finish("finish")}
        return Rollout(
            outcome=verdict.outcome,
            payload_index=slot.payload_index,
            sample_index=slot.sample_index,
            run=slot.run,
            input_id=slot.input_id,
            session_id=slot.session_id,
            reward=verdict.reward,
            records=records,
            result=verdict.result,
            error=verdict.error,
            timings=timings,
        )

    def _open(self, slot: _Slot) -> _Session | None:
        if self.gateway is None:
            return None
        overrides = dict(self.sampling_overrides)
        if self.seed is not None:
            overrides["seed"] = session_seed(self.seed, slot.payload_index, slot.sample_index)
        session: _Session = self.gateway.create_session(sampling_overrides=overrides)
        return session

    async def _run_agent(self, slot: _Slot, session: _Session | None, clock: _Clock) -> _Verdict:
        """Invoke, wait, stop. Whatever goes wrong with this one rollout becomes its verdict."""
        config = dict(self.rollout_config)
        if session is not None:
            if not session.base_url.startswith("http"):
                raise SetupError("the gateway has no address: start its server before the rollouts")
            config |= {"base_url": session.base_url, "api_key": session.api_key}
        try:
            future = await self.client.invoke_async(
                slot.payload, session_id=slot.session_id, input_id=slot.input_id, **config
            )
            clock.lap("invoke")
            try:
                result = await future.result_async(timeout=self.timeout)
                clock.lap("run")
            finally:
                await future.cancel_async()
        except SetupError:
            raise
        except RolloutError as error:
            return _Verdict(error.outcome, error=str(error))
        except ContractError as error:
            return _Verdict(Outcome.REJECTED, error=str(error))
        except Exception as error:
            logger.warning("rollout %s failed", slot.input_id, exc_info=True)
            return _Verdict(Outcome.RUNTIME_FAILED, error=f"{type(error).__name__}: {error}")
        return _judge(result)

    async def _finish(self, slot: _Slot, session: _Session | None, verdict: _Verdict) -> list[TraceRecord]:
        """The session's rows. Those of a failed rollout are dropped: nothing says what they are worth."""
        if self.gateway is None or session is None:
            return []
        if verdict.outcome is not Outcome.SUCCEEDED:
            await self._discard(session)
            return []
        try:
            async with asyncio.timeout(_FINISH_TIMEOUT):
                records = await self.gateway.finish_session(session.session_id, reward=verdict.reward)
        except Exception as error:  # noqa: BLE001 - told in the rollout
            verdict.outcome, verdict.reward = Outcome.RUNTIME_FAILED, None
            verdict.error = f"its records are lost: the gateway did not finish the session ({error!r})"
            return []
        for record in records:
            record.rollout_id = slot.session_id
        if any(record.status == "truncated" for record in records):
            verdict.outcome = Outcome.TRUNCATED
        return records

    async def _discard(self, session: _Session | None) -> None:
        """Forget a gateway session and what it recorded."""
        if self.gateway is None or session is None:
            return
        try:
            async with asyncio.timeout(_FINISH_TIMEOUT):
                await self.gateway.drop_session(session.session_id)
        except Exception as error:  # noqa: BLE001 - a gateway that is gone has forgotten it already
            logger.debug("gateway session not dropped: %r", error)


def _judge(result: dict[str, Any]) -> _Verdict:
    """What a result object says: success with its reward, or failure."""
    outcome = result_outcome(result)
    if outcome is not Outcome.SUCCEEDED:
        return _Verdict(outcome, result=result, error=str(result.get("stop_reason") or "the agent gave no reason"))
    try:
        reward = result_reward(result)
    except ContractError as error:
        return _Verdict(Outcome.AGENT_FAILED, result=result, error=str(error))
    return _Verdict(Outcome.SUCCEEDED, reward, result)


class _Clock:
    """Seconds of each phase, in order."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name], self._last = now - self._last, now

    def finish(self, name: str) -> dict[str, float]:
        self.lap(name)
        return {**self._laps, "total": self._last - self._start}

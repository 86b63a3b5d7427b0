"""``run_rollouts()``: sessions, rewards and traces joined into one typed :class:`Rollout` each.

Every training backend and every evaluation goes through here, so that "the agent failed" or "there is no
reward" means the same everywhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from ._redact import Redactor
from .client._loop import run_async, soon
from .client._one import Ended, Order, run_one
from .client._pool import Pool
from .client._request import check_fields, check_payloads
from .errors import ContractError, Outcome, SetupError
from .protocol import dumps, make_input_id, make_session_id, result_reward

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
    done_url: str


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
    ``timings``: seconds: ``queued``, ``started``, ``running``, ``fetched`` as in :class:`.BatchItem`, ``finish``
    (open the gateway's session, collect its records), ``total``; ``started_at`` is Unix time.
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
    attempt: int | str

    @property
    def input_id(self) -> str:
        return make_input_id(self.run, self.payload_index, self.sample_index)

    @property
    def session_id(self) -> str:
        return make_session_id(self.run, self.input_id, self.attempt)


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
    client's own ``base_url``. ``timeout``: seconds from its first invoke to its result; None: no limit.
    ``max_concurrent``: sessions at a time; as many finished rollouts wait for a slow consumer, then no more
    start. ``run``: names the batch within the client's experiment, and begins each ``input_id``
    (``{run}-{payload:08d}-{sample:03d}``). Default: a new name. With a gateway, a name that was used before runs
    anew, because rows can't be had again; without one, its results are taken.
    ``seed``: for sampling, each rollout gets one of its own by :func:`session_seed`; ``sampling_overrides``: other
    parameters the gateway enforces. ``rollout_config``: further fields of ``_rollout`` (``model_id`` …).

    One bad rollout never ends the batch: it is yielded with its outcome. ``SetupError`` ends it, because all
    others would fail the same way, and so does ``TypeError`` for a ``rollout_config`` that looks like an argument of
    another call (``run_dir``). Cancelling, or closing the generator (``contextlib.aclosing`` does it at
    once when a loop is left early), stops the sessions that run and forgets their gateway sessions.
    """
    check_fields(rollout_config)
    check_payloads(payloads)
    if samples < 1 or max_concurrent < 1:
        raise ValueError(f"samples and max_concurrent must be at least 1, got {samples} and {max_concurrent}")
    batch = _Batch(client, gateway, timeout, seed, dict(sampling_overrides or {}), rollout_config)
    slots = _slots(run or f"run-{uuid.uuid4().hex[:12]}", payloads, samples, recorded=gateway is not None)
    pool: Pool[_Slot, Rollout] = Pool(slots, batch.rollout, max_concurrent)
    try:
        while (rollout := await pool.next()) is not None:
            yield rollout
    finally:
        await pool.close()
        soon(client._sessions.report_unstopped)


def session_seed(seed: int, payload_index: int, sample_index: int) -> int:
    """The sampling seed of one rollout, in ``[0, 2**31)``: the same for the same three numbers."""
    digest = sha256(f"{seed}/{payload_index}/{sample_index}".encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


def _slots(
    run: str, payloads: Iterable[Mapping[str, Any]], samples: int, *, recorded: bool
) -> Generator[_Slot, None, None]:
    for payload_index, payload in enumerate(payloads):
        for sample_index in range(samples):
            # A result of an earlier process that used this name is no good without its rows.
            attempt = uuid.uuid4().hex if recorded else 0
            yield _Slot(run, payload, payload_index, sample_index, attempt)


@dataclass(slots=True)
class _Batch:
    """What all rollouts of one call share."""

    client: RolloutClient
    gateway: Gateway | None
    timeout: float | None
    seed: int | None
    sampling_overrides: dict[str, Any]
    rollout_config: dict[str, Any]

    async def rollout(self, slot: _Slot, deliver: Callable[[Rollout], None]) -> None:
        """One rollout, from its gateway session until its agent's session has ended."""
        started_at, began = time.time(), time.perf_counter()
        session = self._open(slot)
        try:
            ended = await run_async(run_one(self.client, self._order(slot, session)))
        except BaseException:
            await self._discard(session)
            raise
        try:
            rollout = _rollout(slot, ended)
            await self._finish(rollout, session)
            finished = time.perf_counter()
            rollout.timings["finish"] = max(0.0, finished - began - sum(ended.timings.values()))
            rollout.timings |= {"total": finished - began, "started_at": started_at}
            deliver(rollout)
        except BaseException:
            await self._discard(session)
            raise
        finally:
            await run_async(ended.stopped())

    def _open(self, slot: _Slot) -> _Session | None:
        if self.gateway is None:
            return None
        overrides = dict(self.sampling_overrides)
        if self.seed is not None:
            overrides["seed"] = session_seed(self.seed, slot.payload_index, slot.sample_index)
        on_done = self.client._hint_for(slot.input_id, slot.session_id, self.rollout_config)
        session: _Session = self.gateway.create_session(sampling_overrides=overrides, on_done=on_done)
        return session

    def _order(self, slot: _Slot, session: _Session | None) -> Order:
        if session is None:
            config = self.rollout_config
        else:
            if not session.base_url.startswith("http"):
                raise SetupError("the gateway has no address: start its server before the rollouts")
            own = {"base_url": session.base_url, "api_key": session.api_key}
            config = {"notify_url": session.done_url, **self.rollout_config, **own}
        return Order(slot.payload, slot.session_id, slot.input_id, config, self.timeout)

    async def _finish(self, rollout: Rollout, session: _Session | None) -> None:
        """Add the session's rows. Those of a failed rollout are dropped: nothing says what they are worth."""
        if self.gateway is None or session is None:
            return
        if rollout.failed:
            await self._discard(session)
        else:
            try:
                async with asyncio.timeout(_FINISH_TIMEOUT):
                    rollout.records = await self.gateway.finish_session(session.session_id, reward=rollout.reward)
            except Exception as error:  # noqa: BLE001 - told in the rollout
                rollout.outcome, rollout.reward = Outcome.RUNTIME_FAILED, None
                rollout.error = f"its records are lost: the gateway did not finish the session ({error!r})"
                await self._discard(session)
        for record in rollout.records:
            record.rollout_id = rollout.session_id
        if any(record.status == "truncated" for record in rollout.records):
            rollout.outcome = Outcome.TRUNCATED
        redactor = Redactor([session.api_key])  # an agent may have put its key into a result or an error
        rollout.result, rollout.error = redactor.values(rollout.result), redactor.values(rollout.error)

    async def _discard(self, session: _Session | None) -> None:
        """Forget a gateway session and what it recorded."""
        if self.gateway is None or session is None:
            return
        try:
            async with asyncio.timeout(_FINISH_TIMEOUT):
                await self.gateway.drop_session(session.session_id)
        except Exception as error:  # noqa: BLE001 - a gateway that is gone has forgotten it already
            logger.debug("gateway session not dropped: %r", error)


def _rollout(slot: _Slot, ended: Ended) -> Rollout:
    """What the agent's part comes to, before the gateway has its say."""
    rollout = Rollout(
        outcome=ended.outcome,
        payload_index=slot.payload_index,
        sample_index=slot.sample_index,
        run=slot.run,
        input_id=slot.input_id,
        session_id=slot.session_id,
        result=ended.result,
        error=ended.error,
        timings=dict(ended.timings),
    )
    if not rollout.failed and ended.result is not None:
        try:
            rollout.reward = result_reward(ended.result)
        except ContractError as error:
            rollout.outcome, rollout.error = Outcome.AGENT_FAILED, str(error)
    return rollout

"""Batches: many payloads, a bounded number of sessions at a time, one ``BatchItem`` each."""

from __future__ import annotations

import asyncio
import atexit
import os
import uuid
import weakref
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import Outcome, RolloutCancelled, RolloutError, SetupError
from ..protocol import make_input_id, make_session_id
from ._ledger import Ledger, Past
from ._loop import on_the_loop, run_async, run_sync, start
from ._one import Ended, Order, run_one
from ._pool import Pool
from ._progress import Progress
from ._request import check_payloads
from ._sweep import Pace

if TYPE_CHECKING:
    from ._client import RolloutClient

__all__ = ["AsyncBatchResult", "BatchItem", "BatchResult", "BatchSettings", "Priority", "close_batches"]

Priority = float | Sequence[float] | Callable[[Mapping[str, Any]], float]
"""Of the whole batch, or of each payload, or how to tell it. The greater goes first."""


_WITH_RESULT = frozenset({Outcome.SUCCEEDED, Outcome.AGENT_FAILED})


@dataclass(slots=True)
class BatchItem:
    """What became of one rollout of a batch.

    ``success``: the agent ended and reported no error. ``result``: its result object; an agent that failed
    has one too, with ``status_code`` 500, ``stop_reason`` and ``traceback``. ``error``: what went wrong, None
    if nothing did. ``index``, ``sample``: position in ``payloads``, and which of the payload's samples, from 0.
    ``elapsed``: seconds from its first invoke until the result was here. ``outcome``: how it ended.
    ``input_id``, ``session_id``: its identity. ``timings``: seconds of each phase it reached: ``queued`` (for the rate
    limit), ``started`` (until the session had accepted the payload), ``running`` (until its result was seen),
    ``fetched`` (until it was here). ``invokes``: invoke requests that were sent. ``attempts``: sessions that were given
    the payload; more than 1 only where earlier ones were lost or cancelled in an earlier run of the same ``run_dir``.
    ``resumed``: taken from such a run, nothing was invoked.
    """

    success: bool
    result: dict[str, Any] | None = None
    error: str | None = None
    index: int = 0
    elapsed: float = 0.0
    outcome: Outcome = Outcome.SUCCEEDED
    sample: int = 0
    input_id: str = ""
    session_id: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    invokes: int = 0
    attempts: int = 1
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The arguments of ``RolloutClient.run_batch``, checked. ``skip``: see :meth:`BatchResult.without`."""

    payloads: Iterable[Mapping[str, Any]]
    max_concurrent: int
    timeout: float | None
    pace: Pace
    log_interval: float
    samples: int
    run_dir: str | os.PathLike[str] | None
    ordered: bool
    priority: Priority
    progress: bool | None
    skip: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        check_payloads(self.payloads)
        if self.max_concurrent < 1 or self.samples < 1:
            raise ValueError(
                f"max_concurrent_sessions and samples must be at least 1, got {self.max_concurrent} and {self.samples}"
            )
        if self.ordered and not isinstance(self.priority, int | float):
            raise ValueError("ordered=True and priorities of payloads exclude each other")
        if isinstance(self.priority, Sequence) and not (
            isinstance(self.payloads, Sized) and len(self.priority) == len(self.payloads)
        ):
            raise ValueError("priority: one number for each payload of a list is required")

    @property
    def total(self) -> int | None:
        """Rollouts, if that can be known."""
        return len(self.payloads) * self.samples - len(self.skip) if isinstance(self.payloads, Sized) else None


@dataclass(frozen=True, slots=True)
class _Job:
    payload: Mapping[str, Any]
    index: int
    sample: int
    priority: float


def _jobs(settings: BatchSettings) -> Iterator[_Job]:
    """Every payload ``samples`` times: lazily, except where priorities are to be sorted."""
    numbered: Iterable[tuple[float, int, Mapping[str, Any]]]
    priority = settings.priority
    if isinstance(priority, int | float):
        numbered = ((priority, index, payload) for index, payload in enumerate(settings.payloads))
    else:
        payloads = list(settings.payloads)
        each = priority if isinstance(priority, Sequence) else [priority(payload) for payload in payloads]
        numbered = sorted(zip(each, range(len(payloads)), payloads, strict=True), key=lambda job: (-job[0], job[1]))
    for value, index, payload in numbered:
        for sample in range(settings.samples):
            if (index, sample) not in settings.skip:
                yield _Job(payload, index, sample, float(value))


class BatchResult:
    """Iterate over it, with ``for`` or ``async for``: sessions start with the first step.

    Items come in the order in which rollouts complete, or of the payloads with ``ordered=True``.
    """

    def __init__(self, client: RolloutClient, settings: BatchSettings) -> None:
        self.client, self.settings = client, settings

    def without(self, kept: Collection[tuple[int, int]]) -> BatchResult:
        """The same, but for the rollouts of these payloads and samples: somebody else has kept their items."""
        return BatchResult(self.client, replace(self.settings, skip=frozenset(kept)))

    def __iter__(self) -> Generator[BatchItem, None, None]:
        batch = run_sync(_Batch.open(self.client, self.settings), _Batch.close)
        try:
            while (item := run_sync(batch.next())) is not None:
                yield item
        finally:
            batch.leave()

    async def __aiter__(self) -> AsyncGenerator[BatchItem, None]:
        batch = await run_async(_Batch.open(self.client, self.settings), _Batch.close)
        try:
            while (item := await run_async(batch.next())) is not None:
                yield item
        finally:
            try:
                if not batch.closed:
                    await run_async(batch.close())
            except BaseException:
                batch.report_all()
                raise


AsyncBatchResult = BatchResult


class _Batch:
    """One pass over the payloads. Lives on the background loop."""

    def __init__(self, client: RolloutClient, settings: BatchSettings, ledger: Ledger | None) -> None:
        self.client, self._settings, self._ledger = client, settings, ledger
        self._run = ledger.run if ledger else f"run-{uuid.uuid4().hex[:12]}"
        self._open: set[str] = set()
        self.closed = False
        self._progress = Progress(settings.total, settings.progress, settings.log_interval)
        in_thread = not isinstance(settings.payloads, list | tuple)
        self._pool: Pool[_Job, BatchItem] = Pool(
            _jobs(settings), self._rollout, settings.max_concurrent, ordered=settings.ordered, in_thread=in_thread
        )

    @classmethod
    async def open(cls, client: RolloutClient, settings: BatchSettings) -> _Batch:
        ledger = None
        if settings.run_dir is not None:
            identity = {"exp_id": client.exp_id, "s3_bucket": client.s3_bucket, "agent": client.agent_runtime_arn}
            ledger = Ledger(settings.run_dir, identity)
        batch = cls(client, settings, ledger)
        _open_batches.add(batch)
        return batch

    async def next(self) -> BatchItem | None:
        """The next item; None after the last."""
        self.client._sessions.check()
        return await self._pool.next()

    def leave(self) -> None:
        """:meth:`close` it, for an iterator that ends: by its user, or as garbage, in whatever thread that is."""
        if self.closed:
            return
        if on_the_loop():
            start(self.close())
            return
        try:
            run_sync(self.close())
        except BaseException:  # interrupted a second time: there is no time left for stopping
            self.report_all()
            raise

    async def close(self, error: Exception | None = None) -> None:
        """End it, and stop the sessions that run. Whoever waits for an item gets ``error``."""
        _open_batches.discard(self)
        self.closed = True
        try:
            await self._pool.close(error)
        finally:
            self._progress.close()
            if self._ledger:
                self._ledger.close()
            self.client._sessions.report_unstopped()

    def report_all(self) -> None:
        """Warn of every session that may run; for whoever can't wait until they are stopped. From any thread."""
        self.client._sessions.report_unstopped(also=frozenset(self._open))

    async def _rollout(self, job: _Job, deliver: Callable[[BatchItem], None]) -> None:
        """One rollout, from its invoke until its session is stopped: only then is its place free."""
        input_id = make_input_id(self._run, job.index, job.sample)
        past = await self._past(input_id, job)
        order = Order(
            job.payload,
            make_session_id(self._run, input_id, past.attempt),
            input_id,
            timeout=self._settings.timeout,
            priority=job.priority,
            pace=self._settings.pace,
            look_first=past.known and not past.final,
        )
        self._progress.started()
        ended: Ended | None = None
        try:
            resumed = past.final
            ended = await (self._recall(order, past) if resumed else self._run_one(order, past))
            deliver(_item(job, order, ended, past.attempt + 1, resumed=resumed))
        finally:
            self._progress.ended(ended.outcome if ended else None)
        self._open.add(order.session_id)
        await ended.stopped()
        self._open.discard(order.session_id)

    async def _past(self, input_id: str, job: _Job) -> Past:
        if self._ledger is None:
            return Past("", 0)
        return await asyncio.to_thread(self._ledger.past, input_id, job.payload)

    async def _run_one(self, order: Order, past: Past) -> Ended:
        """Run it, and write down that it begins and how it ends."""
        self._note(order, past)
        past.outcome = Outcome.CANCELLED  # unless it ends by itself
        self._open.add(order.session_id)
        ended: Ended | None = None
        try:
            ended = await run_one(self.client, order)
            past.outcome, past.error, past.elapsed = ended.outcome, ended.error, ended.elapsed
            return ended
        finally:
            self._open.discard(order.session_id)
            try:
                self._note(order, past)
            except SetupError:
                if ended is not None:
                    await ended.stopped()
                raise

    async def _recall(self, order: Order, past: Past) -> Ended:
        """What an earlier run of the script has had, with its result from S3."""
        assert past.outcome is not None
        ended = Ended(past.outcome, error=past.error, elapsed=past.elapsed)
        if past.outcome in _WITH_RESULT:
            try:
                ended.result = await self.client._fetch(order)
            except RolloutError as error:
                ended.outcome, ended.error = Outcome.RUNTIME_FAILED, f"it {past.outcome}, but: {error}"
        return ended

    def _note(self, order: Order, past: Past) -> None:
        if self._ledger is not None:
            self._ledger.write(order.input_id, past)


def _item(job: _Job, order: Order, ended: Ended, attempts: int, *, resumed: bool) -> BatchItem:
    trace = ended.result.get("traceback") if ended.result and ended.error else None
    return BatchItem(
        success=ended.outcome is Outcome.SUCCEEDED,
        result=ended.result,
        error="\n".join(str(part) for part in (ended.error, trace) if part) or None,
        index=job.index,
        elapsed=ended.elapsed,
        outcome=ended.outcome,
        sample=job.sample,
        input_id=order.input_id,
        session_id=order.session_id,
        timings=ended.timings,
        invokes=ended.invokes,
        attempts=attempts,
        resumed=resumed,
    )


_open_batches: weakref.WeakSet[_Batch] = weakref.WeakSet()


async def close_batches(client: RolloutClient) -> None:
    """End those that the client still runs."""
    error = RolloutCancelled("the client was closed")
    await asyncio.gather(*(batch.close(error) for batch in list(_open_batches) if batch.client is client))


@atexit.register
def _at_exit() -> None:
    """Somebody has left an iterator open. Later, when it is collected, the loop has stopped."""
    for batch in list(_open_batches):
        batch.leave()


def _after_fork() -> None:
    for batch in _open_batches:
        batch.closed = True  # its sessions are the parent's
    _open_batches.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

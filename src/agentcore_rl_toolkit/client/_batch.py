"""Batches: many payloads, a bounded number of sessions at a time, one ``BatchItem`` each."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ContractError, Outcome, RolloutError, SetupError
from ..protocol import make_input_id, make_session_id, result_outcome
from ._loop import run_async, run_sync
from ._poll import Intervals

if TYPE_CHECKING:
    from ._client import RolloutClient

__all__ = ["AsyncBatchResult", "BatchItem", "BatchResult", "BatchSettings"]

logger = logging.getLogger("agentcore_rl_toolkit.client")


@dataclass(slots=True)
class BatchItem:
    """What became of one rollout of a batch.

    ``success``: the agent ended and reported no error. ``result``: its result object; an agent that failed
    has one too, with ``status_code`` 500, ``stop_reason`` and ``traceback``. ``error``: what went wrong, None
    if nothing did. ``index``, ``sample``: position in ``payloads``, and which of the payload's samples, from 0.
    ``elapsed``: seconds from the invoke until the result was seen. ``outcome``: how it ended.
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


@dataclass(frozen=True, slots=True)
class BatchSettings:
    payloads: list[Mapping[str, Any]]
    max_concurrent: int
    timeout: float | None
    intervals: Intervals
    log_interval: float
    samples: int

    def __post_init__(self) -> None:
        if self.max_concurrent < 1 or self.samples < 1:
            raise ValueError(
                f"max_concurrent_sessions and samples must be at least 1, got {self.max_concurrent} and {self.samples}"
            )


class BatchResult:
    """Iterate over it: sessions start with the first step, items come in the order in which they complete."""

    def __init__(self, client: RolloutClient, settings: BatchSettings) -> None:
        self.client, self.settings = client, settings

    def __iter__(self) -> Generator[BatchItem, None, None]:
        batch = _Batch(self.client, self.settings)
        try:
            while (item := run_sync(batch.next())) is not None:
                yield item
        finally:
            run_sync(batch.close())


class AsyncBatchResult:
    """:class:`BatchResult` for ``async for``."""

    def __init__(self, client: RolloutClient, settings: BatchSettings) -> None:
        self.client, self.settings = client, settings

    async def __aiter__(self) -> AsyncGenerator[BatchItem, None]:
        batch = _Batch(self.client, self.settings)
        try:
            while (item := await run_async(batch.next())) is not None:
                yield item
        finally:
            await run_async(batch.close())


class _Batch:
    """One pass over the payloads. Lives on the background loop."""

    def __init__(self, client: RolloutClient, settings: BatchSettings) -> None:
        self._client, self._settings = client, settings
        self._run_name = f"run-{uuid.uuid4().hex[:12]}"
        self._task: asyncio.Task[None] | None = None
        self._active = self._finished = 0
        self._total = len(settings.payloads) * settings.samples

    async def next(self) -> BatchItem | None:
        """The next item; None after the last."""
        if not self._total:
            return None
        if self._task is None:
            self._items: asyncio.Queue[BatchItem | Exception | None] = asyncio.Queue()
            self._task = asyncio.create_task(self._run())
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def close(self) -> None:
        """End it, and stop the sessions that run."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._items.put_nowait(None)  # nobody waits for ever, should one still wait

    async def _run(self) -> None:
        jobs = self._jobs()
        count = min(self._settings.max_concurrent, self._total)
        end: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                report = group.create_task(self._report())
                await asyncio.wait([group.create_task(self._work(jobs)) for _ in range(count)])
                report.cancel()
        except ExceptionGroup as errors:  # raised in the consumer; the first is the cause of the others
            end = errors.exceptions[0]
        self._items.put_nowait(end)

    def _jobs(self) -> Iterator[tuple[int, int]]:
        for index in range(len(self._settings.payloads)):
            for sample in range(self._settings.samples):
                yield index, sample

    async def _work(self, jobs: Iterator[tuple[int, int]]) -> None:
        for index, sample in jobs:
            self._active += 1
            try:
                await self._rollout(index, sample)
            finally:
                self._active -= 1
            self._finished += 1

    async def _rollout(self, index: int, sample: int) -> None:
        """One rollout, from its invoke until its session is stopped: only then is its slot free."""
        input_id = make_input_id(self._run_name, index, sample)
        item = BatchItem(False, index=index, sample=sample, input_id=input_id)
        item.session_id = make_session_id(self._run_name, input_id)
        started, future = time.monotonic(), None
        timeout = self._settings.timeout
        try:
            try:
                future = await self._client._start(
                    self._settings.payloads[index],
                    item.session_id,
                    input_id,
                    {},
                    self._settings.intervals,
                    timeout,
                )
                left = None if timeout is None else max(0.0, timeout - future.elapsed())
                _judge(item, await future._wait(left))
            except SetupError:
                raise
            except RolloutError as error:
                item.error, item.outcome = str(error), error.outcome
            except ContractError as error:
                item.error, item.outcome = str(error), Outcome.REJECTED
            except Exception as error:
                logger.exception("rollout %s failed", input_id)
                item.error, item.outcome = f"{type(error).__name__}: {error}", Outcome.RUNTIME_FAILED
            item.elapsed = future.elapsed() if future else time.monotonic() - started
            self._items.put_nowait(item)
        finally:
            if future is not None:
                await future._cancel()  # ends the watching too, if there is no result

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._settings.log_interval)
            logger.info("batch: %d of %d done, %d sessions active", self._finished, self._total, self._active)


def _judge(item: BatchItem, result: dict[str, Any]) -> None:
    item.result, item.outcome = result, result_outcome(result)
    item.success = item.outcome is Outcome.SUCCEEDED
    if not item.success:
        reason = result.get("stop_reason") or f"the agent answered status {result.get('status_code')}"
        item.error = "\n".join(str(part) for part in (reason, result.get("traceback")) if part)

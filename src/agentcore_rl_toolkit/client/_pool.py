"""Working through many jobs, a bounded number at a time. For batches and for ``run_rollouts``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from ._threads import Threads

__all__ = ["Pool"]

Job = TypeVar("Job")
Item = TypeVar("Item")

_END = object()


class Pool(Generic[Job, Item]):
    """Runs ``work(job, deliver)`` for every job; :meth:`next` gives what they deliver.

    ``work`` calls ``deliver`` once, and returns when its place is free again. ``limit``: jobs at a time; as many more
    may wait for the consumer, so that memory depends on neither the number of jobs nor the consumer's speed.
    ``ordered``: in the order of the jobs instead of that in which they are done. ``in_thread``: take the next job in
    a thread, since the iterable may block. An exception of a job, or of the iterable, ends all; :meth:`next` raises it.
    """

    def __init__(
        self,
        jobs: Iterable[Job],
        work: Callable[[Job, Callable[[Item], None]], Awaitable[None]],
        limit: int,
        *,
        ordered: bool = False,
        in_thread: bool = False,
    ) -> None:
        self._jobs, self._work, self._limit = iter(jobs), work, limit
        self._ordered = ordered
        self._thread = Threads(1, "agentcore-rl-payloads") if in_thread else None
        self._room = asyncio.Semaphore(2 * limit)
        self._items: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue()
        self._early: dict[int, Item] = {}
        self._handed_out = 0
        self._task: asyncio.Task[None] | None = None

    async def next(self) -> Item | None:
        """The next item; None after the last. Raises what a job raised."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        item = await self._next()
        if item is not None:
            self._handed_out += 1
            self._room.release()
        return item

    async def _next(self) -> Item | None:
        while self._handed_out not in self._early:
            entry = await self._items.get()
            if entry is None or isinstance(entry, Exception):
                self._items.put_nowait(None)  # whoever asks again
                if entry is None:
                    return None
                raise entry
            number, item = entry
            if not self._ordered:
                return item
            self._early[number] = item
        return self._early.pop(self._handed_out)

    async def close(self, error: Exception | None = None) -> None:
        """End all jobs, and return when they have cleaned up. Whoever still waits for items gets ``error``, or None."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._items.put_nowait(error)

    async def _run(self) -> None:
        places = asyncio.Semaphore(self._limit)
        end: Exception | None = None
        number = 0
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await places.acquire()
                    await self._room.acquire()
                    job = await self._thread.run(self._take_in_thread) if self._thread else self._take()
                    if job is _END:
                        break
                    task = group.create_task(self._one(number, job))  # type: ignore[arg-type]
                    task.add_done_callback(lambda _: places.release())
                    number += 1
        except ExceptionGroup as errors:
            end = errors.exceptions[0]  # the cause of the others
        finally:
            if self._thread:
                self._thread.close()
        self._items.put_nowait(end)

    async def _one(self, number: int, job: Job) -> None:
        await self._work(job, lambda item: self._items.put_nowait((number, item)))

    def _take(self) -> Job | object:
        return next(self._jobs, _END)

    def _take_in_thread(self) -> Job | object:
        try:
            return self._take()
        except Exception:
            raise
        except BaseException as error:  # a SystemExit would end the loop, and leave every client waiting
            raise RuntimeError(f"the iterable raised {error!r}") from error

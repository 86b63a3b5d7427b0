"""Threads for blocking calls."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["Threads"]

T = TypeVar("T")
_Jobs = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Threads:
    """At most ``most`` daemon threads, started as they are needed.

    Unlike those of ``concurrent.futures``, nothing joins them when the interpreter ends: a server that does not
    answer keeps no process alive.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._count = self._unfinished = 0
        self._jobs: _Jobs = queue.SimpleQueue()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._jobs.put((future, work))
            self._unfinished += 1
            if self._count < min(self._unfinished, self._most):
                self._count += 1
                threading.Thread(target=self._run, args=(self._jobs,), name=self._name, daemon=True).start()
        return future

    async def run(self, work: Callable[[], T]) -> T:
        """The value of ``work``. Cancelled, it leaves a call that has begun to end by itself."""
        return await asyncio.wrap_future(self.submit(work))

    def close(self) -> None:
        """Let the threads end when their work is done. Jobs that come later get new ones."""
        with self._lock:
            for _ in range(self._count):
                self._jobs.put(None)
            self._jobs, self._count = queue.SimpleQueue(), 0

    def _run(self, jobs: _Jobs) -> None:
        while (job := jobs.get()) is not None:
            future, work = job
            settle: Callable[[], None] | None = None
            if future.set_running_or_notify_cancel():
                try:
                    settle = functools.partial(future.set_result, work())
                except BaseException as error:  # noqa: BLE001 - it is the future's
                    settle = functools.partial(future.set_exception, error)
            with self._lock:
                self._unfinished -= 1  # before anybody is told: who sends the next job needs no further thread
            if settle:
                settle()
            del job, future, work, settle  # an idle thread keeps nothing alive

"""Threads for blocking calls."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["Threads"]

T = TypeVar("T")


class Threads:
    """At most ``most`` daemon threads, started as they are needed.

    Unlike those of ``concurrent.futures``, nothing joins them when the interpreter ends: a server that does not
    answer keeps no process alive.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name, self._count = most, name, 0
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((future, work))
        if not self._idle.acquire(blocking=False):
            with self._lock:
                if self._count < self._most:
                    self._count += 1
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    async def run(self, work: Callable[[], T]) -> T:
        """The value of ``work``. Cancelled, it leaves a call that has begun to end by itself."""
        return await asyncio.wrap_future(self.submit(work))

    def close(self) -> None:
        """Let the threads end when their work is done."""
        with self._lock:
            for _ in range(self._count):
                self._jobs.put(None)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                self._idle.release()
                job = self._jobs.get()
            if job is None:
                self._idle.acquire(blocking=False)  # a closed pool that is used again must not count on this one
                with self._lock:
                    self._count -= 1
                return
            future, work = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - it is the future's
                    future.set_exception(error)
            del job, future, work  # an idle thread keeps nothing alive

"""Threads for blocking calls."""

from __future__ import annotations

import asyncio
import functools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ..errors import SetupError

__all__ = ["Threads"]

T = TypeVar("T")
_Jobs = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Threads:
    """At most ``most`` daemon threads, started as they are needed.

    Unlike those of ``concurrent.futures``, nothing joins them when the interpreter ends: a server that does not
    answer keeps no process alive. A forked child has none of them, and shares their connections with the parent: it
    gets ``SetupError``.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name, self._process = most, name, os.getpid()
        self._count = self._unfinished = 0
        self._jobs: _Jobs = queue.SimpleQueue()
        self._lock = threading.Lock()

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made them."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Raises ``SetupError`` in a forked child."""
        if self.forked:
            raise SetupError("this RolloutClient was made before the process forked: make a new one in the child")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        self.check()
        future: Future[T] = Future()
        with self._lock:
            self._start(min(self._unfinished + 1, self._most))
            self._jobs.put((future, work))
            self._unfinished += 1
        return future

    def prepare(self, count: int) -> None:
        """Have ``count`` threads now: from Python 3.12 on none can be started any more when the interpreter ends."""
        self.check()
        with self._lock:
            self._start(count)

    def _start(self, count: int) -> None:
        while self._count < count:
            thread = threading.Thread(target=self._run, args=(self._jobs,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._count:
                    raise
                return  # those that there are will do it
            self._count += 1

    async def run(self, work: Callable[[], T]) -> T:
        """The value of ``work``. Cancelled, it leaves a call that has begun to end by itself."""
        return await asyncio.wrap_future(self.submit(work))

    def close(self) -> None:
        """Let the threads end when their work is done. Jobs that come later get new ones."""
        if self.forked:  # somebody who is not here may hold the lock
            return
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

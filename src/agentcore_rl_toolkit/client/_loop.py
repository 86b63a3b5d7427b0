"""One event loop in a background thread, on which every client of this process does its work.

So the logic exists once, as coroutines, and can be used from sync code, from any event loop and from several
threads at the same time; a caller that blocks its own loop delays no poll and no timeout.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

__all__ = ["on_the_loop", "run_async", "run_sync", "soon", "start", "to_the_end"]

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def _background() -> asyncio.AbstractEventLoop:
    global _loop, _thread
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="agentcore-rl-client", daemon=True)
            _thread.start()
        return _loop


def _after_fork() -> None:
    global _loop, _lock
    _loop, _lock = None, threading.Lock()  # the thread stayed in the parent


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _Job(Generic[T]):
    """A coroutine on the background loop, once it is started. ``ended`` is settled when it has really ended, cleaning
    up included. Starting is a step of its own, so that an interrupt at any time finds a job that it can cancel."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.ended: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._coroutine = coroutine
        self._loop = _background()
        self._task: asyncio.Task[T] | None = None

    def start(self) -> _Job[T]:
        self._loop.call_soon_threadsafe(self._begin)
        return self

    def _begin(self) -> None:
        if not self.ended.done():
            self._task = self._loop.create_task(self._coroutine)
            self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(task.result())

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.ended.done():  # the interrupt came before the start
            self._coroutine.close()
            self.ended.set_exception(asyncio.CancelledError())


# What is done with a value whose receiver has left before it came.
Discard = Callable[[T], Coroutine[Any, Any, object]]


def run_sync(coroutine: Coroutine[Any, Any, T], discard: Discard[T] | None = None) -> T:
    """Run to the end and return its value. An interrupt (Ctrl-C) cancels it and waits for its cleaning up."""
    job = _Job(coroutine)
    try:
        return job.start().ended.result()
    except BaseException:
        job.cancel()
        if job.ended.exception() is None and discard:  # it may have ended just when the interrupt came
            _Job(discard(job.ended.result())).start().ended.result()
        raise


async def run_async(coroutine: Coroutine[Any, Any, T], discard: Discard[T] | None = None) -> T:
    """:func:`run_sync` for a caller in an event loop of its own; what interrupts there is cancellation here."""
    job = _Job(coroutine).start()
    ended = asyncio.wrap_future(job.ended)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        job.cancel()
        await asyncio.wait([ended])
        if ended.exception() is None and discard:
            await asyncio.wrap_future(_Job(discard(ended.result())).start().ended)
        raise


def on_the_loop() -> bool:
    """Whether this is the loop's own thread, which can't use :func:`run_sync`; garbage is collected there as well."""
    return threading.current_thread() is _thread


def start(coroutine: Coroutine[Any, Any, object]) -> None:
    """Run it on the loop, and don't wait."""
    _Job(coroutine).start()


def soon(callback: Callable[[], object]) -> None:
    """Call ``callback`` on the loop, and don't wait; nothing happens if the loop is gone."""
    if _loop is not None and not _loop.is_closed():
        _loop.call_soon_threadsafe(callback)


async def to_the_end(task: asyncio.Task[T]) -> T:
    """The task's value. Cancelled, it is waited for all the same: it is somebody's cleaning up."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        raise

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
from typing import Any, TypeVar

__all__ = ["run_async", "run_sync", "soon"]

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _background() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="agentcore-rl-client", daemon=True).start()
        return _loop


def _after_fork() -> None:
    global _loop, _lock
    _loop, _lock = None, threading.Lock()  # the thread stayed in the parent


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _submit(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    return asyncio.run_coroutine_threadsafe(coroutine, _background())


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end and return its value. An interrupt (Ctrl-C) here cancels the coroutine there."""
    future = _submit(coroutine)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """The same for a caller in an event loop of its own; cancelling the caller cancels the coroutine."""
    return await asyncio.wrap_future(_submit(coroutine))


def soon(callback: Callable[[], object]) -> None:
    """Call ``callback`` on the loop, and don't wait; nothing happens if the loop is gone."""
    if _loop is not None and not _loop.is_closed():
        _loop.call_soon_threadsafe(callback)

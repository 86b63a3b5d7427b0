"""Keeps turns and updates of the weights apart."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ...errors import EngineError
from .base import RETRY_AFTER, TokenChunk

__all__ = ["Gate", "Running"]


@dataclass(slots=True, eq=False)
class Running:
    """Work that needs the current weights, on ``loop``. An update may end it."""

    loop: asyncio.AbstractEventLoop
    limit: asyncio.Timeout | None = None
    aborted: bool = False

    def abort(self) -> None:
        """On ``loop`` only."""
        self.aborted = True
        if self.limit is not None:
            self.limit.reschedule(self.loop.time())

    @asynccontextmanager
    async def until_aborted(self) -> AsyncIterator[None]:
        """Ends the block when this work is aborted, with an ``EngineError``."""
        try:
            async with asyncio.timeout(None) as self.limit:
                if self.aborted:
                    self.abort()
                yield
        except TimeoutError:
            if not self.aborted:
                raise
            raise EngineError("aborted: the weights are being updated", retry_after=RETRY_AFTER) from None
        finally:
            self.limit = None

    async def abortable(self, chunks: AsyncGenerator[TokenChunk]) -> AsyncGenerator[TokenChunk]:
        """The same chunks, until this work is aborted."""
        while True:
            async with self.until_aborted():
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            yield chunk


@dataclass(slots=True, eq=False)
class Gate:
    """What runs with the current weights: turns, and what they set going. Closed, it holds new turns back.

    Any thread may use it; turns wait on their own loops.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False
    running: set[Running] = field(default_factory=set)
    waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)

    async def enter(self) -> Running:
        """A turn that may begin. Whoever entered has to :meth:`leave`."""
        loop = asyncio.get_running_loop()
        while True:
            with self.lock:
                if not self.closed:
                    turn = Running(loop)
                    self.running.add(turn)
                    return turn
                event = asyncio.Event()
                self.waiting.append((loop, event))
            await event.wait()

    def follow(self, turn: Running) -> Running:
        """Work that a running turn sets going and that may outlive it."""
        work = Running(turn.loop, aborted=turn.aborted)
        self.running.add(work)
        return work

    def leave(self, work: Running) -> None:
        self.running.discard(work)

    def close(self) -> None:
        """Let no turn begin. Raises ``RuntimeError`` if it is closed."""
        with self.lock:
            if self.closed:
                raise RuntimeError("the weights are being updated already")
            self.closed = True

    def open(self) -> None:
        with self.lock:
            self.closed = False
            waiting, self.waiting = self.waiting, []
        for loop, event in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    async def idle(self, wait: float) -> bool:
        """Whether nothing runs any more after at most ``wait`` seconds. Polls: turns may run on another thread."""
        deadline = time.monotonic() + wait
        while self.running:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.005)
        return True

    def abort(self) -> None:
        for work in list(self.running):
            if not work.loop.is_closed():
                work.loop.call_soon_threadsafe(work.abort)

"""``RolloutFuture``: one started rollout."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Generator
from typing import Any

from ..errors import RolloutCancelled, RolloutTimeout
from ._aws import Aws
from ._loop import run_async, run_sync, soon
from ._poll import Intervals, ResultPoller

__all__ = ["RolloutFuture"]


class RolloutFuture:
    """A rollout that runs. Usable from sync code, from any event loop, and from several threads.

    ``session_id``, ``input_id``, ``s3_bucket``, ``result_key``: its identity and where its result appears.
    Once a result is fetched, or waiting for it is given up (timeout, cancellation), the session is stopped.
    """

    def __init__(
        self,
        client: Aws,
        poller: ResultPoller,
        *,
        session_id: str,
        input_id: str,
        s3_bucket: str,
        result_key: str,
        intervals: Intervals,
        started: float,
    ) -> None:
        self.session_id, self.input_id = session_id, input_id
        self.s3_bucket, self.result_key = s3_bucket, result_key
        self._aws, self._poller = client, poller
        self._stopping: asyncio.Task[bool] | None = None
        self._result = poller.watch(s3_bucket, result_key, intervals)
        clock = self._clock = _Clock(started)
        self._result.add_done_callback(lambda _: clock.stop())
        # Nobody is left to ask: no need to poll any longer. The session itself goes on.
        weakref.finalize(self, soon, self._result.cancel).atexit = False

    def __repr__(self) -> str:
        state = "done" if self.done() else "running"
        return f"<RolloutFuture {state}, session {self.session_id}, {self.elapsed():.1f} s>"

    # -- what one can ask at any time --

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled before it had a result."""
        return self._result.done() and isinstance(self._result.exception(), RolloutCancelled)

    def done(self) -> bool:
        """Whether :meth:`result` would return (or raise) at once. Costs nothing: it reads what the poller knows."""
        return self._result.done()

    async def done_async(self) -> bool:
        """Same as :meth:`done`."""
        return self._result.done()

    def elapsed(self) -> float:
        """Seconds since the invoke, until the result was seen."""
        return self._clock.read()

    # -- waiting --

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the result object, and stop the session.

        An agent that failed has a result too: its error object (``status_code`` 500, ``stop_reason``,
        ``traceback``). ``timeout``: seconds from now; None waits without limit.

        Raises ``RolloutTimeout`` (a ``TimeoutError``), ``RolloutCancelled``, or ``SetupError`` if results can't
        be read at all.
        """
        return run_sync(self._finish(timeout))

    async def result_async(self, timeout: float | None = None) -> dict[str, Any]:
        """:meth:`result` for async code."""
        return await run_async(self._finish(timeout))

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        return self.result_async().__await__()

    # -- giving up --

    def cancel(self) -> bool:
        """Stop the session, and stop waiting. True if the session is stopped now. Never raises for AWS errors."""
        return run_sync(self._cancel())

    async def cancel_async(self) -> bool:
        """:meth:`cancel` for async code."""
        return await run_async(self._cancel())

    # -- on the background loop --

    async def _finish(self, timeout: float | None) -> dict[str, Any]:
        try:
            return await self._wait(timeout)
        except asyncio.CancelledError:  # whoever gives up waiting gives up the rollout
            self._fail(self._was_cancelled())
            raise
        finally:
            await self._stop()

    async def _wait(self, timeout: float | None) -> dict[str, Any]:
        """The result, without stopping the session."""
        await asyncio.wait([self._result], timeout=timeout)
        if not self._result.done() and not await self._poller.look(self._result, self.s3_bucket, self.result_key):
            self._fail(
                RolloutTimeout(
                    f"session {self.session_id} has no result after {timeout} s; its log says what it was doing",
                    session_id=self.session_id,
                )
            )
        return self._result.result()

    async def _cancel(self) -> bool:
        self._fail(self._was_cancelled())
        return await self._stop()

    async def _stop(self) -> bool:
        """Stop the session once; whoever asks again waits for the same call."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._aws.stop(self.session_id))
        try:
            return await asyncio.shield(self._stopping)
        except asyncio.CancelledError:
            await asyncio.wait([self._stopping])  # the session's end is not given up with the waiting
            raise

    def _was_cancelled(self) -> RolloutCancelled:
        return RolloutCancelled(f"session {self.session_id} was cancelled", session_id=self.session_id)

    def _fail(self, error: Exception) -> None:
        if not self._result.done():
            self._result.set_exception(error)
            self._result.exception()  # told to whoever asks, not to the loop's log


class _Clock:
    """Seconds from the start until stopped."""

    def __init__(self, started: float) -> None:
        self._started, self._stopped = started, 0.0

    def stop(self) -> None:
        self._stopped = time.monotonic()

    def read(self) -> float:
        return (self._stopped or time.monotonic()) - self._started

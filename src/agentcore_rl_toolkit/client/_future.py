"""``RolloutFuture``: one started rollout."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Generator
from typing import Any

from ..errors import RolloutCancelled, RolloutTimeout
from ._loop import run_async, run_sync, soon, to_the_end
from ._probe import Probe
from ._sessions import Sessions
from ._sweep import Sweeper, Watch

__all__ = ["RolloutFuture"]

_LAST_LOOK = 5.0  # seconds


class RolloutFuture:
    """A rollout that runs. Usable from sync code, from any event loop, and from several threads.

    ``session_id``, ``input_id``, ``s3_bucket``, ``result_key``: its identity and where its result appears.
    Once a result is fetched, or waiting for it is given up (timeout, cancellation), the session is stopped.
    """

    def __init__(
        self,
        sessions: Sessions,
        sweeper: Sweeper,
        watch: Watch,
        *,
        session_id: str,
        input_id: str,
        s3_bucket: str,
        started: float,
        probe: Probe | None = None,
    ) -> None:
        self.session_id, self.input_id = session_id, input_id
        self.s3_bucket, self.result_key = s3_bucket, watch.key
        self._sessions, self._sweeper, self._watch, self._probe = sessions, sweeper, watch, probe
        self._accepted = time.monotonic()
        self._stopping: asyncio.Task[bool] | None = None
        self._result = watch.result
        clock = self._clock = _Clock(started)
        self._result.add_done_callback(lambda _: clock.stop())
        # Nobody is left to ask: no need to look any longer. The session itself goes on.
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
        """Whether :meth:`result` would return (or raise) at once. Costs nothing: it reads what the sweeper knows."""
        return self._result.done()

    async def done_async(self) -> bool:
        """Same as :meth:`done`."""
        return self._result.done()

    def elapsed(self) -> float:
        """Seconds since its first invoke was sent, until the result was here."""
        return self._clock.ended() - self._clock.started

    # -- waiting --

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the result object, and stop the session.

        An agent that failed has a result too: its error object (``status_code`` 500, ``stop_reason``,
        ``traceback``). ``timeout``: seconds from now; None waits without limit.

        Raises ``RolloutTimeout`` (a ``TimeoutError``), ``RolloutCancelled``, ``InvocationError`` if the object is no
        result, or ``SetupError`` if results can't be read at all.
        """
        try:
            return run_sync(self._finish(timeout))
        except KeyboardInterrupt:
            self._report_if_unstopped()
            raise

    async def result_async(self, timeout: float | None = None) -> dict[str, Any]:
        """:meth:`result` for async code."""
        return await run_async(self._finish(timeout))

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        return self.result_async().__await__()

    # -- giving up --

    def cancel(self) -> bool:
        """Stop the session, and stop waiting. True if the session is stopped now. Never raises for AWS errors."""
        try:
            return run_sync(self._cancel())
        except KeyboardInterrupt:
            self._report_if_unstopped()
            raise

    async def cancel_async(self) -> bool:
        """:meth:`cancel` for async code."""
        return await run_async(self._cancel())

    def _report_if_unstopped(self) -> None:
        """After an interrupt; the second one has not waited until the session was stopped."""
        if self._stopping is None or not self._stopping.done():
            self._sessions.report_unstopped(also={self.session_id})

    # -- on the background loop --

    def _timings(self, began: float) -> dict[str, float]:
        """``BatchItem.timings`` of a rollout that has ended, and was wanted since ``began``."""
        ended = self._clock.ended()
        seen = min(self._watch.seen or ended, ended)
        accepted = min(self._accepted, seen)
        return {
            "queued": self._clock.started - began,
            "started": accepted - self._clock.started,
            "running": seen - accepted,
            "fetched": ended - seen,
        }

    async def _finish(self, timeout: float | None) -> dict[str, Any]:
        self._sessions.check()
        try:
            return await self._wait(timeout)
        finally:
            await self._stop()
            self._sessions.report_unstopped()

    async def _wait(self, timeout: float | None) -> dict[str, Any]:
        """The result, without stopping the session. Whoever gives up waiting gives up the rollout."""
        try:
            await asyncio.wait([self._result], timeout=timeout)
            if not self._result.done():
                await asyncio.wait([asyncio.ensure_future(self._sweeper.look(self._watch))], timeout=_LAST_LOOK)
        except asyncio.CancelledError:
            self._watch.fail(self._was_cancelled())
            raise
        if not self._result.done():
            text = (
                f"session {self.session_id} has no result after {self.elapsed():.1f} s; its log says what it was doing"
            )
            self._watch.fail(RolloutTimeout(text, session_id=self.session_id))
        return self._result.result()

    async def _cancel(self) -> bool:
        self._sessions.check()
        runs = not self._result.done()
        self._watch.fail(self._was_cancelled())
        if runs:
            await self._sessions.cancel(self.session_id)
        stopped = await self._stop()
        self._sessions.report_unstopped()
        return stopped

    async def _stop(self) -> bool:
        """Stop the session once; whoever asks again gets the same answer."""
        if self._stopping is None:
            sent = self._probe.sent if self._probe else None
            self._stopping = asyncio.create_task(self._sessions.stop(self.session_id, sent))
        return await to_the_end(self._stopping)

    def _was_cancelled(self) -> RolloutCancelled:
        return RolloutCancelled(f"session {self.session_id} was cancelled", session_id=self.session_id)


class _Clock:
    """``started``, and when it was stopped; apart from the future, which nobody may hold from here."""

    def __init__(self, started: float) -> None:
        self.started, self._ended = started, 0.0

    def stop(self) -> None:
        self._ended = time.monotonic()

    def ended(self) -> float:
        return self._ended or time.monotonic()

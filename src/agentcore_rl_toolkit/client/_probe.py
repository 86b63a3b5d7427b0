"""Asking a session from time to time whether its agent still runs the rollout.

An agent that is killed (no memory left, a crash) writes no result, and AgentCore tells nobody. But the next request to
its session meets a new process, which does not know the rollout: so it is lost, and need not be waited for.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from ..errors import InvocationError
from ..protocol import PROBE_FIELD
from ._request import encode
from ._sessions import Sessions
from ._sweep import Sweeper, Watch

__all__ = ["Probe"]


class Probe:
    """Asks every ``interval`` seconds or so, until the watch is settled.

    ``address``: the fields of ``_rollout`` that say which rollout is meant.
    """

    def __init__(
        self,
        sessions: Sessions,
        sweeper: Sweeper,
        watch: Watch,
        session_id: str,
        address: Mapping[str, Any],
        interval: float,
    ) -> None:
        self._sessions, self._sweeper, self._watch = sessions, sweeper, watch
        self._session_id, self._address, self._interval = session_id, address, interval
        self.sent: Future[bytes] | None = None
        """The last question: it may be on its way."""
        self._task: asyncio.Task[None] | None = None
        self._timer = self._set()
        watch.result.add_done_callback(self._end)

    def _set(self) -> asyncio.TimerHandle:
        # Sessions that were started together are not asked together.
        return asyncio.get_running_loop().call_later(self._interval * random.uniform(0.7, 1.3), self._begin)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._ask())

    def _end(self, _: object) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    async def _ask(self) -> None:
        await self._sessions.may_probe()
        if self._watch.result.done():  # whoever stops the session may have looked at ``sent`` already
            return
        body = encode({}, {**self._address, PROBE_FIELD: True})  # not before: most rollouts are never asked
        self.sent = self._sessions.probe(self._session_id, body)
        try:
            lost = _status(await asyncio.wrap_future(self.sent)) == "unknown"
        except Exception as error:  # noqa: BLE001 - it is asked again
            self._sessions.probe_failed(self._session_id, error)
            lost = False
        # It may have ended just before it was asked.
        if lost and not await self._sweeper.look(self._watch) and self._sweeper.missing(self._watch):
            text = (
                f"session {self._session_id} has lost its rollout: the agent no longer runs it and has left no result;"
                " its log says why (killed? no memory left? S3 refused the result?)"
            )
            self._watch.fail(InvocationError(text, session_id=self._session_id))
        else:
            self._timer = self._set()


def _status(answer: bytes) -> Any:
    try:
        return json.loads(answer).get("status")
    except (ValueError, AttributeError, RecursionError):
        return None

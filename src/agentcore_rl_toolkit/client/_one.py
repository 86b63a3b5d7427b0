"""One rollout from its invoke to its result, whatever becomes of it: the place where errors become outcomes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ContractError, Outcome, RolloutError, SetupError
from ..protocol import result_outcome
from ._sessions import Start
from ._sweep import Pace

if TYPE_CHECKING:
    from ._client import RolloutClient
    from ._future import RolloutFuture

__all__ = ["Ended", "Order", "run_one"]

logger = logging.getLogger("agentcore_rl_toolkit.client")


@dataclass(slots=True)
class Order:
    """A rollout to run.

    ``config``: fields of ``_rollout``. ``timeout``: seconds from its first invoke to its result. ``look_first``: it may
    have run already. ``start``: how its session's start went, once it has begun.
    """

    payload: Mapping[str, Any]
    session_id: str
    input_id: str
    config: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    priority: float = 0.0
    pace: Pace = Pace()  # noqa: RUF009 - immutable
    look_first: bool = False
    start: Start | None = None


@dataclass(slots=True)
class Ended:
    """How it ended. ``result``: the agent's object, if there is one. ``error``: what went wrong, None if nothing did.

    ``elapsed``: seconds from its first invoke to its result. ``timings``: seconds of each phase it reached: ``queued``
    (for the rate limit), ``started`` (until the session had accepted the payload), ``running`` (until its result was
    seen), ``fetched`` (until it was here). ``invokes``: requests that were sent.
    """

    outcome: Outcome
    result: dict[str, Any] | None = None
    error: str | None = None
    elapsed: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)
    invokes: int = 0
    _stopping: asyncio.Future[bool] | None = None

    async def stopped(self) -> None:
        """Returns when the session has ended, or can't be ended. On the background loop, like :func:`run_one`."""
        if self._stopping is not None:
            await self._stopping


async def run_one(client: RolloutClient, order: Order) -> Ended:
    """Run it, and begin to stop its session. Raises ``SetupError``, because every other would fail the same way."""
    began = time.monotonic()
    future: RolloutFuture | None = None
    try:
        future = await client._start(order)
        left = None if order.timeout is None else max(0.0, order.timeout - future.elapsed())
        ended = judge(await future._wait(left))
    except SetupError:
        await _stop(future)
        raise
    except asyncio.CancelledError:
        await _stop(future)
        raise
    except RolloutError as error:
        ended = Ended(error.outcome, error=str(error))
    except ContractError as error:
        ended = Ended(Outcome.REJECTED, error=str(error))
    except Exception as error:
        logger.exception("rollout %s failed", order.input_id)
        ended = Ended(Outcome.RUNTIME_FAILED, error=f"{type(error).__name__}: {error}")
    if future is not None:
        ended._stopping = asyncio.ensure_future(future._stop())
        ended.elapsed, ended.timings = future.elapsed(), future._timings(began)
    elif order.start and order.start.sent:
        ended.elapsed = time.monotonic() - order.start.sent
        ended.timings = {"queued": order.start.sent - began, "started": ended.elapsed}
    if ended.error:
        ended.error = await client._masked(order, ended.error)
    ended.invokes = order.start.invokes if order.start else 0
    return ended


async def _stop(future: RolloutFuture | None) -> None:
    if future is not None:
        await future._stop()


def judge(result: dict[str, Any]) -> Ended:
    outcome = result_outcome(result)
    if outcome is Outcome.SUCCEEDED:
        return Ended(outcome, result)
    reason = result.get("stop_reason") or f"the agent answered status {result.get('status_code')}"
    return Ended(outcome, result, str(reason))

"""Starting and stopping sessions of one runtime: within its limits, retried, and none forgotten."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass

from .._aws import ServiceError
from .._faults import NEEDS_SETUP, Fault, fault_of, pause, setup_error
from ..errors import InvocationError, SetupError
from ._limits import FIRST, LAST, Limiter
from ._loop import to_the_end
from ._request import masked
from ._runtime import Runtime
from ._threads import Threads

__all__ = ["MOST_CALLS", "Sessions", "Start"]

logger = logging.getLogger("agentcore_rl_toolkit.client")

Call = Callable[[str, bytes], bytes]
"""A request to a session, with a body; the body of the answer."""

# An invoke takes as long as the session's start. This many may be on their way; AWS lets 400 sessions a minute start.
_INVOKES, _STOPS, _PROBES = 256, 64, 64
_STOPS_AT_EXIT = 8
MOST_CALLS = _INVOKES + _STOPS + _PROBES
_STOP_TRIES = 6
_CANCEL_SECONDS = 15.0
_LAST_WORD = 10.0  # seconds for a request that can't be called back

_NOT_NOW = frozenset({Fault.THROTTLED, Fault.NO_CAPACITY, Fault.IN_TRANSITION})
"""Sent again until the rollout's time is over; the other faults that are sent again count as failures."""
_AGAIN = frozenset({Fault.COLD, Fault.SERVER, Fault.UNREACHED, Fault.UNANSWERED})
_MAY_HAVE_STARTED = frozenset({Fault.COLD, Fault.SERVER, Fault.UNANSWERED, Fault.IN_TRANSITION})
_SETUP = NEEDS_SETUP | {Fault.FORBIDDEN, Fault.GONE}


@dataclass(slots=True)
class Start:
    """A session on its way to accepting its payload.

    ``has_result``: looks whether its result is there. ``on_sent``: called when the first invoke is sent. ``sent``: when
    that was (``time.monotonic()``). ``invokes``: how many were sent. ``last``: the error of the last one that failed.
    ``may_run``: whether the session may exist. ``in_flight``: the call that was sent last.
    """

    session_id: str
    body: bytes
    has_result: Callable[[], Awaitable[bool]]
    on_sent: Callable[[], None]
    priority: float = 0.0
    sent: float | None = None
    invokes: int = 0
    last: Exception | None = None
    may_run: bool = False
    in_flight: Future[bytes] | None = None


class Sessions:
    """Lives on the background loop. ``attempts``: failed calls of one session that are sent again.

    ``unstopped``: sessions that could not be stopped and may still run, with the reason.
    """

    def __init__(self, runtime: Runtime, limiter: Limiter, attempts: int, in_flight: int) -> None:
        self._runtime, self._limiter, self._attempts = runtime, limiter, max(0, attempts)
        # Neither a look for a result nor a stop may wait behind sessions that start slowly.
        self._invokes = Threads(max(_INVOKES, in_flight), "agentcore-rl-invoke")
        self._stops = Threads(_STOPS, "agentcore-rl-stop")
        self._probes = Threads(_PROBES, "agentcore-rl-probe")  # an agent that blocks may take minutes to answer
        self._reached = False
        """Whether AgentCore has ever answered."""
        self._served = False
        """Whether any session was ever started."""
        self._stopping: dict[str, asyncio.Task[bool]] = {}
        self.unstopped: dict[str, str] = {}

    def check(self) -> None:
        """Raises ``SetupError`` in a forked child: all that is waited for here happens in the parent."""
        self._invokes.check()

    def close(self) -> None:
        self._invokes.close()
        self._stops.close()
        self._probes.close()

    # -- the beginning of a session ------------------------------------------------------------------------

    async def start(self, start: Start, call: Call | None = None) -> bytes | None:
        """InvokeAgentRuntime until it is accepted: the body of the answer; None if there is a result already.

        ``call``: another request that starts a session.

        Raises ``SetupError`` or ``InvocationError``. When it raises, or is cancelled, no session is left.
        """
        try:
            return await self._start(start, call or self._runtime.invoke)
        except BaseException:
            await to_the_end(asyncio.ensure_future(self._abandon(start)))
            raise

    async def _start(self, start: Start, send: Call) -> bytes | None:
        failures = delays = 0
        self._stops.prepare(_STOPS_AT_EXIT)
        while True:
            await self._limiter.turn(new_session=not start.may_run, priority=FIRST if start.may_run else start.priority)
            if start.sent is None:
                start.sent = time.monotonic()
                start.on_sent()
            start.invokes += 1
            call = functools.partial(_without_secrets, send, start.session_id, start.body)
            start.in_flight = self._invokes.submit(call)
            try:
                answer = await asyncio.wrap_future(start.in_flight)
            except Exception as error:  # noqa: BLE001 - sorted by its fault
                start.last, fault = error, self._fault(error)
            else:
                self._reached = self._served = start.may_run = True
                return answer
            logger.info("invoke of session %s, try %d: %s", start.session_id, start.invokes, start.last)
            if fault not in _NOT_NOW:
                failures += 1
                if failures > self._attempts or not self._worth_another(fault):
                    raise self._final(start, fault) from start.last
            delays += 1
            self._hold_back(fault, new_session=not start.may_run, seconds=pause(delays))
            start.may_run |= fault in _MAY_HAVE_STARTED
            # Perhaps only the answer was lost. The agent would not run twice, but a result spares the question.
            if fault is Fault.UNANSWERED and await start.has_result():
                return None
            await asyncio.sleep(pause(delays))

    def _fault(self, error: Exception) -> Fault:
        fault = fault_of(error)
        self._reached |= fault not in (Fault.UNREACHED, Fault.UNANSWERED)
        return fault

    def _worth_another(self, fault: Fault) -> bool:
        # Where sessions have been started, "not allowed" is rather a passing trouble of AWS than a wrong setting.
        return fault in _AGAIN or (self._served and fault in _SETUP)

    def _hold_back(self, fault: Fault, *, new_session: bool, seconds: float) -> None:
        if fault is Fault.THROTTLED:
            self._limiter.throttled(new_session=new_session)
        elif fault is Fault.NO_CAPACITY:
            self._limiter.no_capacity(seconds)

    def _final(self, start: Start, fault: Fault) -> Exception:
        error = start.last
        assert error is not None
        if fault in _SETUP or (fault is Fault.INVALID and not self._served):
            return setup_error(error)
        if fault in (Fault.UNREACHED, Fault.UNANSWERED) and not self._reached:
            return SetupError(
                f"AgentCore can't be reached ({error}): check the network, the region in agent_runtime_arn,"
                " and AWS_ENDPOINT_URL_BEDROCK_AGENTCORE if a local runtime is meant"
            )
        hint = ""
        if fault is Fault.COLD:
            hint = "; the agent's container failed, its log says why (CloudWatch, or agent.log of the local runtime)"
        return InvocationError(
            f"invoke of session {start.session_id} failed: {error}{hint}", session_id=start.session_id
        )

    # -- while it runs -------------------------------------------------------------------------------------

    async def may_probe(self) -> None:
        """Wait until nobody else has anything to send."""
        await self._limiter.turn(new_session=False, priority=LAST)

    def probe(self, session_id: str, body: bytes) -> Future[bytes]:
        """InvokeAgentRuntime, once: the body of the answer."""
        return self._probes.submit(functools.partial(self._runtime.invoke, session_id, body))

    def probe_failed(self, session_id: str, error: Exception) -> None:
        """It says nothing of the agent, but perhaps of the rate."""
        self._hold_back(self._fault(error), new_session=False, seconds=0.0)
        logger.info("probe of session %s: %s", session_id, error)

    # -- the end of a session ------------------------------------------------------------------------------

    async def cancel(self, session_id: str) -> None:
        """Ask the agent to end, where its protocol has a word for that, before the session is stopped. Never raises."""
        if not self._runtime.cancels:
            return
        await self._limiter.turn(new_session=False, priority=FIRST)
        try:
            async with asyncio.timeout(_CANCEL_SECONDS):
                await self._stops.run(functools.partial(self._runtime.cancel, session_id))
        except Exception as error:  # noqa: BLE001 - the stop that follows ends it anyway
            logger.info("the agent of session %s was not cancelled: %s", session_id, error)

    async def stop(self, session_id: str, sent: Future[bytes] | None = None) -> bool:
        """End a session, and say whether it has ended. Never raises: an unstopped session ends by its own limits.

        ``sent``: a request to it that may be on its way, and would start it anew. Whoever asks again while it is being
        stopped waits for the same call. Cancelled, it is stopped all the same.
        """
        task = self._stopping.get(session_id)
        if task is None:
            task = self._stopping[session_id] = asyncio.ensure_future(self._stop(session_id, sent))
            task.add_done_callback(lambda _: self._stopping.pop(session_id, None))
        return await to_the_end(task)

    async def _stop(self, session_id: str, sent: Future[bytes] | None) -> bool:
        on_its_way = sent is not None and not sent.cancel() and not sent.done()
        stopped = await self._stop_call(session_id) in (None, Fault.GONE)
        if sent is None or not on_its_way:
            return stopped
        return await self._has_ended(session_id, sent) and await self._stop_call(session_id) in (None, Fault.GONE)

    async def _has_ended(self, session_id: str, sent: Future[bytes]) -> bool:
        """Whether a request that was on its way when its session was stopped has ended; if not, that is reported."""
        answer = asyncio.wrap_future(sent)
        await asyncio.wait([answer], timeout=_LAST_WORD)
        if answer.done():
            answer.exception()  # whatever it is: it has been seen
        else:
            self._give_up(session_id, "a request to it was on its way and could not be called back")
        return answer.done()

    async def _stop_call(self, session_id: str) -> Fault | None:
        """StopRuntimeSession within the rate limit: None if it is stopped, or what was wrong in the end."""
        call = functools.partial(self._runtime.stop, session_id)
        for attempt in range(1, _STOP_TRIES + 1):
            await self._limiter.turn(new_session=False, priority=FIRST)
            fault: Fault | None = None
            try:
                await self._stops.run(call)
            except Exception as error:  # noqa: BLE001 - sorted by its fault; it may not hide the rollout's outcome
                fault, reason = self._fault(error), str(error)
            if fault in (None, Fault.GONE):
                self.unstopped.pop(session_id, None)
                return fault
            logger.info("stop of session %s, try %d: %s", session_id, attempt, reason)
            if fault not in _NOT_NOW | _AGAIN:
                break
            self._hold_back(fault, new_session=False, seconds=0.0)
            await asyncio.sleep(pause(attempt))
        self._give_up(session_id, reason)
        return fault

    async def _abandon(self, start: Start) -> None:
        """End a session that may have started, or still may: an invoke that was sent can't be called back."""
        sent = start.in_flight
        if sent is None or sent.cancel() or sent.done():
            if start.may_run or (sent is not None and not sent.cancelled() and _may_have_started(sent.exception())):
                await self.stop(start.session_id)
            return
        if await self._stop_call(start.session_id) is not Fault.GONE:
            return
        # The stop overtook it.
        if await self._has_ended(start.session_id, sent) and _may_have_started(sent.exception()):
            await self._stop_call(start.session_id)

    def _give_up(self, session_id: str, reason: str) -> None:
        self.unstopped[session_id] = reason

    def report_unstopped(self, also: set[str] | frozenset[str] = frozenset()) -> None:
        """Warn once of the sessions that may still run (``also``: and of these), and forget them."""
        ids = sorted({*self.unstopped, *also})
        if not ids:
            return
        reasons = sorted(set(self.unstopped.values()))[:3]
        self.unstopped.clear()
        logger.warning(
            "%d sessions may still run, and cost money until their idle timeout; stop them with"
            " `aws bedrock-agentcore stop-runtime-session`: %s%s",
            len(ids),
            ", ".join(ids),
            f" ({'; '.join(reasons)})" if reasons else "",
        )


def _without_secrets(send: Call, session_id: str, body: bytes) -> bytes:
    """Send it; an error that quotes the body does not quote its secrets. In a thread: bodies may be large."""
    try:
        return send(session_id, body)
    except ServiceError as error:
        raise ServiceError(error.code, error.status, masked(error.message, body)) from None


def _may_have_started(error: BaseException | None) -> bool:
    """Whether an invoke that ended like this may have left a session."""
    return error is None or fault_of(error) in _MAY_HAVE_STARTED

"""How fast AWS lets sessions be started and stopped. All clients of one runtime in this process share one limiter.

Two quotas: calls per second, and new sessions per minute. A throttled answer halves the rate it was sent at, and
each second after that gives a tenth of the halved rate back, so that many clients (also of other processes, which
draw on the same quota) find what is left for them.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import os
import threading
import time
import weakref

from ..errors import SetupError

__all__ = ["FIRST", "LAST", "Limiter", "Rates", "shared_limiter"]

_RECOVERY = 0.1  # of the halved rate, each second
_HALVE_AT_MOST_EVERY = 1.0  # seconds: what was sent together is throttled together
_SLOWEST = 0.2  # of a call, each second

FIRST = math.inf
"""The priority of stops, and of whatever has a session already: it makes room for others."""
LAST = -math.inf
"""Of what can wait until nobody else has anything to send."""


class Bucket:
    """Tokens that come back at a rate. ``limit``: per second, ``inf`` for no limit; ``burst``: the most it holds."""

    def __init__(self, limit: float, burst: float) -> None:
        self.limit, self.burst = limit, burst
        self.rate = limit
        self._step = math.inf
        self._tokens, self._at = burst, time.monotonic()
        self._halved = -math.inf
        self._recent: tuple[float, int, float] = (self._at, 0, 0.0)

    def wait(self) -> float:
        """Seconds until there is a token; 0.0 if there is one."""
        now = time.monotonic()
        passed, self._at = now - self._at, now
        if self.rate < self.limit:
            self.rate = min(self.limit, self.rate + passed * self._step)
        if self.rate == math.inf:
            return 0.0
        self._tokens = min(self.burst, self._tokens + passed * self.rate)
        return 0.0 if self._tokens >= 1 else (1 - self._tokens) / self.rate

    def take(self) -> None:
        began, count, before = self._recent
        if self._at - began >= 1.0:
            began, count, before = self._at, 0, count / (self._at - began)
        self._recent = began, count + 1, before
        if self.rate < math.inf:
            self._tokens -= 1

    def throttled(self) -> None:
        now = time.monotonic()
        if now - self._halved < _HALVE_AT_MOST_EVERY:
            return
        self._halved = now
        _, count, before = self._recent
        sent_at = min(self.rate, max(count, before, 2 * _SLOWEST))
        self.rate = max(_SLOWEST, sent_at / 2)
        self._step = self.rate * _RECOVERY
        self._tokens = min(self._tokens, 0.0)
        if self.burst == math.inf:
            self.burst = 1.0


class Rates:
    """What one client allows. ``calls``: per second; ``sessions``: new ones per minute; None for no limit."""

    def __init__(self, calls: float | None, sessions: float | None) -> None:
        for name, value in ("tps_limit", calls), ("new_sessions_per_minute", sessions):
            if value is not None and not value > 0:
                raise SetupError(f"{name} must be above 0, or None for no limit; it is {value!r}")
        self.calls = math.inf if calls is None else float(calls)
        self.sessions = math.inf if sessions is None else float(sessions)


class Limiter:
    """Grants calls in order of priority, then of arrival.

    Lives on the background loop; :meth:`join` and :meth:`leave` are for any thread.
    """

    def __init__(self) -> None:
        self._calls, self._sessions = Bucket(math.inf, math.inf), Bucket(math.inf, math.inf)
        self._members: weakref.WeakSet[Rates] = weakref.WeakSet()
        # Apart, because a start that waits for a session holds up no other call.
        self._waiting: dict[bool, list[tuple[float, int, asyncio.Future[None]]]] = {False: [], True: []}
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._closed_until = -math.inf
        self._lock = threading.Lock()

    def join(self, rates: Rates) -> None:
        """Keep to these rates as long as ``rates`` lives: the strictest of all clients' count."""
        with self._lock:
            self._members.add(rates)
            self._adopt()

    def leave(self, rates: Rates) -> None:
        with self._lock:
            self._members.discard(rates)
            self._adopt()

    def _adopt(self) -> None:
        members = list(self._members)
        if not members:
            return
        calls = min(member.calls for member in members)
        if calls != self._calls.limit:
            self._calls = Bucket(calls, max(1.0, calls / 10))
        sessions = min(member.sessions for member in members) / 60
        if sessions != self._sessions.limit:
            self._sessions = Bucket(sessions, max(1.0, 60 * sessions))  # a minute's worth at once, as the quota is read

    async def turn(self, *, new_session: bool, priority: float = 0.0) -> None:
        """Wait until one more call may be sent; the greater ``priority`` goes first."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting[new_session], (-priority, next(self._order), turn))
        self._pump()
        await turn

    def throttled(self, *, new_session: bool) -> None:
        """A call was throttled. Which of the quotas it met AWS does not say."""
        self._calls.throttled()
        if new_session:
            self._sessions.throttled()

    def no_capacity(self, seconds: float) -> None:
        """No session is free: start none for a while."""
        self._closed_until = max(self._closed_until, time.monotonic() + seconds)

    def _delay(self, new_session: bool) -> float:
        wait = self._calls.wait()
        if new_session:
            wait = max(wait, self._sessions.wait(), self._closed_until - time.monotonic())
        return max(0.0, wait)

    def _take(self, new_session: bool) -> None:
        self._calls.take()
        if new_session:
            self._sessions.take()

    def _pump(self) -> None:
        """Let go whoever may go, and come back when the next one may."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while waiting := [new_session for new_session, heap in self._waiting.items() if self._drop_cancelled(heap)]:
            delays = {new_session: self._delay(new_session) for new_session in waiting}
            if all(delays.values()):
                # An hour's sleep would oversleep a limit that is lifted.
                self._timer = asyncio.get_running_loop().call_later(min(0.5, *delays.values()), self._pump)
                return
            ready = (new_session for new_session, delay in delays.items() if not delay)
            best = min(ready, key=lambda new_session: self._waiting[new_session][0][:2])
            _, _, turn = heapq.heappop(self._waiting[best])
            self._take(best)
            turn.set_result(None)

    @staticmethod
    def _drop_cancelled(heap: list[tuple[float, int, asyncio.Future[None]]]) -> bool:
        """Whether anybody waits in it still."""
        while heap and heap[0][-1].done():
            heapq.heappop(heap)
        return bool(heap)


_shared: weakref.WeakValueDictionary[tuple[str, str], Limiter] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def shared_limiter(endpoint: str, arn: str) -> Limiter:
    """The limiter of this runtime, as long as some client holds it."""
    with _lock:
        limiter = _shared.get((endpoint, arn))
        if limiter is None:
            limiter = _shared[endpoint, arn] = Limiter()
        return limiter


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _shared.clear()  # their timers are the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

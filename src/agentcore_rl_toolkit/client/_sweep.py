"""Watching for results in S3: one sweeper for all pending results of one bucket and prefix.

A listing answers for a thousand keys at once, so many pending keys are looked for by LIST, from the first pending one
on; what lies between is skipped where it can be. Few keys, and those that stand alone among finished ones, are
looked at by GET: a miss costs no more than HEAD, and a hit saves a call. A hint (somebody saw the result being
written) makes it look at once. S3 stays the truth.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from bisect import bisect_right
from dataclasses import dataclass
from itertools import chain
from typing import Any

from .._aws import Page, Storage
from .._faults import NEEDS_SETUP, Fault, fault_of, pause, setup_error
from ..errors import InvocationError, RolloutCancelled
from ._threads import Threads

__all__ = ["Pace", "Sweeper", "Watch"]

logger = logging.getLogger("agentcore_rl_toolkit.client")

_FEW = 12  # a LIST costs as much as 12 GETs
_LOOKS = 64  # direct looks a sweep
_LISTS = 20  # pages a sweep
_HUNG = 5.0  # seconds after which a call is sent again beside the first
_AT_ONCE = 3  # calls for the same key
_CORRUPT = 4  # times that an object is no JSON until that is believed
_STRIKES = 3  # sweeps that all say the same until it is believed
_RENEWAL = 60.0  # seconds for which credentials that worked may be refused
_HINTED_PAUSE = 10.0  # seconds between sweeps while hints bring the results
_HINTS_APART = 1.0  # seconds in which further hints for the same key are not heard


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between sweeps: ``first`` after one that found something, then times ``factor`` up to ``longest``."""

    first: float = 0.25
    longest: float = 2.0
    factor: float = 1.5

    def __post_init__(self) -> None:
        if not (0 < self.first <= self.longest and self.factor >= 1):
            raise ValueError(
                "polling needs 0 < initial_interval <= max_interval and backoff_factor >= 1,"
                f" got {self.first}, {self.longest}, {self.factor}"
            )


@dataclass(slots=True, eq=False)
class Watch:
    """One pending result. ``asleep``: its session was not invoked yet, nobody need look for it.

    ``seen``: when it was known to be there (``time.monotonic()``). ``fault``: of the last look at it.
    """

    key: str
    pace: Pace
    result: asyncio.Future[dict[str, Any]]
    asleep: bool = True
    seen: float | None = None
    fault: Fault | None = None
    alone: bool = False
    calls: int = 0
    called: float = 0.0
    hinted: float = -math.inf
    failures: int = 0
    corrupt: int = 0
    not_before: float = 0.0
    looked: int = 0
    """The sweep that looked for it last, by GET."""

    def fail(self, error: Exception) -> None:
        """There will be no result, unless there is one."""
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # it is told to whoever asks for the result, not to the loop's log


class Sweeper:
    """Lives on the background loop; sweeps only while something is pending.

    ``foreign``: the agent named the bucket, so that nobody's settings are wrong if it can't be read.
    """

    def __init__(self, storage: Storage, threads: Threads, bucket: str, prefix: str, *, foreign: bool = False) -> None:
        self._storage, self._threads = storage, threads
        self._bucket, self._prefix, self._foreign = bucket, prefix, foreign
        self._watches: dict[str, Watch] = {}
        self._behind: dict[str, list[Watch]] = {}
        """Further watches of a key, whose session was invoked again: they follow when the first is done."""
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._fetches: set[asyncio.Task[bool]] = set()
        self._number = 0
        self._found = False
        self._hinted = False
        self._may_list = True
        self._list_refusals = 0
        self._setup_strikes, self._forbidden_strikes = _Strikes(), _Strikes()
        self._worked = self._warned = False
        self._tells_missing = False
        """Whether S3 has ever said of a result that it is not there, instead of forbidding to look."""

    def watch(self, key: str, pace: Pace) -> Watch:
        """Watch for a key. Settling or cancelling the future ends it."""
        watch = Watch(key, pace, asyncio.get_running_loop().create_future())
        if self._watches.setdefault(key, watch) is not watch:
            self._behind.setdefault(key, []).append(watch)
        watch.result.add_done_callback(lambda _: self._forget(watch))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return watch

    def _forget(self, watch: Watch) -> None:
        behind = self._behind.get(watch.key, [])
        if watch in behind:
            behind.remove(watch)
        elif self._watches.get(watch.key) is watch:
            del self._watches[watch.key]
            if behind:
                self._watches[watch.key] = behind.pop(0)
        if not behind:
            self._behind.pop(watch.key, None)
        if not self._watches:
            self._wake.set()

    def hint(self, key: str) -> None:
        """The result is said to be there. By an agent, which may say so wrongly, and a thousand times."""
        watch, now = self._watches.get(key), time.monotonic()
        if watch is None or watch.hinted > now:  # it is looked at later anyway
            return
        at = max(now, watch.hinted + _HINTS_APART)
        watch.hinted = at
        asyncio.get_running_loop().call_later(at - now, self._look_as_hinted, watch)

    def _look_as_hinted(self, watch: Watch) -> None:
        if not watch.result.done() and watch.calls < _AT_ONCE:
            self._fetch(watch, hinted=True)

    async def look(self, watch: Watch) -> bool:
        """Look once, now; whether the result was there."""
        return watch.result.done() or await self._get(watch)

    def missing(self, watch: Watch) -> bool:
        """Whether the last look at it says surely that there is no result."""
        return watch.fault is Fault.GONE or (watch.fault is Fault.FORBIDDEN and not self._tells_missing)

    def close(self) -> None:
        """Nobody will get a result any more."""
        for watch in [*self._watches.values(), *chain.from_iterable(self._behind.values())]:
            watch.fail(RolloutCancelled("the client was closed"))

    # -- sweeping --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        delay = 0.0
        while self._watches:
            pace = min((watch.pace for watch in self._watches.values()), key=lambda p: (p.first, p.longest))
            delay = pace.first if self._found or not delay else min(delay * pace.factor, pace.longest)
            self._found = False
            if self._hinted:  # until a sweep finds what no hint has told of
                delay = max(delay, _HINTED_PAUSE)
            await self._sleep(delay)
            if self._watches:
                self._number += 1
                try:
                    await self._sweep()
                except Exception:
                    logger.exception("a sweep of s3://%s/%s failed", self._bucket, self._prefix)
        self._task = None

    async def _sleep(self, seconds: float) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _sweep(self) -> None:
        now = time.monotonic()
        due = [watch for watch in self._watches.values() if self._is_due(watch, now)]
        alone = [watch for watch in due if watch.alone]
        many = sorted((watch for watch in due if not watch.alone), key=lambda watch: watch.key)
        if len(many) > _FEW and self._may_list:
            many = await self._list_through(many)
        self._look_at([*alone, *many])

    def _is_due(self, watch: Watch, now: float) -> bool:
        return not watch.asleep and _may_call(watch, now)

    async def _list_through(self, pending: list[Watch]) -> list[Watch]:
        """List from the first pending key on; what is left to be looked at directly."""
        keys = [watch.key for watch in pending]
        position = 0
        for _ in range(_LISTS):
            page = await self._list(keys[position])
            if page is None:
                break
            for key in page.keys:
                if watch := self._watches.get(key):
                    watch.seen = watch.seen or time.monotonic()
                    if _may_call(watch, time.monotonic()):
                        self._fetch(watch)
            if not (page.truncated and page.keys):
                return []
            start, position = position, bisect_right(keys, page.keys[-1])
            if position - start < _FEW:  # a page for so few: a finished crowd lies around them
                for watch in pending[start:position]:
                    watch.alone = True
            if len(keys) - position <= _FEW:
                break
        return pending[position:]

    async def _list(self, first: str) -> Page | None:
        """The page that begins with ``first``; None if it could not be had."""
        # "Start after" excludes: begin a little before the key itself.
        call = self._threads.run(lambda: self._storage.list(self._bucket, self._prefix, first[:-1]))
        try:
            async with asyncio.timeout(_HUNG):
                page = await call
        except TimeoutError:
            logger.info("a listing of s3://%s/%s takes long", self._bucket, self._prefix)
            return None
        except Exception as error:  # noqa: BLE001 - sorted by its fault
            fault = fault_of(error)
            logger.info("could not list s3://%s/%s: %s", self._bucket, self._prefix, error)
            if fault is Fault.FORBIDDEN:
                self._list_refusals += 1
                if self._list_refusals >= _STRIKES:
                    self._may_list = False
                    self._warn_forbidden()
            elif fault in NEEDS_SETUP:
                self._strike(error)
            return None
        self._list_refusals = 0
        self._setup_works()
        return page

    def _look_at(self, watches: list[Watch]) -> None:
        """Look by GET, those first that were not looked at for the longest time."""
        if len(watches) > _LOOKS:
            watches = sorted(watches, key=lambda watch: watch.looked)[:_LOOKS]
        for watch in watches:
            watch.looked = self._number
            self._fetch(watch)

    # -- one key ---------------------------------------------------------------------------------------------

    def _fetch(self, watch: Watch, *, hinted: bool = False) -> None:
        task = asyncio.create_task(self._get(watch, hinted=hinted))
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)

    def _fetch_again(self, watch: Watch, seconds: float) -> None:
        """After a failed call: not at the next sweep, which may be soon or late."""
        watch.not_before = time.monotonic() + seconds

        def again() -> None:
            if not (watch.calls or watch.result.done()):
                self._fetch(watch)

        asyncio.get_running_loop().call_later(seconds, again)

    async def _get(self, watch: Watch, *, hinted: bool = False) -> bool:
        watch.calls += 1
        watch.called = began = time.monotonic()
        try:
            result = await self._threads.run(lambda: _read(self._storage.get(self._bucket, watch.key)))
        except (ValueError, RecursionError) as error:
            self._corrupt(watch, error)
        except Exception as error:  # noqa: BLE001 - a look that failed is not a rollout that failed
            self._missed(watch, error)
        else:
            self._setup_works()
            self._forbidden_strikes.clear()
            if not watch.result.done():
                self._found = True
                self._hinted = hinted
                watch.seen = watch.seen or (began if hinted else time.monotonic())
                watch.result.set_result(result)
            return True
        finally:
            watch.calls -= 1
        return False

    def _corrupt(self, watch: Watch, error: Exception) -> None:
        watch.fault = None  # something is there
        watch.corrupt += 1
        self._fetch_again(watch, pause(watch.corrupt, first=0.25))
        if watch.corrupt >= _CORRUPT:
            watch.fail(InvocationError(f"s3://{self._bucket}/{watch.key} is not a result: {error}"))

    def _missed(self, watch: Watch, error: Exception) -> None:
        fault = watch.fault = fault_of(error)
        if fault in (Fault.GONE, Fault.FORBIDDEN):  # S3 took the credentials: the setup is not broken
            self._setup_works()
        if fault is Fault.GONE:
            self._tells_missing = True
            self._forbidden_strikes.clear()
            watch.failures = 0
            return
        if fault is Fault.FORBIDDEN:  # without s3:ListBucket, a missing key reads like that
            if self._forbidden_strikes.add(self._number) >= _STRIKES:
                self._warn_forbidden()
            return
        watch.failures += 1
        self._fetch_again(watch, pause(watch.failures, first=0.25, longest=2.0))
        logger.info("could not look at s3://%s/%s: %s", self._bucket, watch.key, error)
        if fault in NEEDS_SETUP:
            self._strike(error)

    def _setup_works(self) -> None:
        self._worked = True
        self._setup_strikes.clear()

    def _strike(self, error: Exception) -> None:
        """One answer may be wrong; when sweep after sweep says the same, no result will ever be read. What has worked
        before gets time: credentials that expire are renewed."""
        count = self._setup_strikes.add(self._number)
        if count >= _STRIKES and (not self._worked or self._setup_strikes.age >= _RENEWAL):
            told: Exception = setup_error(error)
            if self._foreign:
                told = InvocationError(f"the agent says that its result is in s3://{self._bucket}, but: {told}")
            for watch in list(self._watches.values()):
                watch.fail(told)

    def _warn_forbidden(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "S3 answers 403 in s3://%s/%s. Without s3:ListBucket a result that is not there yet reads like that,"
                " and each must be looked for by itself: allow s3:ListBucket on the bucket to wait cheaply."
                " If no result ever comes, s3:GetObject is missing as well",
                self._bucket,
                self._prefix,
            )


class _Strikes:
    """How many sweeps in a row have said something, at most one for each sweep."""

    def __init__(self) -> None:
        self._count, self._last, self._since = 0, -1, 0.0

    @property
    def age(self) -> float:
        """Seconds since the first of them."""
        return time.monotonic() - self._since

    def add(self, sweep: int) -> int:
        if sweep != self._last:
            if not self._count:
                self._since = time.monotonic()
            self._count, self._last = self._count + 1, sweep
        return self._count

    def clear(self) -> None:
        self._count = 0


def _may_call(watch: Watch, now: float) -> bool:
    if watch.calls:
        return now - watch.called > _HUNG and watch.calls < _AT_ONCE
    return now >= watch.not_before


def _read(body: bytes) -> dict[str, Any]:
    result = json.loads(body)
    if not isinstance(result, dict):
        raise ValueError("it is no JSON object")
    return result

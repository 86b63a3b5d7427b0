"""The limiter by itself: what it grants in how many seconds, and in which order."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentcore_rl_toolkit.client._limits import FIRST, LAST, Limiter, Rates, shared_limiter
from agentcore_rl_toolkit.errors import SetupError


def limiter(calls: float | None, sessions: float | None = None) -> tuple[Limiter, Rates]:
    made, rates = Limiter(), Rates(calls, sessions)
    made.join(rates)
    return made, rates


async def take(limiter: Limiter, count: int, *, new_session: bool = True) -> float:
    began = time.monotonic()
    await asyncio.gather(*(limiter.turn(new_session=new_session) for _ in range(count)))
    return time.monotonic() - began


async def test_calls_are_granted_at_the_rate() -> None:
    made, _rates = limiter(100)
    assert 0.39 <= await take(made, 50) < 0.8  # a tenth of a second's worth at once, then 100 a second


async def test_no_limit_is_no_wait() -> None:
    made, _rates = limiter(None)
    assert await take(made, 10_000) < 10.0


async def test_sessions_are_limited_by_the_minute_and_calls_are_not() -> None:
    made, _rates = limiter(None, 600)
    assert await take(made, 600) < 0.5
    assert await take(made, 100, new_session=False) < 0.5
    assert 0.2 <= await take(made, 5) < 1.0


async def test_starts_that_wait_for_a_session_hold_up_no_other_call() -> None:
    made, _rates = limiter(None, 60)
    await take(made, 60)
    starts = [asyncio.ensure_future(made.turn(new_session=True)) for _ in range(3)]
    began = time.monotonic()
    await made.turn(new_session=False, priority=LAST)
    assert time.monotonic() - began < 0.5
    made.no_capacity(60.0)
    await made.turn(new_session=False, priority=LAST)
    assert time.monotonic() - began < 0.5
    assert sum(start.done() for start in starts) <= 1
    for start in starts:
        start.cancel()


async def test_a_throttled_answer_halves_the_rate_and_it_comes_back() -> None:
    made, _rates = limiter(100)
    await take(made, 100)
    for _ in range(20):  # sent together, throttled together: once
        made.throttled(new_session=False)
    assert made._calls.rate == pytest.approx(50, rel=0.1)
    assert await take(made, 25) >= 0.4
    await asyncio.sleep(1.0)
    assert await take(made, 1) < 0.1
    assert 50 < made._calls.rate < 70  # a tenth of 50 each second


async def test_without_a_limit_the_rate_that_was_throttled_is_found() -> None:
    made, _rates = limiter(None)
    for _ in range(20):
        await take(made, 2)
        await asyncio.sleep(0.1)
    made.throttled(new_session=True)
    assert 4 <= made._calls.rate <= 15  # half of about 20 a second


async def test_stops_go_first_then_the_greater_priority_then_the_earlier() -> None:
    made, _rates = limiter(20)
    await take(made, 2)
    order: list[str] = []

    async def call(name: str, priority: float) -> None:
        await made.turn(new_session=priority != FIRST, priority=priority)
        order.append(name)

    calls = [("a", 0.0), ("b", 0.0), ("c", 1.0), ("stop", FIRST)]
    await asyncio.gather(*(call(*each) for each in calls))
    assert order == ["stop", "c", "a", "b"]


async def test_a_turn_that_is_given_up_holds_nobody_back() -> None:
    made, _rates = limiter(10)
    await take(made, 1)
    waiting = [asyncio.ensure_future(made.turn(new_session=False)) for _ in range(20)]
    await asyncio.sleep(0)
    for turn in waiting:
        turn.cancel()
    assert await take(made, 1) < 0.3


async def test_the_strictest_of_all_members_holds() -> None:
    made, _rates = limiter(1000)
    strict = Rates(10, None)
    made.join(strict)
    assert await take(made, 4) >= 0.25
    made.leave(strict)
    assert await take(made, 40) < 0.3


async def test_no_capacity_holds_new_sessions_back_alone() -> None:
    made, _rates = limiter(None)
    made.no_capacity(0.4)
    assert await take(made, 5, new_session=False) < 0.1
    assert 0.3 <= await take(made, 5) < 1.2


def test_one_limiter_for_each_runtime() -> None:
    one = shared_limiter("http://a", "arn")
    assert shared_limiter("http://a", "arn") is one
    assert shared_limiter("http://b", "arn") is not one


@pytest.mark.parametrize(("calls", "sessions"), [(0, None), (-1, None), (None, 0)])
def test_rates_must_be_above_zero(calls: float | None, sessions: float | None) -> None:
    with pytest.raises(SetupError, match="above 0"):
        Rates(calls, sessions)

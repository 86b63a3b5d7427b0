"""The client's loop and threads: nothing waits that could run, nothing is lost between two of them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from agentcore_rl_toolkit.client._loop import _Job, run_sync
from agentcore_rl_toolkit.client._sessions import pause
from agentcore_rl_toolkit.client._threads import Threads


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns at nearly every instruction."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_no_job_waits_while_there_may_be_another_thread() -> None:
    """Jobs that wait for each other: if one has no thread, none ends."""
    for round_number in range(1_000):
        threads = Threads(8, "test")
        threads.submit(lambda: None).result(5)
        for _ in range(round_number % 3):  # some of them end just when the next ones come
            threads.submit(lambda: None)
        together = threading.Barrier(3)
        for future in [threads.submit(lambda barrier=together: barrier.wait(5)) for _ in range(3)]:
            future.result(5)
        threads.close()


def test_threads_are_started_as_they_are_needed_and_no_more_than_allowed() -> None:
    threads = Threads(4, "test")
    used = {threads.submit(threading.get_ident).result(5) for _ in range(50)}
    assert len(used) == 1
    hold, running = threading.Event(), []
    futures = [threads.submit(lambda: (running.append(1), hold.wait(5))) for _ in range(10)]
    assert len(running) <= 4
    hold.set()
    for future in futures:
        future.result(5)
    threads.close()
    assert threads.submit(lambda: "again").result(5) == "again"
    threads.close()


def test_a_value_that_comes_together_with_the_interrupt_is_not_lost() -> None:
    discarded = []

    async def work() -> str:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        with contextlib.suppress(asyncio.CancelledError):  # what the interrupt does; too late for this one
            await asyncio.sleep(30)
        return "a session"

    async def discard(value: str) -> None:
        discarded.append(value)

    with pytest.raises(KeyboardInterrupt):
        run_sync(work(), discard)
    assert discarded == ["a session"]


def test_an_interrupt_before_the_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    async def work() -> None:
        begun.append(1)

    def interrupted(job: _Job[None]) -> _Job[None]:
        raise KeyboardInterrupt

    monkeypatch.setattr(_Job, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sync(work())  # a coroutine never awaited would be a warning, hence an error
    assert begun == []


@pytest.mark.parametrize("attempt", [1, 10, 5_000])
def test_a_pause_has_an_end_after_any_number_of_tries(attempt: int) -> None:
    assert 0.0 < pause(attempt, longest=2.0) <= 2.0

"""The client's loop and threads: nothing waits that could run, nothing is lost between two of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit._faults import pause
from agentcore_rl_toolkit.client._loop import _Job, run_sync
from agentcore_rl_toolkit.client._threads import Threads

from .conftest import World


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


# -- forks ---------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], object]) -> str:
    """What ``work`` gives, or raises, in a forked child; "" if it hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.setitimer(signal.ITIMER_REAL, 5)  # instead of pytest's own
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            try:
                told = str(work())
            except BaseException as error:  # noqa: BLE001 - a copy of the tests may not go on
                told = f"{type(error).__name__}: {error}"
            os.write(writer, told.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return told


MADE_BEFORE = "SetupError: this RolloutClient was made before the process forked: make a new one in the child"


async def invoke_async(client: RolloutClient) -> object:
    return await (await client.invoke_async({})).result_async(5)


@pytest.mark.parametrize("used", [True, False])
def test_a_client_from_before_a_fork_says_so_in_the_child_and_goes_on_in_the_parent(world: World, used: bool) -> None:
    client = world.client()
    future = client.invoke({"seconds": 0.5}) if used else None
    assert in_child(lambda: client.invoke({})) == MADE_BEFORE
    assert in_child(lambda: asyncio.run(invoke_async(client))) == MADE_BEFORE
    assert in_child(lambda: list(client.run_batch([{}], 1))) == MADE_BEFORE
    assert world.stub.runs == used
    if future:
        assert future.result(5)["rewards"] == 1.0
    assert [item.success for item in client.run_batch([{}] * 3, 2)] == [True] * 3


def test_a_new_client_works_in_a_forked_child_while_the_parents_waits(world: World) -> None:
    before = world.client()
    future = before.invoke({"seconds": 1.0})

    def work() -> object:
        with RolloutClient(before.agent_runtime_arn, before.s3_bucket, "child") as client:
            rewards = client.invoke({}).result(4)["rewards"]
            return rewards, [item.success for item in client.run_batch([{}] * 3, 2)]

    assert in_child(work) == "(1.0, [True, True, True])"
    assert future.result(5)["rewards"] == 1.0
    assert world.stub.open == {}


def test_threads_that_stayed_behind_are_asked_for_nothing() -> None:
    threads = Threads(1, "test")
    with threads._lock:  # as another thread may do when the process forks
        assert in_child(threads.close) == "None"
        assert in_child(lambda: threads.submit(int)) == MADE_BEFORE


def test_what_the_parent_waits_for_is_neither_waited_for_nor_stopped_in_a_forked_child(
    world: World, tmp_path: Path
) -> None:
    client = world.client()
    list(client.run_batch([{}], 1, run_dir=tmp_path))
    future = client.invoke({"seconds": 1.0})
    running = iter(client.run_batch([{"seconds": 1.0}] * 3, 2))
    next(running)
    assert in_child(future.result) == MADE_BEFORE
    assert in_child(lambda: future.result(0.1)) == MADE_BEFORE
    assert in_child(future.cancel) == MADE_BEFORE
    assert in_child(lambda: next(running)) == MADE_BEFORE
    assert in_child(lambda: list(client.run_batch([{}], 1, run_dir=tmp_path))) == MADE_BEFORE
    assert in_child(client.close) == "None"
    assert future.result(5)["rewards"] == 1.0
    assert [item.success for item in running] == [True] * 2
    assert world.stub.open == {}


async def test_an_async_batch_of_the_parent_ends_in_a_forked_child(world: World) -> None:
    running = aiter(world.client().run_batch([{"seconds": 0.2}] * 3, 2))
    await anext(running)

    async def go_on() -> object:
        return [item async for item in running]

    def work() -> object:
        asyncio._set_running_loop(None)  # type: ignore[attr-defined]
        return asyncio.run(go_on())

    assert in_child(work) == MADE_BEFORE
    assert [item.success async for item in running] == [True] * 2

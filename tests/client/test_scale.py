"""What many sessions cost, and in which order things happen."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.client._sessions import MOST_CALLS
from agentcore_rl_toolkit.errors import SetupError

from .conftest import ARN, BUCKET, Forward, World, is_kind


def delays(items: list[Any]) -> list[float]:
    return sorted(arrived - item.result["finished_at"] for arrived, item in items)


@pytest.mark.slow
def test_many_pending_results_cost_few_requests_and_no_thread_each(world: World) -> None:
    payloads = [{"seconds": 2.0 + i / 250} for i in range(500)]
    before, most = threading.active_count(), 0
    items = []
    for item in world.client().run_batch(payloads, 500):
        items.append((time.time(), item))
        most = max(most, threading.active_count())
    assert all(item.success for _, item in items)
    assert most - before <= MOST_CALLS + 32 + 1  # the loop's own
    polls = sum(count for name, count in world.stub.counts.items() if name in ("list", "head", "get_miss"))
    # One loop of HEADs each, at 0.5 s times 1.5: 3 to 5 for each of these.
    assert polls <= 4 * 500 / 20
    late = delays(items)
    assert late[250] < 1.5
    assert late[475] < 3.0


def test_a_hint_brings_the_result_at_once(world: World) -> None:
    payloads = [{"seconds": 1.0 + i / 20} for i in range(40)]
    items = [(time.time(), i) for i in world.client(notify_address="http://127.0.0.1:0").run_batch(payloads, 40)]
    assert all(item.success for _, item in items)
    assert delays(items)[20] < 0.3
    assert world.stub.counts["list"] + world.stub.counts["get_miss"] < 30


def test_a_lost_hint_costs_no_result(world: World) -> None:
    client = world.client(notify_address="http://127.0.0.1:0")
    future = client.invoke({"seconds": 0.2}, notify_url="http://127.0.0.1:9/nobody")
    assert future.result(timeout=15)["rewards"] == 1.0


def test_false_hints_hold_up_nobody_and_cost_little(world: World) -> None:
    client = world.client(notify_address="http://127.0.0.1:0")
    future = client.invoke({"seconds": 4.0, "text": "slow"})
    other = client.invoke({"seconds": 2.0}, notify_url="http://127.0.0.1:9/nobody")
    assert client._listener is not None
    url, hint = asyncio.run(client._listener.url()), {"s3_bucket": client.s3_bucket, "result_key": future.result_key}
    before = world.stub.counts["get_miss"]
    with ThreadPoolExecutor(20) as pool:
        assert set(pool.map(lambda _: post(url, json.dumps(hint).encode()), range(300))) == {204}
    assert world.stub.counts["get_miss"] - before < 60
    assert other.result(timeout=20)["rewards"] == 1.0
    assert other.elapsed() < 5  # sweeps go on as if nobody had said anything
    assert future.result(timeout=20)["text"] == "slow"


def test_a_hint_that_came_too_early_does_not_hide_the_true_one(world: World) -> None:
    async def hint_at_once(request: web.Request, forward: Forward) -> web.Response:
        answer, url = await forward(), (await request.json())["_rollout"]["notify_url"]
        async with aiohttp.ClientSession() as http, http.post(url, data=answer.body) as response:
            assert response.status == 204
        return answer

    world.runtime.on(is_kind("invoke"), hint_at_once)
    client = world.client(notify_address="http://127.0.0.1:0")
    batch = client.run_batch([{"seconds": 0.5}] * 5, 5, initial_interval=30.0, max_interval=30.0)
    items = [(time.time(), item) for item in batch]
    assert all(item.success for _, item in items)
    assert delays(items)[-1] < 3.0


def post(url: str, body: bytes) -> int | None:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, method="POST"), timeout=5) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def test_the_listener_takes_hints_from_its_agents_alone(world: World) -> None:
    client = world.client(notify_address="http://127.0.0.1:0")
    assert client.invoke({"seconds": 0.0}).result(timeout=10)
    assert client._listener is not None
    url = asyncio.run(client._listener.url())
    assert post(url, b'{"s3_bucket": "local", "result_key": "exp/a/b.json"}') == 204
    assert post(url, b"{") is None  # closed without an answer
    assert post(url.rpartition("/")[0] + "/guess", b"{}") == 404
    assert client.invoke({"seconds": 0.0}).result(timeout=10)
    for bad in "localhost:9", "https://x:1", "http://x", "http://x:y", "":
        with pytest.raises(SetupError, match="notify_address"):
            world.client(notify_address=bad)


def test_payloads_are_taken_as_places_get_free(world: World) -> None:
    taken = most_ahead = done = 0

    def payloads() -> Iterator[dict[str, Any]]:
        nonlocal taken
        for _ in range(40):
            taken += 1
            yield {"seconds": 0.0}

    for item in world.client().run_batch(payloads(), 10):
        assert item.success
        done += 1
        most_ahead = max(most_ahead, taken - done)
    assert done == 40
    assert most_ahead <= 2 * 10 + 1


def test_ordered_items_come_in_the_order_of_the_payloads(world: World) -> None:
    payloads = [{"seconds": 0.5 if i % 5 == 0 else 0.0, "text": str(i)} for i in range(20)]
    items = list(world.client().run_batch(payloads, 5, ordered=True, samples=2))
    assert [(item.index, item.sample) for item in items] == [(i, s) for i in range(20) for s in range(2)]
    assert [(item.result or {})["text"] for item in items] == [str(i) for i in range(20) for _ in range(2)]
    assert world.stub.most_open <= 5


@pytest.mark.parametrize("priority", [[0, 2, 1, 3], lambda payload: payload["level"]], ids=["list", "function"])
def test_the_greater_priority_starts_first(world: World, priority: Any) -> None:
    payloads = [{"seconds": 0.0, "level": level} for level in (0, 2, 1, 3)]
    items = list(world.client().run_batch(payloads, 1, priority=priority))
    assert [item.index for item in items] == [3, 1, 2, 0]


def test_a_batch_of_greater_priority_goes_first_at_the_limiter(world: World) -> None:
    client = world.client(tps_limit=40)
    done: list[str] = []

    def work(name: str, count: int, priority: float) -> None:
        for item in client.run_batch([{"seconds": 0.0}] * count, count, priority=priority):
            assert item.success
            done.append(name)

    threads = [threading.Thread(target=work, args=args) for args in (("low", 60, 0.0), ("high", 15, 1.0))]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert done[::-1].index("high") >= 15  # so many of those that came first ended after the last of these


def test_bad_arguments_of_a_batch_are_refused(world: World) -> None:
    client = world.client()
    for bad, reason in (
        ({"ordered": True, "priority": [1.0]}, "exclude each other"),
        ({"priority": [1.0, 2.0]}, "one number for each payload"),
        ({"max_interval": 1.0, "initial_interval": 0.0}, "initial_interval"),
    ):
        with pytest.raises(ValueError, match=reason):
            client.run_batch([{}], 1, **bad)  # type: ignore[arg-type]


async def test_one_result_serves_for_and_async_for(world: World) -> None:
    result = world.client().run_batch_async([{"seconds": 0.0}] * 3, 3)
    assert [item.success async for item in result] == [True] * 3
    assert await asyncio.to_thread(lambda: [item.success for item in result]) == [True] * 3


def test_every_phase_is_timed(world: World) -> None:
    [item] = world.client().run_batch([{"seconds": 0.5}], 1)
    assert list(item.timings) == ["queued", "started", "running", "fetched"]
    assert 0.4 < item.timings["running"] < 3.0
    assert sum(item.timings.values()) - item.timings["queued"] == pytest.approx(item.elapsed, abs=0.01)
    assert item.invokes == 1


def test_progress_is_logged_where_there_is_no_terminal(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "agentcore_rl_toolkit.client")
    batch = iter(world.client().run_batch([{"seconds": 0.0}, {"seconds": 60.0}], 2, log_interval=0.1))
    next(batch)
    deadline = time.monotonic() + 10
    while "batch: 1 of 2 done: 1 succeeded, 1 active" not in caplog.messages:
        assert time.monotonic() < deadline, caplog.messages
        time.sleep(0.02)
    batch.close()  # type: ignore[attr-defined]


def test_a_bar_shows_progress_and_goes_away(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    list(world.client().run_batch([{"seconds": 0.0}] * 3, 3, progress=True))
    assert "rollouts" in capfd.readouterr().err


@pytest.mark.slow
def test_old_results_of_the_experiment_cost_no_listing(world: World) -> None:
    """A straggler among thousands of finished results is looked at by itself."""
    client = world.client()
    list(client.run_batch([{"seconds": 0.0}] * 1200, 200))
    world.s3.log.clear()
    futures = [client.invoke({"seconds": 1.0}, input_id=f"run-zz{i}") for i in range(14)]
    futures += [client.invoke({"seconds": 1.0}, input_id=f"a{i}") for i in range(14)]
    assert all(future.result(timeout=20)["rewards"] == 1.0 for future in futures)
    assert sum(what == "list" for _, what, _ in world.s3.log) < 40


def test_clients_that_are_dropped_leave_no_threads(world: World) -> None:
    def use() -> None:
        client = RolloutClient(ARN, BUCKET, "exp", tps_limit=None)
        assert all(item.success for item in client.run_batch([{}] * 8, 8))

    use()
    before = threading.active_count()
    for _ in range(5):
        use()
    gc.collect()
    time.sleep(0.2)
    assert threading.active_count() <= before

"""Every fault that AgentCore and S3 are known to show, made by a proxy in front of them, in the middle of a batch.

A batch must end with one typed item for each payload and every finished result delivered, no session left open, and no
later than the fault makes it.
"""

from __future__ import annotations

import gc
import json
import logging
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentcore_rl_toolkit import BatchItem, Outcome
from agentcore_rl_toolkit.client._loop import run_sync
from agentcore_rl_toolkit.errors import InvocationError, RolloutCancelled, RolloutTimeout, SetupError

from .conftest import (
    ARN,
    BUCKET,
    World,
    answer,
    cut,
    delayed,
    garble,
    hang,
    is_key,
    is_kind,
    kind,
    lose_answer,
    reset,
)  # fmt: skip

SESSIONS = 40
ONE = "-00000007-000/"
"""In the key of one of them."""


def run(world: World, payloads: list[Any] | None = None, **options: Any) -> tuple[dict[int, BatchItem], float]:
    """The items by index, and how many seconds it took."""
    payloads = payloads or [{"seconds": 0.2 + 0.01 * i} for i in range(SESSIONS)]
    client = world.client(**options.pop("client", {}))
    began = time.monotonic()
    items = list(client.run_batch(payloads, len(payloads), **{"timeout": 20.0, **options}))
    seconds = time.monotonic() - began
    assert sorted(item.index for item in items) == list(range(len(payloads)))
    assert world.stub.open == {}, "sessions are left open"
    return {item.index: item for item in items}, seconds


def failed(items: dict[int, BatchItem]) -> dict[int, Outcome]:
    return {index: item.outcome for index, item in items.items() if not item.success}


# -- reading results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["get", pytest.param("list", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fault",
    [
        answer(403),
        answer(403, error="ExpiredToken"),
        answer(503, error="SlowDown"),
        reset,
        garble(10),
        cut(10),
    ],
    ids=["403", "ExpiredToken", "SlowDown", "reset", "garbled", "cut"],
)
def test_one_bad_answer_of_s3_changes_nothing(world: World, what: str, fault: Any) -> None:
    rule = world.s3.on(is_kind(what), fault, times=1)
    items, seconds = run(world)
    assert rule.used == 1
    assert failed(items) == {}
    assert seconds < 15


@pytest.mark.parametrize("fault", [answer(503, error="SlowDown"), reset], ids=["503", "reset"])
def test_a_key_that_never_answers_costs_only_itself(world: World, fault: Any) -> None:
    world.s3.on(is_key(ONE), fault)
    items, seconds = run(world, timeout=3.0)
    assert failed(items) == {7: Outcome.TIMED_OUT}
    assert "no result after" in (items[7].error or "")
    assert seconds < 3.0 + 12  # its time, and a last look at it


@pytest.mark.slow
def test_five_errors_on_one_key_delay_no_other(world: World) -> None:
    rule = world.s3.on(is_key(ONE), answer(503, error="SlowDown"), times=5)
    client = world.client()
    began = time.monotonic()
    arrived = {
        item.index: time.monotonic() - began
        for item in client.run_batch([{"seconds": 0.3}] * SESSIONS, SESSIONS, timeout=30.0)
    }
    assert rule.used == 5
    assert len(arrived) == SESSIONS
    assert max(arrived[i] for i in arrived if i != 7) < 9.0
    assert arrived[7] < 18.0


@pytest.mark.slow
@pytest.mark.parametrize("what", ["get", "list"])
def test_an_answer_that_hangs_is_not_waited_for(world: World, what: str) -> None:
    world.s3.on(is_key(ONE) if what == "get" else is_kind("list"), hang(60.0), times=1)
    items, seconds = run(world)
    assert failed(items) == {}
    assert seconds < 15.0  # it is asked again after 5 s


@pytest.mark.slow
def test_an_answer_that_hangs_is_asked_for_again_while_many_are_pending(world: World) -> None:
    world.s3.on(is_key(ONE), hang(60.0), times=1)
    items, _ = run(world, [{"seconds": 0.2 if i == 7 else 12.0} for i in range(SESSIONS)], timeout=30.0)
    assert failed(items) == {}
    assert items[7].elapsed < 10.0


@pytest.mark.parametrize(
    "fault", [garble(10), answer(200, "[1]"), answer(200, "[" * 100_000)], ids=["half", "list", "deep"]
)
def test_an_object_that_stays_unreadable_is_a_failure_of_the_runtime(world: World, fault: Any) -> None:
    world.s3.on(is_key(ONE), fault)
    items, _ = run(world)
    assert failed(items) == {7: Outcome.RUNTIME_FAILED}
    assert "is not a result" in (items[7].error or "")


def forbid_listing(world: World) -> None:
    """As S3 answers who has no s3:ListBucket."""

    async def forbid_missing(_: Any, forward: Any) -> Any:
        real = await forward()
        return real if real.status == 200 else await answer(403, error="AccessDenied")(None, forward)

    world.s3.on(is_kind("list"), answer(403, error="AccessDenied"))
    world.s3.on(is_kind("get"), forbid_missing)


def test_without_list_bucket_one_bad_answer_changes_nothing_either(world: World) -> None:
    began = time.monotonic()
    late = world.s3.on(
        lambda request: kind(request) == "get" and time.monotonic() > began + 2.0,
        answer(403, error="ExpiredToken"),
        times=1,
    )
    forbid_listing(world)
    items, _ = run(world, [{"seconds": 3.0}] * SESSIONS)
    assert late.used == 1
    assert failed(items) == {}


def test_without_list_bucket_results_come_and_the_permission_is_named(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    forbid_listing(world)
    items, seconds = run(world, [{"seconds": 3.0}] * SESSIONS)
    assert failed(items) == {}
    assert seconds < 15
    [warning] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "s3:ListBucket" in warning
    assert len([1 for _, what, _ in world.s3.log if what == "list"]) == 3


def test_a_setup_that_is_broken_for_good_ends_the_batch(world: World) -> None:
    world.s3.on(is_kind("get", "list"), answer(403, error="ExpiredToken"))
    with pytest.raises(SetupError, match="renew the AWS credentials"):
        run(world)
    assert world.stub.open == {}


@pytest.mark.slow
def test_credentials_that_expire_for_a_while_lose_nothing(world: World) -> None:
    """Long enough for several sweeps; what worked before is given time to be renewed."""
    began = time.monotonic()
    expired = world.s3.on(
        lambda request: kind(request) in ("get", "list") and 2.0 < time.monotonic() - began < 9.0,
        answer(403, error="ExpiredToken"),
    )
    items, _ = run(world, [{"seconds": 0.5 + 0.1 * i} for i in range(SESSIONS)])
    assert expired.used > 3
    assert failed(items) == {}


def test_a_slow_consumer_holds_no_session_open_and_loses_nothing(world: World) -> None:
    client = world.client()
    seen = []
    for item in client.run_batch([{"seconds": 0.1}] * SESSIONS, 10, timeout=5.0):
        seen.append(item)
        if len(seen) == 1:
            time.sleep(2.0)
            assert world.stub.open == {}  # what ran is done and stopped, and nobody waits for the consumer
            assert world.stub.counts["invoke"] <= 21  # nor does the rest pile up
    assert [item.outcome for item in seen] == [Outcome.SUCCEEDED] * SESSIONS


# -- starting sessions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        pytest.param(answer(429, error="ThrottlingException"), 5, id="429"),
        pytest.param(answer(424, error="RuntimeClientError"), 2, id="424"),
        pytest.param(lose_answer, 2, id="lost"),
        pytest.param(answer(409, error="RetryableConflictException"), 10, id="409", marks=pytest.mark.slow),
        pytest.param(answer(402, error="ServiceQuotaExceededException"), 10, id="402", marks=pytest.mark.slow),
        pytest.param(answer(500, error="InternalServerException"), 2, id="500", marks=pytest.mark.slow),
        pytest.param(answer(503), 2, id="503", marks=pytest.mark.slow),
        pytest.param(reset, 2, id="reset", marks=pytest.mark.slow),
        pytest.param(cut(5), 2, id="cut", marks=pytest.mark.slow),
    ],
)
def test_an_invoke_is_sent_again_where_that_helps(world: World, fault: Any, times: int) -> None:
    world.runtime.on(is_kind("invoke"), fault, times=times)
    items, _ = run(world, [{"seconds": 0.1}] * 10)
    assert failed(items) == {}
    assert sum(item.invokes for item in items.values()) <= 10 + times
    assert all(item.attempts == 1 for item in items.values())


def test_no_capacity_waits_as_long_as_there_is_time_and_says_so_in_the_end(world: World) -> None:
    world.runtime.on(is_kind("invoke"), answer(402, "{}", error="ServiceQuotaExceededException"))
    items, seconds = run(world, [{}] * 3, timeout=2.0, client={"max_retry_attempts": 0})
    assert set(failed(items).values()) == {Outcome.TIMED_OUT}
    assert all("ServiceQuotaExceededException" in (item.error or "") for item in items.values())
    assert 2.0 <= seconds < 8.0
    assert world.stub.counts["stop"] == 0  # none was ever started


def test_throttled_invokes_slow_down_and_get_through(world: World) -> None:
    granted: list[float] = []

    def over(request: Any) -> bool:
        if kind(request) != "invoke":
            return False
        now = time.monotonic()
        if sum(now - at < 1.0 for at in granted) >= 10:
            return True
        granted.append(now)
        return False

    rule = world.runtime.on(over, answer(429, error="ThrottlingException"))
    items, seconds = run(world, [{}] * 25)
    assert failed(items) == {}
    assert seconds < 12
    assert 0 < rule.used < 3 * 25


def test_a_container_that_never_comes_up_is_told_with_where_to_look(world: World) -> None:
    world.runtime.on(is_kind("invoke"), answer(424, error="RuntimeClientError"))
    items, _ = run(world, [{}], client={"max_retry_attempts": 2})
    assert failed(items) == {0: Outcome.RUNTIME_FAILED}
    assert "its log says why" in (items[0].error or "")
    assert items[0].invokes == 3
    assert items[0].elapsed > 0


def test_one_refusal_amid_a_running_batch_is_a_passing_trouble(world: World) -> None:
    client = world.client()
    batch = iter(client.run_batch([{"seconds": 0.1}] * 20, 2, timeout=10.0))
    first = next(batch)
    world.runtime.on(is_kind("invoke"), answer(403, error="AccessDeniedException"), times=1)
    assert [item.outcome for item in [first, *batch]] == [Outcome.SUCCEEDED] * 20


def test_a_payload_that_aws_finds_invalid_ends_the_batch_only_if_nothing_ever_worked(world: World) -> None:
    world.runtime.on(is_kind("invoke"), answer(400, error="ValidationException"))
    with pytest.raises(SetupError, match="check agent_runtime_arn"):
        run(world)
    world.runtime.rules.clear()
    client = world.client()
    batch = iter(client.run_batch([{"seconds": 0.1}] * 10, 1, timeout=10.0))
    first = next(batch)
    world.runtime.on(is_kind("invoke"), answer(400, error="ValidationException"), times=1)
    items = [first, *batch]
    assert sorted(item.outcome for item in items) == [Outcome.RUNTIME_FAILED] + [Outcome.SUCCEEDED] * 9


def test_a_lost_answer_is_made_good_by_the_result(world: World) -> None:
    """The session runs, its invoke gets no answer: the result is taken, and nothing runs twice."""
    world.runtime.on(is_kind("invoke"), lose_answer, times=1)
    client = world.client()
    future = client.invoke({"seconds": 0.0})
    assert future.result(timeout=10)["rewards"] == 1.0
    assert world.stub.open == {}
    assert world.stub.runs == 1


def test_the_time_of_a_rollout_counts_from_its_first_invoke(world: World) -> None:
    """Not from when its place was free: the last wait for the limiter longer than the rest takes."""
    items, seconds = run(world, [{"seconds": 0.0}] * 14, timeout=1.5, client={"tps_limit": 10})
    assert failed(items) == {}
    assert seconds > 1.5
    assert max(item.timings["queued"] for item in items.values()) > 1.0
    assert max(item.elapsed for item in items.values()) < 1.5


# -- stopping sessions ----------------------------------------------------------------------------------------


def test_fifty_timeouts_at_once_stop_within_the_limit(world: World) -> None:
    run(world, [{"seconds": 60.0}] * 50, timeout=0.5, client={"tps_limit": 50})
    calls = [at for at, what, _ in world.runtime.log if what in ("invoke", "stop")]
    assert len(calls) == 100
    for start in calls:  # a burst of a tenth of a second's worth, and the rate
        assert sum(start <= at < start + 1.0 for at in calls) <= 50 + 5 + 5


@pytest.mark.parametrize(
    "fault", [answer(429, error="ThrottlingException"), answer(500), reset], ids=["429", "500", "reset"]
)
def test_a_stop_is_sent_again(world: World, fault: Any, caplog: pytest.LogCaptureFixture) -> None:
    world.runtime.on(is_kind("stop"), fault, times=2)
    items, _ = run(world, [{"seconds": 0.1}] * 5)
    assert failed(items) == {}
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_sessions_that_can_t_be_stopped_are_named_once_and_their_results_are_kept(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.runtime.on(is_kind("stop"), answer(403, error="AccessDeniedException"))
    client = world.client()
    items = list(client.run_batch([{"seconds": 0.1}] * 3, 3))
    assert [item.success for item in items] == [True] * 3
    [warning] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.startswith("3 sessions may still run")
    assert all(item.session_id in warning for item in items)
    assert "AccessDeniedException" in warning
    world.stub.open.clear()


def test_an_exception_in_the_loop_s_body_stops_the_sessions(world: World) -> None:
    def consume() -> None:
        for _ in world.client().run_batch([{"seconds": 0.1}] + [{"seconds": 60.0}] * 9, 10):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        consume()
    assert world.stub.open == {}


def test_an_invoke_that_is_still_on_its_way_when_all_ends_leaves_no_session(world: World) -> None:
    world.runtime.on(lambda r: kind(r) == "invoke" and world.stub.counts["invoke"] > 0, delayed(1.0))
    batch = iter(world.client().run_batch([{"seconds": 0.0}] + [{"seconds": 60.0}] * 9, 10))
    next(batch)
    batch.close()  # type: ignore[attr-defined]
    time.sleep(1.2)
    assert world.stub.open == {}


SCRIPT = f"""
from agentcore_rl_toolkit import RolloutClient
client = RolloutClient({ARN!r}, {BUCKET!r}, "exp", tps_limit=None)
"""


def script(text: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT + textwrap.dedent(text)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", ["for", "async for"])
def test_a_second_interrupt_ends_at_once_and_names_what_may_run(world: World, how: str) -> None:
    world.runtime.on(is_kind("stop"), hang(60.0))
    process = script(f"""
        import asyncio, threading
        batch = client.run_batch([{{"seconds": 60}}] * 3, 3, log_interval=0.2)
        threading.Timer(1.5, lambda: print("running", flush=True)).start()
        async def consume():
            async for _ in batch:
                pass
        if {how!r} == "for":
            for _ in batch:
                pass
        else:
            asyncio.run(consume())
    """)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    assert len(world.stub.open) == 3
    process.send_signal(signal.SIGINT)
    time.sleep(0.7)
    assert process.poll() is None  # it waits for the stops
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=5)
    assert "3 sessions may still run" in errors
    assert all(session_id in errors for session_id in world.stub.open)
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_a_second_interrupt_of_a_future_names_its_session(world: World) -> None:
    world.runtime.on(is_kind("stop"), hang(60.0))
    process = script("""
        future = client.invoke({"seconds": 60})
        print("running", flush=True)
        future.result()
    """)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    for _ in range(2):
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=5)
    assert "1 sessions may still run" in errors
    assert all(session_id in errors for session_id in world.stub.open)


def test_a_script_that_ends_beside_an_open_iterator_stops_its_sessions(world: World) -> None:
    process = script("""
        items = iter(client.run_batch([{"seconds": 0}] + [{"seconds": 60}] * 3, 4))
        next(items)
    """)
    assert process.communicate(timeout=10) == ("", "")
    assert world.stub.open == {}


def test_payloads_that_block_keep_no_process_alive(world: World) -> None:
    process = script("""
        import queue
        waiting = queue.Queue()
        waiting.put({"seconds": 0})
        for item in client.run_batch(iter(waiting.get, None), 4):
            break
    """)
    assert process.communicate(timeout=10) == ("", "")


def test_payloads_that_end_the_program_end_their_batch_alone(world: World) -> None:
    def payloads() -> Iterator[dict[str, Any]]:
        yield {"seconds": 60}
        sys.exit("no more")

    with pytest.raises(RuntimeError, match="SystemExit"):
        list(world.client().run_batch(payloads(), 4))
    run(world, [{}])


def test_an_iterator_that_is_collected_as_garbage_stops_its_sessions(world: World) -> None:
    async def collect() -> None:  # on the client's own loop, where it could wait for itself for ever
        gc.collect()

    cycle: list[Any] = [iter(world.client().run_batch([{"seconds": 0}] + [{"seconds": 60}] * 3, 4))]
    next(cycle[0])
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        run_sync(collect())
    finally:
        gc.enable()
    time.sleep(0.5)
    assert world.stub.open == {}


def test_a_batch_ends_with_its_client(world: World) -> None:
    client = world.client()
    items = iter(client.run_batch([{"seconds": 0}] + [{"seconds": 60}] * 20, 4))
    next(items)
    client.close()
    invoked = world.stub.counts["invoke"]
    with pytest.raises(RolloutCancelled, match="closed"):
        next(items)
    assert (world.stub.open, world.stub.counts["invoke"]) == ({}, invoked)


def test_closing_a_client_stops_what_it_waits_for(world: World) -> None:
    with world.client() as client:
        future = client.invoke({"seconds": 60.0})
    assert world.stub.open == {}
    with pytest.raises(RolloutCancelled):
        future.result(timeout=5)


def test_a_session_that_is_invoked_twice_has_two_futures(world: World) -> None:
    client = world.client()
    session_id = str(uuid.uuid4())
    first, second = (client.invoke({"seconds": 0.3}, session_id=session_id, input_id="same") for _ in range(2))
    assert first.result(timeout=10) == second.result(timeout=10)
    third = client.invoke({"seconds": 60.0}, session_id=str(uuid.uuid4()), input_id="other")
    fourth = client.invoke({"seconds": 60.0}, session_id=third.session_id, input_id="other")
    third.cancel()
    assert not fourth.done()
    fourth.cancel()
    assert world.stub.runs == 2


# -- limits ---------------------------------------------------------------------------------------------------


def test_clients_of_one_runtime_share_the_strictest_limit(world: World) -> None:
    one, other = world.client(tps_limit=20, exp_id="a"), world.client(tps_limit=100, exp_id="b")
    began = time.monotonic()

    def work(client: Any) -> None:
        assert all(item.success for item in client.run_batch([{}] * 10, 10))

    threads = [threading.Thread(target=work, args=[client]) for client in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= (40 - 2) / 20  # 20 invokes and 20 stops, two at once
    one.close()
    began = time.monotonic()
    assert all(item.success for item in other.run_batch([{}] * 50, 10))
    assert time.monotonic() - began < 4.0  # the stricter one has gone: it would take 5 s


def test_new_sessions_have_a_limit_of_their_own(world: World) -> None:
    items, seconds = run(world, [{}] * 63, client={"new_sessions_per_minute": 60})
    assert failed(items) == {}
    assert 2.5 <= seconds < 8.0  # a minute's worth goes at once, stops are not held back


def test_a_start_without_room_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcore_rl_toolkit.client import _client

    monkeypatch.setattr(_client, "_START_TIMEOUT", 1.0)
    world.runtime.on(is_kind("invoke"), answer(429, error="ThrottlingException"))
    with pytest.raises(RolloutTimeout, match="did not start within 1 s: ThrottlingException"):
        world.client().invoke({})


def test_a_refused_payload_is_an_invocation_error_at_once(world: World) -> None:
    world.runtime.on(is_kind("invoke"), answer(413))
    with pytest.raises(InvocationError, match="413"):
        world.client().invoke({})
    assert world.stub.counts["invoke"] == 0


SECRETS = {"api_key": "sk-0123456789", "base_url": "http://gateway/sessions/key-0123456789/v1"}


def quote(status: int, error: str = "") -> Any:
    """Answer with what was sent."""

    async def act(request: web.Request, _: Any) -> web.Response:
        body = {"message": await request.text(), "status": "rejected", "error": await request.text()}
        return web.json_response(body, status=status, headers={"x-amzn-ErrorType": error} if error else None)

    return act


@pytest.mark.parametrize("fault", [quote(424, "RuntimeClientError"), quote(500), quote(200)], ids=["424", "500", "200"])
def test_an_answer_that_quotes_the_request_gives_no_secret_away(
    world: World, fault: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agentcore_rl_toolkit")
    world.runtime.on(is_kind("invoke"), fault)
    items, _ = run(
        world,
        [{"password": "pw-0123456789"}],
        run_dir=tmp_path,
        client={**SECRETS, "max_retry_attempts": 0},
    )
    said = [str(items[0].error), caplog.text, (tmp_path / "ledger.jsonl").read_text()]
    assert "***" in said[0]
    assert not [text for text in said if "0123456789" in text.replace(ARN, "")]


def test_an_answer_that_is_cut_within_a_secret_gives_no_part_of_it_away(world: World) -> None:
    key = "sk-Vq3xT9wLmZ7aRb2NcYd5KfHg8JpQsEuW"
    world.runtime.on(is_kind("invoke"), answer(502, body=f"{'x' * 480}{key} was refused"))
    items, _ = run(world, [{}], client={"api_key": key, "max_retry_attempts": 0})
    assert "xxx" in str(items[0].error)
    assert not [i for i in range(len(key) - 7) if key[i : i + 8] in str(items[0].error)]


def test_an_agents_error_is_written_down_without_secrets(world: World, tmp_path: Path) -> None:
    async def failed_result(_: Any, forward: Any) -> web.Response:
        real = await forward()
        error = {"status_code": 500, "stop_reason": f"refused: {SECRETS['api_key']}"}
        return web.json_response(error) if real.status == 200 else real

    world.s3.on(is_kind("get"), failed_result)
    items, _ = run(world, [{}], run_dir=tmp_path, client=SECRETS)
    assert items[0].error == "refused: ***"
    assert SECRETS["api_key"] not in (tmp_path / "ledger.jsonl").read_text()


def test_close_stops_sessions_whose_results_nobody_has_taken(world: World) -> None:
    with world.client() as client:
        future = client.invoke({"seconds": 0.0})
        while not future.done():
            time.sleep(0.01)
        assert len(world.stub.open) == 1
    assert world.stub.open == {}
    assert future.result(timeout=5)["rewards"] == 1.0


def test_a_closed_client_starts_nothing(world: World) -> None:
    client = world.client()
    client.close()
    with pytest.raises(SetupError, match="closed"):
        client.invoke({})
    with pytest.raises(SetupError, match="closed"):
        list(client.run_batch([{}], 1))
    assert world.stub.runs == 0
    client.close()  # once more is no error


@pytest.mark.parametrize(("name", "meant"), [("run_dir", "no argument here"), ("tps_limt", "did you mean tps_limit=")])
def test_keywords_that_are_meant_for_others_are_not_sent_to_the_agent(world: World, name: str, meant: str) -> None:
    options: dict[str, Any] = {name: 3}
    with pytest.raises(TypeError, match=meant):
        world.client(**options)
    with pytest.raises(TypeError, match=meant):
        world.client().invoke({}, **options)
    assert world.client(temperature=1, timeout_ms=5, transport_hint="x").extra_config["temperature"] == 1


def test_one_payload_is_no_batch(world: World) -> None:
    with pytest.raises(TypeError, match="put it into a list"):
        world.client().run_batch({"text": "hi"}, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("bucket", ["no-such-bucket", "Bad Bucket!"])
def test_an_agent_that_names_another_bucket_fails_alone(world: World, bucket: str) -> None:
    async def elsewhere(_: Any, forward: Any) -> web.Response:
        answer = json.loads((await forward()).body)
        return web.json_response({**answer, "s3_bucket": bucket})

    world.runtime.on(is_kind("invoke"), elsewhere, times=1)
    items, _ = run(world, [{"seconds": 4.0}] * 5)
    assert sorted(item.outcome for item in items.values()) == [Outcome.RUNTIME_FAILED] + [Outcome.SUCCEEDED] * 4
    assert [item for item in items.values() if bucket in str(item.error)]


def test_an_answer_that_names_no_address_leaves_no_session(world: World) -> None:
    async def odd(_: Any, forward: Any) -> web.Response:
        await forward()
        return web.json_response({"status": "processing", "s3_bucket": 7, "result_key": ["x"]})

    world.runtime.on(is_kind("invoke"), odd)
    with pytest.raises(SetupError, match="instead of"):
        world.client().invoke({"seconds": 60})
    assert world.stub.open == {}

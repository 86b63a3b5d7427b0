"""``run_batch(run_dir=…)``: a script that died goes on where it was, and nothing runs twice that need not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit import BatchItem, Outcome, RolloutClient
from agentcore_rl_toolkit.client import _runtime
from agentcore_rl_toolkit.errors import SetupError
from agentcore_rl_toolkit.local import LocalAgentCore, Quotas

from .conftest import World, answer, background, is_kind, late, lose_answer, put_proxies

PAYLOADS = [{"seconds": 0.05, "text": str(i)} for i in range(12)]


def batch(world: World, run_dir: Path, payloads: list[Any] = PAYLOADS, **options: Any) -> Iterator[BatchItem]:
    return iter(world.client().run_batch(payloads, 4, run_dir=run_dir, timeout=10.0, **options))


def test_a_finished_batch_is_given_again_without_running_again(world: World, tmp_path: Path) -> None:
    first = {item.input_id: item for item in batch(world, tmp_path)}
    assert all(item.success and not item.resumed for item in first.values())
    again = {item.input_id: item for item in batch(world, tmp_path)}
    assert world.stub.runs == len(PAYLOADS)
    assert world.stub.counts["invoke"] == len(PAYLOADS)
    assert again.keys() == first.keys()
    for input_id, item in again.items():
        assert item.resumed
        assert item.success
        assert item.result == first[input_id].result
        assert (item.index, item.session_id) == (first[input_id].index, first[input_id].session_id)


def test_what_was_stopped_in_the_middle_runs_again_as_another_attempt(world: World, tmp_path: Path) -> None:
    payloads = [{"seconds": 0.0}, {"seconds": 1.0}, {"seconds": 1.0}]
    left = batch(world, tmp_path, payloads)
    first = next(left)
    left.close()  # type: ignore[attr-defined]
    assert world.stub.open == {}
    items = {item.index: item for item in batch(world, tmp_path, payloads)}
    assert [item.outcome for item in items.values()] == [Outcome.SUCCEEDED] * 3
    assert (items[0].resumed, items[0].attempts, items[0].session_id) == (True, 1, first.session_id)
    assert [(items[i].resumed, items[i].attempts) for i in (1, 2)] == [(False, 2)] * 2
    assert world.stub.runs == 5


def test_failures_are_kept_and_lost_sessions_are_run_again(world: World, tmp_path: Path) -> None:
    payloads = [{"seconds": 60.0}, {"bad": float("nan")}, {"seconds": 0.0}]
    rule = world.runtime.on(lambda r: r.path.endswith("/invocations"), answer(413), times=1)
    items = {i.index: i for i in world.client().run_batch(payloads, 1, run_dir=tmp_path, timeout=1.0)}
    outcomes = {index: item.outcome for index, item in items.items()}
    assert outcomes == {0: Outcome.RUNTIME_FAILED, 1: Outcome.REJECTED, 2: Outcome.SUCCEEDED}
    assert rule.used == 1
    again = {i.index: i for i in world.client().run_batch(payloads, 1, run_dir=tmp_path, timeout=1.0)}
    assert (again[0].outcome, again[0].attempts, again[0].resumed) == (Outcome.TIMED_OUT, 2, False)
    assert (again[1].outcome, again[1].error, again[1].resumed) == (Outcome.REJECTED, items[1].error, True)
    third = {i.index: i for i in world.client().run_batch(payloads, 1, run_dir=tmp_path, timeout=1.0)}
    assert (third[0].outcome, third[0].attempts, third[0].resumed) == (Outcome.TIMED_OUT, 2, True)


def test_a_result_that_has_gone_from_s3_is_told(world: World, tmp_path: Path) -> None:
    list(batch(world, tmp_path, PAYLOADS[:1]))
    world.s3.on(is_kind("get"), answer(404, error="NoSuchKey"))
    [item] = batch(world, tmp_path, PAYLOADS[:1])
    assert item.outcome is Outcome.RUNTIME_FAILED
    assert "can't be read" in (item.error or "")


def test_another_batch_in_the_same_folder_is_refused(world: World, tmp_path: Path) -> None:
    list(batch(world, tmp_path, PAYLOADS[:2]))
    with pytest.raises(SetupError, match=r"another payload for .*-00000001-000"):
        list(batch(world, tmp_path, [PAYLOADS[0], PAYLOADS[5]]))
    with pytest.raises(SetupError, match="another exp_id"):
        list(world.client(exp_id="other").run_batch(PAYLOADS[:2], 4, run_dir=tmp_path))
    (tmp_path / "ledger.jsonl").write_text("what\n")
    with pytest.raises(SetupError, match="no ledger of this version"):
        list(batch(world, tmp_path))


def test_one_process_at_a_time_and_a_torn_line_is_dropped(world: World, tmp_path: Path) -> None:
    running = batch(world, tmp_path)
    next(running)
    with pytest.raises(SetupError, match="in use"):
        next(batch(world, tmp_path))
    list(running)
    ledger = tmp_path / "ledger.jsonl"
    whole = ledger.read_bytes()
    ledger.write_bytes(whole + b'{"input_id": "half')
    assert all(item.resumed for item in batch(world, tmp_path))
    assert ledger.read_bytes() == whole


def test_a_full_disk_ends_the_batch_and_it_goes_on_when_there_is_room(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, lines = os.write, 0

    def full(file: int, data: bytes) -> int:
        nonlocal lines
        lines += b'"input_id"' in data
        return write(file, data[:20] if lines == 7 else data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(SetupError, match=r"No space left on device\): make room"):
            list(batch(world, tmp_path))
    assert world.stub.open == {}
    assert all(item.success for item in batch(world, tmp_path))


def test_more_payloads_may_follow(world: World, tmp_path: Path) -> None:
    list(batch(world, tmp_path, PAYLOADS[:4]))
    items = list(batch(world, tmp_path, PAYLOADS[:6], samples=2))
    assert Counter((item.resumed, item.success) for item in items) == {(True, True): 4, (False, True): 8}


AGENT = """
import os, time
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()

@app.rollout_entrypoint
def agent(payload, context):
    with open(payload["log"], "a") as log:
        log.write(payload["name"] + "\\n")
    time.sleep(payload["seconds"])
    return {"rewards": 1.0, "name": payload["name"]}

app.run()
"""

SCRIPT = """
import json, sys
from agentcore_rl_toolkit import RolloutClient

job = json.load(open(sys.argv[1]))
with RolloutClient(job["arn"], job["bucket"], "killed", tps_limit=200, new_sessions_per_minute=None) as client:
    for item in client.run_batch(job["payloads"], 6, run_dir=job["run_dir"], timeout=60.0):
        print(json.dumps([item.index, item.outcome, item.attempts, item.result and item.result["name"]]), flush=True)
print("done", flush=True)
"""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAgentCore]:
    folder = tmp_path_factory.mktemp("agent")
    (folder / "rl_app.py").write_text(textwrap.dedent(AGENT))
    quotas = Quotas(tps=None, new_sessions_per_minute=None, active_sessions=None)
    with LocalAgentCore("python rl_app.py", cwd=folder, quotas=quotas) as running:
        yield running


def start(local: LocalAgentCore, tmp_path: Path, payloads: list[Any]) -> subprocess.Popen[str]:
    job = {"arn": local.agent_runtime_arn, "bucket": local.bucket, "payloads": payloads, "run_dir": f"{tmp_path}/run"}
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "job.json")]
    return subprocess.Popen(command, env=os.environ | local.environment(), stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[int, Any]:
    out, _ = process.communicate(timeout=90)
    *lines, last = out.splitlines()
    assert last == "done"
    rows = [json.loads(line) for line in lines]
    assert len({row[0] for row in rows}) == len(rows)
    return {row[0]: row[1:] for row in rows}


def test_a_killed_script_takes_its_sessions_up_again(local: LocalAgentCore, tmp_path: Path) -> None:
    log = tmp_path / "log"
    payloads = [{"name": str(i), "seconds": 2.0, "log": str(log)} for i in range(4)]
    process = start(local, tmp_path, payloads)
    while not (log.exists() and len(log.read_text().splitlines()) == 4):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.communicate()
    rows = finish(start(local, tmp_path, payloads))
    assert rows == {i: ["succeeded", 1, str(i)] for i in range(4)}
    assert sorted(log.read_text().splitlines()) == ["0", "1", "2", "3"]  # each ran once
    deadline = time.monotonic() + 10
    while local.sessions():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("fault", [lose_answer, pytest.param(late(3.0), marks=pytest.mark.slow)], ids=["lost", "late"])
def test_an_unanswered_invoke_is_sent_again_and_the_agent_runs_once(
    local: LocalAgentCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    monkeypatch.setattr(_runtime, "_INVOKE_READ_TIMEOUT", 1.0)
    log = tmp_path / "log"
    with background() as (stack, call):
        environment = local.environment()
        runtime, _ = call(put_proxies(stack, environment))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        runtime.on(is_kind("invoke"), fault, times=1)
        with RolloutClient(local.agent_runtime_arn, local.bucket, "unanswered") as client:
            payload = {"name": "once", "seconds": 3.0, "log": str(log)}
            [item] = client.run_batch([payload], 1, timeout=30.0)
    assert item.success
    assert item.invokes == 2
    assert log.read_text().splitlines() == ["once"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_kills_at_random_moments_lose_nothing_and_run_nothing_twice(local: LocalAgentCore, tmp_path: Path) -> None:
    rng = random.Random(time.time_ns())
    log = tmp_path / "log"
    payloads = [{"name": str(i), "seconds": rng.uniform(0.0, 1.5), "log": str(log)} for i in range(40)]
    for _ in range(10):
        process = start(local, tmp_path, payloads)
        time.sleep(rng.uniform(0.5, 3.0))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    rows = finish(start(local, tmp_path, payloads))
    assert rows == {i: ["succeeded", 1, str(i)] for i in range(40)}
    assert Counter(log.read_text().splitlines()) == {str(i): 1 for i in range(40)}  # no agent was lost

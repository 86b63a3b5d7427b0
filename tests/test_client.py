"""The trainer's side against the local runtime: real HTTP, real sessions, real boto3."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from agentcore_rl_toolkit import BatchItem, Outcome, RolloutClient, RolloutFuture
from agentcore_rl_toolkit.errors import (
    ContractError,
    InvocationError,
    RolloutCancelled,
    RolloutTimeout,
    SetupError,
)
from agentcore_rl_toolkit.local import LocalAgentCore, Quotas

AGENT = """
import asyncio
import os
from pathlib import Path

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()

@app.rollout_entrypoint
async def agent(payload, context):
    await asyncio.sleep(payload.get("sleep", 0))
    match payload.get("do"):
        case "fail":
            raise ValueError("boom")
        case "status":
            return {"status_code": 418, "stop_reason": "teapot"}
    return {"rewards": payload.get("value", 1.0), "config": payload["_rollout"], "pid": os.getpid()}

if __name__ == "__main__":
    app.run()
"""

# Answers, but knows nothing of rollouts.
FOREIGN = """
from bedrock_agentcore.runtime import BedrockAgentCoreApp

app = BedrockAgentCoreApp()

@app.entrypoint
def agent(payload):
    return {"answer": 42}

if __name__ == "__main__":
    app.run(port=int(__import__("os").environ["AGENTCORE_RL_PORT"]))
"""

# Healthy, but every first invocation of a session is answered with an error, as on a cold start.
COLD = """
import json, os
from http.server import BaseHTTPRequestHandler, HTTPServer

class Agent(BaseHTTPRequestHandler):
    calls = 0

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply(200, {"status": "Healthy", "time_of_last_update": 0})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Agent.calls += 1
        if Agent.calls <= body["cold"]:
            self.reply(500, {"error": "not ready"})
        else:
            self.reply(200, {"status": "processing", "calls": Agent.calls})

HTTPServer(("127.0.0.1", int(os.environ["AGENTCORE_RL_PORT"])), Agent).serve_forever()
"""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAgentCore]:
    folder = tmp_path_factory.mktemp("agents")
    for name, source in ("rl_app", AGENT), ("foreign", FOREIGN), ("cold", COLD):
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    with LocalAgentCore(agent="python rl_app.py", cwd=folder) as running, pytest.MonkeyPatch.context() as env:
        for name, value in running.environment().items():
            env.setenv(name, value)
        yield running


@pytest.fixture
def client(local: LocalAgentCore) -> Iterator[RolloutClient]:
    with connect(local) as connected:
        yield connected


@pytest.fixture(scope="module")
def cold(local: LocalAgentCore) -> str:
    return local.register("cold", "python cold.py")


def connect(local: LocalAgentCore, arn: str | None = None, **options: Any) -> RolloutClient:
    options = {"exp_id": "exp", "tps_limit": 200, **options}
    return RolloutClient(arn or local.agent_runtime_arn, options.pop("s3_bucket", local.bucket), **options)


def live(local: LocalAgentCore) -> set[str]:
    return {s.session_id for s in local.sessions() if s.pid is not None}


def wait_stopped(local: LocalAgentCore, session_id: str) -> None:
    deadline = time.monotonic() + 10
    while session_id in live(local):
        assert time.monotonic() < deadline, f"{session_id} still runs"
        time.sleep(0.02)


FAST: dict[str, Any] = {"initial_interval": 0.05, "max_interval": 0.2}


def test_invoke_and_result(local: LocalAgentCore, client: RolloutClient) -> None:
    future = client.invoke({"value": 0.5}, base_url="http://model/v1", sampling_params={"temperature": 1})
    assert isinstance(future, RolloutFuture)
    result = future.result(timeout=30)
    assert result["status_code"] == 200
    assert result["rewards"] == 0.5
    assert result["config"] == {
        "exp_id": "exp",
        "input_id": future.input_id,
        "s3_bucket": local.bucket,
        "base_url": "http://model/v1",
        "sampling_params": {"temperature": 1},
    }
    assert future.result_key == f"exp/{future.input_id}/{future.session_id}.json"
    assert future.done()
    assert not future.cancelled
    elapsed = future.elapsed()
    assert 0 < elapsed < 30
    assert future.result() == result
    assert future.elapsed() == elapsed  # stands still once the result is there
    wait_stopped(local, future.session_id)


async def test_the_calls_that_rllm_makes(local: LocalAgentCore) -> None:
    client = RolloutClient(
        agent_runtime_arn=local.agent_runtime_arn, s3_bucket=local.bucket, exp_id="rllm", tps_limit=25
    )
    session_id, base_url = str(uuid.uuid4()), "http://gateway/sessions/some-session/v1"
    future = await client.invoke_async(
        payload={"value": 1.0}, session_id=session_id, input_id="task-1", base_url=base_url, model_id="m"
    )
    assert not await future.done_async() or future.done()
    result = await future.result_async(timeout=30.0)
    assert result.get("status_code") in (None, 200)
    assert result["rewards"] == 1.0
    assert result["config"]["model_id"] == "m"
    assert result["result_key"] == f"rllm/task-1/{session_id}.json"
    assert isinstance(future.elapsed(), float)

    failed = await (await client.invoke_async(payload={"do": "fail"}, session_id=str(uuid.uuid4())))
    assert failed["status_code"] == 500
    assert failed["stop_reason"] == "ValueError: boom"
    assert "rl_app.py" in failed["traceback"]

    slow = await client.invoke_async(payload={"sleep": 60}, session_id=str(uuid.uuid4()))
    with pytest.raises(asyncio.TimeoutError):
        await slow.result_async(timeout=0.2)
    client.close()


def test_timeout_stops_the_session(local: LocalAgentCore, client: RolloutClient) -> None:
    future = client.invoke({"sleep": 60})
    assert future.session_id in live(local)
    with pytest.raises(TimeoutError) as caught:
        future.result(timeout=0.3)
    assert isinstance(caught.value, RolloutTimeout)
    assert caught.value.session_id == future.session_id
    wait_stopped(local, future.session_id)
    with pytest.raises(RolloutTimeout):
        future.result()


def test_cancel_stops_the_session(local: LocalAgentCore, client: RolloutClient) -> None:
    future = client.invoke({"sleep": 60})
    assert not future.done()
    assert future.cancel() is True
    assert future.cancelled
    assert future.done()
    wait_stopped(local, future.session_id)
    with pytest.raises(RolloutCancelled):
        future.result()


def test_a_closed_client_leaves_nobody_waiting(local: LocalAgentCore) -> None:
    with connect(local) as other:
        future = other.invoke({"sleep": 60})
    with pytest.raises(RolloutCancelled, match="closed"):
        future.result(timeout=10)
    wait_stopped(local, future.session_id)  # given up with the waiting


async def test_cancelling_the_waiter_stops_the_session(local: LocalAgentCore, client: RolloutClient) -> None:
    future = await client.invoke_async({"sleep": 60})
    waiter = asyncio.ensure_future(future.result_async())
    await asyncio.sleep(0.1)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await asyncio.to_thread(wait_stopped, local, future.session_id)
    assert future.cancelled


async def test_an_invoke_that_is_cancelled_leaves_no_session(local: LocalAgentCore, client: RolloutClient) -> None:
    before = live(local)
    for delay in (0.0, 0.02, 0.1, 0.3, 0.6):
        invoke = asyncio.ensure_future(client.invoke_async({"sleep": 60}))
        await asyncio.sleep(delay)
        invoke.cancel()
        if invoke.done():  # it was quicker than the delay
            await (await invoke).cancel_async()
        else:
            with pytest.raises(asyncio.CancelledError):
                await invoke
        assert live(local) <= before


def test_a_late_look_finds_what_the_interval_would_miss(client: RolloutClient) -> None:
    future = client.invoke({"sleep": 1.0})  # looks at 0.5, 1.25, 2.4 s …
    time.sleep(1.8)
    assert future.result(timeout=0.1)["status_code"] == 200


def test_batch_yields_every_rollout_with_its_outcome(client: RolloutClient) -> None:
    payloads: list[Any] = [
        {"value": 0.0},
        {"do": "fail"},
        {"do": "status"},
        {"sleep": 60},
        {"bad": float("nan")},
        ["no dict"],
        {"value": 6.0},
    ]
    items = list(client.run_batch(payloads, max_concurrent_sessions=4, timeout=8.0, **FAST))
    assert len(items) == len(payloads)
    by_index = {item.index: item for item in items}
    assert {i: item.outcome for i, item in by_index.items()} == {
        0: Outcome.SUCCEEDED,
        1: Outcome.AGENT_FAILED,
        2: Outcome.AGENT_FAILED,
        3: Outcome.TIMED_OUT,
        4: Outcome.REJECTED,
        5: Outcome.REJECTED,
        6: Outcome.SUCCEEDED,
    }
    assert [i for i, item in sorted(by_index.items()) if item.success] == [0, 6]
    first, failed, teapot, late, nan, no_dict, last = (by_index[i] for i in range(7))
    assert (first.result or {})["rewards"] == 0.0
    assert (last.result or {})["rewards"] == 6.0
    assert first.error is None
    assert (failed.result or {})["status_code"] == 500
    assert failed.error is not None
    assert failed.error.startswith("ValueError: boom\nTraceback")
    assert teapot.error == "teapot"
    assert late.result is None
    assert 8.0 <= late.elapsed < 15.0
    assert nan.error == "payload.bad: NaN is not JSON"
    assert no_dict.error == "payload: a dict is required, got list"


def test_samples_have_identities_of_their_own(local: LocalAgentCore, client: RolloutClient) -> None:
    items = list(client.run_batch([{}, {}], max_concurrent_sessions=6, samples=3, timeout=30, **FAST))
    assert sorted((item.index, item.sample) for item in items) == [(i, s) for i in range(2) for s in range(3)]
    assert len({item.session_id for item in items}) == 6
    runs = {item.input_id.rpartition("-")[0].rpartition("-")[0] for item in items}
    assert len(runs) == 1
    assert {item.input_id for item in items} == {
        f"{next(iter(runs))}-{i:08d}-{s:03d}" for i in range(2) for s in range(3)
    }
    # Its own process each, and all stopped when the batch is over.
    assert len({(item.result or {})["pid"] for item in items}) == 6
    assert not live(local) & {item.session_id for item in items}


def test_batch_keeps_to_the_number_of_sessions(local: LocalAgentCore, client: RolloutClient) -> None:
    seen = 0
    for _ in client.run_batch([{"sleep": 0.2}] * 6, max_concurrent_sessions=2, timeout=30, **FAST):
        seen = max(seen, len(live(local)))
    assert seen == 2


async def test_async_batch(client: RolloutClient) -> None:
    items = [i async for i in client.run_batch_async([{}, {"do": "fail"}], max_concurrent_sessions=2, **FAST)]
    assert all(isinstance(item, BatchItem) for item in items)
    assert {item.index: item.success for item in items} == {0: True, 1: False}


def test_leaving_a_batch_stops_its_sessions(local: LocalAgentCore, client: RolloutClient) -> None:
    before = live(local)
    batch = iter(client.run_batch([{}] + [{"sleep": 60}] * 3, max_concurrent_sessions=4, **FAST))
    assert next(batch).index == 0
    batch.close()  # type: ignore[attr-defined]
    assert live(local) <= before


async def test_leaving_an_async_batch_stops_its_sessions(local: LocalAgentCore, client: RolloutClient) -> None:
    before = live(local)
    batch = client.run_batch_async([{}] + [{"sleep": 60}] * 3, max_concurrent_sessions=4, **FAST).__aiter__()
    assert (await batch.__anext__()).index == 0
    await batch.aclose()
    assert live(local) <= before


def test_ctrl_c_stops_the_sessions(local: LocalAgentCore, tmp_path: Path) -> None:
    script = f"""
        from agentcore_rl_toolkit import RolloutClient
        client = RolloutClient({local.agent_runtime_arn!r}, {local.bucket!r}, "exp", tps_limit=200)
        for item in client.run_batch([{{}}] + [{{"sleep": 60}}] * 3, 4, initial_interval=0.05):
            print("first", flush=True)
    """
    before = live(local)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"first\n"
    deadline = time.monotonic() + 10
    while len(live(local) - before) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=15)
    assert errors.rstrip().endswith(b"KeyboardInterrupt")
    assert live(local) <= before


def test_one_client_serves_threads_and_loops_at_once(client: RolloutClient) -> None:
    from concurrent.futures import ThreadPoolExecutor

    async def in_a_loop(value: float) -> float:
        future = await client.invoke_async({"value": value})
        return float((await future)["rewards"])

    with ThreadPoolExecutor(4) as pool:
        sync = [pool.submit(lambda v=v: client.invoke({"value": v}).result(30)["rewards"]) for v in (1.0, 2.0)]
        loops = [pool.submit(asyncio.run, in_a_loop(v)) for v in (3.0, 4.0)]
        assert [f.result(30) for f in (*sync, *loops)] == [1.0, 2.0, 3.0, 4.0]


# -- what is retried --------------------------------------------------------------------------------------


def test_cold_starts_are_retried(local: LocalAgentCore, cold: str) -> None:
    with connect(local, cold) as client:
        future = client.invoke({"cold": 2})
        assert future.result_key == f"exp/{future.input_id}/{future.session_id}.json"  # the agent named none
        assert future.cancel() is True


def test_retries_are_bounded_and_the_error_points_to_the_log(local: LocalAgentCore, cold: str) -> None:
    with connect(local, cold, max_retry_attempts=1) as client:
        session_id = str(uuid.uuid4())
        with pytest.raises(InvocationError, match="container failed, its log says why") as caught:
            client.invoke({"cold": 99}, session_id=session_id)
        assert caught.value.session_id == session_id
        wait_stopped(local, session_id)
        items = list(client.run_batch([{"cold": 99}], max_concurrent_sessions=1))
        assert [item.outcome for item in items] == [Outcome.RUNTIME_FAILED]
        assert not items[0].success


def test_throttled_calls_are_retried(tmp_path: Path) -> None:
    (tmp_path / "rl_app.py").write_text(textwrap.dedent(AGENT))
    quotas = Quotas(tps=4)
    with (
        LocalAgentCore("python rl_app.py", cwd=tmp_path, quotas=quotas) as local,
        pytest.MonkeyPatch.context() as env,
    ):
        for name, value in local.environment().items():
            env.setenv(name, value)
        with connect(local, tps_limit=None, max_pool_connections=20) as client:
            items = list(client.run_batch([{}] * 12, max_concurrent_sessions=12, timeout=30, **FAST))
        assert [item.error for item in items] == [None] * 12


def test_the_rate_limit_holds_for_invoke_and_stop_together(local: LocalAgentCore) -> None:
    with connect(local, tps_limit=5) as client:
        began = time.monotonic()
        items = list(client.run_batch([{}] * 4, max_concurrent_sessions=4, timeout=30, **FAST))
        assert time.monotonic() - began >= 7 / 5  # 4 invokes and 4 stops: 7 gaps
        assert all(item.success for item in items)


# -- broken setups ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arn",
    ["", "arn:aws:iam::123456789012:role/x", "arn:aws:bedrock-agentcore::123456789012:runtime/a-b", "my_agent", None],
)
def test_a_bad_arn_is_refused(arn: Any) -> None:
    with pytest.raises(SetupError, match="no agent runtime ARN"):
        RolloutClient(arn, "bucket", "exp")


def unknown_arn(local: LocalAgentCore) -> str:
    return local.agent_runtime_arn.rpartition("/")[0] + "/nobody-0123456789"


def test_an_unknown_runtime_ends_a_batch_at_once(local: LocalAgentCore, caplog: pytest.LogCaptureFixture) -> None:
    with connect(local, unknown_arn(local)) as client:
        began = time.monotonic()
        with pytest.raises(SetupError, match="check agent_runtime_arn"):
            list(client.run_batch([{}] * 50, max_concurrent_sessions=5))
        assert time.monotonic() - began < 5
        with pytest.raises(SetupError, match="check agent_runtime_arn"):
            client.invoke({})
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING and "agentcore" in r.name]


def test_an_agent_without_the_decorator_is_a_broken_setup(local: LocalAgentCore) -> None:
    with connect(local, local.register("foreign", "python foreign.py")) as client:
        session_id = str(uuid.uuid4())
        with pytest.raises(SetupError, match=r"rollout_entrypoint"):
            client.invoke({}, session_id=session_id)
        wait_stopped(local, session_id)


def test_a_missing_bucket_ends_a_batch(local: LocalAgentCore) -> None:
    with (
        connect(local, s3_bucket="no-such-bucket") as client,
        pytest.raises(SetupError, match="create the bucket, or correct s3_bucket"),
    ):
        list(client.run_batch([{}] * 3, max_concurrent_sessions=3, timeout=30, **FAST))


def test_missing_credentials_say_what_to_do(local: LocalAgentCore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("AWS_") and "ENDPOINT" not in name:
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    with connect(local) as client, pytest.raises(SetupError, match="AWS_PROFILE"):
        client.invoke({})


def test_nobody_listening_is_a_broken_setup(local: LocalAgentCore, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", f"http://127.0.0.1:{port}")
    with (
        connect(local, max_retry_attempts=1) as client,
        pytest.raises(SetupError, match="AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"),
    ):
        list(client.run_batch([{}] * 20, max_concurrent_sessions=5))


# -- what is refused before anything is sent ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"session_id": "x" * 20}, "session_id: 20 characters"),
        ({"session_id": "x" * 257}, "session_id: 257 characters"),
        ({"session_id": "../" * 12}, "session_id: "),
        ({"input_id": "a/b"}, "_rollout.input_id"),
        ({"base_url": 7}, "_rollout.base_url"),
        ({"payload": {"x": {"y": object()}}}, "payload.x.y: object is not JSON"),
        ({"payload": "text"}, "payload: a dict is required"),
        ({"payload": {"x": "y" * 100_000_000}}, "AgentCore takes at most 100,000,000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_calls_are_refused_locally(
    local: LocalAgentCore, client: RolloutClient, call: dict[str, Any], reason: str
) -> None:
    before = {s.session_id for s in local.sessions()}
    with pytest.raises(ContractError, match=reason.replace(".", r"\.")):
        client.invoke(**{"payload": {}, **call})
    assert {s.session_id for s in local.sessions()} == before


def test_bad_settings_are_refused(local: LocalAgentCore, client: RolloutClient) -> None:
    for options in ({"tps_limit": 0}, {"max_pool_connections": 0}):
        with pytest.raises(SetupError):
            connect(local, **options)
    with pytest.raises(ContractError, match=r"_rollout\.exp_id"):
        connect(local, exp_id="a/b")
    for bad in ({"max_concurrent_sessions": 0}, {"max_concurrent_sessions": 1, "samples": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            client.run_batch([{}], **bad)
    assert list(client.run_batch([], max_concurrent_sessions=1)) == []


def test_a_result_that_is_no_json_object_is_an_error(local: LocalAgentCore, cold: str) -> None:
    with connect(local, cold) as client:
        future = client.invoke({"cold": 0})
        boto3.client("s3").put_object(Bucket=local.bucket, Key=future.result_key, Body=json.dumps([1]).encode())
        with pytest.raises(InvocationError, match="is not a result"):
            future.result(timeout=10)

"""The agent's side in real processes: real HTTP through ``app.run()``, moto's server as S3."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

import app_support
from app_support import BUCKET, Agent, read, rollout, run_one, session

# moto's server shares our process and leaves its ends of the sockets to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SECRET = "sk-x"  # short on purpose: masking is by value, not by a pattern

AGENT = """
import asyncio, contextvars, datetime, json, os, sys, time
import numpy as np
from bedrock_agentcore.runtime import BedrockAgentCoreContext
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp(store_payload=os.environ.get("STORE") == "1")

class Odd(Exception):
    def __str__(self):
        raise ValueError("no text")

def runs():
    with open("runs.txt", "a") as f:
        f.write("x")

def act(payload):
    cyclic = {}
    cyclic["self"] = cyclic
    match payload["do"]:
        case "echo": return {"rewards": 1.0, "text": payload.get("text"), "config": payload.get("_rollout")}
        case "list": return [1]
        case "none": return None
        case "nan": return {"metrics": {"loss": float("nan")}}
        case "float32 nan": return {"metrics": [np.float32("nan")]}
        case "convert": return {"a": np.float32(0.5), "b": np.arange(3), "t": datetime.date(2024, 2, 29)}
        case "bytes": return {"x": {"y": b"raw"}}
        case "keys": return {"m": {1: 2}}
        case "surrogate": return {"text": "\\ud800"}
        case "cyclic": return cyclic
        case "raise": raise ValueError(f"boom with {payload['_rollout'].get('api_key')}")
        case "odd": raise Odd
        case "surrogate error": raise ValueError("\\ud800")
        case "exit": sys.exit(3)
        case "interrupt": raise KeyboardInterrupt
        case "stop": raise StopIteration
        case "cancelled": raise asyncio.CancelledError
        case "deep": act(payload)
        case "session": return {"session": BedrockAgentCoreContext.get_session_id()}
"""

SYNC = """
@app.rollout_entrypoint
def agent(payload, anything):
    runs()
    time.sleep(payload.get("sleep", 0))
    assert anything.session_id == BedrockAgentCoreContext.get_session_id()
    return act(payload)
"""

ASYNC = """
@app.rollout_entrypoint
async def agent(payload, context):
    runs()
    if payload["do"] == "cancel me":
        asyncio.current_task().cancel()
        return {}
    if payload["do"] == "block":
        time.sleep(payload["sleep"])
        return {}
    await asyncio.sleep(payload.get("sleep", 0))
    assert context.session_id == BedrockAgentCoreContext.get_session_id()
    return act(payload)
"""

PLAIN = """
@app.rollout_entrypoint
def agent(payload, temperature=0.7):
    return {"temperature": temperature}
"""

STREAM = """
@app.rollout_entrypoint
async def agent(payload):
    for i in range(3):
        yield {"i": i}
"""

RUN = """
if __name__ == "__main__":
    app.run()
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    client.create_bucket(Bucket=BUCKET)
    yield client
    client.close()
    server.stop()


@contextlib.contextmanager
def start(s3: Any, folder: Path, *parts: str, **env: str) -> Iterator[Agent]:
    with app_support.start(s3.meta.endpoint_url, folder, "".join((AGENT, *parts, RUN)), **env) as agent:
        yield agent


@pytest.fixture(scope="module", params=["sync", "async"])
def agent(request: pytest.FixtureRequest, s3: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp(request.param)
    with start(s3, folder, SYNC if request.param == "sync" else ASYNC) as running:
        yield running


def test_answers_at_once_and_is_busy_until_the_result_is_there(agent: Agent, s3: Any) -> None:
    sid = session()
    began = time.monotonic()
    answer = agent.post({"do": "echo", "sleep": 2.0, "text": "hällo", "_rollout": rollout()}, sid)
    assert time.monotonic() - began < 1.8
    assert agent.ping() == "HealthyBusy"
    agent.wait_healthy()
    assert read(s3, answer["result_key"]) == {
        "status_code": 200,
        "stop_reason": "end_turn",
        "rewards": 1.0,
        "text": "hällo",
        "config": rollout(),
        "input_id": "in",
        "s3_bucket": BUCKET,
        "result_key": f"exp/in/{sid}.json",
    }


FAILURES = [
    ("list", "result: the handler must return a dict, it returned list"),
    ("none", "it returned NoneType"),
    ("nan", "metrics.loss: NaN is not JSON"),
    ("float32 nan", "metrics[0]: NaN is not JSON"),
    ("bytes", "x.y: bytes is not JSON"),
    ("keys", "m: key 1 is int, JSON keys are strings"),
    ("surrogate", "text: not valid Unicode"),
    ("cyclic", "contains itself"),
    ("raise", "ValueError: boom with ***"),
    ("odd", "Odd: <exception str() failed>"),
    ("surrogate error", "ValueError: ?"),
    ("exit", "SystemExit: 3"),
    ("interrupt", "KeyboardInterrupt"),
    ("stop", "StopIteration"),
    ("cancelled", "CancelledError"),
    ("deep", "RecursionError"),
]


@pytest.mark.parametrize(("what", "reason"), FAILURES, ids=[what for what, _ in FAILURES])
def test_every_failure_is_one_complete_error_object(agent: Agent, s3: Any, what: str, reason: str) -> None:
    result = run_one(agent, s3, {"do": what, "password": "hunter22"}, api_key=SECRET)
    assert result["status_code"] == 500
    assert result["outcome"] == "agent_failed"
    assert reason in result["stop_reason"]
    assert result["input_id"] == "in"
    assert result["s3_bucket"] == BUCKET
    assert isinstance(result["traceback"], str)
    if reason.partition(":")[0] in ("ValueError", "SystemExit", "KeyboardInterrupt", "StopIteration"):
        assert "rl_app.py" in result["traceback"]
    assert SECRET not in json.dumps(result)
    assert SECRET not in agent.log()
    # The process is well: the next rollout works.
    assert run_one(agent, s3, {"do": "echo"})["status_code"] == 200


def test_convertible_values_are_converted(agent: Agent, s3: Any) -> None:
    result = run_one(agent, s3, {"do": "convert"})
    assert (result["a"], result["b"], result["t"]) == (0.5, [0, 1, 2], "2024-02-29")


def test_live_keys_are_masked_in_results_and_other_data_is_not_touched(agent: Agent, s3: Any) -> None:
    payload = {"do": "echo", "text": "sk-x42 EMPTY python", "keyword_key": "python"}
    result = run_one(agent, s3, payload, api_key=SECRET, base_url="http://h/sessions/abcd.efgh/v1", max_tokens="42")
    assert result["text"] == "***42 EMPTY python"
    assert result["config"]["api_key"] == "***"
    assert result["config"]["base_url"] == "http://h/sessions/***/v1"


def test_a_session_runs_once(agent: Agent, s3: Any) -> None:
    sid, before = session(), agent.runs()
    payload = {"do": "echo", "sleep": 0.5, "_rollout": rollout()}
    first = agent.post(payload, sid)
    assert agent.post(payload, sid) == first  # while it runs
    agent.wait_healthy()
    assert agent.post(payload, sid) == first  # when it has finished
    agent.wait_healthy()
    assert agent.runs() == before + 1


def test_an_existing_result_is_neither_run_again_nor_overwritten(agent: Agent, s3: Any) -> None:
    sid, before = session(), agent.runs()
    s3.put_object(Bucket=BUCKET, Key=f"exp/in/{sid}.json", Body=b'{"earlier": true}', ContentType="application/json")
    agent.post({"do": "echo", "_rollout": rollout()}, sid)
    agent.wait_healthy()
    assert agent.runs() == before
    assert read(s3, f"exp/in/{sid}.json") == {"earlier": True}

    # Written by somebody else in the meantime: the first result stays.
    sid = session()
    agent.post({"do": "echo", "sleep": 1.0, "_rollout": rollout()}, sid)
    deadline = time.monotonic() + 10
    while agent.runs() == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    s3.put_object(Bucket=BUCKET, Key=f"exp/in/{sid}.json", Body=b'{"earlier": true}', ContentType="application/json")
    agent.wait_healthy()
    assert read(s3, f"exp/in/{sid}.json") == {"earlier": True}


REJECTIONS = [
    ("x", "_rollout: a JSON object is required", False),
    ([1], "_rollout: a JSON object is required", False),
    ({"exp_id": "e"}, "_rollout.input_id", False),
    (rollout(input_id="../x"), "_rollout.input_id", False),
    (rollout(exp_id=7), "_rollout.exp_id", False),
    (rollout(s3_bucket=""), "_rollout.s3_bucket", False),
    (rollout(base_url=7), "_rollout.base_url", True),
    (rollout(sampling_params="hot"), "_rollout.sampling_params", True),
]


@pytest.mark.parametrize(("bad", "reason", "written"), REJECTIONS)
def test_a_bad_rollout_is_rejected_with_status_200(agent: Agent, s3: Any, bad: Any, reason: str, written: bool) -> None:
    before, sid = agent.runs(), session()
    answer = agent.post({"do": "echo", "_rollout": bad}, sid)
    assert answer["status"] == "rejected"
    assert reason in answer["error"]
    agent.wait_healthy()
    assert agent.runs() == before
    assert ("result_key" in answer) is written
    if written:
        result = read(s3, answer["result_key"])
        assert (result["status_code"], result["outcome"]) == (500, "rejected")
        assert reason in result["stop_reason"]


def test_a_missing_bucket_is_named_in_the_log(agent: Agent) -> None:
    before = agent.runs()
    answer = agent.post({"do": "echo", "_rollout": rollout(s3_bucket="no-such-bucket")}, session())
    assert answer["status"] == "processing"
    agent.wait_healthy()
    assert "bucket 'no-such-bucket' does not exist" in agent.log()
    assert agent.runs() == before


@pytest.mark.parametrize("config", [{}, {"_rollout": None}, {"_rollout": {"base_url": "http://m/v1"}}])
def test_a_direct_call_gets_the_handlers_value(agent: Agent, config: dict[str, Any]) -> None:
    answer = agent.post({"do": "echo", "text": "hi", **config}, session())
    assert answer == {"rewards": 1.0, "text": "hi", "config": config.get("_rollout")}
    assert agent.post({"do": "list"}) == [1]


def test_a_failing_direct_call_is_an_ordinary_500(agent: Agent) -> None:
    for what in ("raise", "exit", "interrupt", "cancelled"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            agent.post({"do": what, "_rollout": {"api_key": None}})
        assert caught.value.code == 500
    assert agent.post({"do": "list"}) == [1]


def test_a_blocking_async_handler_blocks_neither_ping_nor_the_answer(s3: Any, tmp_path: Path) -> None:
    with start(s3, tmp_path, ASYNC) as agent:
        began = time.monotonic()
        agent.post({"do": "block", "sleep": 4.0, "_rollout": rollout()}, session())
        assert agent.ping() == "HealthyBusy"
        assert time.monotonic() - began < 3.5
        agent.wait_healthy()


def test_a_handler_that_cancels_its_task_still_has_a_result(s3: Any, tmp_path: Path) -> None:
    with start(s3, tmp_path, ASYNC) as agent:
        result = run_one(agent, s3, {"do": "cancel me"})
        assert result["status_code"] == 500
        assert "CancelledError" in result["stop_reason"]


@pytest.mark.parametrize("kind", [SYNC, ASYNC], ids=["sync", "async"])
def test_sigterm_writes_aborted_results(s3: Any, tmp_path: Path, kind: str) -> None:
    with start(s3, tmp_path, kind) as agent:
        keys = [
            agent.post({"do": "echo", "sleep": 60, "_rollout": rollout()}, session())["result_key"] for _ in range(3)
        ]
        deadline = time.monotonic() + 10
        while agent.runs() < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        agent.process.send_signal(signal.SIGTERM)
        agent.process.wait(timeout=10)
        for key in keys:
            result = read(s3, key)
            assert (result["status_code"], result["outcome"]) == (500, "runtime_failed")
            assert result["stop_reason"].startswith("aborted")


def test_payload_is_stored_on_request_with_secrets_masked(s3: Any, tmp_path: Path) -> None:
    with start(s3, tmp_path, SYNC, STORE="1") as agent:
        payload = {"do": "echo", "db": {"password": "pw1"}, "url": "http://u:pw2@h/", "keyword": "python"}
        result = run_one(agent, s3, payload, api_key=SECRET)
        assert result["payload"] == {
            "do": "echo",
            "db": {"password": "***"},
            "url": "http://u:***@h/",
            "keyword": "python",
            "_rollout": rollout(api_key="***"),
        }
        nan = agent.post(b'{"do": "echo", "x": NaN, "_rollout": ' + json.dumps(rollout()).encode() + b"}", session())
        agent.wait_healthy()
        assert read(s3, nan["result_key"])["payload"] == {"error": "not stored: payload.x: NaN is not JSON"}


def test_a_second_parameter_with_a_default_is_the_agents_own(s3: Any, tmp_path: Path) -> None:
    with start(s3, tmp_path, PLAIN) as agent:
        assert agent.post({}) == {"temperature": 0.7}
        assert run_one(agent, s3, {})["temperature"] == 0.7


def test_a_streaming_handler_streams_in_a_direct_call(s3: Any, tmp_path: Path) -> None:
    with start(s3, tmp_path, STREAM) as agent:
        assert agent.post({}) == "".join(f'data: {{"i": {i}}}\n\n' for i in range(3))
        assert "must return a dict, it returned async_generator" in run_one(agent, s3, {})["stop_reason"]


def test_the_trainer_is_notified_after_the_result_is_written(s3: Any, tmp_path: Path) -> None:
    seen: list[tuple[dict[str, Any], dict[str, Any]]] = []

    class Done(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            hint = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((hint, read(s3, hint["result_key"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Done) as server, start(s3, tmp_path, SYNC) as agent:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = run_one(agent, s3, {"do": "echo"}, notify_url=f"http://127.0.0.1:{server.server_port}/done")
        deadline = time.monotonic() + 10
        while not seen and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [(hint["result_key"], body) for hint, body in seen] == [(result["result_key"], result)]
        # A trainer that is gone, or a URL that is none, costs nothing.
        assert run_one(agent, s3, {"do": "echo"}, notify_url="http://127.0.0.1:9/done")["status_code"] == 200
        assert run_one(agent, s3, {"do": "echo"}, notify_url="file:///etc/passwd")["status_code"] == 200
        server.shutdown()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the AgentCore SDK
def test_handlers_that_cannot_be_called_are_refused_at_decoration() -> None:
    from agentcore_rl_toolkit import AgentCoreRLApp

    app = AgentCoreRLApp()

    def nothing() -> Any: ...

    bad: list[Callable[..., Any]] = [nothing, lambda a, b, c: {}, lambda a, *, needed: {}]
    for func in bad:
        with pytest.raises(TypeError, match=r"\(payload\) or \(payload, context\)"):
            app.rollout_entrypoint(func)

    def good(payload: Any) -> Any:
        return payload

    assert app.rollout_entrypoint(good) is good

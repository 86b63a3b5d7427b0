"""What the agent's side accepts, refuses and keeps to itself: real processes, the local S3."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app_support import Agent, FaultyS3, read, rollout, run_one, session, start

PROGRAM = """
import os
from pydantic import BaseModel, ConfigDict, Field, field_validator
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp(max_result_bytes=20_000, store_payload=os.environ.get("STORE") == "1")

class Step(BaseModel):
    n: int

class Task(BaseModel):
    model_config = ConfigDict(extra="forbid")
    prompt: str
    steps: list[Step] = Field(default_factory=list, max_length=3)
    level: int = 7
    api_key: str = ""

    @field_validator("prompt")
    @classmethod
    def known(cls, value):
        if value == "secret in the reason":
            raise ValueError("refused: hunter22-hunter22")
        return value

@app.rollout_entrypoint(payload_model=Task)
def agent(payload):
    with open("runs.txt", "a") as f:
        f.write("x")
    match payload["prompt"]:
        case "echo": return payload
        case "large": return {"rewards": 1.0, "transcript": "x" * 30_000, "small": 1}
        case "collision": return {"rewards": 1.0, "input_id": "mine"}
        case "payload": return {"rewards": 1.0, "payload": "mine"}
        case "environment": raise RuntimeError(str(dict(os.environ)))
        case "leak": return {"text": f"{payload['api_key']} {os.environ['SOME_SECRET']}", "hub_token": "hf_abcdefgh"}
        case "raise": raise RuntimeError(f"with {payload['api_key']} and AKIAIOSFODNN7EXAMPLE")
        case "shorten": Step(n=payload["api_key"])
        case "stream": return quoting(payload["api_key"])
        case "async stream": return quoting_async(payload["api_key"])
        case "generator": return (i for i in range(3))
    return {}

@app.entrypoint
def plain(payload, context):
    if payload == "raise":
        raise ValueError("plainly")
    if payload == "stream":
        return iter_it()
    return {"plain": payload, "session": context.session_id}

def quoting(key):
    yield 1
    raise ValueError(f"with {key}")

async def quoting_async(key):
    yield 1
    raise ValueError(f"with {key}")

def iter_it():
    yield 1
    yield 2

app.run()
"""

KEY = "sk-live-0123456789"
SECRET = "topsecret-0123456789"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyS3]:
    with FaultyS3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def agent(s3: FaultyS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    environment = {"SOME_SECRET": SECRET, "AWS_SECRET_ACCESS_KEY": "aws/0123456789+secret"}
    with start(s3.endpoint, tmp_path_factory.mktemp("agent"), PROGRAM, **environment) as running:
        yield running


# -- payload_model -----------------------------------------------------------------------------------------------

BAD: list[tuple[Any, str]] = [
    ({}, "prompt: Field required"),
    ({"prompt": 7}, "prompt: Input should be a valid string"),
    ({"prompt": "echo", "steps": [{"n": 1}, {"n": "x"}]}, "steps[1].n: Input should be a valid integer"),
    ({"prompt": "echo", "extra": 1}, "extra: Extra inputs are not permitted"),
    ({"prompt": "echo", "steps": [{"n": 1}] * 4}, "steps: List should have at most 3 items"),
]


@pytest.mark.parametrize(("payload", "reason"), BAD, ids=range(len(BAD)))
def test_a_payload_that_does_not_fit_the_model_is_rejected(
    s3: FaultyS3, agent: Agent, payload: dict[str, Any], reason: str
) -> None:
    before, sid = agent.runs(), session()
    answer = agent.post({**payload, "_rollout": rollout()}, sid)
    assert answer["status"] == "rejected"
    assert reason in answer["error"]
    assert answer["result_key"] == f"exp/in/{sid}.json"
    agent.wait_healthy()
    result = read(s3.client, answer["result_key"])
    assert (result["status_code"], result["outcome"], result["stop_reason"]) == (500, "rejected", answer["error"])
    assert agent.runs() == before


def test_the_models_values_reach_the_handler(s3: FaultyS3, agent: Agent) -> None:
    result = run_one(agent, s3.client, {"prompt": "echo", "steps": [{"n": "4"}]})
    assert (result["prompt"], result["steps"], result["level"]) == ("echo", [{"n": 4}], 7)
    assert result["_rollout"] == rollout()


def test_secrets_are_not_in_the_reason_of_a_rejection(s3: FaultyS3, agent: Agent) -> None:
    payload = {"prompt": "secret in the reason", "api_key": "hunter22-hunter22", "_rollout": rollout()}
    answer = agent.post(payload, session())
    assert "refused: ***" in answer["error"]
    agent.wait_healthy()
    assert "hunter22" not in json.dumps(read(s3.client, answer["result_key"])) + agent.log()


def test_a_bad_payload_and_a_bad_rollout_are_both_named(agent: Agent) -> None:
    assert "_rollout.input_id" in agent.post({"_rollout": rollout(input_id="a/b")}, session())["error"]


# -- plain entrypoint beside it ------------------------------------------------------------------------------------


def test_a_plain_entrypoint_serves_the_direct_calls(agent: Agent) -> None:
    sid = session()
    assert agent.post({"anything": 1}, sid) == {"plain": {"anything": 1}, "session": sid}
    assert agent.post([1, 2], sid) == {"plain": [1, 2], "session": sid}
    assert agent.post("stream") == "data: 1\n\ndata: 2\n\n"
    with pytest.raises(urllib.error.HTTPError) as caught:
        agent.post("raise")
    assert (caught.value.code, json.load(caught.value)) == (500, {"error": "plainly"})


# -- results that can't be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("large", r"result: 30,\d\d\d bytes of JSON, at most 20,000 are allowed"),
        ("large", r"the largest field is 'transcript' with 30,002$"),
        ("collision", r"^input_id: this name belongs to the result's address"),
        ("generator", r"^result: the handler must return a dict, it returned generator"),
    ],
)
def test_what_is_no_result_is_an_error_that_says_why(s3: FaultyS3, agent: Agent, prompt: str, reason: str) -> None:
    result = run_one(agent, s3.client, {"prompt": prompt})
    assert (result["status_code"], result["outcome"]) == (500, "agent_failed")
    assert re.search(reason, result["stop_reason"]), result["stop_reason"]
    assert "transcript" not in result


def test_a_stored_payload_does_not_cost_the_result(s3: FaultyS3, tmp_path: Path) -> None:
    with start(s3.endpoint, tmp_path, PROGRAM, STORE="1") as agent:
        result = run_one(agent, s3.client, {"prompt": "other", "api_key": "x" * 30_000})
        assert (result["status_code"], result["payload"]["api_key"]) == (200, "***")
        result = run_one(agent, s3.client, {"prompt": "y" * 30_000})
        assert (result["status_code"], result["payload"]) == (200, {"error": "not stored: over max_result_bytes"})
        result = run_one(agent, s3.client, {"prompt": "payload"})
        assert result["stop_reason"].startswith("payload: the request is stored under this name")
        assert result["payload"]["prompt"] == "payload"


# -- secrets ---------------------------------------------------------------------------------------------------------


def test_secrets_stay_out_of_results(s3: FaultyS3, agent: Agent) -> None:
    result = run_one(agent, s3.client, {"prompt": "leak", "api_key": KEY})
    assert result["text"] == "*** ***"
    assert result["hub_token"] == "***"


def test_secrets_stay_out_of_errors_tracebacks_and_logs(s3: FaultyS3, agent: Agent) -> None:
    result = run_one(agent, s3.client, {"prompt": "raise", "api_key": KEY})
    assert result["stop_reason"] == "RuntimeError: with *** and ***"
    everything = json.dumps(result) + json.dumps(run_one(agent, s3.client, {"prompt": "environment"})) + agent.log()
    assert "PATH" in everything
    for secret in (KEY, SECRET, "AKIAIOSFODNN7EXAMPLE", "aws/0123456789+secret"):
        assert secret not in everything


def test_what_pydantic_shows_of_a_long_secret_stays_out_too(s3: FaultyS3, agent: Agent) -> None:
    key = KEY + "abcdefghijklmnopqrstuvwxyz" + KEY[::-1]
    result = run_one(agent, s3.client, {"prompt": "shorten", "api_key": key})
    assert "input_value='***...***'" in result["stop_reason"]
    assert "input_value='***...***'" in result["traceback"]
    everything = json.dumps(result) + agent.log()
    assert not [key[i : i + 8] for i in range(len(key) - 7) if key[i : i + 8] in everything]


def test_the_session_id_may_be_the_key(s3: FaultyS3, agent: Agent) -> None:
    sid = session()
    answer = agent.post({"prompt": "echo", "_rollout": rollout(api_key=sid)}, sid)
    agent.wait_healthy()
    result = read(s3.client, answer["result_key"])
    assert (result["result_key"], result["_rollout"]["api_key"]) == (f"exp/in/{sid}.json", "***")


def test_a_failing_direct_call_keeps_the_keys_out_of_answer_and_log(s3: FaultyS3, tmp_path: Path) -> None:
    program = PROGRAM.replace("@app.entrypoint\n", "")
    with start(s3.endpoint, tmp_path, program) as agent:
        with pytest.raises(urllib.error.HTTPError) as caught:
            agent.post({"prompt": "raise", "api_key": KEY})
        assert json.load(caught.value) == {"error": "RuntimeError: with *** and ***"}
        assert "rl_app.py" in agent.log()
        assert KEY not in agent.log()
        assert agent.post({"prompt": 7}) == {"status": "rejected", "error": "prompt: Input should be a valid string"}
        for prompt in "stream", "async stream":
            answer = agent.post({"prompt": prompt, "api_key": KEY})
            assert answer.startswith("data: 1\n")
            assert "ValueError: with ***" in answer
        assert KEY not in agent.log()


# -- a good guest ------------------------------------------------------------------------------------------------------


def test_making_an_app_leaves_the_logging_of_the_process_alone() -> None:
    script = """
import io, json, logging
stream = io.StringIO()
logging.basicConfig(stream=stream, level=logging.WARNING, format="mine %(message)s")
logging.getLogger("other").setLevel(logging.ERROR)
def state():
    loggers = [logging.getLogger(), *(l for l in logging.root.manager.loggerDict.values() if hasattr(l, "handlers"))]
    # The AgentCore SDK gives its own logger a handler.
    return {l.name: (l.level, l.propagate, l.disabled, list(map(repr, l.handlers))) for l in loggers
            if not l.name.startswith("bedrock_agentcore")}
import agentcore_rl_toolkit.app as module, boto3
before = state()
module.AgentCoreRLApp()
after = {name: value for name, value in state().items() if name in before}
assert after == before, (before, after)
assert all(value[3] == [] for name, value in state().items() if name.startswith("agentcore_rl_toolkit"))
logging.getLogger("agentcore_rl_toolkit.app").warning("heard")
assert stream.getvalue().endswith("mine heard\\n")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_agents_side_needs_nothing_but_the_sdk_and_boto3() -> None:
    script = """
import sys
import agentcore_rl_toolkit.app
heavy = {"numpy", "aiohttp", "transformers", "tokenizers", "jinja2", "rich", "openai", "a2a", "httpx", "torch"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert not [name for name in sys.modules if name.startswith("agentcore_rl_toolkit.client")]
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)  # installs the distribution in an environment of its own
def test_under_the_opentelemetry_distribution(s3: FaultyS3, tmp_path: Path) -> None:
    """AgentCore's images start agents with ``opentelemetry-instrument``, which patches threads and loops."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    root = Path(__file__).parent.parent
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", str(root), "aws-opentelemetry-distro"],
        check=True,
        capture_output=True,
    )
    environment = {
        "OTEL_PYTHON_DISTRO": "aws_distro",
        "OTEL_PYTHON_CONFIGURATOR": "aws_configurator",
        "OTEL_TRACES_EXPORTER": "none",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        "AGENT_OBSERVABILITY_ENABLED": "true",
        "SOME_SECRET": SECRET,
    }
    argv = [str(folder / "bin" / "opentelemetry-instrument"), str(python)]
    with start(s3.endpoint, tmp_path / "agent", PROGRAM, argv=argv, **environment) as agent:
        assert run_one(agent, s3.client, {"prompt": "other"})["status_code"] == 200
        assert run_one(agent, s3.client, {"prompt": "raise"})["status_code"] == 500
        assert agent.post({"direct": 1})["plain"] == {"direct": 1}
        assert "Cannot run the event loop" not in agent.log()

"""Agents over A2A: the same entrypoint, client and outcomes, in the local runtime; and any other A2A client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from a2a.client import ClientConfig, ClientFactory
from a2a.client.card_resolver import A2ACardResolver
from a2a.helpers import get_artifact_text, get_message_text, new_data_part, new_message, new_text_message, new_text_part
from a2a.types import CancelTaskRequest, Message, Role, SendMessageRequest, StreamResponse, TaskState

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit._aws import ServiceError
from agentcore_rl_toolkit.errors import InvocationError, RolloutCancelled, RolloutRejected, SetupError
from agentcore_rl_toolkit.local import LocalAgentCore

PROGRAM = '''
import asyncio, os, time
from pydantic import BaseModel
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()

class Task(BaseModel):
    prompt: str

def note(text):
    with open(os.environ["NOTES"], "a") as file:
        file.write(text + "\\n")

async def slow(payload):
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        note("cancelled " + payload["prompt"])
        raise

def words():
    yield "one "
    yield "two"

@app.rollout_entrypoint(payload_model=Task)
def helper(payload, context):
    """Helps with everything."""
    note("ran " + str(context.session_id))
    match payload["prompt"].split()[0]:
        case "raise": raise ValueError("no, " + str(payload["_rollout"].get("api_key")))
        case "slow": return slow(payload)
        case "block": time.sleep(payload["seconds"])
        case "stream": return words()
        case "die": os._exit(9)
        case "text": return "just text"
    return {"rewards": 1.0, "payload": {k: v for k, v in payload.items() if k != "_rollout"}, "s": context.session_id}

if __name__ == "__main__":
    app.run_a2a()
'''


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAgentCore]:
    folder = tmp_path_factory.mktemp("a2a")
    (folder / "agent.py").write_text(PROGRAM)
    env = {"NOTES": str(folder / "data" / "notes"), "PYTHONWARNINGS": "ignore"}
    with LocalAgentCore("python agent.py", cwd=folder, data_dir=folder / "data", env=env, protocol="A2A") as runtime:
        patch = pytest.MonkeyPatch()
        for name, value in runtime.environment().items():
            patch.setenv(name, value)
        yield runtime
        patch.undo()


@pytest.fixture(scope="module")
def client(local: LocalAgentCore) -> Iterator[RolloutClient]:
    with RolloutClient(
        local.agent_runtime_arn, local.bucket, "exp", tps_limit=200, new_sessions_per_minute=None, transport="a2a"
    ) as made:
        yield made


def notes(local: LocalAgentCore) -> list[str]:
    file = local.data_dir / "notes"
    return file.read_text().splitlines() if file.exists() else []


def read(local: LocalAgentCore, key: str) -> dict[str, Any]:
    s3 = boto3.client("s3")
    try:
        body: dict[str, Any] = json.loads(s3.get_object(Bucket=local.bucket, Key=key)["Body"].read())
        return body
    finally:
        s3.close()


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


# -- RolloutClient --------------------------------------------------------------------------------------------------


def test_a_rollout_has_its_result_and_numbers_stay_what_they_are(client: RolloutClient) -> None:
    numbers = {"i": 3, "big": 2**60 + 1, "f": 1.0, "small": 0.1, "none": None, "deep": [{"n": 1}, "\u00e9\u2603"]}
    future = client.invoke({"prompt": "hello", **numbers})
    result = future.result(timeout=30)
    assert (result["status_code"], result["rewards"]) == (200, 1.0)
    assert result["payload"] == {"prompt": "hello", **numbers}
    assert type(result["payload"]["i"]) is int
    assert type(result["payload"]["f"]) is float
    assert result["s"] == future.session_id


def test_a_failure_is_the_same_error_object(client: RolloutClient) -> None:
    result = client.invoke({"prompt": "raise"}, api_key="sk-0123456789").result(timeout=30)
    assert (result["status_code"], result["outcome"]) == (500, "agent_failed")
    assert result["stop_reason"] == "ValueError: no, ***"
    assert "agent.py" in result["traceback"]


def test_a_rejection_names_the_field(client: RolloutClient) -> None:
    with pytest.raises(RolloutRejected, match="prompt: Field required"):
        client.invoke({"x": 1})


def test_a_batch_has_typed_items(client: RolloutClient, local: LocalAgentCore) -> None:
    payloads = [{"prompt": "raise" if i == 3 else "hello"} for i in range(6)]
    items = sorted(client.run_batch(payloads, max_concurrent_sessions=6, timeout=60), key=lambda item: item.index)
    assert [item.success for item in items] == [i != 3 for i in range(6)]
    wait_until(lambda: not local.sessions())


def test_a_cancelled_rollout_says_so_in_its_result(client: RolloutClient, local: LocalAgentCore) -> None:
    future = client.invoke({"prompt": "slow a"})
    wait_until(lambda: f"ran {future.session_id}" in notes(local))
    assert future.cancel() is True
    with pytest.raises(RolloutCancelled):
        future.result()
    assert "cancelled slow a" in notes(local)
    result = read(local, future.result_key)
    assert (result["status_code"], result["outcome"]) == (500, "cancelled")
    assert result["stop_reason"] == "cancelled by the client"
    assert not [s for s in local.sessions() if s.session_id == future.session_id]


def test_a_stopped_session_leaves_an_aborted_result(client: RolloutClient, local: LocalAgentCore) -> None:
    future = client.invoke({"prompt": "slow b"})
    wait_until(lambda: f"ran {future.session_id}" in notes(local))
    aws = boto3.client("bedrock-agentcore")
    aws.stop_runtime_session(agentRuntimeArn=local.agent_runtime_arn, runtimeSessionId=future.session_id)
    aws.close()
    result = future.result(timeout=30)
    assert (result["outcome"], result["stop_reason"].partition(":")[0]) == ("runtime_failed", "aborted")


def test_a_repeated_invoke_runs_once(client: RolloutClient, local: LocalAgentCore) -> None:
    sid, iid = str(uuid.uuid4()), "same"
    first = client.invoke({"prompt": "block", "seconds": 1.0}, session_id=sid, input_id=iid)
    second = client.invoke({"prompt": "block", "seconds": 1.0}, session_id=sid, input_id=iid)
    assert second.result(timeout=30)["rewards"] == 1.0
    first.cancel()
    assert notes(local).count(f"ran {sid}") == 1


def test_a_lost_agent_is_told_and_a_task_that_was_asked_about_can_be_cancelled(local: LocalAgentCore) -> None:
    with RolloutClient(
        local.agent_runtime_arn, local.bucket, "exp", tps_limit=None, transport="a2a", probe_interval=0.3
    ) as client:
        with pytest.raises(InvocationError, match="lost its rollout"):
            client.invoke({"prompt": "die"}).result(timeout=60)
        future = client.invoke({"prompt": "slow c"})
        time.sleep(2.0)
        assert not future.done()
        assert future.cancel() is True
    assert read(local, future.result_key)["outcome"] == "cancelled"


def test_the_task_of_a_session_that_has_gone_is_forgotten(client: RolloutClient) -> None:
    client._runtime._tasks["gone" * 10] = "task"  # type: ignore[attr-defined]
    with pytest.raises(ServiceError, match="404"):
        client._runtime.stop("gone" * 10)
    assert "gone" * 10 not in client._runtime._tasks  # type: ignore[attr-defined]


def test_the_agent_card(client: RolloutClient, local: LocalAgentCore) -> None:
    card = client.agent_card()
    assert (card.name, card.description) == ("helper", "Helps with everything.")
    assert card.capabilities.streaming
    assert card.supported_interfaces[0].url.startswith(local.endpoint_url)
    # And as anybody else asks AgentCore for it.
    aws = boto3.client("bedrock-agentcore")
    answer = aws.get_agent_card(agentRuntimeArn=local.agent_runtime_arn, runtimeSessionId=str(uuid.uuid4()))
    aws.close()
    assert answer["agentCard"]["name"] == "helper"


def test_transports_are_named(local: LocalAgentCore) -> None:
    with pytest.raises(SetupError, match="'http', 'a2a'"):
        RolloutClient(local.agent_runtime_arn, local.bucket, "exp", transport="smoke")  # type: ignore[arg-type]
    with (
        RolloutClient(local.agent_runtime_arn, local.bucket, "exp") as http,
        pytest.raises(SetupError, match="only A2A agents have a card"),
    ):
        http.agent_card()


# -- any other A2A client --------------------------------------------------------------------------------------------


@pytest.fixture
def session(local: LocalAgentCore) -> Iterator[str]:
    """The address of an agent's own server."""
    aws = boto3.client("bedrock-agentcore")
    sid = str(uuid.uuid4())
    aws.get_agent_card(agentRuntimeArn=local.agent_runtime_arn, runtimeSessionId=sid)
    port = next(s.port for s in local.sessions() if s.session_id == sid)
    yield f"http://127.0.0.1:{port}"
    aws.stop_runtime_session(agentRuntimeArn=local.agent_runtime_arn, runtimeSessionId=sid)
    aws.close()


async def talk(url: str, message: Message, *, streaming: bool) -> AsyncIterator[StreamResponse]:
    async with httpx.AsyncClient(timeout=30) as http:
        card = await A2ACardResolver(http, url).get_agent_card()
        for interface in card.supported_interfaces:
            interface.url = url + "/"  # the card leads through AgentCore, which wants signatures
        made = ClientFactory(ClientConfig(streaming=streaming, httpx_client=http)).create(card)
        async for event in made.send_message(SendMessageRequest(message=message)):
            yield event


@pytest.mark.parametrize(
    ("message", "artifact"),
    [
        (new_text_message("text please", role=Role.ROLE_USER), "just text"),
        (new_message([new_data_part({"prompt": "text"})], role=Role.ROLE_USER), "just text"),
        (new_message([new_text_part('{"prompt": "text"}', "application/json")], role=Role.ROLE_USER), "just text"),
        (new_text_message("stream please", role=Role.ROLE_USER), "one \ntwo"),
    ],
    ids=["text", "data", "json", "stream"],
)
async def test_a_direct_message_is_a_task_with_the_handlers_value(
    session: str, message: Message, artifact: str
) -> None:
    events = [event async for event in talk(session, message, streaming=False)]
    task = events[-1].task
    assert task.status.state == TaskState.TASK_STATE_COMPLETED, task
    assert get_artifact_text(task.artifacts[0]) == artifact


async def test_a_streaming_handler_streams(session: str) -> None:
    message = new_text_message("stream please", role=Role.ROLE_USER)
    events = [event async for event in talk(session, message, streaming=True)]
    chunks = [get_artifact_text(e.artifact_update.artifact) for e in events if e.HasField("artifact_update")]
    assert chunks == ["one ", "two"]
    assert events[-1].status_update.status.state == TaskState.TASK_STATE_COMPLETED


@pytest.mark.parametrize(
    ("message", "state", "reason"),
    [
        (new_text_message("raise", role=Role.ROLE_USER), TaskState.TASK_STATE_FAILED, "KeyError"),
        (
            new_message([new_data_part({"x": 1})], role=Role.ROLE_USER),
            TaskState.TASK_STATE_REJECTED,
            "prompt: Field required",
        ),
        (
            new_message([new_text_part("{", "application/json")], role=Role.ROLE_USER),
            TaskState.TASK_STATE_FAILED,
            "no JSON",
        ),
    ],
    ids=["raises", "rejected", "malformed"],
)
async def test_a_direct_message_that_fails(session: str, message: Message, state: TaskState, reason: str) -> None:
    task = [event async for event in talk(session, message, streaming=False)][-1].task
    assert task.status.state == state
    assert reason in get_message_text(task.status.message)


async def test_a_rollout_is_a_task_that_ends_with_the_result(session: str, local: LocalAgentCore) -> None:
    config = {"exp_id": "exp", "input_id": "task", "s3_bucket": local.bucket}
    text = json.dumps({"prompt": "block", "seconds": 0.5, "_rollout": config})
    message = new_message([new_text_part(text, "application/json")], role=Role.ROLE_USER)
    message.context_id = "context"
    events = []
    async for event in talk(session, message, streaming=True):
        if not events:
            async with httpx.AsyncClient() as http:
                ping = await http.get(f"{session}/ping")
            assert ping.json()["status"] == "HealthyBusy"
        events.append(event)
    answer = json.loads(get_message_text(events[0].task.status.message))
    assert (answer["status"], answer["result_key"]) == ("processing", "exp/task/context.json")
    result = json.loads(get_artifact_text(events[1].artifact_update.artifact))
    assert result == read(local, answer["result_key"])
    assert events[-1].status_update.status.state == TaskState.TASK_STATE_COMPLETED


async def test_a_rollout_whose_result_can_not_be_written_is_a_failed_task(session: str) -> None:
    config = {"exp_id": "exp", "input_id": "task", "s3_bucket": "nowhere"}
    text = json.dumps({"prompt": "hello", "_rollout": config})
    message = new_message([new_text_part(text, "application/json")], role=Role.ROLE_USER)
    status = [event async for event in talk(session, message, streaming=True)][-1].status_update.status
    assert status.state == TaskState.TASK_STATE_FAILED
    assert "not run, its result could not be written: bucket 'nowhere' does not exist" in get_message_text(
        status.message
    )


async def test_a_task_can_be_cancelled_by_anybody(session: str, local: LocalAgentCore) -> None:
    message = new_text_message("slow c", role=Role.ROLE_USER)
    async with httpx.AsyncClient(timeout=30) as http:
        card = await A2ACardResolver(http, session).get_agent_card()
        card.supported_interfaces[0].url = session + "/"
        made = ClientFactory(ClientConfig(streaming=False, polling=True, httpx_client=http)).create(card)
        task = [event async for event in made.send_message(SendMessageRequest(message=message))][-1].task
        assert task.status.state == TaskState.TASK_STATE_WORKING
        wait_until(lambda: f"ran {task.context_id}" in notes(local))
        cancelled = await made.cancel_task(CancelTaskRequest(id=task.id))
    assert cancelled.status.state == TaskState.TASK_STATE_CANCELED
    wait_until(lambda: "cancelled slow c" in notes(local))


def test_the_http_contract_is_served_beside_it(session: str) -> None:
    body = json.dumps({"prompt": "text"}).encode()
    request = urllib.request.Request(f"{session}/invocations", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        assert json.load(response) == "just text"


# -- extras and settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("AgentCoreRLApp().run_a2a()", "a2a-server"),
        (
            "RolloutClient('arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/a-0123456789',"
            " 'b', 'e', transport='a2a')",
            "a2a",
        ),
    ],
    ids=["server", "client"],
)
def test_a_missing_extra_is_named(code: str, extra: str) -> None:
    script = f"import sys; sys.modules['a2a'] = None\nfrom agentcore_rl_toolkit import *\n{code}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert f"pip install 'agentcore-rl-toolkit[{extra}]'" in done.stderr


def test_an_app_without_an_entrypoint_is_named() -> None:
    script = "from agentcore_rl_toolkit import *\nAgentCoreRLApp().run_a2a()"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert "SetupError: run_a2a() serves the function decorated with @app.rollout_entrypoint" in done.stderr


def test_the_command_line_reads_dotenv_but_the_environment_wins(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("AGENTCORE_AGENT_ARN=arn:from-the-file\nAGENTCORE_S3_BUCKET=bucket\n")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "x"}\n')
    command = [sys.executable, "-m", "agentcore_rl_toolkit", "eval", "--data", "tasks.jsonl", "--out", "out"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AGENTCORE_")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "arn:from-the-file" in done.stderr
    environment["AGENTCORE_AGENT_ARN"] = "arn:from-the-environment"
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "arn:from-the-environment" in done.stderr

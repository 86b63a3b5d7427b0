"""The local AgentCore Runtime as an unmodified boto3 client sees it: real processes, real HTTP."""

from __future__ import annotations

import copy
import http.client
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
import pytest
from botocore.config import Config
from botocore.eventstream import EventStreamBuffer
from botocore.exceptions import ClientError
from moto.core.eventstream import EventStreamEncoder

from agentcore_rl_toolkit.errors import SetupError
from agentcore_rl_toolkit.local import Lifecycle, LocalAgentCore, Quotas, eventstream
from processes import marked

AGENT = """
import os, signal, subprocess, sys, time
from bedrock_agentcore import BedrockAgentCoreApp, PingStatus
from helper_beside_the_agent import HELP

app = BedrockAgentCoreApp()

@app.entrypoint
def invoke(payload, context):
    do = payload.get("do")
    if do == "exit":
        print("last words"); os._exit(3)
    if do == "raise":
        raise RuntimeError(f"boom {payload.get('api_key')}")
    if do == "stream":
        return ({"i": i, "time": time.time(), "last": time.sleep(0.3)} for i in range(3))
    if do == "busy":
        app.force_ping_status(PingStatus.HEALTHY_BUSY)
    if do == "stubborn":
        os.kill(os.getpid(), signal.SIGUSR1)
    if do == "sleep":
        time.sleep(payload["seconds"])
    if do == "break off":
        def broken():
            yield "x" * 10
            os._exit(4)
        return broken()
    if do == "spawn":  # a grandchild that ignores SIGTERM; with "leave" also out of the process group
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
        command = [sys.executable, "-c", code]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=payload["leave"])
        child.stdout.readline()
        return {"child": child.pid}
    return {
        "pid": os.getpid(), "cwd": os.getcwd(), "session": context.session_id, "argv": sys.argv, "help": HELP,
        "main": __name__, "size": len(payload.get("blob", "")), "env": os.environ.get("OF_THE_TEST"),
        "headers": context.request_headers,
    }

def become_stubborn(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

signal.signal(signal.SIGUSR1, become_stubborn)
time.sleep(float(os.environ.get("START_SECONDS", 0)))
app.run(port=int(os.environ["AGENTCORE_RL_PORT"]))
"""


@pytest.fixture(scope="module")
def agent_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("an agent")  # with a space
    (directory / "rl_app.py").write_text(AGENT)
    (directory / "helper_beside_the_agent.py").write_text("HELP = 42\n")
    return directory


@pytest.fixture(scope="module", params=["fork"])
def local(request: pytest.FixtureRequest, agent_dir: Path) -> Iterator[LocalAgentCore]:
    with LocalAgentCore(
        "python rl_app.py --flag", cwd=agent_dir, start=request.param, env={"OF_THE_TEST": "yes"}
    ) as local:
        yield local


both_ways = pytest.mark.parametrize("local", ["fork", "process"], indirect=True)


class Client:
    """boto3 with nothing but environment variables set, and without retries."""

    def __init__(self, local: LocalAgentCore) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in local.environment().items():
                patch.setenv(name, value)
            config = Config(retries={"total_max_attempts": 1}, read_timeout=30, max_pool_connections=50)
            self.boto = boto3.session.Session().client("bedrock-agentcore", config=config)
        self.arn = local.agent_runtime_arn

    def at(self, arn: str) -> Client:
        other = copy.copy(self)
        other.arn = arn
        return other

    def raw(self, payload: Any, session: str, **arguments: Any) -> dict[str, Any]:
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        return self.boto.invoke_agent_runtime(
            agentRuntimeArn=self.arn, runtimeSessionId=session, payload=body, **arguments
        )

    def invoke(self, session: str, do: str | None = None, **payload: Any) -> dict[str, Any]:
        return json.loads(self.raw({"do": do, **payload}, session)["response"].read())

    def stop(self, session: str) -> None:
        self.boto.stop_runtime_session(agentRuntimeArn=self.arn, runtimeSessionId=session)

    def command(self, session: str, command: str, **body: Any) -> tuple[str, str, dict[str, Any]]:
        answer = self.boto.invoke_agent_runtime_command(
            agentRuntimeArn=self.arn, runtimeSessionId=session, body={"command": command, **body}
        )
        events = [event["chunk"] for event in answer["stream"]]
        assert events[0] == {"contentStart": {}}
        deltas = [event["contentDelta"] for event in events[1:-1]]
        out, err = ("".join(delta.get(name, "") for delta in deltas) for name in ("stdout", "stderr"))
        return out, err, events[-1]["contentStop"]

    def error(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, int, str]:
        """The modelled exception that a call raises: its type, HTTP status, message."""
        with pytest.raises(ClientError) as caught:
            call(*args, **kwargs)
        response: Any = caught.value.response
        name = response["Error"]["Code"]
        assert type(caught.value) is getattr(self.boto.exceptions, name), "not as botocore models it"
        return name, response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Message"]


@pytest.fixture(scope="module")
def client(local: LocalAgentCore) -> Client:
    return Client(local)


@pytest.fixture
def session() -> str:
    return f"session-{uuid.uuid4()}"


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


# -- invoke and stop -----------------------------------------------------------------------------------


@both_ways
def test_a_session_is_one_process_with_its_own_directory(
    local: LocalAgentCore, client: Client, session: str, agent_dir: Path
) -> None:
    first = client.raw({}, session)
    assert first["runtimeSessionId"] == session
    assert first["contentType"] == "application/json"
    body = json.loads(first["response"].read())
    again, other = client.invoke(session), client.invoke(session + "-other")
    assert body["pid"] == again["pid"] != other["pid"]
    assert body["session"] == session
    assert body["cwd"] == str(local.data_dir / "sessions" / session / "work") != other["cwd"]
    assert body["argv"] == [str(agent_dir / "rl_app.py"), "--flag"]
    assert (body["help"], body["main"], body["env"]) == (42, "__main__", "yes")
    assert os.getpgid(body["pid"]) == os.getsid(body["pid"]) == body["pid"]
    info = next(s for s in local.sessions() if s.session_id == session)
    assert (info.pid, info.state, info.agent_runtime_arn) == (body["pid"], "ready", local.agent_runtime_arn)
    for name in (session, session + "-other"):
        client.stop(name)
    assert not alive(body["pid"])
    assert client.invoke(session)["pid"] != body["pid"], "fresh compute"
    client.stop(session)


def test_stop_of_an_absent_session(client: Client, session: str) -> None:
    assert client.error(client.stop, session)[:2] == ("ResourceNotFoundException", 404)
    client.invoke(session)
    client.stop(session)
    assert client.error(client.stop, session)[:2] == ("ResourceNotFoundException", 404)


def test_without_a_session_id_botocore_makes_one(client: Client) -> None:
    answer = client.boto.invoke_agent_runtime(agentRuntimeArn=client.arn, payload=b"{}")
    assert json.loads(answer["response"].read())["session"] == answer["runtimeSessionId"]
    client.stop(answer["runtimeSessionId"])


def test_streams_are_passed_on_as_they_come(client: Client, session: str) -> None:
    client.invoke(session)
    answer = client.raw({"do": "stream"}, session)
    assert answer["contentType"].startswith("text/event-stream")
    lines = [(time.time(), line) for line in answer["response"].iter_lines(chunk_size=1) if line]
    arrived, events = [t for t, _ in lines], [json.loads(line.removeprefix(b"data: ")) for _, line in lines]
    assert [event["i"] for event in events] == [0, 1, 2]
    assert arrived[2] - arrived[0] > 0.3, "the first event must not wait for the last"
    client.stop(session)


def test_headers_reach_the_agent_but_not_the_signature(client: Client, session: str) -> None:
    answer = client.raw({}, session, baggage="k=v", traceParent="00-1")
    headers = json.loads(answer["response"].read())["headers"]
    if version("bedrock-agentcore").startswith("1.6."):
        assert headers is None  # that SDK hands on its own kind of headers only
    else:
        assert headers.items() >= {"baggage": "k=v", "traceparent": "00-1"}.items()
    seen = {name.lower() for name in client.invoke(session)["headers"] or {}}
    assert "authorization" not in seen
    client.stop(session)


# -- failures ------------------------------------------------------------------------------------------


def test_424_when_the_agent_answers_500(client: Client, session: str) -> None:
    name, status, message = client.error(client.invoke, session, "raise", api_key="sk-very-secret")
    assert (name, status) == ("RuntimeClientError", 424)
    assert "500" in message
    assert message.count("boom ***") > 1, "in the answer and in the log"
    assert "very-secret" not in message
    assert f"{session}/agent.log" in message
    assert client.invoke(session)["session"] == session, "the session lives on"
    client.stop(session)


@both_ways
def test_424_when_the_agent_dies_and_then_fresh_compute(client: Client, session: str) -> None:
    pid = client.invoke(session)["pid"]
    name, status, message = client.error(client.invoke, session, "exit")
    assert (name, status) == ("RuntimeClientError", 424)
    assert "exit code 3" in message
    assert "last words" in message
    assert client.invoke(session)["pid"] != pid
    client.stop(session)


def test_an_answer_that_breaks_off_is_not_taken_for_whole(client: Client, session: str) -> None:
    with pytest.raises(Exception, match=r"(?i)connection broken|incomplete|protocol|response payload"):
        client.raw({"do": "break off"}, session)["response"].read()


def test_a_command_may_hold_the_whole_program(tmp_path: Path) -> None:
    program = "from agentcore_rl_toolkit import AgentCoreRLApp; AgentCoreRLApp().run()" + "; pass" * 1000
    with LocalAgentCore(["python", "-c", program], cwd=tmp_path):
        pass  # its name would be too long for a file


def test_an_agent_that_never_comes_up(tmp_path: Path, session: str) -> None:
    (tmp_path / "a.py").write_text("import no_such_module")
    with LocalAgentCore("python a.py", cwd=tmp_path) as local:
        client = Client(local)
        name, status, message = client.error(client.invoke, session)
        assert (name, status) == ("RuntimeClientError", 424)
        assert "exited with code 1 before it answered /ping" in message
        assert "No module named 'no_such_module'" in message
        assert local.sessions() == []
    (tmp_path / "b.py").write_text("import time; time.sleep(60)")
    with LocalAgentCore("python b.py", cwd=tmp_path, lifecycle=Lifecycle(start_timeout=0.5)) as local:
        client = Client(local)
        assert "did not answer /ping within 0.5 s" in client.error(client.invoke, session)[2]


def test_409_while_a_session_starts(agent_dir: Path, session: str) -> None:
    with LocalAgentCore("python rl_app.py", cwd=agent_dir, env={"START_SECONDS": "1"}) as local:
        client, answers = Client(local), []
        first = threading.Thread(target=lambda: answers.append(client.invoke(session)))
        first.start()
        until(lambda: len(local.sessions()) == 1)
        assert client.error(client.invoke, session)[:2] == ("RetryableConflictException", 409)
        first.join()
        assert answers[0]["session"] == session


def test_a_session_can_be_stopped_while_it_starts(agent_dir: Path, session: str) -> None:
    with LocalAgentCore("python rl_app.py", cwd=agent_dir, env={"START_SECONDS": "30"}) as local:
        client, errors = Client(local), []
        first = threading.Thread(target=lambda: errors.append(client.error(client.invoke, session)))
        first.start()
        until(lambda: any(s.pid for s in local.sessions()))
        client.stop(session)
        first.join()
        assert errors[0][:2] == ("RuntimeClientError", 424)
        assert "stopped while it started" in errors[0][2]


def test_quotas(agent_dir: Path) -> None:
    sessions = [f"{uuid.uuid4()}" for _ in range(3)]
    quotas = Quotas(active_sessions=1, new_sessions_per_minute=2)
    with LocalAgentCore("python rl_app.py", cwd=agent_dir, quotas=quotas) as local:
        client = Client(local)
        client.invoke(sessions[0])
        assert client.error(client.invoke, sessions[1])[:2] == ("ServiceQuotaExceededException", 402)
        client.stop(sessions[0])
        client.invoke(sessions[1])
        client.stop(sessions[1])
        assert client.error(client.invoke, sessions[2])[:2] == ("ThrottlingException", 429)
    with LocalAgentCore("python rl_app.py", cwd=agent_dir, quotas=Quotas(tps=2)) as local:
        client = Client(local)
        client.invoke(sessions[0])
        results = [_status(lambda: client.invoke(sessions[0])) for _ in range(5)]
        assert 429 in results
        time.sleep(0.6)
        client.invoke(sessions[0])


def _status(call: Callable[[], Any]) -> int:
    try:
        call()
    except ClientError as error:
        return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
    return 200


def test_what_the_service_refuses(client: Client, session: str) -> None:
    invalid = ("ValidationException", 400)
    assert client.error(client.invoke, "x" * 257)[:2] == invalid
    assert client.error(client.raw, b"x" * 100_000_001, session)[:2] == invalid
    for body in ({"command": "x" * 65_537}, {"command": "ls", "timeout": 0}, {"command": "ls", "timeout": 3601}):
        assert client.error(client.command, session, **body)[:2] == invalid
    assert client.error(client.raw, {}, session, qualifier="other")[:2] == ("ResourceNotFoundException", 404)
    nowhere = client.at(client.arn.replace("runtime/", "runtime/no"))
    assert client.error(nowhere.invoke, session)[:2] == ("ResourceNotFoundException", 404)


def test_requests_that_botocore_would_not_send(local: LocalAgentCore) -> None:
    connection = http.client.HTTPConnection(local.endpoint_url.removeprefix("http://"))
    path = f"/runtimes/{quote(local.agent_runtime_arn, safe='')}/invocations"
    signed = {"X-Amzn-Bedrock-AgentCore-Runtime-Session-Id": "short", "Authorization": "any"}
    for headers, status, error in (
        (signed, 400, "ValidationException"),
        ({}, 403, "AccessDeniedException"),  # what a web page could send
        ({**signed, "Host": "evil.example"}, 403, "AccessDeniedException"),
    ):
        connection.request("POST", path, b"{}", headers)
        answer = connection.getresponse()
        assert (answer.status, answer.headers["x-amzn-ErrorType"]) == (status, error)
        assert {"message"} <= set(json.loads(answer.read())) <= {"message", "reason"}
    connection.close()


def test_a_large_payload(client: Client, session: str) -> None:
    assert client.invoke(session, blob="x" * 20_000_000)["size"] == 20_000_000
    client.stop(session)


# -- lifecycle -----------------------------------------------------------------------------------------


def test_idle_sessions_are_reclaimed_and_busy_ones_are_not(agent_dir: Path) -> None:
    idle, busy, working = (f"{name}-{uuid.uuid4()}" for name in ("idle", "busy", "working"))
    lifecycle = Lifecycle(idle_timeout=1, ping_interval=0.2)
    with LocalAgentCore("python rl_app.py", cwd=agent_dir, lifecycle=lifecycle) as local:
        client = Client(local)
        client.invoke(busy, "busy")
        client.invoke(idle)
        assert client.invoke(working, "sleep", seconds=2.5)["session"] == working, "a request keeps it alive"
        assert {s.session_id for s in local.sessions()} == {busy, working}
        until(lambda: {s.session_id for s in local.sessions()} == {busy})


def test_an_advancing_time_of_last_update_keeps_a_session(tmp_path: Path, session: str) -> None:
    (tmp_path / "a.py").write_text(PLAIN.replace("'moment'", "time.time()"))
    (tmp_path / "b.py").write_text(PLAIN)
    lifecycle = Lifecycle(idle_timeout=0.6, ping_interval=0.2)
    for script, survives in (("a.py", True), ("b.py", False)):
        with LocalAgentCore(f"python {script}", cwd=tmp_path, lifecycle=lifecycle) as local:
            Client(local).invoke(session)
            time.sleep(1.5)
            assert [s.session_id for s in local.sessions()] == ([session] if survives else [])


def test_the_maximum_lifetime_ends_a_busy_session(agent_dir: Path, session: str) -> None:
    with LocalAgentCore("python rl_app.py", cwd=agent_dir, lifecycle=Lifecycle(max_lifetime=1.0)) as local:
        Client(local).invoke(session, "busy")
        until(lambda: not local.sessions())


@both_ways
@pytest.mark.parametrize("leave", [False, True])
def test_stop_kills_a_grandchild_that_ignores_sigterm(client: Client, session: str, leave: bool) -> None:
    child = client.invoke(session, "spawn", leave=leave)["child"]
    assert alive(child)
    client.stop(session)
    until(lambda: not alive(child), 1)


def test_sigkill_after_the_grace_period(tmp_path: Path, session: str) -> None:
    (tmp_path / "a.py").write_text("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + PLAIN)
    with LocalAgentCore("python a.py", cwd=tmp_path, lifecycle=Lifecycle(stop_grace=0.5)) as local:
        client = Client(local)
        pid = client.invoke(session)["pid"]
        start = time.monotonic()
        client.stop(session)
        assert 0.5 <= time.monotonic() - start < 3
        assert not alive(pid)


def test_an_agent_that_hangs_can_be_stopped(agent_dir: Path, session: str) -> None:
    lifecycle = Lifecycle(stop_grace=0.3, ping_interval=0.05)
    with LocalAgentCore("python rl_app.py", cwd=agent_dir, lifecycle=lifecycle) as local:
        client = Client(local)
        pid = client.invoke(session)["pid"]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.2)  # a ping is under way now
        start = time.monotonic()
        client.stop(session)
        assert time.monotonic() - start < 3
        assert not alive(pid)


# -- commands ------------------------------------------------------------------------------------------


def test_commands(local: LocalAgentCore, client: Client, session: str) -> None:
    out, err, stop = client.command(session, "pwd; echo $PORT; echo oops >&2; exit 7")
    info = next(s for s in local.sessions() if s.session_id == session)
    assert out.splitlines() == [str(info.work), str(info.port)], "a command may be the first contact"
    assert (err, stop) == ("oops\n", {"exitCode": 7, "status": "COMPLETED"})
    assert client.command(session, r"printf '\xe2\x82'; sleep 0.3; printf '\xac'; printf '\xff'")[0] == "€\ufffd"
    assert client.command(session, "kill -9 $$")[2] == {"exitCode": 137, "status": "COMPLETED"}
    assert client.command(session, "echo begun; sleep 60", timeout=1)[::2] == (
        "begun\n",
        {"exitCode": -1, "status": "TIMED_OUT"},
    )
    out, _, stop = client.command(session, "sleep 600 & echo $!")  # does not wait for the background child
    assert stop["exitCode"] == 0
    assert alive(int(out)), "which goes on, in the session"
    client.stop(session)
    until(lambda: not alive(int(out)), 1)


def test_events_stay_below_64_kb_and_lose_nothing(local: LocalAgentCore, client: Client, session: str) -> None:
    command = r"head -c 300000 /dev/zero | tr '\0' '\1'; seq 100000"
    connection = http.client.HTTPConnection(local.endpoint_url.removeprefix("http://"))
    path = f"/runtimes/{quote(local.agent_runtime_arn, safe='')}/commands"
    headers = {"X-Amzn-Bedrock-AgentCore-Runtime-Session-Id": session, "Authorization": "any"}
    connection.request("POST", path, json.dumps({"command": command}), headers)
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "application/vnd.amazon.eventstream"
    buffer = EventStreamBuffer()
    buffer.add_data(answer.read())
    frames = list(buffer)
    assert max(frame.prelude.total_length for frame in frames) <= 65_536
    bodies = [json.loads(frame.payload) for frame in frames]
    out = "".join(body.get("contentDelta", {}).get("stdout", "") for body in bodies)
    assert out == "\1" * 300_000 + "".join(f"{i}\n" for i in range(1, 100_001))
    connection.close()
    client.stop(session)


def test_frames_are_what_other_implementations_write_and_read() -> None:
    body = {"contentDelta": {"stdout": "é\n"}}
    payload = json.dumps(body, ensure_ascii=False).encode()
    headers = {":event-type": "chunk", ":message-type": "event", ":content-type": "application/json"}
    assert eventstream.event("chunk", body) == EventStreamEncoder().encode_message(headers, payload)
    buffer = EventStreamBuffer()
    buffer.add_data(eventstream.event("chunk", body) + eventstream.exception("throttlingException", "slow"))
    first, second = buffer
    assert (first.headers, json.loads(first.payload)) == (headers, body)
    assert second.headers[":exception-type"] == "throttlingException"


# -- other agents and registration ---------------------------------------------------------------------

PLAIN = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.answer({"status": "Healthy", "time_of_last_update": 'moment'})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"pid": os.getpid(), "who": os.environ.get("WHO")})
    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


def test_an_app_that_knows_nothing_of_the_toolkit(agent_dir: Path, tmp_path: Path, session: str) -> None:
    (tmp_path / "plain_app.py").write_text(
        textwrap.dedent("""
        from bedrock_agentcore import BedrockAgentCoreApp
        app = BedrockAgentCoreApp()
        @app.entrypoint
        async def invoke(payload):
            return {"got": payload}
    """)
    )
    with LocalAgentCore("uvicorn plain_app:app --port {port}", cwd=tmp_path) as local:
        assert Client(local).invoke(session, "x") == {"got": {"do": "x"}}


def test_numpy_does_not_prevent_forks_and_each_fork_has_its_own_random_numbers(
    tmp_path: Path, session: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.py").write_text("import numpy as np\n" + PLAIN.replace('os.environ.get("WHO")', "np.random.rand()"))
    with LocalAgentCore("python a.py", cwd=tmp_path) as local:
        assert caplog.text == ""
        client = Client(local)
        assert client.invoke(session)["who"] != client.invoke(session + "2")["who"]


def test_imports_that_start_threads_fall_back_to_processes(
    tmp_path: Path, session: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
    )
    (tmp_path / "a.py").write_text("import threaded\n" + PLAIN)
    with LocalAgentCore("python a.py", cwd=tmp_path) as local:
        assert "the imports of a.py start 1 threads" in caplog.text
        pid = Client(local).invoke(session)["pid"]
        assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 2, "the agent has its thread"


def test_create_and_get_agent_runtime(
    local: LocalAgentCore, tmp_path: Path, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text(PLAIN)
    environment = local.environment()
    for name in (
        "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE_CONTROL",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_REGION",
    ):
        monkeypatch.setenv(name, environment[name])
    control = boto3.session.Session().client("bedrock-agentcore-control", region_name="us-east-1")
    request: dict[str, Any] = {
        "agentRuntimeArtifact": {"containerConfiguration": {"containerUri": "0.dkr.ecr.us-east-1.amazonaws.com/x:1"}},
        "roleArn": "arn:aws:iam::000000000000:role/x",
        "networkConfiguration": {"networkMode": "PUBLIC"},
        "lifecycleConfiguration": {"idleRuntimeSessionTimeout": 60, "maxLifetime": 120},
    }
    variables = {"AGENTCORE_RL_COMMAND": "python a.py", "AGENTCORE_RL_CWD": str(tmp_path), "WHO": "me"}
    name = f"made_{uuid.uuid4().hex[:8]}"
    created = control.create_agent_runtime(agentRuntimeName=name, environmentVariables=variables, **request)
    assert created["status"] == "READY"
    found = control.get_agent_runtime(agentRuntimeId=created["agentRuntimeId"])
    assert found["agentRuntimeArn"] == created["agentRuntimeArn"]
    assert found["agentRuntimeArtifact"] == request["agentRuntimeArtifact"]
    assert found["lifecycleConfiguration"] == request["lifecycleConfiguration"]
    client = Client(local).at(created["agentRuntimeArn"])
    assert client.invoke(session)["who"] == "me"
    client.stop(session)
    for change, error in (
        ({"agentRuntimeName": name, "environmentVariables": variables}, "ConflictException"),
        ({"agentRuntimeName": name + "2", "environmentVariables": {}}, "ValidationException"),
        ({"agentRuntimeName": "a b", "environmentVariables": variables}, "ValidationException"),
    ):
        with pytest.raises(getattr(control.exceptions, error)):
            control.create_agent_runtime(**{**request, **change})
    with pytest.raises(control.exceptions.ResourceNotFoundException):
        control.get_agent_runtime(agentRuntimeId="none-0123456789")


def test_setup_errors_say_what_to_do(tmp_path: Path) -> None:
    for arguments, message in (
        ({"agent": "python no_such_file.py"}, "set cwd"),
        ({"agent": "no-such-command"}, "not a command"),
        ({"agent": ""}, "empty"),
        ({"agent": "python 'rl_app.py"}, "No closing quotation"),
        ({"agent": "python rl_app.py", "cwd": tmp_path / "nowhere"}, "nowhere' is no directory"),
        ({"port": 99999}, "choose another port"),
        ({"agent": "sleep 1", "start": "fork"}, "python file.py"),
        ({"start": "magic"}, "'fork', 'process' or None"),
    ):
        with pytest.raises(SetupError, match=message), LocalAgentCore(**{"cwd": tmp_path, **arguments}):  # type: ignore[arg-type]
            pass
    with pytest.raises(SetupError, match="idle_timeout: -1"):
        Lifecycle(idle_timeout=-1)
    with LocalAgentCore() as local:
        with pytest.raises(SetupError, match="no agent is registered"):
            _ = local.agent_runtime_arn
        taken = int(local.endpoint_url.rpartition(":")[2])
        with pytest.raises(SetupError, match="choose another port"), LocalAgentCore(port=taken):
            pass


def test_a_script_is_looked_for_in_cwd_alone(
    agent_dir: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(agent_dir)  # it is here, but sessions would not find it
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with pytest.raises(SetupError, match="set cwd"), LocalAgentCore("python rl_app.py", cwd=elsewhere):
        pass


# -- nothing stays behind ------------------------------------------------------------------------------


def serve(agent_dir: Path, mark: str) -> tuple[subprocess.Popen[str], dict[str, str], str]:
    """``agentcore-rl local`` in a process of its own; what it prints for clients."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentcore_rl_toolkit", "local", "--agent", "python rl_app.py", "--cwd", str(agent_dir),
         "--env", f"MARK={mark}", "--data-dir", str(agent_dir / mark)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    exports, arn = {}, ""
    while not arn:
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        if line.strip().startswith("export"):
            exports |= dict(pair.split("=", 1) for pair in line.split("#")[0].split()[1:])
        elif line.startswith("agent runtime ARN"):
            arn = line.split()[-1]
    return process, exports, arn


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_command_line_leaves_no_process_behind(
    agent_dir: Path, session: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    mark = uuid.uuid4().hex
    process, exports, arn = serve(agent_dir, mark)
    try:
        for name, value in exports.items():
            monkeypatch.setenv(name, value)
        boto = boto3.session.Session().client("bedrock-agentcore")
        for leave in (False, True):
            payload = json.dumps({"do": "spawn", "leave": leave}).encode()
            boto.invoke_agent_runtime(agentRuntimeArn=arn, runtimeSessionId=f"{session}{leave}", payload=payload)
        assert len(marked(mark)) == 5, "the supervisor, two agents, a child of each"
        process.send_signal(number)
        _, log = process.communicate(timeout=20)
        assert process.returncode == (-number if number == signal.SIGKILL else 0)
        until(lambda: not marked(mark), 5)
        assert log.count(" started: pid") == 2
        assert log.count(" ended: ") == (0 if number == signal.SIGKILL else 2)
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_twice_quits_at_once(agent_dir: Path, session: str) -> None:
    mark = uuid.uuid4().hex
    process, exports, arn = serve(agent_dir, mark)
    environment = {**os.environ, **exports}
    script = f"""if True:
        import boto3, json
        boto3.client("bedrock-agentcore").invoke_agent_runtime(
            agentRuntimeArn="{arn}", runtimeSessionId="{session}", payload=json.dumps({{"do": "stubborn"}}))"""
    try:
        subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=30)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "Ctrl-C again" not in process.stderr.readline():
            pass
        assert len(marked(mark)) == 2, "the agent is in its grace period"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=5) == 130
        until(lambda: not marked(mark), 5)
    finally:
        process.kill()
        process.communicate()


def test_a_forked_copy_of_the_host_does_not_keep_agents_alive(agent_dir: Path, session: str) -> None:
    mark = uuid.uuid4().hex
    script = f"""if True:
        import json, os, subprocess, sys, time, uuid
        from agentcore_rl_toolkit.local import LocalAgentCore
        local = LocalAgentCore(
            "python rl_app.py", cwd={str(agent_dir)!r}, env={{"MARK": "{mark}"}}, data_dir={str(agent_dir / mark)!r}
        ).__enter__()
        os.fork() or time.sleep(30) or os._exit(0)  # a worker of the trainer: it holds every descriptor
        print("up", flush=True)
        time.sleep(60)"""
    host = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert host.stdout is not None
        assert host.stdout.readline() == b"up\n"
        assert len(marked(mark)) == 1
        host.kill()
        until(lambda: not marked(mark), 5)
    finally:
        os.killpg(host.pid, signal.SIGKILL)
        host.communicate()


def test_a_killed_supervisor_takes_its_agents_along(agent_dir: Path, session: str) -> None:
    mark = uuid.uuid4().hex
    with LocalAgentCore("python rl_app.py", cwd=agent_dir, env={"MARK": mark}) as local:
        client = Client(local)
        child = client.invoke(session, "spawn", leave=False)["child"]
        supervisor = int(Path(f"/proc/{local.sessions()[0].pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(supervisor, signal.SIGKILL)
        until(lambda: not marked(mark), 5)
        assert not alive(child)
        assert client.invoke(session)["session"] == session, "the next session gets a new supervisor"


def test_many_sessions_at_once(agent_dir: Path) -> None:
    with LocalAgentCore("python rl_app.py", cwd=agent_dir) as local:
        client, pids = Client(local), []
        threads = [
            threading.Thread(target=lambda: pids.append(client.invoke(str(uuid.uuid4()))["pid"])) for _ in range(40)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(pids)) == 40
    assert not any(map(alive, pids))

"""Agents in real processes, and an S3 that fails on demand: what the tests of the agent's side share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3
from aiohttp import web

from agentcore_rl_toolkit.local.s3 import LocalS3

BUCKET = "results"


class Agent:
    """An agent's process."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.url, self.process, self.folder = url, process, folder

    def post(self, payload: Any, session: str | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if session:
            headers["X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"] = session
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        request = urllib.request.Request(f"{self.url}/invocations", body, headers)
        with urllib.request.urlopen(request, timeout=20) as response:
            text = response.read().decode()
        return json.loads(text) if response.headers["Content-Type"].startswith("application/json") else text

    def ping(self) -> str:
        with urllib.request.urlopen(f"{self.url}/ping", timeout=5) as response:
            return json.load(response)["status"]

    def wait_healthy(self, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while self.ping() != "Healthy":
            assert time.monotonic() < deadline, "still busy\n" + self.log()
            time.sleep(0.02)

    def runs(self) -> int:
        path = self.folder / "runs.txt"
        return len(path.read_text()) if path.exists() else 0

    def log(self) -> str:
        return (self.folder / "agent.log").read_text()


@contextlib.contextmanager
def start(
    endpoint: str,
    folder: Path,
    program: str,
    *,
    argv: Sequence[str] = (sys.executable,),
    unset: Sequence[str] = (),
    **env: str,
) -> Iterator[Agent]:
    """Run ``program``, a file that ends in ``app.run()``, until the block ends. ``endpoint``: its S3."""
    folder.mkdir(exist_ok=True)
    (folder / "rl_app.py").write_text(textwrap.dedent(program))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "AGENTCORE_RL_PORT": str(port),
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "PYTHONWARNINGS": "ignore",
        **env,
    }
    environment = {name: value for name, value in environment.items() if name not in unset}
    with (folder / "agent.log").open("wb") as log:
        process = subprocess.Popen([*argv, "rl_app.py"], cwd=folder, env=environment, stdout=log, stderr=log)
    agent = Agent(f"http://127.0.0.1:{port}", process, folder)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                agent.ping()
                break
            except OSError:
                assert process.poll() is None, agent.log()
                assert time.monotonic() < deadline, agent.log()
                time.sleep(0.05)
        yield agent
    finally:
        process.kill()
        process.wait()


def rollout(**fields: Any) -> dict[str, Any]:
    return {"exp_id": "exp", "input_id": "in", "s3_bucket": BUCKET, **fields}


def session() -> str:
    return str(uuid.uuid4())


def read(s3: Any, key: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    answer = s3.get_object(Bucket=BUCKET, Key=key)
    assert answer["ContentType"] == "application/json"
    return json.loads(answer["Body"].read(), parse_constant=refuse)


def run_one(agent: Agent, s3: Any, payload: dict[str, Any], **config: Any) -> dict[str, Any]:
    sid = session()
    answer = agent.post({**payload, "_rollout": rollout(**config)}, sid)
    assert answer == {"status": "processing", "s3_bucket": BUCKET, "result_key": f"exp/in/{sid}.json", "probes": True}
    agent.wait_healthy()
    return read(s3, answer["result_key"])


# -- an S3 that fails on demand ---------------------------------------------------------------------------------

Fault = Callable[[web.Request, Callable[[], Awaitable[web.StreamResponse]]], Awaitable[web.StreamResponse]]


class FaultyS3:
    """The local S3 in a thread; ``fault`` answers in its stead while it is set."""

    def __init__(self, folder: Path) -> None:
        self.fault: Fault | None = None
        self.seen: list[str] = []
        """The method of every request."""
        self._app = LocalS3(folder, buckets=[BUCKET]).app()
        self._app.middlewares.append(self._answer)
        self._loop = asyncio.new_event_loop()
        self._runner = web.AppRunner(self._app, access_log=None, shutdown_timeout=0.1)

    @web.middleware
    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.seen.append(request.method)
        if self.fault is None:
            return await handler(request)
        return await self.fault(request, lambda: handler(request))

    def __enter__(self) -> FaultyS3:
        started: threading.Event = threading.Event()

        async def serve() -> None:
            await self._runner.setup()
            await web.TCPSite(self._runner, "127.0.0.1", 0).start()
            started.set()

        def run() -> None:
            self._loop.run_until_complete(serve())
            self._loop.run_forever()
            self._loop.run_until_complete(self._runner.cleanup())
            self._loop.close()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert started.wait(10)
        self.endpoint = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def s3_error(status: int, code: str) -> web.Response:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told to</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml")


def cut(request: web.Request) -> web.Response:
    """Reset the connection."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()

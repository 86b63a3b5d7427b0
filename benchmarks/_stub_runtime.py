"""The wire of AgentCore Runtime and the local S3, with a stub in place of agents: for the client's benchmark and tests.

Sessions are entries in a table. An invoke is answered after ``invoke_seconds``; ``payload["seconds"]`` later the result
is in S3. Nothing is limited. ``python _stub_runtime.py [invoke_seconds [read_seconds]]`` prints its addresses as one
line of JSON and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from aiohttp import web

from agentcore_rl_toolkit.local.limits import ServiceError
from agentcore_rl_toolkit.local.s3 import LocalS3
from agentcore_rl_toolkit.local.wire import SESSION_HEADER, errors
from agentcore_rl_toolkit.protocol import RolloutConfig

ARN = "arn:aws:bedrock-agentcore:us-east-1:000000000000:runtime/stub-0123456789"
BUCKET = "local"
_HOST = "127.0.0.1"


class StubRuntime:
    """``invoke_seconds``: until an invoke is answered; ``read_seconds``: until S3 answers a GET, HEAD or LIST."""

    def __init__(self, invoke_seconds: float = 0.0, read_seconds: float = 0.0) -> None:
        self._invoke_seconds, self._read_seconds = invoke_seconds, read_seconds
        self.counts: Counter[str] = Counter()
        self.open: dict[str, float] = {}
        """Running sessions and when they were first invoked."""
        self.most_open = self.runs = 0
        self._agents: dict[str, asyncio.Task[None]] = {}

    async def start(self, stack: AsyncExitStack) -> dict[str, str]:
        """Serve until the stack is closed; the environment variables that lead clients here."""
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        runtime = web.Application(middlewares=[errors], client_max_size=2**27)
        runtime.add_routes(
            [
                web.post("/runtimes/{arn}/invocations", self._invoke),
                web.post("/runtimes/{arn}/stopruntimesession", self._stop),
                web.get("/stats", self._stats),
            ]
        )
        s3 = LocalS3(Path(folder), buckets=[BUCKET]).app()
        s3.middlewares.append(self._count)
        self._s3_url = await listen(stack, s3)
        self._http = await stack.enter_async_context(aiohttp.ClientSession(headers={"Authorization": "stub"}))
        stack.push_async_callback(self._end)
        return {
            "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": await listen(stack, runtime),
            "AWS_ENDPOINT_URL_S3": self._s3_url,
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    async def _end(self) -> None:
        for task in self._agents.values():
            task.cancel()
        await asyncio.gather(*self._agents.values(), return_exceptions=True)

    async def _invoke(self, request: web.Request) -> web.Response:
        session_id, payload = request.headers[SESSION_HEADER], json.loads(await request.read())
        config = RolloutConfig.from_payload(payload)
        assert config is not None
        self.counts["invoke"] += 1
        if session_id not in self.open:
            self.open[session_id] = time.time()
            self.most_open = max(self.most_open, len(self.open))
        await asyncio.sleep(self._invoke_seconds)
        key = config.result_key(session_id)
        if session_id not in self._agents:
            self.runs += 1
            self._agents[session_id] = asyncio.create_task(self._agent(config, key, payload))
        return web.json_response({"status": "processing", "s3_bucket": config.s3_bucket, "result_key": key})

    async def _agent(self, config: RolloutConfig, key: str, payload: dict[str, object]) -> None:
        await asyncio.sleep(float(str(payload.get("seconds", 0.0))))
        result = {"status_code": 200, "rewards": 1.0, "text": payload.get("text"), "finished_at": time.time()}
        url = f"{self._s3_url}/{config.s3_bucket}/{key}"
        async with self._http.put(url, data=json.dumps(result), headers={"Content-Type": "application/json"}) as put:
            put.raise_for_status()
        if config.notify_url:
            body = {"s3_bucket": config.s3_bucket, "result_key": key}
            with contextlib.suppress(aiohttp.ClientError):
                async with self._http.post(config.notify_url, json=body):
                    pass

    async def _stop(self, request: web.Request) -> web.Response:
        session_id = request.headers[SESSION_HEADER]
        self.counts["stop"] += 1
        if self.open.pop(session_id, None) is None:
            raise ServiceError("ResourceNotFoundException", f"no session {session_id}")
        self._agents.pop(session_id).cancel()
        return web.json_response({})

    async def _stats(self, _request: web.Request) -> web.Response:
        return web.json_response({**self.counts, "open": len(self.open), "most_open": self.most_open})

    @web.middleware
    async def _count(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            return await handler(request)
        await asyncio.sleep(self._read_seconds)
        answer = await handler(request)
        kind = "list" if "list-type" in request.query else request.method.lower()
        self.counts[kind if answer.status < 400 or kind != "get" else "get_miss"] += 1
        return answer


async def listen(stack: AsyncExitStack, app: web.Application) -> str:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, _HOST, 0, backlog=1024).start()
    return f"http://{_HOST}:{runner.addresses[0][1]}"


async def _main() -> None:
    async with AsyncExitStack() as stack:
        print(json.dumps(await StubRuntime(*map(float, sys.argv[1:])).start(stack)), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main())

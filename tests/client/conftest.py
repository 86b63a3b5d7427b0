"""The stub runtime of the benchmarks, with a proxy that makes faults in front of its runtime and of its S3."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from agentcore_rl_toolkit import RolloutClient

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _stub_runtime import ARN, BUCKET, StubRuntime, listen

Forward = Callable[[], Awaitable[web.Response]]
Action = Callable[[web.Request, Forward], Awaitable[web.StreamResponse]]
Match = Callable[[web.Request], bool]


def answer(status: int, body: str = "", error: str = "") -> Action:
    """Answer for the server. ``error``: AgentCore's or S3's name of it."""

    async def act(request: web.Request, _: Forward) -> web.Response:
        text = body or (f"<Error><Code>{error}</Code></Error>" if error else "")
        return web.Response(status=status, text=text, headers={"x-amzn-ErrorType": error} if error else None)

    return act


async def reset(request: web.Request, _: Forward) -> web.StreamResponse:
    """Break the connection off."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def lose_answer(request: web.Request, forward: Forward) -> web.StreamResponse:
    """Let the server do it, and break off instead of its answer."""
    await forward()
    return await reset(request, forward)


def late(seconds: float) -> Action:
    """Let the server do it, and keep its answer for a while."""

    async def act(request: web.Request, forward: Forward) -> web.StreamResponse:
        real = await forward()
        await asyncio.sleep(seconds)
        return real

    return act


def delayed(seconds: float) -> Action:
    """Keep the request for a while before the server gets it."""

    async def act(request: web.Request, forward: Forward) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await forward()

    return act


def hang(seconds: float) -> Action:
    """Answer nothing for a while, then break off."""

    async def act(request: web.Request, forward: Forward) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await reset(request, forward)

    return act


def cut(keep: int) -> Action:
    """Announce the whole body, send its first ``keep`` bytes, break off."""

    async def act(request: web.Request, forward: Forward) -> web.StreamResponse:
        whole = await forward()
        assert isinstance(whole.body, bytes)
        if whole.status != 200:
            return whole
        part = web.StreamResponse(headers={"Content-Length": str(len(whole.body))})
        await part.prepare(request)
        await part.write(whole.body[:keep])
        await asyncio.sleep(0.01)
        return await reset(request, forward)

    return act


def garble(keep: int) -> Action:
    """A shorter body that looks complete."""

    async def act(_: web.Request, forward: Forward) -> web.StreamResponse:
        whole = await forward()
        assert isinstance(whole.body, bytes)
        return web.Response(body=whole.body[:keep]) if whole.status == 200 else whole

    return act


@dataclass
class Rule:
    match: Match
    action: Action
    times: float
    used: int = 0


@dataclass
class Proxy:
    """Forwards to ``target``, except where a rule has something else to do. ``log``: time, kind, path of requests."""

    target: str
    http: aiohttp.ClientSession
    rules: list[Rule] = field(default_factory=list)
    log: list[tuple[float, str, str]] = field(default_factory=list)

    def on(self, match: Match, action: Action, times: float = float("inf")) -> Rule:
        rule = Rule(match, action, times)
        self.rules.append(rule)
        return rule

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**27)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.log.append((time.monotonic(), kind(request), request.path))

        async def forward() -> web.Response:
            url = self.target + request.raw_path
            drop = {"host", "content-length", "connection"}
            headers = {name: value for name, value in request.headers.items() if name.lower() not in drop}
            body = await request.read()
            async with self.http.request(request.method, URL(url, encoded=True), headers=headers, data=body) as reply:
                kept = {n: v for n, v in reply.headers.items() if n.lower() in ("content-type", "x-amzn-errortype")}
                return web.Response(status=reply.status, body=await reply.read(), headers=kept)

        for rule in self.rules:
            if rule.used < rule.times and rule.match(request):
                rule.used += 1
                return await rule.action(request, forward)
        return await forward()


def kind(request: web.Request) -> str:
    """``invoke``, ``stop``, ``list`` or ``get``."""
    if request.method == "POST":
        return "invoke" if request.path.endswith("/invocations") else "stop"
    return "list" if "list-type" in request.query else "get"


def is_kind(*names: str) -> Match:
    return lambda request: kind(request) in names


def is_key(part: str) -> Match:
    """A GET of the result whose key contains ``part``."""
    return lambda request: kind(request) == "get" and part in request.path


@dataclass
class World:
    """The stub runtime and its two proxies."""

    stub: StubRuntime
    runtime: Proxy
    s3: Proxy
    clients: list[RolloutClient] = field(default_factory=list)

    def client(self, **options: Any) -> RolloutClient:
        defaults: dict[str, Any] = {"tps_limit": None, "new_sessions_per_minute": None, "exp_id": "exp"}
        client = RolloutClient(ARN, BUCKET, **{**defaults, **options})
        self.clients.append(client)
        return client


@contextmanager
def background() -> Iterator[tuple[AsyncExitStack, Callable[[Coroutine[Any, Any, Any]], Any]]]:
    """An event loop in a thread: a stack that is closed at the end, and a way to run coroutines there."""
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(20)

    try:
        yield stack, call
    finally:
        call(stack.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def put_proxies(stack: AsyncExitStack, environment: dict[str, str]) -> list[Proxy]:
    """In front of the runtime and of S3; ``environment`` leads to them from now on."""
    http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
    proxies = []
    for name in "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", "AWS_ENDPOINT_URL_S3":
        proxies.append(Proxy(environment[name], http))
        environment[name] = await listen(stack, proxies[-1].app())
    return proxies


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with background() as (stack, call):
        stub = StubRuntime()
        environment = call(stub.start(stack))
        made = World(stub, *call(put_proxies(stack, environment)))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield made
        for client in made.clients:
            client.close()

"""Serving a gateway over HTTP: routes, streaming, and a server on its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import web

from ..errors import GatewayError, SetupError
from .gateway import CallIdBook, RolloutGateway
from .parsed import Delta
from .sessions import Session
from .traces import TraceRecord, Turn
from .wires import Answer, OpenAIChat, Wire, WireRequest
from .wires.base import bad_request

logger = logging.getLogger(__name__)

MAX_BODY = 64 * 1024 * 1024
_RETRY_HEADER = "x-stainless-retry-count"
"""Set by the openai and anthropic SDKs; 1 or more on a request that they send again."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def gateway_app(gateway: RolloutGateway) -> web.Application:
    """The aiohttp application of a gateway, for your own event loop. Serve it with ``handler_cancellation=True``
    (``AppRunner(app, handler_cancellation=True)``), so that a client that hangs up aborts its engine call."""
    app = web.Application(client_max_size=MAX_BODY)
    chat = _chat_handler(gateway, OpenAIChat())
    models = _models_handler(gateway)
    for prefix in ("", "/sessions/{key}", "/sessions/{key}/v1"):
        app.router.add_post(f"{prefix}/v1/chat/completions", chat)
        app.router.add_get(f"{prefix}/v1/models", models)
    app.router.add_get("/healthz", _healthz)
    return app


def _chat_handler(gateway: RolloutGateway, wire: Wire) -> Handler:
    """The handler of one wire's chat endpoint. Errors have the wire's own shape, whatever raised them."""

    async def handle(http: web.Request) -> web.StreamResponse:
        try:
            session = gateway.sessions.get(_key(http))
            task = asyncio.current_task()
            assert task is not None
            session.requests.add(task)
            try:
                return await _serve_turn(gateway, wire, session, http)
            finally:
                session.requests.discard(task)
        except GatewayError as error:
            return _error_response(wire, error)
        except web.HTTPRequestEntityTooLarge:
            return _error_response(
                wire, GatewayError(413, f"the request is over {MAX_BODY} bytes", kind="request_too_large")
            )
        except Exception:
            logger.exception("a request failed inside the gateway")
            return _error_response(
                wire, GatewayError(500, "internal error of the gateway; see its log", kind="internal_error")
            )

    return handle


async def _serve_turn(gateway: RolloutGateway, wire: Wire, session: Session, http: web.Request) -> web.StreamResponse:
    request = wire.decode(await _json_body(http))
    request.model = request.model or gateway.model
    exchange = _Exchange(gateway, wire, session, request, http)
    return await (exchange.stream() if request.stream else exchange.whole())


class _Exchange:
    """One request and its response."""

    def __init__(
        self, gateway: RolloutGateway, wire: Wire, session: Session, request: WireRequest, http: web.Request
    ) -> None:
        self._gateway, self._wire, self._session = gateway, wire, session
        self._request, self._http = request, http
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._retry = _is_retry(http)

    async def whole(self) -> web.StreamResponse:
        turn = await self._gateway.take_turn(self._session, self._request, retry=self._retry)
        response = web.json_response(self._wire.encode(self._answer(turn)), dumps=_dumps)
        await response.prepare(self._http)
        await response.write_eof()
        self._session.tree.deliver(turn)
        return response

    async def stream(self) -> web.StreamResponse:
        call_ids = CallIdBook(self._gateway.renderer)
        encoder = self._wire.stream(self._id, self._created, self._request, call_ids)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

        async def send(deltas: list[Delta]) -> None:
            data = encoder.deltas(deltas)
            if not response.prepared:  # errors before the first delta still get a status of their own
                await response.prepare(self._http)
                data = encoder.start() + data
            await response.write(data)

        try:
            turn = await self._gateway.take_turn(
                self._session, self._request, retry=self._retry, call_ids=call_ids, on_deltas=send
            )
            await send([])
            await response.write(encoder.finish(self._answer(turn)))
        except GatewayError as error:
            if not response.prepared:
                raise
            await response.write(encoder.error(error))
            await response.write_eof()
            return response
        await response.write_eof()
        self._session.tree.deliver(turn)
        return response

    def _answer(self, turn: Turn) -> Answer:
        tokens = None
        if self._request.logprobs:
            decode = self._gateway.renderer.decode
            tokens = [(decode([i]), p) for i, p in zip(turn.output_ids, turn.logprobs, strict=True)]
        return Answer(
            id=self._id,
            created=self._created,
            model=self._request.model,
            message=turn.message,
            call_ids=turn.call_ids,
            finish_reason=turn.finish_reason,
            prompt_tokens=sum(len(t.new_ids) + len(t.output_ids) for t in turn.path()) - len(turn.output_ids),
            completion_tokens=len(turn.output_ids),
            tokens=tokens,
        )


def _models_handler(gateway: RolloutGateway) -> Handler:
    async def handle(http: web.Request) -> web.StreamResponse:
        model = {"id": gateway.model, "object": "model", "created": 0, "owned_by": "agentcore-rl-toolkit"}
        return web.json_response({"object": "list", "data": [model]})

    return handle


async def _healthz(_: web.Request) -> web.StreamResponse:
    return web.json_response({"status": "ok"})


def _key(http: web.Request) -> str | None:
    """The session key of a request: from the URL, else the Bearer token, else ``x-api-key``."""
    if key := http.match_info.get("key"):
        return key
    scheme, _, token = http.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return http.headers.get("x-api-key")


def _is_retry(http: web.Request) -> bool:
    count = http.headers.get(_RETRY_HEADER, "0")
    return (count.isdigit() and int(count) >= 1) or "Idempotency-Key" in http.headers


async def _json_body(http: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await http.read())
    except (ValueError, RecursionError) as error:
        raise bad_request("body", f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("body", "a JSON object is required")
    return body


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _error_response(wire: Wire, error: GatewayError) -> web.Response:
    headers = {"Retry-After": "1"} if error.status == 503 else None
    return web.json_response(wire.encode_error(error), status=error.status, headers=headers, dumps=_dumps)


class ThreadedGatewayServer:
    """A gateway served from a thread with an event loop of its own, for trainers of any kind.

    ``host``, ``port``: where to listen; port 0 takes a free one. ``start()`` returns when it listens; ``base_url`` is
    its address with ``/v1``. The session methods may be called from any thread and any event loop. Also a context
    manager.
    """

    def __init__(self, gateway: RolloutGateway, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.gateway, self.host, self.port = gateway, host, port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}/v1"

    def start(self) -> ThreadedGatewayServer:
        """Listen. Raises ``SetupError`` where the address is not to be had."""
        if self._thread is not None:
            raise RuntimeError("the server is already started")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-gateway", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        except OSError as error:
            self.shutdown()
            raise SetupError(
                f"can't listen on {self.host}:{self.port}: {error.strerror}; choose another port"
            ) from error
        return self

    def shutdown(self) -> None:
        """Stop listening; requests being served are aborted. Calling it twice is no error."""
        if self._loop is None or self._thread is None:
            return
        if self._runner is not None:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = self._runner = None

    def create_session(self, session_id: str | None = None, **limits: Any) -> Session:
        """:meth:`RolloutGateway.create_session`."""
        return self.gateway.create_session(session_id, **limits)

    async def finish_session(self, session_id: str, **options: Any) -> list[TraceRecord]:
        """:meth:`RolloutGateway.finish_session`, run on the server's loop."""
        return await self._on_loop(self.gateway.finish_session(session_id, **options))

    async def drop_session(self, session_id: str) -> None:
        """:meth:`RolloutGateway.drop_session`, run on the server's loop."""
        await self._on_loop(self.gateway.drop_session(session_id))

    def __enter__(self) -> ThreadedGatewayServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def _listen(self) -> None:
        runner = web.AppRunner(
            gateway_app(self.gateway), handler_cancellation=True, access_log=None, shutdown_timeout=0.5
        )
        await runner.setup()
        site = web.TCPSite(runner, self.host, self.port)
        try:
            await site.start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        self.port = runner.addresses[0][1]
        if not self.gateway.base_url:
            self.gateway.base_url = f"http://{self.host}:{self.port}"

    async def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            coroutine.close()
            raise RuntimeError("the server is not started")
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

"""Serving a gateway over HTTP: routes, streaming, and a server on its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiohttp import web

from ..errors import SetupError
from .endpoints import MAX_BODY, count_tokens_handler, done_handler, elsewhere, healthz, models_handler, turn_handler
from .gateway import RolloutGateway
from .sessions import Session
from .traces import TraceRecord
from .wires import AnthropicMessages, OpenAIChat, OpenAICompletions, OpenAIResponses

T = TypeVar("T")


def gateway_app(gateway: RolloutGateway) -> web.Application:
    """The aiohttp application of a gateway, for your own event loop. Serve it with ``handler_cancellation=True``
    (``AppRunner(app, handler_cancellation=True)``), so that a client that hangs up aborts its engine call."""
    app = web.Application(client_max_size=MAX_BODY)
    posts = {
        "/chat/completions": turn_handler(gateway, OpenAIChat()),
        "/completions": turn_handler(gateway, OpenAICompletions()),
        "/responses": turn_handler(gateway, OpenAIResponses()),
        "/messages": turn_handler(gateway, AnthropicMessages()),
        "/messages/count_tokens": count_tokens_handler(gateway, AnthropicMessages()),
    }
    models = models_handler(gateway)
    for prefix in ("/v1", "/sessions/{key}/v1", "/sessions/{key}/v1/v1"):
        for path, handler in posts.items():
            app.router.add_post(prefix + path, handler)
        app.router.add_get(f"{prefix}/models", models)
        app.router.add_get(f"{prefix}/models/{{name:.+}}", models)
    app.router.add_post("/sessions/{key}/done", done_handler(gateway))
    app.router.add_get("/healthz", healthz)
    app.router.add_route("*", "/{path:.*}", elsewhere)
    return app


class ThreadedGatewayServer:
    """A gateway served from a thread with an event loop of its own, for trainers of any kind.

    ``host``, ``port``: where to listen; port 0 takes a free one. ``start()`` returns when it listens; ``base_url`` is
    its address with ``/v1``. To listen on all addresses (``0.0.0.0``), give the gateway the ``base_url`` by which
    agents reach it: sessions hand it out. The session methods may be called from any thread and any event loop.
    Also a context manager.
    """

    def __init__(self, gateway: RolloutGateway, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.gateway, self.host, self.port = gateway, host, port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None

    @property
    def base_url(self) -> str:
        return f"{self._origin}/v1"

    @property
    def _origin(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def start(self) -> ThreadedGatewayServer:
        """Listen. Raises ``SetupError`` where the address is not to be had."""
        if self._thread is not None:
            raise RuntimeError("the server is already started")
        if self.host in ("", "0.0.0.0", "::") and not self.gateway.base_url:
            raise SetupError(
                f"host {self.host!r} is no address that agents can reach: "
                "pass RolloutGateway(base_url='http://<address of this machine>:<port>') too"
            )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-gateway", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        except (OSError, OverflowError) as error:
            self.shutdown()
            reason = getattr(error, "strerror", None) or error
            raise SetupError(f"can't listen on {self.host}:{self.port}: {reason}; choose another address") from error
        return self

    def shutdown(self) -> None:
        """Stop listening; requests being served are aborted. Calling it twice is no error."""
        if self._loop is None or self._thread is None:
            return
        if self._runner is not None:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        if close := getattr(self.gateway.backend, "aclose", None):  # its connections end with their loop
            asyncio.run_coroutine_threadsafe(close(), self._loop).result()
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
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        self.port = runner.addresses[0][1]
        if not self.gateway.base_url:
            self.gateway.base_url = self._origin

    async def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            coroutine.close()
            raise RuntimeError("the server is not started")
        if asyncio.get_running_loop() is self._loop:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

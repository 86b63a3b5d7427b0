"""``AgentCoreRLApp``: the agent's side. One decorator turns an AgentCore agent into one that can be trained.

A *rollout* call (the payload carries ``_rollout`` with the address of a result) is answered at once with
``{"status": "processing"}``; the handler runs in the background while ``/ping`` says ``HealthyBusy``, and its
outcome is written to S3 once, as one complete JSON object, whatever happens to the handler. Any other call is a
*direct* call: the handler's value is the answer, exactly as with ``@app.entrypoint``. So the image that was
trained is the image that is deployed.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

from bedrock_agentcore.runtime import BedrockAgentCoreApp, PingStatus

from ._handler import call_handler, payload_validator, takes_context, takes_named_context
from ._runner import Call, Calls, RolloutRunner
from .errors import SetupError, require

if TYPE_CHECKING:
    from a2a.types import AgentCard
    from bedrock_agentcore.runtime import RequestContext
    from pydantic import BaseModel
    from starlette.middleware import Middleware

__all__ = ["AgentCoreRLApp"]

Handler = TypeVar("Handler", bound=Callable[..., Any])


class AgentCoreRLApp(BedrockAgentCoreApp):
    """A ``BedrockAgentCoreApp`` whose handler can also be run for training.

    ``store_payload``: also keep the request payload in the result object, with secret-looking fields masked.
    ``max_result_bytes``: a larger result object becomes an error that names its largest field; default 64 MiB.
    The other arguments are those of ``BedrockAgentCoreApp``.
    """

    def __init__(
        self,
        debug: bool = False,
        lifespan: Callable[[Any], AbstractAsyncContextManager[Any]] | None = None,
        middleware: Sequence[Middleware] | None = None,
        *,
        store_payload: bool = False,
        max_result_bytes: int = 64 * 2**20,
    ) -> None:
        self._rollouts = RolloutRunner(self, store_payload=store_payload, max_result_bytes=max_result_bytes)
        self._direct_call: Call | None = None
        self._serve: Callable[[Any, RequestContext], Any] | None = None
        self._calls: Callable[[], Calls] | None = None
        self._about = ("", "")
        super().__init__(debug=debug, lifespan=self._with_shutdown(lifespan), middleware=middleware)

    @overload
    def rollout_entrypoint(self, func: Handler) -> Handler: ...
    @overload
    def rollout_entrypoint(self, *, payload_model: type[BaseModel] | None = None) -> Callable[[Handler], Handler]: ...

    def rollout_entrypoint(self, func: Any = None, *, payload_model: type[BaseModel] | None = None) -> Any:
        """Register ``func`` as the agent; returns it unchanged. ``@app.rollout_entrypoint`` or with arguments.

        ``func`` takes ``(payload)`` or ``(payload, context)`` (the second parameter may have any name) and may be
        sync or async. In a rollout it must return a dict; ``rewards`` in it is what a trainer reads. In a direct
        call it may return whatever ``@app.entrypoint`` allows, generators for streaming included. Sync handlers
        run in a thread of their own with the request's context variables. Where ``@app.entrypoint`` is used too,
        that function serves the direct calls.

        ``payload_model``: a pydantic model that every payload must satisfy; one that does not is answered
        ``{"status": "rejected"}`` naming the field, and ``func`` does not run. ``func`` still gets a dict: the
        payload with the model's values (defaults filled in, types converted) and with ``_rollout``.

        Raises ``TypeError`` if ``func`` can't be called like that.
        """
        if func is None:
            return functools.partial(self._register, payload_model=payload_model)
        return self._register(func, payload_model)

    def _register(self, func: Handler, payload_model: type[BaseModel] | None) -> Handler:
        call = functools.partial(call_handler, func, takes_context(func))
        validate = payload_validator(payload_model)

        def calls() -> Calls:
            return Calls(call, self._direct_call or call, validate)

        # The SDK passes the context only to a second parameter of exactly this name.
        async def serve(payload: Any, context: RequestContext) -> Any:
            return await self._rollouts.handle(calls(), payload, context)

        self._calls, self._serve = calls, serve
        name = getattr(func, "__name__", type(func).__name__)
        self._about = (name, inspect.getdoc(func) or f"The agent {name}")
        super().entrypoint(serve)
        return func

    def entrypoint(self, func: Handler) -> Handler:
        """As in ``BedrockAgentCoreApp``; beside ``rollout_entrypoint`` it serves the direct calls."""
        self._direct_call = functools.partial(call_handler, func, takes_named_context(func))
        super().entrypoint(func)
        if self._serve is not None:
            super().entrypoint(self._serve)
        return func

    def ping(self, func: Handler) -> Handler:
        """As in ``BedrockAgentCoreApp``, but ``HealthyBusy`` for as long as a rollout's result is not written."""
        super().ping(lambda: PingStatus.HEALTHY_BUSY if self._rollouts.busy else func())
        return func

    def run(self, port: int | None = None, host: str | None = None, **kwargs: Any) -> None:
        """Serve until stopped.

        ``port``: default is the environment variable ``AGENTCORE_RL_PORT`` (set by the local runtime), else 8080.
        ``host`` and ``kwargs`` (for uvicorn) are those of ``BedrockAgentCoreApp.run``.
        """
        # Requests in flight may not delay the writing of the "aborted" results for long.
        kwargs.setdefault("timeout_graceful_shutdown", 3)
        super().run(port=_port(8080) if port is None else port, host=host, **kwargs)

    def run_a2a(
        self, port: int | None = None, host: str | None = None, *, agent_card: AgentCard | None = None, **kwargs: Any
    ) -> None:
        """Serve the same entrypoint over A2A, until stopped; needs the extra ``[a2a-server]``.

        ``port``: default is ``AGENTCORE_RL_PORT``, else 9000, which AgentCore asks of A2A agents. ``agent_card``:
        default is a card with the name and the docstring of the entrypoint. The rest is as in :meth:`run`, whose
        routes are served too.

        Raises ``SetupError`` without an entrypoint.
        """
        if port is None:
            port = _port(9000)
        self._mount_a2a(agent_card, f"http://localhost:{port}/")
        self.run(port, host, **kwargs)

    def _mount_a2a(self, agent_card: AgentCard | None, url: str) -> None:
        require("a2a.server", "a2a-server")
        from bedrock_agentcore.runtime import build_a2a_app

        from ._a2a import RolloutExecutor

        if self._calls is None:
            raise SetupError("run_a2a() serves the function decorated with @app.rollout_entrypoint: there is none")
        executor = RolloutExecutor(self._rollouts, self._calls, *self._about)
        # Last in the list of routes: what is not /ping, /invocations or /ws.
        self.mount("/", build_a2a_app(executor, agent_card, runtime_url=url))

    def _with_shutdown(
        self, users: Callable[[Any], AbstractAsyncContextManager[Any]] | None
    ) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
        @asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[Any]:
            try:
                if users is None:
                    yield None
                else:
                    async with users(app) as state:
                        yield state
            finally:
                await self._rollouts.shut_down()

        return lifespan


def _port(default: int) -> int:
    text = os.environ.get("AGENTCORE_RL_PORT") or str(default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"AGENTCORE_RL_PORT must be a port number, it is {text!r}") from None

"""``AgentCoreRLApp``: the agent's side. One decorator turns an AgentCore agent into one that can be trained.

A *rollout* call (the payload carries ``_rollout`` with the address of a result) is answered at once with
``{"status": "processing"}``; the handler runs in the background while ``/ping`` says ``HealthyBusy``, and its
outcome is written to S3 once, as one complete JSON object, whatever happens to the handler. Any other call is a
*direct* call: the handler's value is the answer, exactly as with ``@app.entrypoint``. So the image that was
trained is the image that is deployed.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import threading
import traceback
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from bedrock_agentcore.runtime import BedrockAgentCoreApp

from ._handler import Did, call_handler, describe, in_thread, takes_context
from ._redact import Redactor, find_secrets
from ._results import ResultStore
from .errors import Outcome
from .protocol import ROLLOUT_FIELD, ContractError, RolloutConfig, dumps, error_result, success_result, to_jsonable

if TYPE_CHECKING:
    from bedrock_agentcore.runtime import RequestContext
    from starlette.middleware import Middleware

__all__ = ["AgentCoreRLApp"]

logger = logging.getLogger(__name__)

Handler = TypeVar("Handler", bound=Callable[..., Any])

_MAX_ERROR = 4_000
_MAX_TRACEBACK = 32_000
_SHUTDOWN_SECONDS = 10.0
_REMEMBERED = 10_000


class AgentCoreRLApp(BedrockAgentCoreApp):
    """A ``BedrockAgentCoreApp`` whose handler can also be run for training.

    ``store_payload``: also keep the request payload in the result object, with secret-looking fields masked.
    The other arguments are those of ``BedrockAgentCoreApp``.
    """

    def __init__(
        self,
        debug: bool = False,
        lifespan: Callable[[Any], AbstractAsyncContextManager[Any]] | None = None,
        middleware: Sequence[Middleware] | None = None,
        *,
        store_payload: bool = False,
    ) -> None:
        self._rl = _RolloutRunner(self, store_payload)
        super().__init__(debug=debug, lifespan=self._rl.lifespan(lifespan), middleware=middleware)

    def rollout_entrypoint(self, func: Handler) -> Handler:
        """Register ``func`` as the agent; returns it unchanged.

        ``func`` takes ``(payload)`` or ``(payload, context)`` (the second parameter may have any name) and may be
        sync or async. In a rollout it must return a dict; ``rewards`` in it is what a trainer reads. In a direct
        call it may return whatever ``@app.entrypoint`` allows, generators for streaming included. Sync handlers
        run in a thread of their own with the request's context variables.

        Raises ``TypeError`` if ``func`` can't be called like that.
        """
        call = functools.partial(call_handler, func, takes_context(func))

        # The SDK passes the context only to a second parameter of exactly this name.
        async def entrypoint(payload: Any, context: RequestContext) -> Any:
            return await self._rl.handle(call, payload, context)

        self.entrypoint(entrypoint)
        return func

    def run(self, port: int | None = None, host: str | None = None, **kwargs: Any) -> None:
        """Serve until stopped.

        ``port``: default is the environment variable ``AGENTCORE_RL_PORT`` (set by the local runtime), else 8080.
        ``host`` and ``kwargs`` (for uvicorn) are those of ``BedrockAgentCoreApp.run``.
        """
        # Requests in flight may not delay the writing of the "aborted" results for long.
        kwargs.setdefault("timeout_graceful_shutdown", 3)
        super().run(port=_port() if port is None else port, host=host, **kwargs)


def _port() -> int:
    text = os.environ.get("AGENTCORE_RL_PORT") or "8080"
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"AGENTCORE_RL_PORT must be a port number, it is {text!r}") from None


# -- one rollout --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """One rollout in this process."""

    config: RolloutConfig
    key: str
    payload: Mapping[str, Any]
    redactor: Redactor
    """Knows every secret of the payload: for errors and tracebacks."""
    live_keys: Redactor
    """Knows only those of ``_rollout``: the agent's own result must not be garbled by a guess."""
    finished: threading.Event = field(default_factory=threading.Event)
    _claim: threading.Lock = field(default_factory=threading.Lock)
    task: asyncio.Task[None] | None = None

    def claim(self) -> bool:
        """True for exactly one caller: who may write the result, the handler's end or the shutdown."""
        return self._claim.acquire(blocking=False)

    def error(self, stop_reason: str, trace: str = "", outcome: Outcome = Outcome.AGENT_FAILED) -> dict[str, Any]:
        return error_result(
            _clean(self.redactor.text(stop_reason))[:_MAX_ERROR],
            self.config,
            self.key,
            traceback=_clean(self.redactor.text(trace))[-_MAX_TRACEBACK:],
            outcome=outcome,
        )

    def result(self, did: Did) -> dict[str, Any]:
        """The result object for what the handler did; never raises."""
        failure = did.error
        if failure is None:
            try:
                result: dict[str, Any] = self.live_keys.values(success_result(did.value, self.config, self.key))
                return result
            except ContractError as error:
                return self.error(str(error))
            except Exception as error:  # noqa: BLE001 - user objects may do anything when they are converted
                failure = error
        return self.error(describe(failure), "".join(traceback.format_exception(failure)))


class _RolloutRunner:
    """Runs rollouts in the background and writes each outcome once."""

    def __init__(self, app: AgentCoreRLApp, store_payload: bool) -> None:
        self._app = app
        self._store_payload = store_payload
        self._store = ResultStore()
        # Own threads for S3: neither the worker loop nor a pool that agents fill up may delay a result.
        # The threads start with the first rollout, so a process may fork before that.
        self._io = ThreadPoolExecutor(8, thread_name_prefix="agentcore-rl-s3")
        self._runs: dict[str, _Run] = {}
        self._known: dict[str, None] = {}

    async def handle(self, call: Callable[..., Any], payload: Any, context: RequestContext) -> Any:
        session_id = context.session_id or str(uuid.uuid4())
        try:
            config = RolloutConfig.from_payload(payload) if isinstance(payload, Mapping) else None
            key = config.result_key(session_id) if config else ""
        except ContractError as error:
            return self._reject(payload, session_id, str(error))
        if config is None:
            return (await call(payload, context)).unwrap()
        answer = {"status": "processing", "s3_bucket": config.s3_bucket, "result_key": key}
        address = f"{config.s3_bucket}/{key}"
        # An invoke is retried by SDKs, proxies and trainers: the agent still runs once.
        if address not in self._known:
            self._remember(address)
            run = _Run(config, key, payload, *_redactors(payload))
            self._runs[address] = run
            # Busy from before the answer until the result is written, so the session is not reclaimed.
            ping = self._app.add_async_task("rollout")
            run.task = asyncio.create_task(self._run(run, call, context, ping))
        return answer

    async def _run(self, run: _Run, call: Callable[..., Any], context: RequestContext, ping: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            if await loop.run_in_executor(self._io, self._store.may_run, run.config.s3_bucket, run.key):
                did = await call(run.payload, context)
                if run.claim():
                    await loop.run_in_executor(self._io, lambda: self._write(run, run.result(did)))
        except Exception:
            logger.exception("rollout %s: its result could not be written", run.key)
        finally:
            self._runs.pop(f"{run.config.s3_bucket}/{run.key}", None)
            run.finished.set()
            self._app.complete_async_task(ping)

    def _write(self, run: _Run, result: dict[str, Any]) -> None:
        if result["status_code"] != 200:
            logger.error("rollout %s failed: %s\n%s", run.key, result["stop_reason"], result.get("traceback", ""))
        if self._store_payload:
            result["payload"] = _storable(run.redactor.fields(run.payload))
        try:
            body = dumps(result)
        except ContractError as error:
            body = dumps(run.error(str(error)))
        written = self._store.write(run.config.s3_bucket, run.key, body.encode("utf-8"))
        if written and run.config.notify_url:
            _notify(run.config.notify_url, run.config.s3_bucket, run.key, run.redactor)

    def _reject(self, payload: Mapping[str, Any], session_id: str, reason: str) -> dict[str, Any]:
        """Answer a payload that breaks the contract.

        The HTTP status is 200, because AgentCore turns any other into a 424, which reads as a cold start.
        """
        redactor, live_keys = _redactors(payload)
        reason = _clean(redactor.text(reason))[:_MAX_ERROR]
        logger.error("rollout rejected: %s", reason)
        raw: Any = payload.get(ROLLOUT_FIELD)
        try:
            parts = {name: raw[name] for name in ("exp_id", "input_id", "s3_bucket")}
            config = RolloutConfig.from_payload({ROLLOUT_FIELD: parts})
            assert config is not None
            key = config.result_key(session_id)
        except (ContractError, KeyError, TypeError):
            return {"status": "rejected", "error": reason}  # nowhere to write to
        run = _Run(config, key, payload, redactor, live_keys)
        result = run.error(reason, outcome=Outcome.REJECTED)
        self._io.submit(self._write_rejection, run, result, self._app.add_async_task("rejection"))
        return {"status": "rejected", "error": reason, "s3_bucket": config.s3_bucket, "result_key": key}

    def _write_rejection(self, run: _Run, result: dict[str, Any], ping: int) -> None:
        try:
            self._write(run, result)
        except Exception:
            logger.exception("rollout %s: its rejection could not be written", run.key)
        finally:
            self._app.complete_async_task(ping)

    def _remember(self, address: str) -> None:
        self._known[address] = None
        if len(self._known) > _REMEMBERED:  # the result key itself is looked at as well
            oldest = next(iter(self._known))
            if oldest not in self._runs:
                del self._known[oldest]

    def lifespan(
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
                await self._shut_down()

        return lifespan

    async def _shut_down(self) -> None:
        """The process was told to stop (SIGTERM): every rollout still gets its one result."""
        runs = list(self._runs.values())
        if not runs:
            return
        logger.warning("stopping with %d rollouts unfinished: writing their results as aborted", len(runs))
        # Threads that nothing joins at exit: an S3 that hangs may not keep the process.
        ends = [in_thread(functools.partial(self._abort, run)) for run in runs]
        await asyncio.wait(ends, timeout=_SHUTDOWN_SECONDS)

    def _abort(self, run: _Run) -> None:
        if run.claim():
            reason = "aborted: the agent's process was stopped before the rollout ended"
            self._write(run, run.error(reason, outcome=Outcome.RUNTIME_FAILED))
        else:
            run.finished.wait(_SHUTDOWN_SECONDS)


# -- small helpers -------------------------------------------------------------------------------------------


def _redactors(payload: Mapping[str, Any]) -> tuple[Redactor, Redactor]:
    return Redactor(find_secrets(payload)), Redactor(find_secrets(payload.get(ROLLOUT_FIELD)))


def _storable(payload: Any) -> Any:
    """The payload as strict JSON; it was parsed by a laxer reader, which lets NaN through."""
    try:
        return to_jsonable(payload, "payload")
    except (ContractError, RecursionError) as error:
        return {"error": f"not stored: {error}"}


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _notify(url: str, bucket: str, key: str, redactor: Redactor) -> None:
    """Tell the trainer that the result is there. Best effort: S3 stays the truth."""
    if not url.startswith(("http://", "https://")):
        logger.warning("_rollout.notify_url is no http(s) URL; not notified")
        return
    body = json.dumps({"s3_bucket": bucket, "result_key": key}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    try:
        urllib.request.urlopen(request, timeout=1.0).close()
    except Exception as error:  # noqa: BLE001
        logger.info("notify_url did not take the hint: %s", redactor.text(describe(error)))

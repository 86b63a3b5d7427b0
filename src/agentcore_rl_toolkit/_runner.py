"""Rollouts in the agent's process: run in the background, once each, and leave one result whatever happens."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import multiprocessing
import threading
import traceback
import urllib.request
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ._handler import Did, daemon, describe, in_thread
from ._redact import Redactor
from ._results import ResultLost, ResultStore
from ._secrets import Secrets, unwrap
from .errors import Outcome
from .protocol import (
    ADDRESS_FIELDS,
    PROBE_FIELD,
    ROLLOUT_FIELD,
    ContractError,
    RolloutConfig,
    dumps,
    error_result,
    success_result,
)

if TYPE_CHECKING:
    from bedrock_agentcore import BedrockAgentCoreApp
    from bedrock_agentcore.runtime import RequestContext

__all__ = ["Calls", "RolloutRunner", "Run"]

logger = logging.getLogger(__name__)

Call = Callable[[Any, Any], Awaitable[Did]]
"""A handler, called with payload and context; see ``_handler.call_handler``."""


class Calls(NamedTuple):
    """What an app has registered. ``direct`` is ``rollout`` where there is no plain entrypoint."""

    rollout: Call
    direct: Call
    validate: Callable[[Any], Any]


_MAX_ERROR = 4_000
_MAX_TRACEBACK = 32_000
_SHUTDOWN_SECONDS = 10.0
_REMEMBERED = 10_000
_ALONE = multiprocessing.parent_process() is None
"""Whether no other worker of the same server may answer in this one's place."""


@dataclass(slots=True, eq=False)
class Run:
    """One rollout in this process."""

    config: RolloutConfig
    key: str
    payload: Mapping[str, Any]
    secrets: Secrets
    max_bytes: int
    stored: Any = None
    """The payload as it goes into the result, None if it does not."""
    ended: Future[dict[str, Any] | None] = field(default_factory=Future)
    """The result object once it is written, or ``ResultLost``; None if it was there before."""
    ping: int = 0
    task: asyncio.Task[None] | None = None
    _claim: threading.Lock = field(default_factory=threading.Lock)

    @property
    def address(self) -> str:
        return _address(self.config, self.key)

    def claim(self) -> bool:
        """True for exactly one caller, who has to settle it: the handler's end, a cancellation, the shutdown."""
        return self._claim.acquire(blocking=False)

    def error(self, stop_reason: str, trace: str = "", outcome: Outcome = Outcome.AGENT_FAILED) -> dict[str, Any]:
        return error_result(
            self.secrets.message(stop_reason)[:_MAX_ERROR],
            self.config,
            self.key,
            traceback=self.secrets.message(trace)[-_MAX_TRACEBACK:],
            outcome=outcome,
        )

    def result(self, did: Did) -> dict[str, Any]:
        """The result object for what the handler did. Raises ``ResultLost`` if that is why it was not called."""
        failure = did.error
        if isinstance(failure, ResultLost):
            raise failure
        if failure is None:
            try:
                plain = success_result(did.value, self.config, self.key)
                # A session's id may be its key, and yet it is part of the address.
                return {**self.secrets.result(plain), **{name: plain[name] for name in ADDRESS_FIELDS}}
            except ContractError as error:
                return self.error(str(error))
            except Exception as error:  # noqa: BLE001 - user objects may do anything when they are converted
                failure = error
        return self.error(describe(failure), "".join(traceback.format_exception(failure)))

    def body(self, result: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """What to write: ``result``, or an error object that says why it can't be written; and as bytes."""
        try:
            if self.stored is not None and "payload" in result:
                raise ContractError("payload: the request is stored under this name; return it under another one")
            body = dumps(result).encode("utf-8")
            if len(body) > self.max_bytes:
                raise ContractError(_too_large(result, len(body), self.max_bytes))
        except ContractError as error:
            result = self.error(str(error))
            body = dumps(result).encode("utf-8")
        if self.stored is None:
            return result, body
        whole = dumps({**result, "payload": self.stored}).encode("utf-8")
        if len(whole) > self.max_bytes:
            whole = dumps({**result, "payload": {"error": "not stored: over max_result_bytes"}}).encode("utf-8")
        return result, whole


class Begun(NamedTuple):
    """``answer``: to the request. ``run``: the rollout, if it has not ended. ``direct``: it was none."""

    answer: Any
    run: Run | None = None
    direct: bool = False


class RolloutRunner:
    """Runs rollouts in the background and writes each outcome once."""

    def __init__(self, app: BedrockAgentCoreApp, *, store_payload: bool, max_result_bytes: int) -> None:
        self._app = app
        self._store_payload, self._max_result_bytes = store_payload, max_result_bytes
        self._store = ResultStore()
        self._runs: dict[str, Run] = {}
        self._known: dict[str, None] = {}

    @property
    def busy(self) -> bool:
        """Whether a result has still to be written."""
        return bool(self._runs)

    async def handle(self, calls: Calls, payload: Any, context: RequestContext) -> Any:
        """The answer to one request: at once for a rollout, the value of the direct call for any other payload."""
        return (await self.begin(calls, payload, context)).answer

    async def begin(self, calls: Calls, payload: Any, context: RequestContext) -> Begun:
        """:meth:`handle`, for one who wants to see the end of a rollout too."""
        session_id = context.session_id or str(uuid.uuid4())
        try:
            config = RolloutConfig.from_payload(payload) if isinstance(payload, Mapping) else None
            key = config.result_key(session_id) if config else ""
            if config is not None and config.extra.get(PROBE_FIELD) is True:
                runs = _address(config, key) in self._runs
                return Begun({"status": "processing" if runs else "unknown"})
            if config is not None or calls.direct is calls.rollout:  # a plain entrypoint validates for itself
                payload = calls.validate(payload)
        except ContractError as error:
            return self._reject(payload, context, session_id, str(error))
        if config is None:
            return Begun(unwrap(await calls.direct(payload, context), payload, context), direct=True)
        answer = {"status": "processing", "s3_bucket": config.s3_bucket, "result_key": key, "probes": _ALONE}
        run = self._new(config, key, payload, context)
        # An invoke is retried by SDKs, proxies and trainers: the agent still runs once.
        if run.address not in self._known:
            self._remember(run.address)
            self._begin(run)
            run.task = asyncio.create_task(self._run(run, calls.rollout, context))
        return Begun(answer, self._runs.get(run.address))

    def cancel(self, run: Run) -> None:
        """End a rollout with a ``cancelled`` result, unless it has ended. From any thread.

        An async handler is cancelled; a sync one can't be, but what it returns is dropped.
        """
        if not run.claim():
            return
        result = run.error("cancelled by the client", outcome=Outcome.CANCELLED)
        daemon(functools.partial(self._settle, run, lambda: result), "agentcore-rl-result")
        if run.task is not None:
            run.task.get_loop().call_soon_threadsafe(run.task.cancel)

    def _new(self, config: RolloutConfig, key: str, payload: Mapping[str, Any], context: RequestContext) -> Run:
        secrets = Secrets(payload, context)
        stored = secrets.payload(payload) if self._store_payload else None
        return Run(config, key, payload, secrets, self._max_result_bytes, stored)

    def _begin(self, run: Run) -> None:
        """Busy from before the answer until the result is written, so that the session is not reclaimed."""
        self._runs[run.address] = run
        run.ping = self._app.add_async_task("rollout")

    async def _run(self, run: Run, call: Call, context: RequestContext) -> None:
        did: Did | None = None
        try:
            if (await in_thread(functools.partial(self._store.may_run, run.config.s3_bucket, run.key))).unwrap():
                did = await call(run.payload, context)
        except BaseException as error:  # noqa: BLE001 - even this task's cancellation is the rollout's outcome
            did = Did(error=error)
        if run.claim():
            # In a thread: neither an agent that blocks or cancels this loop, nor the loop's end delays it.
            make = functools.partial(run.result, did) if did is not None else None
            daemon(functools.partial(self._settle, run, make), "agentcore-rl-result")

    def _settle(self, run: Run, make_result: Callable[[], dict[str, Any]] | None) -> None:
        """Write the result, if there is one to write; then the rollout has ended. For whoever has claimed it."""
        result, lost = None, None
        try:
            if make_result is not None:
                result = self._write(run, make_result())
        except ResultLost as error:
            logger.error("rollout %s: %s", run.key, error)
            lost = error
        except Exception as error:
            logger.exception("rollout %s: its result could not be written", run.key)
            lost = ResultLost(describe(error))
        finally:
            self._runs.pop(run.address, None)
            self._app.complete_async_task(run.ping)
            run.ended.set_exception(lost) if lost else run.ended.set_result(result)
        if result is not None and run.config.notify_url:  # it may take its time, and nobody waits for it
            _notify(run.config.notify_url, run.config.s3_bucket, run.key, run.secrets.everything)

    def _write(self, run: Run, result: dict[str, Any]) -> dict[str, Any]:
        if result["status_code"] != 200 and "traceback" in result:
            logger.error("rollout %s failed: %s\n%s", run.key, result["stop_reason"], result["traceback"])
        result, body = run.body(result)
        self._store.write(run.config.s3_bucket, run.key, body)
        return result

    def _reject(self, payload: Mapping[str, Any], context: RequestContext, session_id: str, reason: str) -> Begun:
        """The answer to a payload that breaks the contract, and the rollout whose only act is to write that down.

        The HTTP status is 200, because AgentCore turns any other into a 424, which reads as a cold start.
        """
        reason = Secrets(payload, context).message(reason)[:_MAX_ERROR]
        logger.error("rollout rejected: %s", reason)
        answer = {"status": "rejected", "error": reason}
        try:
            raw: Any = payload[ROLLOUT_FIELD]
            # Only what the address of a result takes, so that a wrong field beside it does not matter.
            wanted = ("exp_id", "input_id", "s3_bucket", "notify_url")
            parts = {name: raw[name] for name in wanted if name != "notify_url" or isinstance(raw.get(name), str)}
            config = RolloutConfig.from_payload({ROLLOUT_FIELD: parts})
            assert config is not None
            run = self._new(config, config.result_key(session_id), payload, context)
        except (ContractError, KeyError, TypeError, AttributeError):
            return Begun(answer)  # nowhere to write to
        if run.address not in self._runs and run.claim():
            self._begin(run)
            make = functools.partial(run.error, reason, outcome=Outcome.REJECTED)
            daemon(functools.partial(self._settle, run, make), "agentcore-rl-result")
        return Begun({**answer, "s3_bucket": config.s3_bucket, "result_key": run.key})

    def _remember(self, address: str) -> None:
        self._known[address] = None
        if len(self._known) > _REMEMBERED:  # the result key itself is looked at as well
            oldest = next(iter(self._known))
            if oldest not in self._runs:
                del self._known[oldest]

    async def shut_down(self) -> None:
        """The process was told to stop (SIGTERM): every rollout still gets its one result."""
        runs = list(self._runs.values())
        if not runs:
            return
        logger.warning("stopping with %d rollouts unfinished: writing their results as aborted", len(runs))
        # Threads that nothing joins at exit: an S3 that hangs may not keep the process.
        ends = [in_thread(functools.partial(self._abort, run)) for run in runs]
        await asyncio.wait(ends, timeout=_SHUTDOWN_SECONDS)

    def _abort(self, run: Run) -> None:
        if run.claim():
            reason = "aborted: the agent's process was stopped before the rollout ended"
            self._settle(run, functools.partial(run.error, reason, outcome=Outcome.RUNTIME_FAILED))
        else:
            run.ended.exception(_SHUTDOWN_SECONDS)  # waits


# -- small helpers -------------------------------------------------------------------------------------------


def _address(config: RolloutConfig, key: str) -> str:
    return f"{config.s3_bucket}/{key}"


def _too_large(result: Mapping[str, Any], size: int, limit: int) -> str:
    sizes = {name: len(dumps(value)) for name, value in result.items()}
    largest = max(sizes, key=lambda name: sizes[name])
    return (
        f"result: {size:,} bytes of JSON, at most {limit:,} are allowed (max_result_bytes);"
        f" the largest field is {largest!r} with {sizes[largest]:,}"
    )


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

"""``RolloutClient``: start rollouts of one deployed agent."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from .._arn import parse_arn
from ..errors import ContractError, RolloutRejected, RolloutTimeout, SetupError
from ..protocol import MAX_PAYLOAD_BYTES, ROLLOUT_FIELD, RolloutConfig, dumps, result_key
from ._aws import Aws
from ._batch import AsyncBatchResult, BatchResult, BatchSettings
from ._future import RolloutFuture
from ._loop import run_async, run_sync, soon
from ._poll import Intervals, ResultPoller

__all__ = ["RolloutClient"]

_SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class RolloutClient:
    """Starts sessions of one agent and fetches their results. Usable from several threads and event loops.

    ``agent_runtime_arn``: the deployed agent; the region is the ARN's. ``s3_bucket``: where the agent writes
    results. ``exp_id``: first part of every result key. ``max_retry_attempts``: retries of a call that was
    throttled, met a session that is starting, or got no answer. ``tps_limit``: invoke and stop calls per
    second, together; None for no limit. ``max_pool_connections``: calls in flight at once; an invoke takes as
    long as the session's start, so raise it where starts are slow and many.
    ``base_url``, ``model_id``, ``extra_config`` (``api_key``, ``sampling_params``, …): passed to the agent in
    ``_rollout``; keywords of a single call win over them.

    Raises ``SetupError`` for a bad ARN, ``ContractError`` for an ``exp_id`` that can't be part of a key.
    """

    def __init__(
        self,
        agent_runtime_arn: str,
        s3_bucket: str,
        exp_id: str,
        max_retry_attempts: int = 5,
        tps_limit: float | None = 25,
        max_pool_connections: int = 10,
        base_url: str | None = None,
        model_id: str | None = None,
        **extra_config: Any,
    ) -> None:
        arn = parse_arn(agent_runtime_arn)
        self.agent_runtime_arn, self.region = arn.text, arn.region
        self.s3_bucket, self.exp_id = s3_bucket, exp_id
        self.base_url, self.model_id, self.extra_config = base_url, model_id, extra_config
        result_key(exp_id, "input", "session")  # says so now if exp_id can't be part of a key
        self._aws = Aws(arn, attempts=max_retry_attempts, tps=tps_limit, connections=max_pool_connections)
        self._poller = ResultPoller(self._aws)

    def invoke(
        self,
        payload: Mapping[str, Any],
        session_id: str | None = None,
        input_id: str | None = None,
        **rollout_overrides: Any,
    ) -> RolloutFuture:
        """Start one rollout; returns when the session has accepted it.

        ``session_id`` (33 to 256 characters) and ``input_id``: default is a new UUID each. Invoking a session
        again does not run the agent again. ``rollout_overrides``: fields of ``_rollout`` for this call.

        Raises ``ContractError`` for a payload that is no JSON object or over 100,000,000 bytes,
        ``RolloutRejected`` if the agent refuses it, ``InvocationError`` if the session can't be started, and
        ``SetupError`` if no session can.
        """
        return run_sync(self._start(payload, session_id, input_id, rollout_overrides), RolloutFuture._cancel)

    async def invoke_async(
        self,
        payload: Mapping[str, Any],
        session_id: str | None = None,
        input_id: str | None = None,
        **rollout_overrides: Any,
    ) -> RolloutFuture:
        """:meth:`invoke` for async code."""
        return await run_async(self._start(payload, session_id, input_id, rollout_overrides), RolloutFuture._cancel)

    def run_batch(
        self,
        payloads: Iterable[Mapping[str, Any]],
        max_concurrent_sessions: int,
        timeout: float | None = 900.0,
        initial_interval: float = 0.5,
        max_interval: float = 5.0,
        backoff_factor: float = 1.5,
        log_interval: float = 30.0,
        samples: int = 1,
    ) -> BatchResult:
        """Run every payload ``samples`` times; iterate over the result for a ``BatchItem`` each, as they complete.

        ``max_concurrent_sessions``: sessions at a time. ``timeout``: seconds for each rollout from its invoke;
        its session is stopped then. ``initial_interval``, ``max_interval``, ``backoff_factor``: how long
        between looks for a result, in seconds; a session waits idle until its result is seen, which costs more
        than looking. ``log_interval``: seconds between log lines about progress.

        One bad rollout never ends the batch; ``SetupError`` does, because all others would fail the same way.
        Leaving the loop early, or Ctrl-C, stops the sessions that run.
        """
        return BatchResult(
            self,
            BatchSettings(
                list(payloads),
                max_concurrent_sessions,
                timeout,
                Intervals(initial_interval, max(initial_interval, max_interval), backoff_factor),
                log_interval,
                samples,
            ),
        )

    def run_batch_async(
        self,
        payloads: Iterable[Mapping[str, Any]],
        max_concurrent_sessions: int,
        timeout: float | None = 900.0,
        initial_interval: float = 0.5,
        max_interval: float = 5.0,
        backoff_factor: float = 1.5,
        log_interval: float = 30.0,
        samples: int = 1,
    ) -> AsyncBatchResult:
        """:meth:`run_batch` for ``async for``."""
        batch = self.run_batch(
            payloads,
            max_concurrent_sessions,
            timeout,
            initial_interval,
            max_interval,
            backoff_factor,
            log_interval,
            samples,
        )
        return AsyncBatchResult(batch.client, batch.settings)

    def close(self) -> None:
        """Close connections. Sessions that run go on, but the futures of this client get no result any more."""
        soon(self._poller.close)
        self._aws.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- on the background loop --

    async def _start(
        self,
        payload: Mapping[str, Any],
        session_id: str | None,
        input_id: str | None,
        overrides: Mapping[str, Any],
        intervals: Intervals = Intervals(),  # noqa: B008 - immutable
        timeout: float | None = None,
    ) -> RolloutFuture:
        session_id, input_id = session_id or str(uuid.uuid4()), input_id or str(uuid.uuid4())
        _check_session_id(session_id)
        key = result_key(self.exp_id, input_id, session_id)
        body = await self._aws.in_thread(functools.partial(self._encode, payload, input_id, overrides))
        await self._aws.limiter.wait()
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                answer = await self._aws.invoke(session_id, body)
        except TimeoutError:
            raise RolloutTimeout(
                f"session {session_id} did not start within {timeout} s", session_id=session_id
            ) from None
        try:
            bucket, key = _read_answer(answer, session_id, (self.s3_bucket, key))
        except Exception:
            await self._aws.stop(session_id)
            raise
        return RolloutFuture(
            self._aws,
            self._poller,
            session_id=session_id,
            input_id=input_id,
            s3_bucket=bucket,
            result_key=key,
            intervals=intervals,
            started=started,
        )

    def _encode(self, payload: Mapping[str, Any], input_id: str, overrides: Mapping[str, Any]) -> bytes:
        if not isinstance(payload, Mapping):
            raise ContractError(f"payload: a dict is required, got {type(payload).__name__}")
        config = {
            "base_url": self.base_url,
            "model_id": self.model_id,
            **self.extra_config,
            "exp_id": self.exp_id,
            "input_id": input_id,
            "s3_bucket": self.s3_bucket,
            **overrides,
        }
        full = {**payload, ROLLOUT_FIELD: {name: value for name, value in config.items() if value is not None}}
        body = dumps(full, "payload").encode("utf-8")
        RolloutConfig.from_payload(full)  # the agent would refuse it for the same reason, a session later
        if len(body) > MAX_PAYLOAD_BYTES:
            raise ContractError(
                f"payload: {len(body):,} bytes, AgentCore takes at most {MAX_PAYLOAD_BYTES:,}."
                " Put large inputs into S3 and pass their address"
            )
        return body


def _check_session_id(session_id: str) -> None:
    if not 33 <= len(session_id) <= 256:
        raise ContractError(
            f"session_id: {len(session_id)} characters, AgentCore takes 33 to 256; str(uuid.uuid4()) has 36"
        )
    if not _SESSION_ID.fullmatch(session_id):
        raise ContractError(f"session_id: {session_id!r} may contain letters, digits, '-' and '_' only")


def _read_answer(answer: bytes, session_id: str, default: tuple[str, str]) -> tuple[str, str]:
    """Where the result will be: bucket and key."""
    try:
        data = json.loads(answer)
        status = data.get("status")
    except (ValueError, AttributeError):
        data, status = {}, None
    if status == "processing":
        return data.get("s3_bucket") or default[0], data.get("result_key") or default[1]
    if status == "rejected":
        raise RolloutRejected(f"the agent rejected the payload: {data.get('error')}", session_id=session_id)
    raise SetupError(
        f"the agent answered {answer[:200]!r} instead of {{'status': 'processing'}}:"
        " is its handler decorated with @app.rollout_entrypoint?"
    )

"""``RolloutClient``: start rollouts of one deployed agent."""

from __future__ import annotations

import asyncio
import functools
import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from .._arn import parse_arn
from .._aws import Storage
from .._faults import Fault, pause
from .._redact import Redactor, find_secrets
from ..errors import InvocationError, RolloutTimeout, SetupError
from ..protocol import result_key
from ._a2a import A2ARuntime, parse_card
from ._batch import BatchResult, BatchSettings, Priority, close_batches
from ._future import RolloutFuture
from ._limits import Rates, shared_limiter
from ._loop import run_async, run_sync, soon
from ._notify import Listener
from ._one import Order
from ._probe import Probe
from ._request import Accepted, check_fields, check_session_id, encode, read_answer
from ._runtime import Runtime
from ._sessions import MOST_CALLS, Sessions, Start
from ._sweep import Pace, Sweeper, Watch
from ._threads import Threads

if TYPE_CHECKING:
    from a2a.types import AgentCard

__all__ = ["RolloutClient"]

_TRANSPORTS = {"http": Runtime, "a2a": A2ARuntime}
_READS = 32  # calls to S3 in flight
_START_TIMEOUT = 900.0  # seconds, for a start without a limit of its own
_FETCHES = 6
_ADDRESS = ("exp_id", "input_id", "s3_bucket")
"""The fields of ``_rollout`` that say where its result goes."""


class RolloutClient:
    """Starts sessions of one agent and fetches their results. Usable from several threads and event loops.

    ``agent_runtime_arn``: the deployed agent; the region is the ARN's. ``s3_bucket``: where the agent writes
    results. ``exp_id``: first part of every result key. ``max_retry_attempts``: how often a call that failed is sent
    again; throttled ones, and those that met no free session, are sent again as long as the rollout has time.
    ``tps_limit``: invoke and stop calls per second, together; ``new_sessions_per_minute``: sessions started (AWS
    allows 400 to a container); None for no limit. All clients of one runtime in this process keep to the strictest of
    theirs together, and to less when AWS throttles. ``max_pool_connections``: invokes in flight at once, where more
    than 256 are needed. ``base_url``, ``model_id``, ``extra_config`` (``api_key``, ``sampling_params``, …): passed to
    the agent in ``_rollout``; keywords of a single call win over them.
    ``notify_address``: ``http://host:port`` at which agents reach this process (port 0: a free one). It listens there,
    and agents tell it at once when a result is written; without it, and wherever a hint is lost, results are found by
    looking.
    ``probe_interval``: seconds, about, after which a running session is asked whether its agent still runs the rollout:
    one that was killed leaves no result, and would otherwise be waited for until the timeout. None: never.
    ``transport``: ``"a2a"`` for an agent that serves A2A (``app.run_a2a()``); everything else stays the same. It needs
    the extra ``[a2a]``.

    Raises ``SetupError`` for a bad ARN, ``ContractError`` for an ``exp_id`` that can't be part of a key, ``TypeError``
    for an ``extra_config`` that looks like a misspelt argument.
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
        *,
        new_sessions_per_minute: float | None = 400,
        notify_address: str | None = None,
        probe_interval: float | None = 300.0,
        transport: Literal["http", "a2a"] = "http",
        **extra_config: Any,
    ) -> None:
        arn = parse_arn(agent_runtime_arn)
        self.agent_runtime_arn, self.region = arn.text, arn.region
        self.s3_bucket, self.exp_id = s3_bucket, exp_id
        check_fields(extra_config)
        self.base_url, self.model_id, self.extra_config = base_url, model_id, extra_config
        result_key(exp_id, "input", "session")  # says so now if exp_id can't be part of a key
        if max_pool_connections < 1:
            raise SetupError(f"max_pool_connections must be at least 1, it is {max_pool_connections!r}")
        if probe_interval is not None and not probe_interval > 0:
            raise SetupError(f"probe_interval must be above 0, or None for never; it is {probe_interval!r}")
        self._probe_interval, self._closed = probe_interval, False
        self._rates = Rates(tps_limit, new_sessions_per_minute)
        if transport not in _TRANSPORTS:
            raise SetupError(f"transport={transport!r}: one of {', '.join(map(repr, _TRANSPORTS))} is required")
        self._runtime = _TRANSPORTS[transport](arn, MOST_CALLS + max_pool_connections)
        self._limiter = shared_limiter(self._runtime.endpoint, arn.text)
        self._limiter.join(self._rates)
        self._sessions = Sessions(self._runtime, self._limiter, max_retry_attempts, max_pool_connections)
        self._storage, self._reads = Storage(arn.region, _READS), Threads(_READS, "agentcore-rl-s3")
        self._sweepers: dict[tuple[str, str], Sweeper] = {}
        self._futures: weakref.WeakSet[RolloutFuture] = weakref.WeakSet()
        self._listener = Listener(notify_address, self._hint) if notify_address is not None else None
        # A client that is dropped leaves no threads behind. On the loop: this one may hold one of their locks.
        weakref.finalize(self, soon, functools.partial(_end_threads, self._sessions, self._reads)).atexit = False

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
        ``RolloutRejected`` if the agent refuses it, ``InvocationError`` if the session can't be started,
        ``RolloutTimeout`` if AWS has no room for it in 15 minutes, and ``SetupError`` if no session can be started.
        """
        return run_sync(self._start(_order(payload, session_id, input_id, rollout_overrides)), RolloutFuture._cancel)

    async def invoke_async(
        self,
        payload: Mapping[str, Any],
        session_id: str | None = None,
        input_id: str | None = None,
        **rollout_overrides: Any,
    ) -> RolloutFuture:
        """:meth:`invoke` for async code."""
        order = _order(payload, session_id, input_id, rollout_overrides)
        return await run_async(self._start(order), RolloutFuture._cancel)

    def run_batch(
        self,
        payloads: Iterable[Mapping[str, Any]],
        max_concurrent_sessions: int,
        timeout: float | None = 900.0,
        initial_interval: float = 0.25,
        max_interval: float = 2.0,
        backoff_factor: float = 1.5,
        log_interval: float = 30.0,
        samples: int = 1,
        *,
        run_dir: str | os.PathLike[str] | None = None,
        ordered: bool = False,
        priority: Priority = 0.0,
        progress: bool | None = None,
    ) -> BatchResult:
        """Run every payload ``samples`` times; iterate, with ``for`` or ``async for``, for a ``BatchItem`` each.

        ``payloads``: taken one by one as places get free, so any iterable will do. ``max_concurrent_sessions``:
        sessions at a time. ``timeout``: seconds for each rollout, from its first invoke; its session is stopped then.
        ``initial_interval``, ``max_interval``, ``backoff_factor``: how long between sweeps for results, in seconds; a
        session waits idle until its result is seen, which costs more than looking. ``log_interval``: seconds between
        log lines about progress. ``progress``: True for a bar, None for one on a terminal (it needs rich).

        ``run_dir``: a folder in which the batch keeps a ledger. The same call with the same folder, after the script
        has died, gives every item again: results that were there are fetched, sessions that still run are taken up,
        what was stopped or lost is run once more, and only the rest is started.
        ``ordered``: items in the order of the payloads instead of that in which they complete. ``priority``: of the
        whole batch, among all batches of this runtime in the process; or of each payload (numbers, or a function of
        the payload); the greater starts first.

        One bad rollout never ends the batch; ``SetupError`` does, because all others would fail the same way.
        Leaving the loop early, an exception, or Ctrl-C stops the sessions that run.
        """
        return BatchResult(
            self,
            BatchSettings(
                payloads=payloads,
                max_concurrent=max_concurrent_sessions,
                timeout=timeout,
                pace=Pace(initial_interval, max(initial_interval, max_interval), backoff_factor),
                log_interval=log_interval,
                samples=samples,
                run_dir=run_dir,
                ordered=ordered,
                priority=priority,
                progress=progress,
            ),
        )

    run_batch_async = run_batch
    """The same: its result takes ``async for`` as well."""

    def agent_card(self) -> AgentCard:
        """What the agent says of itself; only with ``transport="a2a"``. A session is started for it, and stopped.

        Raises ``InvocationError`` if the session can't be started, ``SetupError`` if none can or over ``"http"``.
        """
        return run_sync(self._agent_card())

    async def agent_card_async(self) -> AgentCard:
        """:meth:`agent_card` for async code."""
        return await run_async(self._agent_card())

    def close(self) -> None:
        """Stop every session that was started here and is not stopped, and close connections.

        It starts no more. Futures without a result raise ``RolloutCancelled``, and so do the iterators of batches.
        """
        if self._reads.forked:  # sessions and connections are the parent's
            return
        run_sync(self._close())
        self._limiter.leave(self._rates)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- on the background loop --

    async def _start(self, order: Order) -> RolloutFuture:
        """Have the payload accepted by its session; or find its result, where it may have run before."""
        self._sessions.check()
        if self._closed:
            raise SetupError("this RolloutClient is closed: make a new one")
        check_session_id(order.session_id)
        notify_url = await self._listener.url() if self._listener else None
        config = self._config(order.input_id, order.config, notify_url)
        expected = Accepted(config["s3_bucket"], _key(config, order.session_id))
        body = await self._reads.run(lambda: encode(order.payload, config))
        allowed = _START_TIMEOUT if order.timeout is None else order.timeout
        sweeper, watch = self._watch(expected.bucket, expected.key, order.pace)
        loop = asyncio.get_running_loop()

        def on_sent() -> None:
            watch.asleep = False
            limit.reschedule(loop.time() + allowed)

        start = order.start = Start(
            order.session_id, body, lambda: sweeper.look(watch), on_sent, priority=order.priority
        )
        accepted = expected
        try:
            async with asyncio.timeout(None) as limit:
                if not (order.look_first and await sweeper.look(watch)):
                    accepted = await self._accepted(start, expected)
        except TimeoutError:
            watch.result.cancel()
            raise _not_started(start, allowed) from start.last
        except BaseException:
            watch.result.cancel()
            raise
        if accepted[:2] != expected[:2]:  # the agent knows better
            watch.result.cancel()
            foreign = accepted.bucket != expected.bucket
            sweeper, watch = self._watch(accepted.bucket, accepted.key, order.pace, foreign=foreign)
        watch.asleep = False
        start.body = b""  # it may be large, and nobody needs it any more
        future = RolloutFuture(
            self._sessions,
            sweeper,
            watch,
            session_id=order.session_id,
            input_id=order.input_id,
            s3_bucket=accepted.bucket,
            started=start.sent or time.monotonic(),
            probe=self._probe(order.session_id, config, sweeper, watch) if accepted.probes else None,
        )
        self._futures.add(future)
        return future

    async def _agent_card(self) -> AgentCard:
        if not isinstance(self._runtime, A2ARuntime):
            raise SetupError('only A2A agents have a card: RolloutClient(…, transport="a2a")')
        self._sessions.check()
        session_id = str(uuid.uuid4())
        try:
            answer = await self._sessions.start(Start(session_id, b"", _never, _nothing), self._runtime.read_card)
        finally:
            await self._sessions.stop(session_id)
        assert answer is not None
        return parse_card(answer)

    def _probe(self, session_id: str, config: Mapping[str, Any], sweeper: Sweeper, watch: Watch) -> Probe | None:
        if self._probe_interval is None:
            return None
        address = {name: config[name] for name in _ADDRESS}
        return Probe(self._sessions, sweeper, watch, session_id, address, self._probe_interval)

    async def _accepted(self, start: Start, expected: Accepted) -> Accepted:
        """Start the session."""
        answer = await self._sessions.start(start)
        try:
            return expected if answer is None else read_answer(answer, start.session_id, start.body, expected)
        except BaseException:
            await self._sessions.stop(start.session_id)
            raise

    async def _fetch(self, order: Order) -> dict[str, Any]:
        """The result of a rollout that has ended. Raises ``RolloutError``."""
        key = result_key(self.exp_id, order.input_id, order.session_id)
        sweeper, watch = self._watch(self.s3_bucket, key, order.pace)
        try:
            for attempt in range(1, _FETCHES + 1):
                if await sweeper.look(watch):
                    return watch.result.result()
                if watch.fault is Fault.GONE:
                    break
                await asyncio.sleep(pause(attempt))
        finally:
            watch.result.cancel()
        raise InvocationError(f"s3://{self.s3_bucket}/{key} can't be read", session_id=order.session_id)

    def _watch(self, bucket: str, key: str, pace: Pace, *, foreign: bool = False) -> tuple[Sweeper, Watch]:
        prefix = _prefix(key)
        sweeper = self._sweepers.get((bucket, prefix))
        if sweeper is None:
            sweeper = Sweeper(self._storage, self._reads, bucket, prefix, foreign=foreign)
            self._sweepers[bucket, prefix] = sweeper
        return sweeper, sweeper.watch(key, pace)

    def _hint_for(self, input_id: str, session_id: str, config: Mapping[str, Any]) -> Callable[[], None]:
        """What to call, from any thread, when this rollout's result is said to be there."""

        def hint() -> None:
            whole = self._config(input_id, config)
            self._hint(whole["s3_bucket"], _key(whole, session_id))

        return functools.partial(soon, hint)

    def _hint(self, bucket: str, key: str) -> None:
        sweeper = self._sweepers.get((bucket, _prefix(key)))
        if sweeper is not None:
            sweeper.hint(key)

    async def _masked(self, order: Order, text: str) -> str:
        """``text`` without what the rollout was told in confidence: an agent may have put it into its error."""
        told = [self.extra_config, {"base_url": self.base_url}, order.config, order.payload]
        return await self._reads.run(lambda: Redactor(find_secrets(told)).text(text))  # payloads may be large

    def _config(self, input_id: str, config: Mapping[str, Any], notify_url: str | None = None) -> dict[str, Any]:
        """The ``_rollout`` of a rollout. ``config``: the fields of this one alone, which win."""
        return {
            "base_url": self.base_url,
            "model_id": self.model_id,
            "notify_url": notify_url,
            **self.extra_config,
            "exp_id": self.exp_id,
            "input_id": input_id,
            "s3_bucket": self.s3_bucket,
            **config,
        }

    async def _close(self) -> None:
        self._closed = True
        await close_batches(self)
        for sweeper in self._sweepers.values():
            sweeper.close()
        await asyncio.gather(*(future._stop() for future in list(self._futures)))  # once each
        self._sessions.report_unstopped()
        if self._listener:
            self._listener.close()
        for each in (self._sessions, self._reads, self._runtime, self._storage):
            each.close()


def _end_threads(*threads: Sessions | Threads) -> None:
    for each in threads:
        each.close()


def _key(config: Mapping[str, Any], session_id: str) -> str:
    return result_key(config["exp_id"], config["input_id"], session_id)


def _prefix(key: str) -> str:
    """The part that all results of an experiment share: one sweeper looks for them."""
    return key[: key.find("/") + 1]


def _order(
    payload: Mapping[str, Any], session_id: str | None, input_id: str | None, config: Mapping[str, Any]
) -> Order:
    check_fields(config)
    return Order(payload, session_id or str(uuid.uuid4()), input_id or str(uuid.uuid4()), config)


async def _never() -> bool:
    return False


def _nothing() -> None:
    pass


def _not_started(start: Start, allowed: float) -> RolloutTimeout:
    why = f": {start.last}" if start.last is not None else ""
    text = f"session {start.session_id} did not start within {allowed:g} s{why}"
    return RolloutTimeout(text, session_id=start.session_id)

"""``ReplicaRouter``: several replicas of one engine behind the engine seam."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from ...errors import EngineError
from ._gate import Gate, Running
from .base import RETRY_AFTER, SamplingBackend, StreamingEngine, TokenChunk

logger = logging.getLogger(__name__)

OnReturn = Callable[[SamplingBackend, int | None], Awaitable[None]]

_SESSIONS = 100_000
_ABORTED = 60.0
"""Seconds for aborted turns to end."""
_STILL = "a replica is still not healthy after: "


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of a router. ``running``: turns it is sampling. ``failures``: how often it failed since its last good
    turn. ``refusals``: turns in a row that failed at it as if no other replica could do better. ``failed_at``,
    ``down_until``: when it failed last, and until when it rests (``time.monotonic()``; 0.0 = not). ``error``: its last
    failure. ``returned``: False from a failure until ``revival`` has succeeded."""

    backend: SamplingBackend
    running: int = 0
    failures: int = 0
    refusals: int = 0
    failed_at: float = 0.0
    down_until: float = 0.0
    error: str = ""
    returned: bool = True
    revival: asyncio.Task[None] | None = field(default=None, repr=False)


@dataclass(slots=True, eq=False)
class _Try:
    """A turn at one replica. ``since``: when it began (``time.monotonic()``). ``answered``: a chunk of it came."""

    replica: Replica
    since: float = field(default_factory=time.monotonic)
    answered: bool = False


class ReplicaRouter(StreamingEngine):
    """Spreads turns over replicas of one engine; itself an engine.

    A session stays with its replica, where its prefix is cached; a new one goes to the replica with the fewest running
    turns. A replica that fails is left alone for ``cooldown`` seconds (doubled with every further failure, up to
    ``max_cooldown``); then, if it is healthy, one turn tries it. A turn whose engine fails before its first token goes
    to another replica, at most once to each; afterwards the failure is the turn's. Give the replicas ``retries=0``.

    An error that no other replica could help (400, 500 of a healthy server, an answer of a wrong form) is the
    request's fault. Only where ``max_refusals`` turns in a row ended so at one replica, and another one can be trusted,
    that one is asked as well: if it answers, the replica was at fault and rests. So does a replica that breaks as many
    answers off in this way.

    ``policy_version``: version of the weights. A replica that reports another one gets no turn. ``on_return``: awaited
    with a replica and the version before a replica that failed serves again; load the weights there, since a restarted
    server has those it started with.
    """

    def __init__(
        self,
        backends: Sequence[SamplingBackend],
        *,
        policy_version: int | None = None,
        cooldown: float = 2.0,
        max_cooldown: float = 60.0,
        max_refusals: int = 5,
        on_return: OnReturn | None = None,
    ) -> None:
        if not backends:
            raise ValueError("backends: at least one engine is required")
        if max_refusals < 1:
            raise ValueError(f"max_refusals: 1 or more is required, got {max_refusals!r}")
        self.replicas = [Replica(backend) for backend in backends]
        self.on_return = on_return
        self.cooldown, self.max_cooldown, self.max_refusals = cooldown, max_cooldown, max_refusals
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._gate = Gate()
        self.policy_version: int | None = None
        if policy_version is not None:
            self._set_version(policy_version)
        self.min_new_tokens = max(getattr(backend, "min_new_tokens", 1) for backend in backends)
        kinds = {getattr(backend, "stop_kind", "both") for backend in backends} - {"both"}
        self.top_logprobs = all(getattr(backend, "top_logprobs", False) for backend in backends)
        self.stop_kind = kinds.pop() if len(kinds) == 1 else "ids" if kinds else "both"

    async def context_window(self) -> int | None:
        """The smallest window that a replica tells, None if none does. Raises ``EngineError`` if all fail."""
        asks = [ask() for r in self.replicas if (ask := getattr(r.backend, "context_window", None))]
        told = await asyncio.gather(*asks, return_exceptions=True)
        failed = [window for window in told if isinstance(window, BaseException)]
        if told and len(failed) == len(told):
            raise failed[0]
        return min((window for window in told if isinstance(window, int)), default=None)

    # -- the seam ----------------------------------------------------------------------------------------

    async def stream(
        self,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        **media: Any,
    ) -> AsyncGenerator[TokenChunk]:
        """One answer while it is sampled. Raises ``EngineError``."""
        request = {"prompt_ids": prompt_ids, "sampling_params": sampling_params, "session_id": session_id, **media}
        turn = await self._gate.enter()
        try:
            tried: list[Replica] = []
            refusal: tuple[_Try, EngineError] | None = None  # put to another replica to learn whose fault it was
            replica = self._choose(session_id)
            while True:
                tried.append(replica)
                attempt = _Try(replica)
                try:
                    async with aclosing(self._sample(attempt, turn, request)) as chunks:
                        async for chunk in chunks:
                            if refusal:
                                self._refused_wrongly(*refusal, session_id, replica)
                                refusal = None
                            yield chunk
                    return
                except EngineError as error:
                    if refusal:
                        raise refusal[1] from None
                    other = None if attempt.answered or turn.aborted else self._other(session_id, tried, error)
                    if other is None:
                        raise
                    if error.retry_after is None:
                        refusal = attempt, error
                    replica = other
                    logger.warning("turn goes to another replica: %s", error)
        finally:
            self._gate.leave(turn)

    async def _sample(self, attempt: _Try, turn: Running, request: dict[str, Any]) -> AsyncGenerator[TokenChunk]:
        """A turn on one replica, which is judged by it."""
        replica = attempt.replica
        replica.running += 1
        try:
            if not replica.returned:
                await self._revive(replica, turn)
            async with aclosing(_chunks(replica.backend, request)) as chunks:
                async for chunk in turn.abortable(chunks):
                    self._check_version(chunk)
                    if attempt.since >= replica.failed_at:  # an older one says nothing about what came after it
                        replica.failures, replica.down_until = 0, 0.0
                    attempt.answered = True
                    yield chunk
            if attempt.since >= replica.failed_at:
                replica.refusals = 0
        except EngineError as error:
            if error.retry_after is None and getattr(error, "status", 0) >= 500 and not await _healthy(replica):
                error.retry_after = RETRY_AFTER  # not this request's fault
            if error.retry_after is not None:
                if not turn.aborted:
                    self._failed(attempt, error)
            else:
                replica.refusals += 1
                if attempt.answered and self._trusted_instead_of([replica]):
                    self._failed(attempt, error)  # can't be asked elsewhere, but it was accepted here
            raise
        finally:
            replica.running -= 1

    async def _revive(self, replica: Replica, turn: Running) -> None:
        """What comes before a replica that failed serves again; once for all turns that wait for it."""
        task = replica.revival
        if task is None or task.done() or task.get_loop() is not turn.loop:
            work = self._gate.follow(turn)
            task = replica.revival = turn.loop.create_task(self._return(replica, work))
            task.add_done_callback(lambda _: self._gate.leave(work))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # the turns have seen it
        await asyncio.shield(task)

    async def _return(self, replica: Replica, work: Running) -> None:
        # An update of the weights ends it: else it would load the old ones after the new.
        async with work.until_aborted():
            if not await _healthy(replica):
                first = replica.error.removeprefix(_STILL)  # it may be so for days
                raise EngineError(_STILL + first, retry_after=RETRY_AFTER)
            if self.on_return is not None:
                try:
                    await self.on_return(replica.backend, self.policy_version)
                except EngineError:
                    raise
                except Exception as error:
                    logger.exception("on_return failed")
                    raise EngineError(f"on_return raised {type(error).__name__}", retry_after=RETRY_AFTER) from error
        replica.returned = True

    # -- choice ------------------------------------------------------------------------------------------

    def _choose(self, session_id: str | None, tried: Sequence[Replica] = ()) -> Replica:
        now = time.monotonic()
        left = [replica for replica in self.replicas if replica not in tried]
        up = [replica for replica in left if replica.down_until <= now]
        home = self._homes.get(session_id) if session_id is not None else None
        if home in up:
            chosen = home
        elif up:
            chosen = min(up, key=lambda replica: replica.running)
        else:  # all are resting: the one that has rested longest may be back
            chosen = min(left, key=lambda replica: replica.down_until)
        assert chosen is not None
        if chosen.failures:  # this turn tries it; the others wait for the outcome
            chosen.down_until = now + self._rest(chosen)
        self._settle(session_id, chosen)
        return chosen

    def _settle(self, session_id: str | None, replica: Replica) -> None:
        if session_id is not None:
            self._homes[session_id] = replica
            self._homes.move_to_end(session_id)
            while len(self._homes) > _SESSIONS:
                self._homes.popitem(last=False)

    def _other(self, session_id: str | None, tried: Sequence[Replica], error: EngineError) -> Replica | None:
        """Where a turn goes that failed at the last one of ``tried``; None if it is to fail."""
        if error.retry_after is None:
            return self._trusted_instead_of(tried)
        return self._choose(session_id, tried) if len(tried) < len(self.replicas) else None

    def _trusted_instead_of(self, tried: Sequence[Replica]) -> Replica | None:
        """Who may show that the last of ``tried``, not its requests, is at fault; None while there is no doubt."""
        if tried[-1].refusals < self.max_refusals:
            return None
        trusted = [r for r in self.replicas if not r.failures and r.refusals < self.max_refusals and r not in tried]
        return min(trusted, key=lambda r: r.running, default=None)

    def _refused_wrongly(self, refused: _Try, error: EngineError, session_id: str | None, answered: Replica) -> None:
        logger.warning("a replica rests, another one answers what it refuses: %s", error)
        self._failed(refused, error)
        self._settle(session_id, answered)

    def _failed(self, attempt: _Try, error: EngineError) -> None:
        replica = attempt.replica
        replica.error = str(error)
        if attempt.since < replica.failed_at:
            return  # turns that ran side by side and fail together are one failure
        replica.failed_at = time.monotonic()
        replica.failures += 1
        replica.returned = False
        replica.down_until = replica.failed_at + self._rest(replica)

    def _rest(self, replica: Replica) -> float:
        doublings = min(max(replica.failures - 1, 0), 30)
        return float(min(self.cooldown * 2**doublings, self.max_cooldown))

    def _check_version(self, chunk: TokenChunk) -> None:
        wanted, found = self.policy_version, chunk.policy_version
        if wanted is None or found is None:
            return
        for other in set(found if isinstance(found, list) else [found]) - {wanted}:
            raise EngineError(f"a replica samples with weights {other}, current are {wanted}", retry_after=RETRY_AFTER)

    # -- weights -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def updating(self, version: int | None = None, *, wait: float = 0.0) -> AsyncIterator[None]:
        """Change the weights within: no turn is sampled meanwhile, and none by two versions.

        New turns wait. Running ones get ``wait`` seconds to end, then they fail with a retryable ``EngineError``.
        Afterwards ``version`` (the last one + 1 if None) is the current one, also of replicas that keep a
        ``policy_version`` of their own. If the block raises, the version stays. May be used from any thread's loop.
        Raises ``TimeoutError`` where a turn does not end within a minute of its abort.
        """
        self._gate.close()
        try:
            if not await self._gate.idle(wait):
                self._gate.abort()
                if not await self._gate.idle(_ABORTED):
                    raise TimeoutError(f"{len(self._gate.running)} turns did not end: their clients do not read")
            yield
            if version is None and self.policy_version is not None:
                version = self.policy_version + 1
            self._set_version(version)
        finally:
            self._gate.open()

    def _set_version(self, version: int | None) -> None:
        self.policy_version = version
        for replica in self.replicas:
            if hasattr(replica.backend, "policy_version"):
                replica.backend.policy_version = version

    # -- end -----------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close the replicas that can be closed."""
        for replica in self.replicas:
            if aclose := getattr(replica.backend, "aclose", None):
                await aclose()


async def _healthy(replica: Replica) -> bool:
    healthy = getattr(replica.backend, "healthy", None)
    return healthy is None or bool(await healthy())


async def _chunks(backend: SamplingBackend, request: dict[str, Any]) -> AsyncGenerator[TokenChunk]:
    """A backend's answer as chunks, also of one that does not stream."""
    if stream := getattr(backend, "stream", None):
        async with aclosing(stream(**request)) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    record = await backend.generate(**request)
    yield TokenChunk(
        record.output_ids, record.output_log_probs, record.policy_version, record.finish_reason, record.extra
    )

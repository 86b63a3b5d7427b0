"""``RolloutGateway``: sessions, and the one-turn pipeline that every wire goes through.

A turn: decode -> place in the session's token tree and render what is new (:mod:`.prompts`) -> sample, parse, keep
(:mod:`.answers`) -> encode. Wires, renderer, engine and traces don't know each other.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from ..errors import GatewayError
from .answers import Answers, CallIdBook, Inexact, OnDeltas, TokenAnswers, replay, tokens_used_up
from .prompts import History, Prompt, Prompts
from .proxied import ChatAnswers, ChatPrompts, Vocabulary
from .render.base import Renderer
from .sampling import ChatBackend, SamplingBackend
from .sessions import Session, SessionStore
from .traces import Status, TraceRecord, Turn, linearize
from .wires import WireRequest


class RolloutGateway:
    """A chat API in front of a token-in/token-out engine that records every sampled token.

    ``backend``: the engine. ``renderer``: messages to token ids and back; None where the engine does that itself
    (:class:`ChatProxyBackend`). ``history``: ``"preserve"`` (earlier content
    stays as the model saw it, one linear conversation is one row) or ``"template"`` (the messages as sent, rendered
    by the template, decide what stays; the row forks where that removes something). ``model``: the name listed under
    ``/v1/models``. ``base_url``: address the sessions' URLs begin with; a server that starts the gateway sets it.
    ``sampling_defaults`` / ``sampling_overrides``: for all sessions, below the sessions' own.
    ``abandoned``: ``"mask"`` or ``"train"``, see :func:`linearize`. ``inexact``: what becomes of turns sampled with
    truncation, penalties or temperature 0, whose logprobs are not those of the distribution sampled from: ``"warn"``
    (once a session), ``"mask"`` (not trained), ``"refuse"`` (400).
    """

    def __init__(
        self,
        *,
        backend: SamplingBackend | ChatBackend,
        renderer: Renderer | None = None,
        history: History = "preserve",
        model: str = "policy",
        base_url: str = "",
        sampling_defaults: dict[str, Any] | None = None,
        sampling_overrides: dict[str, Any] | None = None,
        abandoned: Literal["mask", "train"] = "mask",
        inexact: Inexact = "warn",
    ) -> None:
        _one_of("history", history, get_args(History))
        _one_of("abandoned", abandoned, ("mask", "train"))
        _one_of("inexact", inexact, get_args(Inexact))
        self.backend, self.history, self.model = backend, history, model
        self.base_url = base_url.rstrip("/")
        if base_url and not re.fullmatch(r"https?://[^/\s].*(?<!/v1)", self.base_url):
            raise ValueError(f"base_url: an address like 'http://10.0.0.5:8000', without /v1, not {base_url!r}")
        self._defaults, self._overrides = sampling_defaults, sampling_overrides
        self._abandoned = abandoned
        self.renderer: Renderer | Vocabulary
        self._prompts: Prompts | ChatPrompts
        self._answers: Answers[Any]
        if renderer is not None and isinstance(backend, SamplingBackend):
            self.renderer = renderer
            self._prompts, self._answers = Prompts(renderer, history), TokenAnswers(backend, renderer, inexact)
        elif renderer is None and isinstance(backend, ChatBackend):
            self._prompts, self._answers = ChatPrompts(backend, history), ChatAnswers(backend, inexact)
            self.renderer = self._answers.vocabulary
        elif not isinstance(backend, SamplingBackend | ChatBackend):
            raise ValueError(f"backend: {type(backend).__name__} has neither `generate` nor `chat`")
        else:
            raise ValueError("renderer: required by an engine that takes tokens; left out for one that takes chats")
        self.sessions = SessionStore()

    # -- sessions ----------------------------------------------------------------------------------------

    def create_session(
        self,
        session_id: str | None = None,
        *,
        sampling_defaults: dict[str, Any] | None = None,
        sampling_overrides: dict[str, Any] | None = None,
        max_context_tokens: int = 0,
        min_response_tokens: int = 1,
        max_turns: int | None = None,
        max_total_tokens: int | None = None,
        deadline: float | None = None,
        volatile: Sequence[str] = (),
        on_done: Callable[[], None] | None = None,
    ) -> Session:
        """Open a session. Without ``session_id`` its key can't be guessed; with one (at least 20 characters) the id
        is the key. Callable from any thread. ``volatile``: regular expressions; it, ``on_done`` and the limits:
        see :class:`Session`. Raises ``ContractError`` for an id that can't be a key or is in use, ``ValueError``
        for a limit below its least, ``re.error``."""
        return self.sessions.create(
            session_id,
            self.base_url,
            sampling_defaults=_merged(self._defaults, sampling_defaults),
            sampling_overrides=_merged(self._overrides, sampling_overrides),
            max_context_tokens=max_context_tokens,
            min_response_tokens=min_response_tokens,
            max_turns=max_turns,
            max_total_tokens=max_total_tokens,
            deadline=deadline,
            volatile=[re.compile(pattern) for pattern in volatile],
            on_done=on_done,
        )

    async def finish_session(
        self,
        session_id: str,
        *,
        reward: float | None = None,
        metadata: dict[str, Any] | None = None,
        turn_rewards: Sequence[float] | None = None,
        wait: float = 5.0,
    ) -> list[TraceRecord]:
        """End a session and return its training rows; the session is forgotten.

        Requests still being served get ``wait`` seconds, then they are aborted and leave no trace. Must be awaited on
        the loop that serves the gateway (:class:`ThreadedGatewayServer` has the same method for other threads).
        ``turn_rewards``: one for each delivered turn, in the order of their delivery; each row gets those of its turns.
        Raises ``KeyError`` for a session that is not live; ``ValueError`` for a number of turn rewards that is not that
        of the turns, or a reward that is not finite: the session stays.
        """
        session = self.sessions.pop(session_id)
        try:
            await _drain(session, wait)
            if turn_rewards is not None and len(turn_rewards) != (turns := len(session.tree.delivered())):
                raise ValueError(f"turn_rewards: {len(turn_rewards)} given, but {turns} turns were delivered")
            return await asyncio.to_thread(
                linearize,
                session.tree,
                rollout_id=session.session_id,
                reward=reward,
                metadata={**(metadata or {}), "history": self.history},
                decode=self._answers.decoder(),
                abandoned=self._abandoned,
                turn_rewards=turn_rewards,
            )
        except BaseException:  # rewards that are no numbers, or cancelled: nothing is lost by it
            self.sessions.put_back(session)
            raise

    async def drop_session(self, session_id: str) -> None:
        """End a session, abort what it is doing, keep nothing. A session that is not live is no error."""
        try:
            session = self.sessions.pop(session_id)
        except KeyError:
            return
        await _drain(session, 0)

    # -- one turn ------------------------------------------------------------------------------------------

    async def take_turns(
        self,
        session: Session,
        request: WireRequest,
        call_ids: Sequence[CallIdBook],
        *,
        retry: bool = False,
        idempotency_key: str | None = None,
        on_prompt: Callable[[int], None] | None = None,
        on_deltas: OnDeltas | None = None,
    ) -> list[Turn]:
        """Sample the answer to a request, or its ``n`` answers side by side, and keep them as prepared turns; the
        caller says when they are delivered. If one fails, none will be.

        ``call_ids``: one for each answer. ``retry``: the client says it sent this request before; it gets the latest
        answers to an equal one, if there are any. ``idempotency_key``: an equal request that had the same key gives its
        own answers instead; this one is sampled if that came to nothing. ``on_prompt``: told the prompt's length in
        tokens. ``on_deltas``: called with what is new of which answer while it is sampled. Cancelling aborts the engine
        and leaves no trace. Raises ``GatewayError``.
        """
        prompt = await self._prompts.make(session.tree, request)
        if earlier := await _earlier_answers(session, prompt, retry, idempotency_key):
            session.expect(idempotency_key, prompt.place.key, request.n).set_result(earlier)
            await _tell_again(earlier, on_prompt, on_deltas)
            return earlier
        if on_prompt:
            prompt.tell_length(on_prompt)
        _check_budget(session, request.n)
        cut: Status | None = Status.ABORTED
        try:
            with session.answering(idempotency_key, prompt.place.key, request.n) as answers:
                async with session.time_left():
                    if request.n == 1:
                        turns = [await self._answers.sample(session, prompt, 0, call_ids[0], on_deltas)]
                    else:
                        turns = await self._take_several(session, prompt, call_ids, on_deltas)
                answers.set_result(turns)
            cut = None
            return turns
        except GatewayError as error:
            cut = Status.FAILED if error.status >= 500 else None
            raise
        finally:
            if prompt.parent is not None:
                prompt.parent.cut = cut

    async def _take_several(
        self, session: Session, prompt: Prompt, call_ids: Sequence[CallIdBook], on_deltas: OnDeltas | None
    ) -> list[Turn]:
        tasks = [
            asyncio.ensure_future(
                self._answers.sample(
                    session, replace(prompt, ids=list(prompt.ids)), choice, call_ids[choice], on_deltas
                )
            )
            for choice in range(prompt.request.n)
        ]
        try:
            turns = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled() and task.exception() is None:
                    session.tree.discard(task.result())
                    session.sampled_tokens -= task.result().sampled_tokens
            raise
        for turn in turns:
            if turn.parent is not None:
                session.tree.built_on(turn.parent)
        return turns

    async def window(self, session: Session) -> int | None:
        """How many tokens a prompt and its answer may have: the session's limit, else the engine's if it tells."""
        return await self._answers.window(session) or None

    async def count_tokens(self, session: Session, request: WireRequest) -> int:
        """The length of the prompt that a request would give. Nothing is sampled or kept. Raises ``GatewayError``."""
        return await self._prompts.count(session.tree, request)


# -- helpers -----------------------------------------------------------------------------------------------


async def _earlier_answers(session: Session, prompt: Prompt, retry: bool, idempotency_key: str | None) -> list[Turn]:
    """What this very request was answered before, or is being answered; empty where it was not."""
    key, n = prompt.place.key, prompt.request.n
    while idempotency_key is not None and (same := session.keyed.get((idempotency_key, key, n))):
        if same.done():
            return [] if same.cancelled() else same.result()
        await asyncio.wait([same])
    if not retry:
        return []
    if running := session.in_flight.get((key, n)):
        await asyncio.wait([running])
        if not running.cancelled():
            return running.result()
    found = session.tree.siblings(key, prompt.parent)
    found = [turn for turn in found if (turn.choice is None) == (n == 1)]
    return sorted(found[-n:], key=lambda turn: turn.choice or 0) if len(found) >= n else []


async def _tell_again(
    turns: Sequence[Turn], on_prompt: Callable[[int], None] | None, on_deltas: OnDeltas | None
) -> None:
    if on_prompt:
        on_prompt(len(turns[0].tokens()) - turns[0].sampled_tokens)
    if on_deltas:
        for choice, turn in enumerate(turns):
            await on_deltas(replay(turn), choice)


async def _drain(session: Session, wait: float) -> None:
    """Let the session's running requests end; abort those that take longer."""
    running = {task for task in session.requests if task is not asyncio.current_task()}
    if running and wait:
        _, running = await asyncio.wait(running, timeout=wait)
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: {' or '.join(map(repr, allowed))}, not {value!r}")


def _merged(*layers: dict[str, Any] | None) -> dict[str, Any]:
    """Sampling parameters of which the later win, each under one name: else one layer's ``max_tokens`` would stand
    beside the ``max_new_tokens`` of another."""
    params: dict[str, Any] = {}
    for layer in layers:
        params |= layer or {}
        if "max_new_tokens" in params:
            params["max_tokens"] = params.pop("max_new_tokens")
    if isinstance(params.get("stop"), str):
        params["stop"] = [params["stop"]]
    return params


def _check_budget(session: Session, n: int) -> None:
    if session.max_turns is not None and len(session.tree.turns) + session.sampling + n > session.max_turns:
        raise GatewayError(400, f"the session's {session.max_turns} turns are used up", kind="turn_limit_exceeded")
    if session.max_total_tokens is not None and session.sampled_tokens >= session.max_total_tokens:
        raise tokens_used_up(session)

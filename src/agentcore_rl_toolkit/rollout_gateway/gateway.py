"""``RolloutGateway``: sessions, and the one-turn pipeline that every wire goes through.

A turn: decode -> match against the session's token tree -> render what is new -> sample -> parse -> keep -> encode.
Only this module joins wires, renderer, engine and traces; none of them knows another.
"""

from __future__ import annotations

import asyncio
import logging
import re
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import ContextLengthExceeded, EngineError, GatewayError, RenderError
from .completions import PlainText, place_prompt, prompt_key
from .messages import Message, assistant_message, chain
from .parsed import CallArgumentsDelta, CallStartDelta, ContentDelta, Delta, ParsedMessage, ReasoningDelta
from .render.base import Fork, Renderer
from .sampling import SamplingBackend, TurnRecord
from .sessions import Session, SessionStore
from .traces import TokenTree, TraceRecord, Turn, check_output, linearize
from .trimmed import Trimmed
from .wires import WireRequest

logger = logging.getLogger(__name__)

History = Literal["preserve", "template"]
OnDeltas = Callable[[list[Delta], int], Awaitable[None]]
"""Called with new deltas, and which of the request's answers they belong to."""

DEFAULT_MAX_TOKENS = 4096
"""Limit of an answer for which nobody named one: engines' own defaults (16, 256, …) cut answers silently."""

_INLINE_CHARACTERS = 4096
"""New text longer than this is rendered in a worker thread: about 2 ms of work on the event loop at most."""


@dataclass(slots=True)
class _Rendered:
    """New tokens; ``fork``: why they begin a new row, if they do; ``divergence``: what the template would change."""

    new_ids: list[int]
    fork: str | None = None
    divergence: str | None = None


@dataclass(slots=True)
class _Place:
    """Where a request stands in the session's tree: after ``parent``, with ``new`` messages on top.

    ``key`` and ``depth``: chain key and number of all the request's messages.
    """

    parent: Turn | None
    new: list[Message]
    key: bytes
    depth: int


@dataclass(slots=True)
class _Prompt:
    """What the engine is asked, and where the answer will hang in the tree."""

    request: WireRequest
    key: bytes
    depth: int
    parent: Turn | None
    new_ids: list[int]
    ids: list[int]
    fork: str | None
    divergence: str | None = None


@dataclass(slots=True)
class CallIdBook:
    """The ids of one answer's tool calls: asked for while streaming, and again when the answer is kept."""

    renderer: Renderer
    ids: list[str] = field(default_factory=list)

    def __call__(self, index: int, parsed_id: str | None) -> str:
        while len(self.ids) <= index:
            self.ids.append(self.renderer.call_id(parsed_id if len(self.ids) == index else None, len(self.ids)))
        return self.ids[index]


class RolloutGateway:
    """A chat API in front of a token-in/token-out engine that records every sampled token.

    ``backend``: the engine. ``renderer``: messages to token ids and back. ``history``: ``"preserve"`` (earlier content
    stays as the model saw it, one linear conversation is one row) or ``"template"`` (the messages as sent, rendered
    by the template, decide what stays; the row forks where that removes something). ``model``: the name listed under
    ``/v1/models``. ``base_url``: address the sessions' URLs begin with; a server that starts the gateway sets it.
    ``sampling_defaults`` / ``sampling_overrides``: for all sessions, below the sessions' own.
    ``abandoned``: ``"mask"`` or ``"train"``, see :func:`linearize`.
    """

    def __init__(
        self,
        *,
        backend: SamplingBackend,
        renderer: Renderer,
        history: History = "preserve",
        model: str = "policy",
        base_url: str = "",
        sampling_defaults: dict[str, Any] | None = None,
        sampling_overrides: dict[str, Any] | None = None,
        abandoned: Literal["mask", "train"] = "mask",
    ) -> None:
        if history not in ("preserve", "template"):
            raise ValueError(f"history: 'preserve' or 'template', not {history!r}")
        if abandoned not in ("mask", "train"):
            raise ValueError(f"abandoned: 'mask' or 'train', not {abandoned!r}")
        self.backend, self.renderer, self.history, self.model = backend, renderer, history, model
        self.base_url = base_url.rstrip("/")
        self._defaults, self._overrides = sampling_defaults or {}, sampling_overrides or {}
        self._abandoned = abandoned
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
        volatile: Sequence[str] = (),
    ) -> Session:
        """Open a session. Without ``session_id`` its key can't be guessed; with one (at least 20 characters) the id
        is the key. Callable from any thread. The limits: see :class:`Session`."""
        return self.sessions.create(
            session_id,
            self.base_url,
            sampling_defaults={**self._defaults, **(sampling_defaults or {})},
            sampling_overrides={**self._overrides, **(sampling_overrides or {})},
            max_context_tokens=max_context_tokens,
            min_response_tokens=min_response_tokens,
            max_turns=max_turns,
            max_total_tokens=max_total_tokens,
            volatile=[re.compile(pattern) for pattern in volatile],
        )

    async def finish_session(
        self,
        session_id: str,
        *,
        reward: float | None = None,
        metadata: dict[str, Any] | None = None,
        wait: float = 5.0,
    ) -> list[TraceRecord]:
        """End a session and return its training rows; the session is forgotten.

        Requests still being served get ``wait`` seconds, then they are aborted and leave no trace. Must be awaited on
        the loop that serves the gateway (:class:`ThreadedGatewayServer` has the same method for other threads).
        Raises ``KeyError`` for a session that is not live.
        """
        session = self.sessions.pop(session_id)
        await _drain(session, wait)
        return await asyncio.to_thread(
            linearize,
            session.tree,
            rollout_id=session.session_id,
            reward=reward,
            metadata={**(metadata or {}), "history": self.history},
            decode=self.renderer.decode,
            abandoned=self._abandoned,
        )

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
        on_prompt: Callable[[int], None] | None = None,
        on_deltas: OnDeltas | None = None,
    ) -> list[Turn]:
        """Sample the answer to a request, or its ``n`` answers side by side, and keep them as prepared turns; the
        caller says when they are delivered. If one fails, none will be.

        ``call_ids``: one for each answer. ``retry``: the client says it sent this request before; it gets the earlier
        answers if they are there. ``on_prompt``: told the prompt's length in tokens. ``on_deltas``: called with what is
        new of which answer while it is sampled. Cancelling aborts the engine and leaves no trace. Raises
        ``GatewayError``.
        """
        prompt = await self._prompt(session, request)
        if on_prompt:
            on_prompt(len(prompt.ids))
        if retry and (earlier := await _earlier_answers(session, prompt)):
            if on_deltas:
                for choice, turn in enumerate(earlier):
                    await on_deltas(replay(turn), choice)
            return earlier
        _check_budget(session, request.n)
        if request.n == 1:
            return [await self._take_turn(session, prompt, 0, call_ids[0], on_deltas)]
        tasks = [
            asyncio.ensure_future(
                self._take_turn(session, replace(prompt, ids=list(prompt.ids)), choice, call_ids[choice], on_deltas)
            )
            for choice in range(request.n)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _take_turn(
        self, session: Session, prompt: _Prompt, choice: int, call_ids: CallIdBook, on_deltas: OnDeltas | None
    ) -> Turn:
        answered: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        session.in_flight[prompt.key] = answered
        session.sampling += 1
        try:
            turn = await self._sample(session, prompt, choice, call_ids, on_deltas)
            answered.set_result(turn)
            return turn
        finally:
            session.sampling -= 1
            answered.cancel()  # no effect once it has a result
            if session.in_flight.get(prompt.key) is answered:
                del session.in_flight[prompt.key]

    async def count_tokens(self, session: Session, request: WireRequest) -> int:
        """The length of the prompt that a request would give. Nothing is sampled or kept. Raises ``GatewayError``."""
        return len((await self._prompt(session, request)).ids)

    async def _prompt(self, session: Session, request: WireRequest) -> _Prompt:
        if request.prompt is not None:
            return await self._given_prompt(session.tree, request, request.prompt)
        place = _locate(session.tree, request)
        if place.new[-1]["role"] == "assistant":
            raise GatewayError(
                400,
                "messages: the last message is the assistant's; continuing it is not supported",
                kind="invalid_request_error",
                param="messages",
            )
        parent, fork = place.parent, _fork_reason(session.tree, place)
        try:
            # With the template's history the whole conversation is rendered: that is no work for the event loop.
            size = sum(len(message["content"]) for message in place.new)
            if parent and self.history == "preserve" and size < _INLINE_CHARACTERS:
                rendered = self._render_new(request, place)
            else:
                rendered = await asyncio.to_thread(self._render_new, request, place)
        except RenderError as error:
            raise GatewayError(400, str(error), kind="invalid_request_error", param="messages") from error
        if rendered.fork:
            fork, parent = rendered.fork, None
        # A list of its own: an engine may keep it.
        ids = parent.tokens() + rendered.new_ids if parent else list(rendered.new_ids)
        return _Prompt(request, place.key, place.depth, parent, rendered.new_ids, ids, fork, rendered.divergence)

    async def _given_prompt(self, tree: TokenTree, request: WireRequest, prompt: str | list[int]) -> _Prompt:
        """A prompt that the client rendered itself."""
        # Copies: a tip's list moves on when another request is answered.
        tips = [(t, list(t.tokens())) for t in tree.tips() if t.rendered_by_client or not isinstance(prompt, str)]
        parent, new = await asyncio.to_thread(place_prompt, self.renderer, tips, prompt)
        ids = parent.tokens() + new if parent else new
        key = prompt_key(ids)
        fork = "new_conversation" if tree.turns and parent is None else None
        if any(turn.prompt_key == key for turn in tree.turns):
            fork = "retry"
        return _Prompt(request, key, 0, parent, new, ids, fork)

    def _render_new(self, request: WireRequest, place: _Place) -> _Rendered:
        """The tokens that are new since the parent, or the whole conversation where it can't be extended."""
        parent, variables = place.parent, request.variables
        if parent is None:
            return _Rendered(self.renderer.render(place.new, request.tools, **variables))
        if self.history == "template" and (reason := self._template_fork(request, parent)):
            return _Rendered(self._render_whole(request), fork=reason)
        answer = assistant_message(parent.message, parent.call_ids)
        tail = self.renderer.extend(parent.output_ids, answer, place.new, **variables)
        if isinstance(tail, Fork):
            return _Rendered(self._render_whole(request), fork=tail.reason)
        return _Rendered(tail, divergence=self.renderer.usual_divergence(answer, place.new, **variables))

    def _render_whole(self, request: WireRequest) -> list[int]:
        return self.renderer.render(request.decode_messages(0), request.tools, **request.variables)

    def _template_fork(self, request: WireRequest, parent: Turn) -> str | None:
        """Why the messages as sent, rendered by the template, no longer begin with what the model saw."""
        messages = request.decode_messages(0)
        for turn in parent.path():
            if turn.message.reasoning.strip() and not messages[turn.depth - 1].get("reasoning_content"):
                return "reasoning_dropped"
        return self.renderer.divergence(messages, parent.depth, request.tools, **request.variables)

    async def _sample(
        self, session: Session, prompt: _Prompt, choice: int, call_ids: CallIdBook, on_deltas: OnDeltas | None
    ) -> Turn:
        params = self._sampling_params(session, prompt)
        plain = prompt.request.prompt is not None
        parser = Trimmed(
            PlainText(self.renderer)
            if plain
            else self.renderer.parser(prompt_ids=prompt.ids, tools=prompt.request.tools),
            params.get("stop") or (),
            one_call=prompt.request.one_call,
        )
        output: list[int] = []
        logprobs: list[float] = []
        versions: list[int | None] = []
        finish_reason = ""
        async with aclosing(self._engine(prompt.ids, params, session.session_id)) as records:
            async for record in records:
                if problem := check_output(record.output_ids, record.output_log_probs):
                    raise GatewayError(502, f"the engine's answer is unusable: {problem}", kind="engine_error")
                output += record.output_ids
                logprobs += record.output_log_probs
                versions += _versions(record)
                finish_reason = record.finish_reason
                deltas = parser.feed(record.output_ids)
                if on_deltas and deltas:
                    await on_deltas(deltas, choice)
        if finish_reason not in ("stop", "length") or not output:
            raise GatewayError(
                503,
                f"the engine gave no whole answer (finish reason {finish_reason or 'none'}, {len(output)} tokens)",
                kind="engine_error",
            )
        deltas, message = parser.finish(finish_reason)
        if parser.stop_sequence:
            finish_reason = "stop"
        for index, call in enumerate(message.tool_calls):
            call_ids(index, call.id)
        turn = self._turn(session, prompt, message, call_ids.ids, finish_reason, output, logprobs)
        turn.policy_versions = versions if versions.count(None) < len(versions) else None
        turn.info.update(sampling=params, exact_logprobs=_exact(params))
        if prompt.request.n > 1:
            turn.info["choice"] = choice
        if parser.stop_sequence:
            turn.info["stop_sequence"] = parser.stop_sequence
        session.tree.add(turn)
        session.sampled_tokens += len(output)
        if on_deltas and deltas:
            await on_deltas(deltas, choice)
        return turn

    def _turn(
        self,
        session: Session,
        prompt: _Prompt,
        message: ParsedMessage,
        call_ids: list[str],
        finish_reason: str,
        output: list[int],
        logprobs: list[float],
    ) -> Turn:
        answer = assistant_message(message, call_ids)
        turn = Turn(
            parent=prompt.parent,
            new_ids=array("i", prompt.new_ids),
            output_ids=array("i", output),
            logprobs=array("d", logprobs),
            finish_reason=finish_reason,
            message=message,
            call_ids=call_ids,
            depth=prompt.depth + 1,
            key=chain([answer], (), start=prompt.key)[0],
            prompt_key=prompt.key,
            fork=prompt.fork,
            asked=(prompt.request.raw_messages, prompt.request.tools),
        )
        if prompt.divergence:
            turn.info["template_divergence"] = prompt.divergence
        return turn

    async def _engine(
        self, prompt_ids: list[int], params: dict[str, Any], session_id: str
    ) -> AsyncGenerator[TurnRecord]:
        """The engine's answer in one or more pieces. Closing the iterator aborts the engine."""
        request: dict[str, Any] = {
            "prompt_ids": prompt_ids,
            "sampling_params": dict(params),
            "session_id": session_id,
        }
        try:
            stream = getattr(self.backend, "stream", None)
            if stream is None:
                yield await self.backend.generate(**request)
                return
            async with aclosing(stream(**request)) as chunks:
                async for chunk in chunks:
                    yield TurnRecord(
                        prompt_ids=prompt_ids,
                        output_ids=chunk.output_ids,
                        output_log_probs=chunk.output_log_probs,
                        finish_reason=chunk.finish_reason or "",
                        policy_version=chunk.policy_version,
                        extra=chunk.extra,
                    )
        except EngineError as error:
            status = 503 if error.retry_after is not None else 502
            raise GatewayError(status, f"the engine failed: {error}", kind="engine_error") from error
        except Exception as error:
            logger.exception("the engine raised")
            raise GatewayError(
                502, f"the engine raised {type(error).__name__}; see the gateway's log", kind="engine_error"
            ) from error

    def _sampling_params(self, session: Session, prompt: _Prompt) -> dict[str, Any]:
        params = {**session.sampling_defaults, **prompt.request.sampling, **session.sampling_overrides}
        params["stop_token_ids"] = sorted({*self.renderer.stop_token_ids, *params.get("stop_token_ids", ())})
        limit = params.get("max_tokens") or params.get("max_new_tokens") or 0
        window = session.max_context_tokens
        if window:
            room = window - len(prompt.ids)
            if room < session.min_response_tokens:
                raise ContextLengthExceeded(len(prompt.ids), window, session.min_response_tokens)
            limit = min(limit or room, room)
        params["max_tokens"] = params["max_new_tokens"] = limit or DEFAULT_MAX_TOKENS
        return params


# -- helpers -----------------------------------------------------------------------------------------------


def replay(turn: Turn) -> list[Delta]:
    """The deltas of an answer that is already there."""
    deltas: list[Delta] = []
    if turn.message.reasoning:
        deltas.append(ReasoningDelta(turn.message.reasoning))
    if turn.message.content:
        deltas.append(ContentDelta(turn.message.content))
    for i, call in enumerate(turn.message.tool_calls):
        deltas += [CallStartDelta(i, call.name, turn.call_ids[i]), CallArgumentsDelta(i, call.arguments)]
    return deltas


async def _earlier_answers(session: Session, prompt: _Prompt) -> list[Turn]:
    """What this very request was answered before, or is being answered; empty where it was not."""
    n = prompt.request.n
    if n == 1 and (running := session.in_flight.get(prompt.key)):
        await asyncio.wait([running])
        if not running.cancelled() and running.exception() is None:
            return [running.result()]
    found = session.tree.siblings(prompt.key, prompt.parent)
    return sorted(found[-n:], key=lambda turn: turn.info.get("choice", 0)) if len(found) >= n else []


async def _drain(session: Session, wait: float) -> None:
    """Let the session's running requests end; abort those that take longer."""
    running = {task for task in session.requests if task is not asyncio.current_task()}
    if running and wait:
        _, running = await asyncio.wait(running, timeout=wait)
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


def _check_budget(session: Session, n: int) -> None:
    if session.max_turns is not None and len(session.tree.turns) + session.sampling + n > session.max_turns:
        raise GatewayError(400, f"the session's {session.max_turns} turns are used up", kind="turn_limit_exceeded")
    if session.max_total_tokens is not None and session.sampled_tokens >= session.max_total_tokens:
        raise GatewayError(
            400, f"the session's {session.max_total_tokens} tokens are used up", kind="token_limit_exceeded"
        )


def _locate(tree: TokenTree, request: WireRequest) -> _Place:
    """Find the turn that a request continues."""
    tip = tree.tip(request.raw_messages, request.tools)
    if tip is not None and tip.asked is not None:
        rest = request.decode_messages(len(tip.asked[0]))
        answer, new = (rest[0], rest[1:]) if rest else ({"role": ""}, [])
        # With another answer further on, a deeper turn may match: the whole history decides.
        if answer["role"] == "assistant" and all(message["role"] != "assistant" for message in new):
            replayed = answer == assistant_message(tip.message, tip.call_ids) or (
                chain([answer], (), start=tip.prompt_key)[0] == tip.key
            )
            if new and replayed and (turn := tree.twin(tip, answer)):
                key = chain(new, (), start=turn.key)[-1]
                return _Place(turn, _with_own_ids(new, answer, turn), key, turn.depth + len(new))
    messages = request.decode_messages(0)
    keys = chain(messages, request.tools)
    parent = tree.match(messages, keys)
    new = _with_own_ids(messages[parent.depth :], messages[parent.depth - 1], parent) if parent else messages
    return _Place(parent, new or messages[-1:], keys[-1], len(messages))


def _with_own_ids(new: list[Message], replayed: Message, turn: Turn) -> list[Message]:
    """``new`` with its results named after the sampled calls, where the client gave the calls ids of its own."""
    own = {
        call["id"]: call_id
        for call, call_id in zip(replayed.get("tool_calls", ()), turn.call_ids, strict=False)
        if call["id"] != call_id
    }
    if not own:
        return new
    return [
        {**m, "tool_call_id": own.get(m["tool_call_id"], m["tool_call_id"])} if "tool_call_id" in m else m for m in new
    ]


def _fork_reason(tree: TokenTree, place: _Place) -> str | None:
    """Why a request does not simply continue the session's last row; None if it does (or is the first)."""
    if not tree.turns or (place.parent is not None and not place.parent.extended):
        return None
    if any(turn.prompt_key == place.key for turn in tree.turns):
        return "retry"
    if place.parent is not None:
        return "branch"
    return "edited" if any(message["role"] == "assistant" for message in place.new) else "new_conversation"


def _versions(record: TurnRecord) -> list[int | None]:
    if isinstance(record.policy_version, list):
        if len(record.policy_version) != len(record.output_ids):
            raise GatewayError(502, "the engine's policy_version list does not match its tokens", kind="engine_error")
        return list(record.policy_version)
    return [record.policy_version] * len(record.output_ids)


def _exact(params: dict[str, Any]) -> bool:
    """Whether the engine samples from the very distribution whose logprobs it reports."""
    return (
        params.get("temperature", 1.0) > 0
        and params.get("top_p", 1.0) >= 1.0
        and params.get("top_k", -1) in (-1, 0)
        and params.get("min_p", 0.0) == 0.0
        and not any(params.get(name) for name in ("presence_penalty", "frequency_penalty"))
        and params.get("repetition_penalty", 1.0) == 1.0
    )

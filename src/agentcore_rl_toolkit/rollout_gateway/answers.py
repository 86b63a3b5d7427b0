"""One answer: sampled, checked, parsed and kept in the session's tree."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from ..errors import ContextLengthExceeded, EngineError, GatewayError
from .completions import PlainText
from .messages import assistant_message, chain, tools_key
from .parsed import CallArgumentsDelta, CallStartDelta, ContentDelta, Delta, OutputParser, ParsedMessage, ReasoningDelta
from .prompts import Prompt
from .render.base import Renderer
from .sampling import NEUTRAL, SamplingBackend, TokenChunk, TurnRecord, add_versions, check_output
from .sessions import Session
from .traces import Turn
from .trimmed import Continued, Trimmed

logger = logging.getLogger(__name__)

OnDeltas = Callable[[list[Delta], int], Awaitable[None]]
"""Called with new deltas, and which of the request's answers they belong to."""
Inexact = Literal["warn", "mask", "refuse"]
P = TypeVar("P", bound=Prompt)

DEFAULT_MAX_TOKENS = 4096
"""Limit of an answer for which nobody named one: engines' own defaults (16, 256, …) cut answers silently."""


@dataclass(slots=True)
class CallIdBook:
    """The ids of one answer's tool calls: asked for while streaming, and again when the answer is kept.
    ``new_id``: a renderer's ``call_id``."""

    new_id: Callable[[str | None, int], str]
    ids: list[str] = field(default_factory=list)

    def __call__(self, index: int, parsed_id: str | None) -> str:
        while len(self.ids) <= index:
            self.ids.append(self.new_id(parsed_id if len(self.ids) == index else None, len(self.ids)))
        return self.ids[index]


@dataclass(slots=True)
class _Output:
    """What an engine has sampled so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    routed_experts: Any = None
    finish_reason: str = ""

    def add(self, record: TurnRecord) -> None:
        if problem := check_output(record.output_ids, record.output_log_probs):
            raise GatewayError(502, f"the engine gave {problem}", kind="engine_error")
        self.ids += record.output_ids
        self.logprobs += record.output_log_probs
        try:
            add_versions(self.versions, record)
        except EngineError as error:
            raise GatewayError(502, f"the engine's answer is unusable: {error}", kind="engine_error") from error
        self.top_logprobs += record.extra.get("top_logprobs", ())
        self.routed_experts = record.extra.get("routed_experts", self.routed_experts)
        self.finish_reason = record.finish_reason

    def check_whole(self) -> None:
        if self.finish_reason not in ("stop", "length") or not self.ids:
            raise GatewayError(
                503,
                f"the engine gave no whole answer (finish reason {self.finish_reason or 'none'}, "
                f"{len(self.ids)} tokens)",
                kind="engine_error",
            )
        if self.top_logprobs and len(self.top_logprobs) != len(self.ids):
            problem = f"top_logprobs for {len(self.top_logprobs)} of {len(self.ids)} tokens"
            raise GatewayError(502, f"the engine's answer is unusable: {problem}", kind="engine_error")


class Answers(ABC, Generic[P]):
    """Samples answers; subclasses know what kind of engine does. ``stop_token_ids``: sent with every request.
    ``inexact``: see :class:`RolloutGateway`."""

    _engine: object

    def __init__(self, engine: object, stop_token_ids: Sequence[int], inexact: Inexact) -> None:
        self._engine, self._stop_token_ids, self._inexact = engine, stop_token_ids, inexact
        self._engine_window: int | None = None

    @abstractmethod
    def _parser(self, prompt: P, params: dict[str, Any]) -> Trimmed: ...

    @abstractmethod
    def _pieces(self, session: Session, prompt: P, params: dict[str, Any]) -> AsyncGenerator[TurnRecord]:
        """The engine's answer in one or more pieces. Closing the iterator aborts the engine."""

    @abstractmethod
    def decoder(self) -> Callable[[Sequence[int]], str]:
        """Token ids to text, for a thread."""

    async def sample(
        self, session: Session, prompt: P, choice: int, call_ids: CallIdBook, on_deltas: OnDeltas | None
    ) -> Turn:
        """One answer, kept as a prepared turn. Raises ``GatewayError``; then, or when cancelled, nothing is kept."""
        params = self._params(session, prompt, await self._limit(session))
        exact = self._check_exactness(session, params)
        parser = self._parser(prompt, params)
        output = _Output()
        async with aclosing(self._checked(self._pieces(session, prompt, params))) as records:
            async for record in records:
                output.add(record)
                deltas = parser.feed(record.output_ids)
                if on_deltas and deltas:
                    await on_deltas(deltas, choice)
        output.check_whole()
        deltas, message = parser.finish(output.finish_reason)
        for index, call in enumerate(message.tool_calls):
            call_ids(index, call.id)
        turn = _turn(prompt, message, call_ids.ids, output, trimmed=parser.trimmed)
        if parser.stop_sequence:
            turn.finish_reason, turn.stop_sequence = "stop", parser.stop_sequence
        turn.exact, turn.masked = exact, not exact and self._inexact == "mask"
        turn.params = params
        if prompt.request.n > 1:
            turn.choice = choice
        self._keep(session, prompt, turn, output.ids)
        if on_deltas and deltas:
            await on_deltas(deltas, choice)
        return turn

    def _keep(self, session: Session, prompt: Prompt, turn: Turn, output_ids: list[int]) -> None:
        tree, request = session.tree, prompt.request
        if turn.parent is not None and turn.parent.params == turn.params:
            turn.params = turn.parent.params  # one dict for a whole conversation
        tree.add(turn, prompt.new_ids, output_ids)
        if turn.parent is not None and turn.choice is None:  # of several answers all must be there first
            tree.built_on(turn.parent)
        if prompt.place.parent is None:
            tree.tools_keys.add(tools_key(request.tools))
        session.sampled_tokens += len(output_ids)

    async def _checked(self, records: AsyncGenerator[TurnRecord]) -> AsyncGenerator[TurnRecord]:
        """The same, but what goes wrong is a ``GatewayError``."""
        try:
            async with aclosing(records):
                async for record in records:
                    yield record
        except EngineError as error:
            raise self._told(error) from error
        except Exception as error:
            logger.exception("the engine raised")
            raise GatewayError(
                502, f"the engine raised {type(error).__name__}; see the gateway's log", kind="engine_error"
            ) from error

    def _told(self, error: EngineError) -> GatewayError:
        """What a client is told of an engine's error."""
        status = 503 if error.retry_after is not None else 502
        return GatewayError(status, f"the engine failed: {error}", kind="engine_error")

    async def window(self, session: Session) -> int:
        """How many tokens a prompt and its answer may have: the session's limit, else the engine's own, asked for once;
        0 where nobody tells."""
        if session.max_context_tokens:
            return session.max_context_tokens
        if self._engine_window is None:
            ask = getattr(self._engine, "context_window", None)
            try:
                self._engine_window = (await ask() if ask else None) or 0
            except EngineError:  # whoever samples next will hear of it, and ask again
                return 0
        return self._engine_window

    async def _limit(self, session: Session) -> int:
        """The window that answers are cut to fit, 0 for none."""
        return await self.window(session)

    def _params(self, session: Session, prompt: Prompt, window: int) -> dict[str, Any]:
        """The effective sampling parameters: defaults < request < overrides, and a limit that fits the window."""
        params = {**session.sampling_defaults, **prompt.request.sampling, **session.sampling_overrides}
        params["stop_token_ids"] = sorted({*self._stop_token_ids, *params.get("stop_token_ids", ())})
        limit, least = params.get("max_tokens") or 0, getattr(self._engine, "min_new_tokens", 1)
        if limit and limit < least:
            problem = f"max_tokens: this engine samples {least} tokens or more, {limit} were asked for"
            raise GatewayError(400, problem, kind="invalid_request_error", param="max_tokens")
        if window:
            room, needed = window - prompt.length, max(session.min_response_tokens, least)
            if room < needed:
                raise ContextLengthExceeded(prompt.length, window, needed)
            limit = min(limit or room, room)
        limit = limit or DEFAULT_MAX_TOKENS
        if session.max_total_tokens is not None:
            left = (session.max_total_tokens - session.sampled_tokens) // prompt.request.n
            if left < least:
                raise tokens_used_up(session)
            limit = min(limit, left)
        params["max_tokens"] = params["max_new_tokens"] = limit
        if prompt.request.top_logprobs:
            if not getattr(self._engine, "top_logprobs", False):
                problem = "top_logprobs: this engine gives the logprob of the sampled token only"
                raise GatewayError(400, problem, kind="invalid_request_error", param="top_logprobs")
            params["top_logprobs"] = prompt.request.top_logprobs
        return params

    def _check_exactness(self, session: Session, params: dict[str, Any]) -> bool:
        names = inexact_parameters(params)
        if not names:
            return True
        told = ", ".join(f"{name}={params[name]}" for name in names)
        if self._inexact == "refuse":
            problem = f"{told}: the engine's logprobs would not be those of the distribution sampled from"
            raise GatewayError(400, problem, kind="invalid_request_error", param=names[0])
        if session.not_warned_of(["inexact logprobs"]):
            logger.warning("session %s: inexact logprobs with %s", session.name, told)
        return False


class TokenAnswers(Answers[Prompt]):
    """Answers of a token-in/token-out engine, read with a renderer."""

    _engine: SamplingBackend

    def __init__(self, backend: SamplingBackend, renderer: Renderer, inexact: Inexact) -> None:
        super().__init__(backend, renderer.stop_token_ids, inexact)
        self._renderer = renderer

    def _parser(self, prompt: Prompt, params: dict[str, Any]) -> Trimmed:
        request = prompt.request
        parser: OutputParser
        if request.prompt is not None:
            parser = PlainText(self._renderer)
        else:
            asked = prompt.ids[: -prompt.begun] if prompt.begun else prompt.ids
            parser = self._renderer.parser(prompt_ids=asked, tools=request.tools)
            if prompt.begun:
                parser = Continued(parser, prompt.ids[-prompt.begun :], prompt.place.prefill)
        return Trimmed(parser, params.get("stop") or (), one_call=request.one_call)

    async def _pieces(self, session: Session, prompt: Prompt, params: dict[str, Any]) -> AsyncGenerator[TurnRecord]:
        request: dict[str, Any] = {
            "prompt_ids": prompt.ids,
            "sampling_params": dict(params),
            "session_id": session.session_id,
        }
        stream = getattr(self._engine, "stream", None)
        if stream is None:
            yield await self._engine.generate(**request)
            return
        async with aclosing(stream(**request)) as chunks:
            async for chunk in chunks:
                yield record_of(chunk, prompt.ids)

    def decoder(self) -> Callable[[Sequence[int]], str]:
        return self._renderer.decode


def record_of(chunk: TokenChunk, prompt_ids: list[int]) -> TurnRecord:
    """A piece of a streamed answer as the record of that piece."""
    return TurnRecord(
        prompt_ids=prompt_ids,
        output_ids=chunk.output_ids,
        output_log_probs=chunk.output_log_probs,
        finish_reason=chunk.finish_reason or "",
        policy_version=chunk.policy_version,
        extra=chunk.extra,
    )


def _turn(prompt: Prompt, message: ParsedMessage, call_ids: list[str], output: _Output, *, trimmed: bool) -> Turn:
    place = prompt.place
    message.raw = ""  # the tokens say it, for less
    if place.prefill:
        message.content = place.prefill + message.content
    answer = assistant_message(message, call_ids)
    return Turn(
        parent=prompt.parent,
        logprobs=_compact(output.logprobs),
        finish_reason=output.finish_reason,
        message=message,
        call_ids=call_ids,
        depth=place.depth + 1,
        key=chain([answer], (), start=place.base)[0],
        base_key=place.base,
        prompt_key=place.key,
        opening=place.parent.opening if place.parent else b"".join(chain(place.new[:1], ())),
        policy_versions=output.versions if any(v is not None for v in output.versions) else None,
        fork=prompt.fork,
        divergence=prompt.divergence,
        prefill=len(place.prefill),
        begun=prompt.begun,
        trimmed=trimmed,
        top_logprobs=output.top_logprobs or None,
        routed_experts=output.routed_experts,
        tip_answer=answer,
        asked=(prompt.request.raw_messages, prompt.request.tools),
    )


def tokens_used_up(session: Session) -> GatewayError:
    return GatewayError(
        400, f"the session's {session.max_total_tokens} tokens are used up", kind="token_limit_exceeded"
    )


def _compact(logprobs: list[float]) -> array[float]:
    """Engines compute in float32: mostly half the memory holds the very same numbers."""
    single = array("f", logprobs)
    return single if single.tolist() == logprobs else array("d", logprobs)


def replay(turn: Turn) -> list[Delta]:
    """The deltas of an answer that is already there."""
    deltas: list[Delta] = []
    if turn.message.reasoning:
        deltas.append(ReasoningDelta(turn.message.reasoning))
    if content := turn.message.content[turn.prefill :]:
        deltas.append(ContentDelta(content))
    for i, call in enumerate(turn.message.tool_calls):
        deltas += [CallStartDelta(i, call.name, turn.call_ids[i]), CallArgumentsDelta(i, call.arguments)]
    return deltas


def inexact_parameters(params: dict[str, Any]) -> list[str]:
    """The parameters under which an engine does not sample from the very distribution whose logprobs it reports."""

    def changes(name: str, neutral: float) -> bool:
        value = params.get(name)
        if name == "temperature":  # logprobs are scaled by any other
            return value == 0
        return value not in (None, neutral) and (name, value) != ("top_k", 0)  # which is another way to say -1

    return [name for name, neutral in NEUTRAL.items() if changes(name, neutral)]

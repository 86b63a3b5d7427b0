"""Chats that the engine renders and parses itself (:class:`.sampling.ChatBackend`): what stands where :mod:`.prompts`
and a renderer stand. Turns are put together by the tokens that the engine reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ..errors import EngineError, GatewayError
from .answers import Answers, CallIdBook, Inexact, OnDeltas, record_of
from .forks import fork_reason
from .messages import Message, parse_arguments
from .names import random_hex
from .parsed import CallArgumentsDelta, CallStartDelta, ContentDelta, Delta, ParsedCall, ParsedMessage, ReasoningDelta
from .prompts import History, Prompt, locate, with_own_ids
from .sampling import ChatBackend, TurnRecord
from .sessions import Session
from .traces import MAX_VOCABULARY, TokenTree, Turn
from .trimmed import Trimmed
from .wires import WireRequest

logger = logging.getLogger(__name__)

_REFUSED = (400, 413, 422)
_DECODING = 30.0
"""Seconds for the text of a row."""


@dataclass(slots=True)
class ChatPrompt(Prompt):
    """A prompt whose tokens only the engine knows, until it reports them. ``messages``: what it is asked.
    ``counted``: how many tokens it said these are, where it was asked before."""

    messages: list[Message] = field(default_factory=list)
    counted: int = 0
    listener: Callable[[int], None] | None = None
    relay: Relay | None = None

    @property
    def length(self) -> int:
        return len(self.ids) or self.counted

    def tell_length(self, listener: Callable[[int], None]) -> None:
        self.listener = listener

    def settle(self, tree: TokenTree, ids: list[int]) -> None:
        """The engine was conditioned on ``ids``: that decides where the answer hangs."""
        if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= MAX_VOCABULARY:
            raise EngineError("the engine's prompt_token_ids are no token ids")
        expected = self.place.parent
        parent, held = deepest(tree, expected, ids)
        self.parent, self.ids, self.new_ids = parent, list(ids), ids[held:]
        if parent is not expected:
            if expected is not None and (parent is None or parent in expected.path()):
                self.fork = "rendered_differently"
            else:
                self.fork = fork_reason(tree, self.request, self.place.new, self.place.key, parent)
        if self.listener:
            self.listener(len(ids))


class ChatPrompts:
    """Makes prompts without rendering. ``history``: ``"preserve"`` asks with earlier answers as they were sampled,
    with their reasoning also where the client left it out; what of it counts is the engine's template's business."""

    def __init__(self, backend: ChatBackend, history: History) -> None:
        self._backend, self._history = backend, history

    async def make(self, tree: TokenTree, request: WireRequest) -> ChatPrompt:
        """Raises ``GatewayError``."""
        if request.prompt is not None:
            problem = "prompt: this engine takes chats, and the gateway has no tokenizer; send messages instead"
            raise GatewayError(400, problem, kind="invalid_request_error", param="prompt")
        place = locate(tree, request)
        if place.new[-1]["role"] == "assistant":
            problem = f"{request.list_name}[-1]: this engine does not go on with the assistant's message"
            raise GatewayError(400, problem, kind="invalid_request_error", param=request.list_name)
        messages = request.decode_messages(0)
        if place.parent is not None and self._history == "preserve":
            messages = as_sampled(messages, place.parent)
        asked_before = [turn for turn in tree.turns if turn.prompt_key == place.key]
        parent = asked_before[-1].parent if asked_before else place.parent
        fork = fork_reason(tree, request, place.new, place.key, place.parent)
        return ChatPrompt(request, place, parent, [], [], fork, messages=messages)

    async def count(self, tree: TokenTree, request: WireRequest) -> int:
        """The prompt's length in tokens. Raises ``GatewayError``."""
        return await count_tokens(self._backend, await self.make(tree, request))


class ChatAnswers(Answers[ChatPrompt]):
    """Answers of a chat engine: its deltas go to the client, its tokens to the tree."""

    _engine: ChatBackend

    def __init__(self, backend: ChatBackend, inexact: Inexact) -> None:
        super().__init__(backend, (), inexact)
        self.vocabulary = Vocabulary()

    async def sample(
        self, session: Session, prompt: ChatPrompt, choice: int, call_ids: CallIdBook, on_deltas: OnDeltas | None
    ) -> Turn:
        if session.max_context_tokens:
            prompt.counted = await count_tokens(self._engine, prompt)
        return await super().sample(session, prompt, choice, call_ids, on_deltas)

    async def _limit(self, session: Session) -> int:
        """The session's alone: the length of a prompt is known only where it was asked for."""
        return session.max_context_tokens

    def _parser(self, prompt: ChatPrompt, params: dict[str, Any]) -> Trimmed:
        prompt.relay = Relay()
        return Trimmed(prompt.relay, params.get("stop") or (), one_call=prompt.request.one_call)

    async def _pieces(self, session: Session, prompt: ChatPrompt, params: dict[str, Any]) -> AsyncGenerator[TurnRecord]:
        assert prompt.relay is not None
        chat = self._engine.chat(
            messages=prompt.messages,
            tools=prompt.request.tools,
            sampling_params=dict(params),
            variables=prompt.request.variables,
            session_id=session.session_id,
        )
        async with aclosing(chat) as chunks:
            async for chunk in chunks:
                if chunk.prompt_ids and not prompt.ids:
                    prompt.settle(session.tree, chunk.prompt_ids)
                if chunk.output_ids and not prompt.ids:
                    raise EngineError("the engine did not report the prompt's tokens")
                self.vocabulary.learn(chunk.extra.get("texts") or {})
                prompt.relay.take(chunk.deltas)
                yield record_of(chunk, prompt.ids)

    def _told(self, error: EngineError) -> GatewayError:
        return _told(error) or super()._told(error)

    def decoder(self) -> Callable[[Sequence[int]], str]:
        """The text of a row, asked of the engine; for threads beside the running loop's. Without an answer: ``""``."""
        loop = asyncio.get_running_loop()

        def decode(ids: Sequence[int]) -> str:
            try:
                return asyncio.run_coroutine_threadsafe(self._engine.detokenize(ids), loop).result(_DECODING)
            except (EngineError, TimeoutError) as error:
                logger.warning("a row has no text: %s", error)
                return ""

        return decode


class Relay:
    """An ``OutputParser`` that hands on what the engine parsed."""

    def __init__(self) -> None:
        self._new: list[Delta] = []
        self._message = ParsedMessage()

    def take(self, deltas: Sequence[Delta]) -> None:
        """What the next tokens say."""
        for delta in deltas:
            self._add(delta)

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        deltas, self._new = self._new, []
        return deltas

    def finish(self, finish_reason: str) -> tuple[list[Delta], ParsedMessage]:
        for index, call in enumerate(self._message.tool_calls):
            if not call.arguments:  # what OpenAI's clients take for no arguments
                self._add(CallArgumentsDelta(index, "{}"))
            if not isinstance(parse_arguments(call.arguments), dict):
                call.status = "unclosed" if finish_reason == "length" else "invalid_json"
                self._message.ill_formed = True
        return self.feed(()), self._message

    def _add(self, delta: Delta) -> None:
        message = self._message
        match delta:
            case ReasoningDelta(text):
                message.reasoning += text
            case ContentDelta(text):
                message.content += text
            case CallStartDelta(_, name, call_id):
                message.tool_calls.append(ParsedCall(name, "", id=call_id))
            case CallArgumentsDelta(index, text):
                message.tool_calls[index].arguments += text
        self._new.append(delta)


class Vocabulary:
    """What of a renderer the gateway needs beside prompts: the text of tokens, as far as the engine has spelled them
    out, and ids for calls, which are the engine's own."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def learn(self, texts: Mapping[int, str]) -> None:
        self._texts.update(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._texts.get(i, "\ufffd") for i in ids)

    def call_id(self, parsed_id: str | None, number: int) -> str:
        return parsed_id or f"call_{random_hex(24)}"


async def count_tokens(backend: ChatBackend, prompt: ChatPrompt) -> int:
    """The length of a prompt, asked of the engine. Raises ``GatewayError``."""
    try:
        return await backend.count_tokens(
            messages=prompt.messages, tools=prompt.request.tools, variables=prompt.request.variables
        )
    except EngineError as error:
        told = _told(error) if getattr(error, "status", None) in _REFUSED else None
        raise told or GatewayError(
            502, f"the engine can't count a prompt, which max_context_tokens needs: {error}", kind="engine_error"
        ) from error


def _told(error: EngineError) -> GatewayError | None:
    """A refusal of the conversation, which is no failure of the engine; else None."""
    if getattr(error, "status", None) not in _REFUSED:
        return None
    too_long = "context length" in str(error)
    kind = "context_length_exceeded" if too_long else "invalid_request_error"
    return GatewayError(400, f"the engine refused: {error}", kind=kind, param="messages")


def as_sampled(messages: list[Message], parent: Turn) -> list[Message]:
    """``messages`` with the answers up to ``parent`` in the words they were sampled in, calls under their own ids."""
    said: list[Message] = []
    for turn in parent.path():
        at = turn.depth - 1
        said += messages[len(said) : at]
        replayed, own = messages[at], turn.answer
        said.append(own)
        end = next((i for i in range(turn.depth, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
        said += with_own_ids(messages[turn.depth : end], replayed, turn)
    return said + messages[len(said) :]


def deepest(tree: TokenTree, expected: Turn | None, ids: Sequence[int]) -> tuple[Turn | None, int]:
    """The deepest turn whose tokens ``ids`` begin with, and how many these are. ``expected``: most likely that one."""
    best: Turn | None = None
    most = 0
    for turn in ([expected] if expected else []) + list(tree.tips()):
        held = turn.tokens()
        end, common = len(held), _common(held, ids)
        if turn is expected and common == end:
            return turn, end
        node: Turn | None = turn
        while node is not None and end > common:
            end -= node.prompt_tokens + node.sampled_tokens
            node = node.parent
        if node is not None and end >= most:
            best, most = node, end
    return best, most


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many items two lists begin alike with."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # all before low are alike
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

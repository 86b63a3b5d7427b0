"""Where a request stands in its session's tree, and the tokens the engine is asked with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Literal

from ..errors import GatewayError, RenderError
from .completions import place_prompt, prompt_key
from .forks import fork_reason
from .messages import Message, chain
from .render.base import Fork, Renderer
from .render.text import LONG_TEXT
from .traces import TokenTree, Turn
from .wires import WireRequest

History = Literal["preserve", "template"]


@dataclass(slots=True)
class Place:
    """A request's place in the tree: after ``parent``, with ``new`` messages on top.

    ``key`` and ``depth``: chain key and number of all its messages. ``prefill``: the beginning of the answer, where
    the client wrote it as the last message; ``base``: the chain key that the whole answer follows.
    """

    parent: Turn | None
    new: list[Message]
    key: bytes
    depth: int
    prefill: str = ""
    base: bytes = b""


@dataclass(slots=True)
class Prompt:
    """What the engine is asked, and where the answer will hang in the tree.

    ``ids``: all tokens; ``new_ids``: those since ``parent``. ``fork``: why they begin a new row, if they do.
    ``divergence``: what the template would change in the history. ``begun``: how many tokens at the end of ``ids``
    belong to the answer.
    """

    request: WireRequest
    place: Place
    parent: Turn | None
    new_ids: list[int]
    ids: list[int]
    fork: str | None
    divergence: str | None = None
    begun: int = 0

    @property
    def length(self) -> int:
        return len(self.ids)

    def tell_length(self, listener: Callable[[int], None]) -> None:
        """Call ``listener`` with the prompt's length as soon as that is known."""
        listener(self.length)


class Prompts:
    """Makes prompts: renders what is new, or everything where the held tokens can't be extended."""

    def __init__(self, renderer: Renderer, history: History) -> None:
        self._renderer, self._history = renderer, history

    async def make(self, tree: TokenTree, request: WireRequest) -> Prompt:
        """Raises ``GatewayError``."""
        if request.prompt is not None:
            return await self._given(tree, request, request.prompt)
        place = self._locate(tree, request)
        try:
            if self._is_quick(request, place):
                new_ids, moved, divergence = self._render(request, place, place.prefill)
            else:
                new_ids, moved, divergence = await asyncio.to_thread(self._render, request, place, place.prefill)
            begun = await self._begun(request, place, new_ids) if place.prefill else 0
        except RenderError as error:
            raise GatewayError(400, str(error), kind="invalid_request_error", param=request.list_name) from error
        parent = None if moved else place.parent
        fork = moved or fork_reason(tree, request, place.new, place.key, parent)
        # A list of its own: an engine may keep it.
        ids = [*parent.tokens(), *new_ids] if parent else list(new_ids)
        return Prompt(request, place, parent, new_ids, ids, fork, divergence, begun)

    def _is_quick(self, request: WireRequest, place: Place) -> bool:
        """Whether rendering takes a millisecond or two at most: else it is no work for the event loop."""
        if place.parent is None:
            return request.size < LONG_TEXT
        # With the template's history the whole conversation is rendered.
        return self._history == "preserve" and sum(len(message["content"]) for message in place.new) < LONG_TEXT

    async def _begun(self, request: WireRequest, place: Place, new_ids: list[int]) -> int:
        """How many tokens at the prompt's end are the beginning of the answer."""
        if place.parent is not None and not place.new:
            return place.parent.begun + place.parent.sampled_tokens
        asked, _, _ = await asyncio.to_thread(self._render, request, place, "")
        return len(new_ids) - len(commonprefix([new_ids, asked]))  # noqa: RUF071 - of lists it is what we want

    async def count(self, tree: TokenTree, request: WireRequest) -> int:
        """The prompt's length in tokens. Raises ``GatewayError``."""
        return (await self.make(tree, request)).length

    def _locate(self, tree: TokenTree, request: WireRequest) -> Place:
        place = locate(tree, request)
        if place.new[-1]["role"] == "assistant":
            place = prefilled(tree, request, self._renderer.stop_token_ids)
        return place

    def _render(self, request: WireRequest, place: Place, prefill: str) -> tuple[list[int], str | None, str | None]:
        """``(new ids, why they begin a new row, what the template would change)``."""
        parent, variables = place.parent, request.variables
        if parent is not None and not place.new:  # an answer that was cut off goes on
            return [], None, None
        extra = {"prefill": prefill} if prefill else {}
        if parent is None:
            return self._renderer.render(place.new, request.tools, **extra, **variables), None, None
        reason = self._template_fork(request, parent) if self._history == "template" else None
        if reason is None:
            tail = self._renderer.extend(parent.output_ids, parent.answer, place.new, **extra, **variables)
            if not isinstance(tail, Fork):
                return tail, None, self._renderer.usual_divergence(parent.answer, place.new, **variables)
            reason = tail.reason
        messages = request.decode_messages(0)[: place.depth]
        return self._renderer.render(messages, request.tools, **extra, **variables), reason, None

    def _template_fork(self, request: WireRequest, parent: Turn) -> str | None:
        """Why the messages as sent, rendered by the template, no longer begin with what the model saw."""
        messages = request.decode_messages(0)
        for turn in parent.path():
            if turn.message.reasoning.strip() and not messages[turn.depth - 1].get("reasoning_content"):
                return "reasoning_dropped"
        return self._renderer.divergence(messages, parent.depth, request.tools, **request.variables)

    async def _given(self, tree: TokenTree, request: WireRequest, prompt: str | list[int]) -> Prompt:
        """A prompt that the client rendered itself."""
        tips = [(t, t.tokens()) for t in tree.tips() if t.rendered_by_client or not isinstance(prompt, str)]
        parent, new = await asyncio.to_thread(place_prompt, self._renderer, tips, prompt)
        ids = parent.tokens() + new if parent else new
        key = prompt_key(ids)
        fork = "new_conversation" if tree.turns and parent is None else None
        if any(turn.prompt_key == key for turn in tree.turns):
            fork = "retry"
        return Prompt(request, Place(parent, [], key, 0, base=key), parent, new, ids, fork)


def locate(tree: TokenTree, request: WireRequest) -> Place:
    """Find the turn that a request continues."""
    tip = tree.tip(request.raw_messages, request.tools)
    if tip is not None and tip.asked is not None:
        request.tools = tip.asked[1]  # equal, and one copy is enough
        rest = request.decode_messages(len(tip.asked[0]))
        answer, new = (rest[0], rest[1:]) if rest else ({"role": ""}, [])
        # With another answer further on, a deeper turn may match: the whole history decides.
        if answer["role"] == "assistant" and all(message["role"] != "assistant" for message in new):
            replayed = answer == tip.answer or chain([answer], (), start=tip.base_key)[0] == tip.key
            if new and replayed and (turn := tree.twin(tip, answer)):
                key = chain(new, (), start=turn.key)[-1]
                return Place(turn, with_own_ids(new, answer, turn), key, turn.depth + len(new), base=key)
    messages = request.decode_messages(0)
    keys = chain(messages, request.tools)
    parent = tree.match(messages, keys)
    new = with_own_ids(messages[parent.depth :], messages[parent.depth - 1], parent) if parent else messages
    return Place(parent, new or messages[-1:], keys[-1], len(messages), base=keys[-1])


def prefilled(tree: TokenTree, request: WireRequest, stops: Sequence[int]) -> Place:
    """The place of a request whose last message is the assistant's: the answer begins with it."""
    messages = request.decode_messages(0)
    keys = chain(messages, request.tools)
    *before, last = messages
    name = f"{request.list_name}[-1]"
    if last.get("tool_calls") or not last["content"] or not before:
        problem = "an assistant's message at the end is continued, which takes text and no tool calls"
        raise GatewayError(400, f"{name}: {problem}", kind="invalid_request_error", param=request.list_name)
    base = keys[-2]
    said = tree.match(messages, keys)
    if said is not None and said.depth == len(messages) and said.output_ids[-1] not in stops and not said.trimmed:
        return Place(said, [], keys[-1], len(before), last["content"], said.base_key)
    if last.get("reasoning_content"):
        problem = "an assistant's message at the end is continued without its reasoning: leave that out"
        raise GatewayError(400, f"{name}: {problem}", kind="invalid_request_error", param=request.list_name)
    parent = tree.match(before, keys[:-1])
    new = with_own_ids(before[parent.depth :], messages[parent.depth - 1], parent) if parent else before
    if not new:
        problem = "two messages of the assistant follow each other; merge them to have them continued"
        raise GatewayError(400, f"{name}: {problem}", kind="invalid_request_error", param=request.list_name)
    return Place(parent, new, keys[-1], len(before), last["content"], base)


def with_own_ids(new: list[Message], replayed: Message, turn: Turn) -> list[Message]:
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

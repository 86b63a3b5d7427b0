"""The token tree of one session: what was sampled, on top of what, and what became of it.

A node is one turn: the prompt tokens that were new since its parent, then the sampled tokens. The path from the
root to a node, concatenated, is exactly what the engine saw and produced. Nothing is ever tokenized again. Turns that
follow each other without a branch are one line, whose tokens are held once, in one list.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ..body import RawMessages, goes_on
from ..messages import Message, assistant_message
from ..parsed import ParsedMessage
from .record import Status

MAX_TIPS = 64
"""Branches of a session that are kept ready to be continued cheaply; older ones still work, at more cost."""

MAX_VOCABULARY = 1 << 21
"""No vocabulary has as many tokens (the largest have 2^18)."""


class TurnState(IntEnum):
    """A turn goes sampled -> PREPARED (kept, before its last byte is sent) -> DELIVERED (the client has it)."""

    PREPARED = 1
    DELIVERED = 2


@dataclass(slots=True, eq=False)
class Line:
    """The tokens of turns that follow each other; ``parent``: the turn that the first of them follows."""

    parent: Turn | None
    ids: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Turn:
    """One node.

    ``new_ids``: prompt tokens since the parent's last token. ``output_ids`` / ``logprobs``: the sampled tokens and
    their logprobs (float64, or float32 where that says the same). ``policy_versions``: one int or None per sampled
    token, or None.
    ``depth``: messages up to and including the answer. ``key``: chain key of those messages, ``base_key`` of those
    before the answer. ``prompt_key``: chain key of the messages asked: siblings of one prompt share it (it differs from
    ``base_key`` where the client wrote the beginning of the answer, ``prefill`` characters of it).
    ``fork``: why this turn does not continue the session's row, None if it does. ``divergence``: what the template
    would have changed in the history. ``trimmed``: the client was given less than was sampled.
    ``choice``: which of a request's answers it is, None for an only one. ``params``: the sampling parameters in effect.
    ``exact``: whether the logprobs are those of the distribution sampled from. ``top_logprobs``: for each sampled token
    the likeliest, ``[(token, logprob), …]``, where they were asked for. ``stop_sequence``: the stop string found.
    ``masked``: not to be trained. ``cut``: how the conversation ended here, where a request that went on from this turn
    failed or was aborted.
    """

    parent: Turn | None
    logprobs: array[float]
    finish_reason: str
    message: ParsedMessage
    call_ids: list[str]
    depth: int
    key: bytes
    base_key: bytes
    prompt_key: bytes
    opening: bytes = b""
    """Chain key of the conversation's first message alone."""
    policy_versions: list[int | None] | None = None
    fork: str | None = None
    divergence: str | None = None
    prefill: int = 0
    begun: int = 0
    """How many tokens at the end of the prompt are the beginning of the answer."""
    trimmed: bool = False
    stop_sequence: str | None = None
    choice: int | None = None
    params: dict[str, Any] = field(default_factory=dict)
    exact: bool = True
    masked: bool = False
    top_logprobs: list[list[tuple[int, float]]] | None = None
    routed_experts: Any = None
    """Of all tokens up to the end of this turn, as the engine gave them; kept until a turn follows that has them."""
    cut: Status | None = None
    state: TurnState = TurnState.PREPARED
    order: int = -1
    """Delivery order in the session, -1 while not delivered."""
    extended: bool = False
    """A later request built on this turn."""
    asked: tuple[Sequence[Any], list[Any]] | None = None
    """The messages and tools that were asked, as they came; kept at the tips only."""
    tip_answer: Message | None = None
    """What :attr:`answer` gives; kept at the tips only."""

    _line: Line = field(default_factory=lambda: Line(None))
    _start: int = 0
    _sampled: int = 0
    _end: int = 0
    """Where in the line the turn starts, where its sampled tokens start, where it ends."""

    @property
    def prompt_tokens(self) -> int:
        """``len(new_ids)``."""
        return self._sampled - self._start

    @property
    def sampled_tokens(self) -> int:
        """``len(output_ids)``."""
        return self._end - self._sampled

    @property
    def new_ids(self) -> list[int]:
        return self._line.ids[self._start : self._sampled]

    @property
    def output_ids(self) -> list[int]:
        return self._line.ids[self._sampled : self._end]

    @property
    def answer(self) -> Message:
        """The canonical message of the answer."""
        return self.tip_answer or assistant_message(self.message, self.call_ids)

    @property
    def reasoning(self) -> str:
        """The reasoning of the answer, that of its earlier part included where this turn went on with one."""
        begins = self.parent is not None and self.parent.depth == self.depth
        return (self.parent.reasoning if self.parent and begins else "") + self.message.reasoning

    @property
    def rendered_by_client(self) -> bool:
        """The prompt came as text or tokens, not as messages."""
        return self.asked is not None and not len(self.asked[0])

    def path(self) -> list[Turn]:
        """The turns from the root to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        turns.reverse()
        return turns

    def tokens(self) -> list[int]:
        """All tokens from the root to the end of this turn, in a list of the caller's own."""
        ids = self._line.ids[: self._end]
        return ids if self._line.parent is None else self._line.parent.tokens() + ids

    def lay(self, new_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Put the turn's tokens behind its parent's: into the same line, unless another turn is there already."""
        parent = self.parent
        goes_on = parent is not None and parent._end == len(parent._line.ids)
        self._line = parent._line if parent is not None and goes_on else Line(parent)
        ids = self._line.ids
        self._start, self._sampled = len(ids), len(ids) + len(new_ids)
        ids.extend(_shared(new_ids))
        ids.extend(_shared(output_ids))
        self._end = len(ids)

    def lift(self) -> None:
        """Take them away again, if nothing followed."""
        if self._end == len(self._line.ids):
            del self._line.ids[self._start :]


class TokenTree:
    """All turns of a session. Not thread-safe: one event loop owns it."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.ties = 0
        """How often two siblings matched a request equally well; the later delivered one was taken."""
        self.tools_keys: set[bytes] = set()
        """Of the tools of all conversations in here."""
        self._by_key: dict[bytes, list[Turn]] = {}
        self._tips: dict[Turn, None] = {}  # in the order they came
        self._delivered = 0

    def match(self, messages: Sequence[Message], keys: Sequence[bytes]) -> Turn | None:
        """The deepest turn whose conversation is a prefix of ``messages`` (``keys`` are their chain keys).

        Ties go to the most recently delivered turn. Reasoning is compared where the client sent it back.
        """
        for index in range(len(messages) - 1, -1, -1):
            if messages[index]["role"] != "assistant":
                continue
            found = [t for t in self._by_key.get(keys[index], ()) if _same_reasoning(t, messages)]
            if found:
                return self._latest(found)
        return None

    def tip(self, messages: Sequence[Any], tools: Sequence[Any]) -> Turn | None:
        """A tip whose own request is a proper prefix of this one, both as they came: the longest. That costs a small
        part of decoding them, and nearly every request of an agent continues a tip so."""
        best: Turn | None = None
        length = 0
        for turn in self._tips:
            asked, asked_tools = turn.asked or ((), [])
            if len(asked) > length and goes_on(messages, asked) and asked_tools == tools:
                best, length = turn, len(asked)
        return best

    def raw_messages(self) -> list[RawMessages]:
        """What the requests of the tips were, where their text was kept."""
        return [turn.asked[0] for turn in self._tips if turn.asked and isinstance(turn.asked[0], RawMessages)]

    def tips(self) -> Sequence[Turn]:
        """Turns that nothing was built on yet, the last :data:`MAX_TIPS` of them, oldest first."""
        return list(self._tips)

    def twin(self, turn: Turn, answer: Message) -> Turn | None:
        """Of ``turn`` and its siblings that said the same, the one a client means that replays it as ``answer``
        (which has the same chain key)."""
        sent = answer.get("reasoning_content")
        twins = [
            t
            for t in self._by_key[turn.key]
            if t.parent is turn.parent and (not sent or sent.strip() == t.reasoning.strip())
        ]
        return self._latest(twins) if twins else None

    def _latest(self, twins: Sequence[Turn]) -> Turn:
        self.ties += len(twins) > 1
        return max(twins, key=lambda turn: turn.order)

    def siblings(self, prompt_key: bytes, parent: Turn | None) -> list[Turn]:
        """The turns that answered this very prompt."""
        return [t for t in self.turns if t.prompt_key == prompt_key and t.parent is parent]

    def add(self, turn: Turn, new_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Keep a sampled turn (prepared) with its tokens."""
        turn.lay(new_ids, output_ids)
        if len(self._tips) >= MAX_TIPS:
            self._forget(next(iter(self._tips)))
        if turn.asked and isinstance(turn.asked[0], RawMessages):
            turn.asked[0].forget()
        self._tips[turn] = None
        self.turns.append(turn)
        self._by_key.setdefault(turn.key, []).append(turn)

    def built_on(self, turn: Turn) -> None:
        """Another turn follows this one for good. If it was only prepared, it is thereby delivered."""
        self.deliver(turn)
        turn.extended = True
        turn.routed_experts = None
        self._forget(turn)

    def discard(self, turn: Turn) -> None:
        """Take back a turn that will never be delivered."""
        turn.lift()
        self._tips.pop(turn, None)
        self.turns.remove(turn)
        self._by_key[turn.key].remove(turn)
        if not self._by_key[turn.key]:
            del self._by_key[turn.key]

    def _forget(self, turn: Turn) -> None:
        """Drop what only a tip needs."""
        turn.asked = turn.tip_answer = None
        self._tips.pop(turn, None)

    def deliver(self, turn: Turn) -> None:
        """The client has the whole answer."""
        if turn.state is not TurnState.DELIVERED:
            turn.state = TurnState.DELIVERED
            turn.order = self._delivered
            self._delivered += 1

    def delivered(self) -> list[Turn]:
        """Delivered turns in delivery order."""
        return sorted((t for t in self.turns if t.state is TurnState.DELIVERED), key=lambda t: t.order)


_INTS: list[int] = []


def _shared(ids: Sequence[int]) -> Iterable[int]:
    """The ids as int objects that all lists share: a held token costs a pointer, not an object of its own."""
    top = max(ids, default=0)
    if top >= len(_INTS):
        if top >= MAX_VOCABULARY:
            return ids
        _INTS.extend(range(len(_INTS), top + 1))
    return map(_INTS.__getitem__, ids)


def _same_reasoning(turn: Turn, messages: Sequence[Message]) -> bool:
    path = turn.path()
    for node, after in zip(path, [*path[1:], None], strict=True):
        sent = messages[node.depth - 1].get("reasoning_content")
        begins = after is not None and after.depth == node.depth
        if sent and not begins and sent.strip() != node.reasoning.strip():
            return False
    return True

"""What a model's sampled tokens mean: the values that parsers produce and wires encode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

CallStatus = Literal["ok", "invalid_json", "unclosed", "unknown_tool"]


@dataclass(slots=True)
class ParsedCall:
    """One tool call.

    ``name``: as sampled. ``arguments``: JSON text of an object; for ``invalid_json`` and ``unclosed`` the raw text as
    sampled. ``unknown_tool``: well-formed, but no tool of the request; where a request has no tools, names are not
    checked.
    ``id``: the id the model itself wrote, where its format has one (Kimi, Mistral), else None: the gateway makes one.
    """

    name: str
    arguments: str
    status: CallStatus = "ok"
    id: str | None = None


@dataclass(slots=True)
class ParsedMessage:
    """One assistant message.

    ``reasoning``, ``content``: text, ``""`` where there is none. ``raw``: the whole output as text, special tokens
    spelled out. ``ill_formed``: something could not be parsed as the format demands; the text is kept all the same.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ParsedCall] = field(default_factory=list)
    ill_formed: bool = False
    raw: str = ""


@dataclass(slots=True, frozen=True)
class ReasoningDelta:
    text: str


@dataclass(slots=True, frozen=True)
class ContentDelta:
    text: str


@dataclass(slots=True, frozen=True)
class CallStartDelta:
    """A tool call begins; ``index`` counts the calls of this message from 0."""

    index: int
    name: str
    id: str | None = None


@dataclass(slots=True, frozen=True)
class CallArgumentsDelta:
    """The next fragment of the argument text of call ``index``."""

    index: int
    text: str


Delta = ReasoningDelta | ContentDelta | CallStartDelta | CallArgumentsDelta


class OutputParser(Protocol):
    """Parses one answer, incrementally. The deltas of all ``feed`` calls plus those of ``finish`` add up to the
    message that ``finish`` returns, however the tokens were cut into pieces."""

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Take the next sampled ids; return what is now certain (never half a character or half a marker)."""
        ...

    def finish(self, finish_reason: str) -> tuple[list[Delta], ParsedMessage]:
        """No more tokens (``"stop"`` or ``"length"``): flush the rest and return the whole message. Never raises."""
        ...


class ParserFactory(Protocol):
    """Makes the parser of one answer."""

    def __call__(self, *, prompt_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> OutputParser:
        """``prompt_ids``: the prompt's tokens (a parser looks at the end: thinking may be pre-opened there).
        ``tools``: OpenAI tool schemas of the request."""
        ...

"""What every wire decodes to and encodes from. Wires are pure: no I/O, no session state, no tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...errors import GatewayError
from ..messages import Message, Tool
from ..parsed import Delta, ParsedMessage


@dataclass(slots=True)
class WireRequest:
    """One request of a client, the same whatever wire it came by.

    ``raw_messages``: the messages as parsed from JSON. ``decode_messages(start)``: ``raw_messages[start:]`` as
    canonical messages, or ``GatewayError(400)`` with the path of a bad field. What the session's earlier request began with needs
    no second look: the gateway compares it as it came and decodes only the rest.
    ``sampling``: what the client asked for, under the names of :class:`SamplingParams`. ``variables``: chat template
    variables. ``stream_usage``: send token counts at the end of a stream.
    """

    raw_messages: list[Any]
    decode_messages: Callable[[int], list[Message]]
    tools: list[Tool] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False


@dataclass(slots=True)
class Answer:
    """One answer to encode. ``finish_reason`` is the engine's: ``"stop"`` or ``"length"``.

    ``tokens``: ``(text, logprob)`` per sampled token where the client asked for logprobs, else None.
    """

    id: str
    created: int
    model: str
    message: ParsedMessage
    call_ids: list[str]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    tokens: list[tuple[str, float]] | None = None


class StreamEncoder(Protocol):
    """Turns the deltas of one answer into the bytes of its event stream."""

    def start(self) -> bytes: ...
    def deltas(self, deltas: Iterable[Delta]) -> bytes: ...
    def finish(self, answer: Answer) -> bytes: ...
    def error(self, error: GatewayError) -> bytes: ...


class Wire(Protocol):
    """One chat protocol."""

    def decode(self, body: Mapping[str, Any]) -> WireRequest:
        """Raises ``GatewayError(400)`` with the path of the offending field."""
        ...

    def encode(self, answer: Answer) -> dict[str, Any]: ...
    def encode_error(self, error: GatewayError) -> dict[str, Any]: ...
    def stream(self, answer_id: str, created: int, request: WireRequest, call_id: CallIds) -> StreamEncoder: ...


class CallIds(Protocol):
    """Gives the id of a tool call, the same one every time it is asked for the same call."""

    def __call__(self, index: int, parsed_id: str | None) -> str: ...


def bad_request(param: str, problem: str, kind: str = "invalid_request_error") -> GatewayError:
    """A 400 that names the field: ``messages[2].content: a string or a list is required``."""
    return GatewayError(400, f"{param}: {problem}", kind=kind, param=param)

"""What every wire decodes to and encodes from. Wires are pure: no I/O, no session state, no tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...errors import GatewayError
from ..fastjson import dumps
from ..messages import Message, Tool
from ..parsed import Delta, ParsedMessage

JSON = Mapping[str, Any]


@dataclass(slots=True)
class WireRequest:
    """One request of a client, the same whatever wire it came by."""

    raw_messages: Sequence[Any]
    """The messages as they came, parsed from JSON or :class:`RawMessages`. What the session's earlier request began
    with needs no second look: the gateway compares it as it came, and decodes only the rest."""
    decode_messages: Callable[[int], list[Message]]
    """``decode_messages(start)``: ``raw_messages[start:]`` as canonical messages, each raw one on its own, or
    ``GatewayError(400)`` with the path of a bad field."""
    size: int = sys.maxsize
    """Bytes of the whole request, where somebody counted them."""
    list_name: str = "messages"
    """What the wire calls the list of messages, for errors."""
    tools: list[Tool] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    """What the client asked for, under the names of :class:`SamplingParams`."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Chat template variables."""
    model: str = ""
    stream: bool = False
    stream_usage: bool = False
    """Send token counts at the end of a stream."""
    logprobs: bool = False
    """Send the logprobs of the sampled tokens."""
    top_logprobs: int = 0
    """Send this many of the likeliest tokens at each place, too."""
    token_ids: bool = False
    """Send the ids of the sampled tokens."""
    n: int = 1
    """How many answers."""
    one_call: bool = False
    """Hand out at most one tool call an answer."""
    ignored: Sequence[str] = ()
    """What has no effect here, for a warning."""
    body: JSON = field(default_factory=dict)
    """The whole request, for wires that repeat parts of it in their answer."""
    kept_items: list[Any] | None = None
    """What a later request that names this one's answer needs besides that answer; None where neither is to be kept."""
    prompt: str | list[int] | None = None
    """A rendered prompt, text or token ids, of a client that sends no messages."""


@dataclass(slots=True)
class TokenLogprob:
    """A token as text, its logprob, and the likeliest tokens at its place where they were asked for."""

    text: str
    logprob: float
    top: Sequence[tuple[str, float]] = ()


@dataclass(slots=True)
class Choice:
    """One sampled answer. ``finish_reason`` is the engine's: ``"stop"`` or ``"length"``.

    ``stop_sequence``: the stop string that ended it, where one did. ``tokens``: one per sampled token where the
    client asked for logprobs, else None. ``token_ids``: as sampled.
    """

    message: ParsedMessage
    call_ids: list[str]
    finish_reason: str
    stop_sequence: str | None
    completion_tokens: int
    tokens: list[TokenLogprob] | None = None
    token_ids: Sequence[int] = ()


@dataclass(slots=True)
class Answer:
    """What a request is answered. Only where it asked for ``n`` > 1 are there more ``choices`` than one."""

    id: str
    created: int
    model: str
    prompt_tokens: int
    choices: list[Choice]

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)


class StreamEncoder(Protocol):
    """Turns the deltas of an answer into the bytes of its event stream."""

    def start(self, prompt_tokens: int) -> bytes: ...
    def deltas(self, deltas: Iterable[Delta], choice: int = 0) -> bytes: ...
    def finish(self, answer: Answer) -> bytes: ...
    def error(self, error: GatewayError) -> bytes: ...


class Wire(Protocol):
    """One chat protocol. ``id_prefix``: how the ids of its answers begin. ``growing_list``: the field whose list of
    messages it takes as :class:`RawMessages`, None where it takes only plain lists."""

    id_prefix: str
    growing_list: str | None

    def decode(self, body: JSON) -> WireRequest:
        """Raises ``GatewayError(400)`` with the path of the offending field."""
        ...

    def encode(self, request: WireRequest, answer: Answer) -> dict[str, Any]: ...
    def encode_error(self, error: GatewayError) -> dict[str, Any]: ...
    def stream(self, answer_id: str, created: int, request: WireRequest, call_ids: Sequence[CallIds]) -> StreamEncoder:
        """``call_ids``: one for each choice."""
        ...


class CallIds(Protocol):
    """Gives the id of a tool call, the same one every time it is asked for the same call."""

    def __call__(self, index: int, parsed_id: str | None) -> str: ...


def bad_request(param: str, problem: str, kind: str = "invalid_request_error") -> GatewayError:
    """A 400 that names the field: ``messages[2].content: a string or a list is required``."""
    return GatewayError(400, f"{param}: {problem}", kind=kind, param=param)


# -- reading fields: absent and null are one thing everywhere ------------------------------------------------


def flag(body: JSON, name: str, path: str = "", *, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad_request(path or name, f"true or false is required, got {value!r}")
    return value


def obj(body: JSON, name: str, path: str = "") -> JSON:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise bad_request(path or name, "an object is required")
    return value


def model_name(body: JSON) -> str:
    value = body.get("model")
    if value is not None and not isinstance(value, str):
        raise bad_request("model", "a string is required")
    return value or ""


def a_string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise bad_request(path, "a string is required")
    return value


def a_list(value: object, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise bad_request(path, "a list is required")
    return value


def an_object(value: object, path: str) -> JSON:
    if not isinstance(value, Mapping):
        raise bad_request(path, "an object is required")
    return value


Numbers = Mapping[str, tuple[str, type[int] | type[float], float, float]]
"""Field -> name for the engine, type, smallest and largest value."""

SAMPLING: Numbers = {
    "temperature": ("temperature", float, 0.0, 100.0),
    "top_p": ("top_p", float, 0.0, 1.0),
    "top_k": ("top_k", int, -1, 2**31),
    "min_p": ("min_p", float, 0.0, 1.0),
    "seed": ("seed", int, -(2**63), 2**63 - 1),
    "presence_penalty": ("presence_penalty", float, -2.0, 2.0),
    "frequency_penalty": ("frequency_penalty", float, -2.0, 2.0),
    "repetition_penalty": ("repetition_penalty", float, 0.0, 100.0),
}


def numbers(body: JSON, fields: Numbers) -> dict[str, Any]:
    """The numeric parameters of a request, under the engine's names."""
    params: dict[str, Any] = {}
    for name, (engine_name, kind, low, high) in fields.items():
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad_request(name, f"a number is required, got {value!r}")
        if not low <= value <= high:  # NaN and infinity fail here too
            raise bad_request(name, f"{value} is not between {low:g} and {high:g}")
        if kind is int and value != int(value):
            raise bad_request(name, f"a whole number is required, got {value!r}")
        params[engine_name] = kind(value)
    return params


def stop_strings(value: object, path: str) -> list[str]:
    stop = [value] if isinstance(value, str) else value
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise bad_request(path, "a string or a list of non-empty strings is required")
    return stop


RESERVED = {"self", "messages", "tools", "documents", "generation_prompt", "add_generation_prompt"}
RESERVED |= {"sampled", "answer", "new", "answered", "prefill"}
"""What the gateway itself gives to a template, and the parameters beside which a renderer takes variables."""


def template_variables(body: JSON) -> dict[str, Any]:
    """``chat_template_kwargs``, without the names of what the gateway itself gives to a template."""
    variables = obj(body, "chat_template_kwargs")
    if taken := RESERVED & variables.keys():
        raise bad_request(f"chat_template_kwargs.{min(taken)}", "this name is taken, the gateway sets it")
    return dict(variables)


def ignored(body: JSON, known: frozenset[str]) -> Sequence[str]:
    """The fields that no one knows here."""
    unknown = body.keys() - known
    return sorted(unknown) if unknown else ()


# -- writing events --------------------------------------------------------------------------------------------


def event(data: JSON, name: str = "") -> bytes:
    """A server-sent event; ``name`` where the protocol names its events."""
    return b"%sdata: %s\n\n" % (f"event: {name}\n".encode() if name else b"", dumps(data))

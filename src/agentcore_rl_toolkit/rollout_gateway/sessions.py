"""Sessions: who may talk to the gateway, and what each one holds."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..errors import ContractError, GatewayError
from .traces import TokenTree, Turn

MIN_OWN_KEY = 20
"""A caller-chosen id is its own key, so it must not be guessable."""
_REMEMBERED = 10_000
"""Ended sessions whose id was chosen by the caller."""
_MAC_CHARS = 32
_WARNINGS = 100
"""Things a session warns of; a client can make up new ones for ever."""
_RESPONSES = 256
"""Answers of a session that a request may name as its beginning: the last ones."""
_KEYS = 1000
"""Requests of a session whose idempotency keys are known: the last ones."""


@dataclass(slots=True, eq=False)
class Session:
    """One conversation partner: a key, its limits and the tokens it caused.

    ``sampling_defaults`` < the request < ``sampling_overrides``. ``max_context_tokens``: window of the model, 0 =
    the engine's own, where it tells. ``min_response_tokens``: a request whose prompt leaves less room is refused.
    ``max_turns``, ``max_total_tokens`` (sampled tokens; an answer is limited to what is left): None = unlimited.
    ``deadline``: seconds from the session's creation; then no turn begins, and one that is being sampled is given
    up. ``volatile``: what to take out of system prompts, because a harness changes it with every request and each
    would begin a new conversation. ``on_done``: called in the gateway's thread when the agent says, at ``done_url``,
    that its result is written; it may be wrong, and say so more than once.
    """

    session_id: str = field(repr=False)  # a chosen one is the key
    api_key: str = field(repr=False)
    gateway_url: str
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    sampling_overrides: dict[str, Any] = field(default_factory=dict)
    max_context_tokens: int = 0
    min_response_tokens: int = 1
    max_turns: int | None = None
    max_total_tokens: int | None = None
    deadline: float | None = None
    volatile: list[re.Pattern[str]] = field(default_factory=list)
    on_done: Callable[[], None] | None = field(default=None, repr=False)
    _created: float = field(default_factory=time.monotonic, repr=False)
    tree: TokenTree = field(default_factory=TokenTree, repr=False)
    sampled_tokens: int = 0
    sampling: int = 0
    """Answers being sampled now."""
    in_flight: dict[tuple[bytes, int], asyncio.Future[list[Turn]]] = field(default_factory=dict, repr=False)
    """Answers being sampled, the latest by the key of their prompt and their number: what a retry may join."""
    requests: set[asyncio.Task[Any]] = field(default_factory=set, repr=False)
    """Requests being served, until their last byte is written."""
    warned: set[str] = field(default_factory=set, repr=False)
    """What the log already warns of: request fields without effect, inexact logprobs."""
    responses: OrderedDict[str, list[Any]] = field(default_factory=OrderedDict, repr=False)
    """The last answers that a request may name as its beginning: answer id -> all items up to and including it."""
    keyed: dict[tuple[str, bytes, int], asyncio.Future[list[Turn]]] = field(default_factory=dict, repr=False)
    """Answers to the last requests with an idempotency key, oldest first, by that key, the prompt's and their number;
    cancelled where a request came to nothing."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_context_tokens", 0),
            ("min_response_tokens", 1),
            ("max_turns", 1),
            ("max_total_tokens", 1),
            ("deadline", 0),
        ):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name}: {least} or more is required, got {value!r}")

    @asynccontextmanager
    async def time_left(self) -> AsyncIterator[None]:
        """Within, the deadline holds; raises ``GatewayError(400)`` at it."""
        if self.deadline is None:
            yield
            return
        try:
            async with asyncio.timeout(max(0.0, self._created + self.deadline - time.monotonic())):
                await asyncio.sleep(0)  # a deadline that has passed begins nothing
                yield
        except TimeoutError:
            raise GatewayError(
                400, f"the session's time ({self.deadline:g} s) is used up", kind="deadline_exceeded"
            ) from None

    def expect(self, idempotency_key: str | None, prompt_key: bytes, n: int) -> asyncio.Future[list[Turn]]:
        """Where to put the answers of a request, for a retry that comes with the same idempotency key."""
        answers: asyncio.Future[list[Turn]] = asyncio.get_running_loop().create_future()
        if idempotency_key is not None:
            self.keyed.pop((idempotency_key, prompt_key, n), None)
            self.keyed[idempotency_key, prompt_key, n] = answers
            if len(self.keyed) > _KEYS:
                del self.keyed[next(iter(self.keyed))]
        return answers

    @contextmanager
    def answering(self, idempotency_key: str | None, prompt_key: bytes, n: int) -> Iterator[asyncio.Future[list[Turn]]]:
        """Within, answers are sampled: the same, and any retry may join them. Cancelled where none were put."""
        answers = self.in_flight[prompt_key, n] = self.expect(idempotency_key, prompt_key, n)
        self.sampling += n
        try:
            yield answers
        finally:
            self.sampling -= n
            answers.cancel()  # no effect once it has a result
            if self.in_flight.get((prompt_key, n)) is answers:
                del self.in_flight[prompt_key, n]

    def remember(self, answer_id: str, items: list[Any]) -> None:
        """Keep the items that an answer ends, for :meth:`recall`."""
        self.responses[answer_id] = items
        while len(self.responses) > _RESPONSES:
            self.responses.popitem(last=False)

    def recall(self, answer_id: object) -> list[Any]:
        """The items that an earlier answer ends; raises ``GatewayError(400)``."""
        items = self.responses.get(answer_id) if isinstance(answer_id, str) else None
        if items is None:
            raise GatewayError(
                400,
                f"previous_response_id: this session has no response {answer_id!r} to go on from (any more)",
                kind="previous_response_not_found",
                param="previous_response_id",
            )
        return items

    def not_warned_of(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that come for the first time; the rest has had its warning."""
        new = [name for name in names if name not in self.warned]
        if len(self.warned) < _WARNINGS:
            self.warned.update(new)
        return new if len(self.warned) < _WARNINGS else []

    @property
    def name(self) -> str:
        """For logs: the id, but not one that is the key."""
        return self.session_id if self.session_id != self.api_key else f"#{_digest(self.api_key).hex()[:12]}"

    @property
    def base_url(self) -> str:
        """For OpenAI clients; carries the key, so any ``api_key`` works with it."""
        return f"{self.gateway_url}/sessions/{self.api_key}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """For Anthropic clients, which append ``/v1`` themselves."""
        return f"{self.gateway_url}/sessions/{self.api_key}"

    @property
    def done_url(self) -> str:
        """For ``_rollout.notify_url``: where the agent tells that its result is written."""
        return f"{self.gateway_url}/sessions/{self.api_key}/done"


class SessionStore:
    """Sessions by key. A generated key is ``id.HMAC``: an ended session is recognised without remembering it."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._by_key: dict[str, Session] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def create(self, session_id: str | None, gateway_url: str, **limits: Any) -> Session:
        """Open a session; ``limits``: fields of :class:`Session`. Raises ``ContractError`` for an id that is too short,
        holds other characters than a URL may, or is in use."""
        if session_id is None:
            session_id = secrets.token_hex(16)
            key = f"{session_id}.{self._mac(session_id)}"
        else:
            key = _own_key(session_id)
            if key in self._by_key:
                raise ContractError("session_id: this one is in use; finish it first or choose another")
            self._ended.pop(_digest(key), None)
        session = Session(session_id=session_id, api_key=key, gateway_url=gateway_url, **limits)
        self._by_key[key] = session
        return session

    def get(self, key: str | None) -> Session:
        """The live session of a key; raises 401 for an unknown one, 410 for one whose session has ended."""
        session = self._by_key.get(key) if key else None
        if session is not None:
            return session
        if key and self._has_ended(key):
            raise GatewayError(410, "this session has ended", kind="session_ended")
        raise GatewayError(
            401,
            "unknown session key: send the session's key as Bearer token or in the URL",
            kind="invalid_api_key",
        )

    def put_back(self, session: Session) -> None:
        """Undo :meth:`pop`."""
        self._by_key[session.api_key] = session
        self._ended.pop(_digest(session.api_key), None)

    def pop(self, session_id: str) -> Session:
        """Take a session out, by its id or key; raises ``KeyError`` (without the key) for one that is not live."""
        key = session_id if session_id in self._by_key else f"{session_id}.{self._mac(session_id)}"
        session = self._by_key.pop(key, None)
        if session is None:
            raise KeyError("no live session has this id")
        if session.api_key == session.session_id:
            self._ended[_digest(key)] = None
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        return session

    def _has_ended(self, key: str) -> bool:
        session_id, _, mac = key.rpartition(".")
        if session_id and hmac.compare_digest(mac.encode(), self._mac(session_id).encode()):
            return True
        return _digest(key) in self._ended

    def _mac(self, session_id: str) -> str:
        mac = hmac.new(self._secret, session_id.encode("utf-8", "surrogatepass"), hashlib.sha256)
        return mac.hexdigest()[:_MAC_CHARS]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _own_key(session_id: str) -> str:
    if len(session_id) < MIN_OWN_KEY:
        raise ContractError(
            f"session_id: {session_id!r} has {len(session_id)} characters; it serves as the session's key, so it needs "
            f"at least {MIN_OWN_KEY}. Leave it out to get an unguessable one"
        )
    if not all(c.isascii() and (c.isalnum() or c in "-_.~") for c in session_id):
        raise ContractError(f"session_id: {session_id!r} may hold only letters, digits and -_.~ (it is part of a URL)")
    return session_id

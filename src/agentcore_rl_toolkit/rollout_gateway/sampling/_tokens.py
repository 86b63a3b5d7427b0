"""What engines behind HTTP share: checks of every piece of an answer, and of what the server calls a logprob."""

from __future__ import annotations

import asyncio
import logging
import math
from abc import abstractmethod
from collections.abc import AsyncGenerator, Container, Mapping, Sequence
from contextlib import aclosing
from hashlib import blake2b
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ...errors import EngineError, SetupError
from ._http import HttpEngine, StatusError
from .base import (
    NEUTRAL,
    NO_LOGPROB,
    RETRY_AFTER,
    ROUNDING,
    ChatChunk,
    StreamingEngine,
    TokenChunk,
    check_output,
)

logger = logging.getLogger(__name__)

Piece = TypeVar("Piece", bound=TokenChunk)

_UNREADABLE = (AttributeError, EOFError, LookupError, TypeError, ValueError)
"""What comes of reading JSON (or an array in it) that has another form."""
_PROBE = (1, 2, 3, 4)
_PROBED = 64


class CheckedServer(HttpEngine):
    """A server whose tokens and logprobs are checked; the subclass knows its wire.

    ``policy_version``: the version of the weights, for servers that do not say it themselves; set it when you have
    changed them. ``adapter``: LoRA adapter to sample with unless ``sampling_params["adapter"]`` names one.
    ``data_parallel``: number of data-parallel ranks; a session's turns then go to one and the same, where their prefix
    is cached.
    """

    unscaled_logprobs: str
    """What to do about a server whose logprobs leave the temperature out."""

    def __init__(
        self,
        base_url: str,
        *,
        policy_version: int | None = None,
        adapter: str | None = None,
        data_parallel: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(base_url, **options)
        self.policy_version, self.adapter = policy_version, adapter
        self.data_parallel = data_parallel
        self._scaled: bool | None = None
        self._verified = False
        self._verifying: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]] = WeakKeyDictionary()

    # -- answers -------------------------------------------------------------------------------------------

    async def _checked(self, pieces: AsyncGenerator[Piece], max_tokens: int) -> AsyncGenerator[Piece]:
        """The same pieces, each of them and all together as an engine must answer."""
        count = 0
        final: Piece | None = None
        async with aclosing(pieces):
            async for piece in self._readable(pieces):
                if final is not None:
                    raise EngineError(f"{self.base_url} went on after the end of its answer")
                self._check(piece)
                count += len(piece.output_ids)
                if count > max_tokens:
                    raise EngineError(f"{self.base_url} sampled {count} tokens, max_tokens was less")
                if piece.policy_version is None:
                    piece.policy_version = self.policy_version
                if piece.finish_reason is not None:
                    final = piece  # told when the server's answer is at its end: then its connection is free again
                elif piece.output_ids or isinstance(piece, ChatChunk):
                    yield piece
        if final is None:
            raise EngineError(f"{self.base_url} broke its answer off after {count} tokens", retry_after=RETRY_AFTER)
        if not count:
            raise EngineError(f"{self.base_url} gave an answer without tokens")
        yield final

    async def _readable(self, pieces: AsyncGenerator[Piece]) -> AsyncGenerator[Piece]:
        """The same pieces; a server whose JSON has another shape is an ``EngineError`` as well."""
        try:
            async for piece in pieces:
                yield piece
        except _UNREADABLE as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> EngineError:
        return EngineError(f"{self.base_url} gave an answer of an unknown form ({type(error).__name__}: {error})")

    @abstractmethod
    async def _top_logprobs(self, prompt_ids: Sequence[int], temperature: float) -> Mapping[Any, float]:
        """The most likely next tokens and what the server says their logprobs are."""

    def _check(self, piece: TokenChunk) -> None:
        if problem := check_output(piece.output_ids, piece.output_log_probs):
            above = any(isinstance(logprob, float) and logprob > ROUNDING for logprob in piece.output_log_probs)
            raise EngineError(f"{self.base_url} gave {problem}" + (f". {self.unscaled_logprobs}" if above else ""))
        piece.output_log_probs = [float(logprob) for logprob in piece.output_log_probs]
        reason = piece.finish_reason
        if reason == "abort":
            raise EngineError(f"{self.base_url} aborted the request", retry_after=RETRY_AFTER)
        if reason not in (None, "stop", "length"):
            raise EngineError(f"{self.base_url} ended its answer with the reason {reason!r}")

    # -- what the server calls a logprob -------------------------------------------------------------------

    async def verify(self, prompt_ids: Sequence[int] = _PROBE) -> bool | None:
        """Find out by two one-token requests whether the server's logprobs are ``log_softmax(logits / temperature)``.

        True: they are. False: they leave the temperature out, so only temperature 1 can be trained. None: this
        prompt does not show it. Raises ``SetupError`` for a server that gives no logprobs at all, ``EngineError`` if
        it can't be asked. Runs by itself before the first answer.
        """
        plain = await self._top_logprobs(prompt_ids, 1.0)
        if any(value > ROUNDING for value in plain.values()) or math.fsum(map(math.exp, plain.values())) > 1.02:
            raise SetupError(f"{self.base_url} gives logits instead of logprobs. {self.unscaled_logprobs}")
        scaled = await self._top_logprobs(prompt_ids, 2.0)
        self._scaled = _halved(plain, scaled)
        self._verified = self._scaled is not None
        return self._scaled

    async def _usable(self, prompt_ids: Sequence[int], params: Mapping[str, Any]) -> None:
        if "max_tokens" not in params:
            raise EngineError("sampling_params need max_tokens: a server's own default (16, 128) cuts answers silently")
        if not self._verified:
            # One for all that wait: with the server down, they would otherwise find out one after the other.
            loop = asyncio.get_running_loop()
            task = self._verifying.get(loop)
            if task is None or task.done():
                task = self._verifying[loop] = loop.create_task(self._verify_once(prompt_ids[-_PROBED:]))
                task.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has seen it
            await asyncio.shield(task)
        temperature = params.get("temperature")
        if self._scaled is False and temperature not in (None, 0.0, 1.0):
            raise EngineError(
                f"{self.base_url} gives logprobs of temperature 1, this request has temperature {temperature}. "
                f"{self.unscaled_logprobs}, or sample at temperature 1 (sampling_overrides={{'temperature': 1.0}})"
            )

    async def _verify_once(self, prompt_ids: Sequence[int]) -> None:
        try:
            await self.verify(prompt_ids)
        except SetupError as error:
            raise EngineError(str(error)) from error
        except _UNREADABLE as error:
            raise self._unreadable(error) from error
        except StatusError as error:
            if error.retry_after is not None:
                raise
            # A server that allows no top logprobs can still serve; each answer is checked as far as it shows.
            logger.warning("can't see which logprobs %s gives: %s", self.base_url, error)
        self._verified = True

    # -- requests ------------------------------------------------------------------------------------------

    def _routing(self, session_id: str | None) -> tuple[str | None, int | None]:
        """A session's name for routers, and its data-parallel rank. A hash: the id may be the session's key."""
        if session_id is None:
            return None, None
        digest = blake2b(session_id.encode(), digest_size=8).digest()
        rank = int.from_bytes(digest, "big") % self.data_parallel if self.data_parallel > 1 else None
        return digest.hex(), rank


class TokenServer(CheckedServer, StreamingEngine):
    """A token-in/token-out server behind HTTP; the subclass knows its wire.

    ``routed_experts``: ask for the experts each token went through (``extra["routed_experts"]``).
    """

    def __init__(self, base_url: str, *, routed_experts: bool = False, **options: Any) -> None:
        super().__init__(base_url, **options)
        self.routed_experts = routed_experts

    async def stream(
        self,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        **media: Any,
    ) -> AsyncGenerator[TokenChunk]:
        """One answer while it is sampled. Raises ``EngineError``."""
        await self._usable(prompt_ids, sampling_params)
        pieces = self._pieces(prompt_ids, sampling_params, session_id, media)
        async with aclosing(self._checked(pieces, sampling_params["max_tokens"])) as checked:
            async for piece in checked:
                yield piece

    @abstractmethod
    def _pieces(
        self, prompt_ids: list[int], params: Mapping[str, Any], session_id: str | None, media: Mapping[str, Any]
    ) -> AsyncGenerator[TokenChunk]:
        """The answer as the server gives it; the finish reason in the server's words."""


def in_their_words(params: Mapping[str, Any], names: Mapping[str, str], unsent: Container[str]) -> dict[str, Any]:
    """Sampling parameters under a server's own ``names``; neutral ones where nobody asked, or None was given."""
    asked = {names.get(name, name): v for name, v in params.items() if v is not None and name not in unsent}
    return {**NEUTRAL, **asked}


def _halved(plain: Mapping[Any, float], scaled: Mapping[Any, float]) -> bool | None:
    """Whether temperature 2 halves the distances between logprobs, as it must; a normaliser does not touch them."""
    common = [i for i in plain if i in scaled and min(plain[i], scaled[i]) > NO_LOGPROB]
    before, after = [plain[i] for i in common], [scaled[i] for i in common]
    if not common or max(before) - min(before) < 0.05:
        return None
    return max(after) - min(after) < 0.75 * (max(before) - min(before))


def version_of(label: object) -> int | None:
    """The policy version in a server's label of its weights, if it is a number."""
    if isinstance(label, int) and not isinstance(label, bool):
        return label
    return int(label) if isinstance(label, str) and label.isascii() and label.isdecimal() else None


def versions_of(spans: object, count: int) -> list[int] | None:
    """One version per token of a whole answer, from ``[{"version", "start", "end"}]``; None where one is no number."""
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        return None
    versions: list[int] = []
    for span in spans:
        version, start, end = version_of(span.get("version")), span.get("start"), span.get("end")
        if version is None or start != len(versions) or not isinstance(end, int) or not start <= end <= count:
            return None
        versions += [version] * (end - start)
    return versions if len(versions) == count else None

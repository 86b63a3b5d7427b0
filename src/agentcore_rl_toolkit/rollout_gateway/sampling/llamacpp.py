"""llama.cpp: ``/completion`` of its server, in short blocks.

Why blocks: the server hands a token's logprob out only while the text so far is whole UTF-8, and when it streams, not
even the token; and it works on an answer that is not streamed to its end, whoever has gone. So an answer is sampled a
few tokens at a time, none streamed by the server: every id arrives, a block is soon over, and the logprobs that are
missing are asked for one by one. The blocks of an answer stay in one slot, where all but their last token is cached.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ...errors import EngineError
from ._tokens import TokenServer
from .base import NEUTRAL, TokenChunk, not_honoured

logger = logging.getLogger(__name__)

_FIRST_BLOCK, _BLOCK = 4, 16
_LIKELY = 256  # a sampled token is nearly always among as many; the whole vocabulary takes seconds
_ALL = 1 << 20
_TRUNCATION = ("top_k", "top_p", "min_p")
_PENALTIES = {
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repeat_penalty",
}
_HONOURED = {*NEUTRAL, "max_tokens", "max_new_tokens", "seed", "stop", "stop_token_ids"}


class LlamaCppBackend(TokenServer):
    """A llama.cpp server (``llama-server``, or ``xllamacpp.Server``).

    Logprobs are ``log_softmax(logits / temperature)``. Only where a temperature other than 0 and 1 meets top-k/p,
    min-p or a penalty, llama.cpp tells no more than the probabilities it sampled from, after all of them; such turns
    are marked ``exact_logprobs=False`` by the gateway anyway. As many answers are sampled at a time as the server has
    slots; others wait. Adapters, routed experts and data-parallel ranks are not for llama.cpp; other options:
    :class:`HttpEngine` (key, headers, timeouts, retries), ``policy_version``.
    """

    unscaled_logprobs = "A newer llama.cpp is needed (one with post_sampling_probs)"

    def __init__(self, base_url: str, **options: Any) -> None:
        super().__init__(base_url, **options)
        if self.adapter or self.routed_experts or self.data_parallel != 1:
            raise ValueError("llama.cpp has no adapter, routed_experts or data_parallel")
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, _Slots] = WeakKeyDictionary()
        self._letter: int | None = None
        self._warned = False

    async def context_window(self) -> int | None:
        """Tokens of prompt and answer that fit one slot, None if the server does not say. Raises ``EngineError``."""
        window = ((await self.get_json("/props")).get("default_generation_settings") or {}).get("n_ctx")
        return window if isinstance(window, int) else None

    # -- one answer --------------------------------------------------------------------------------------

    async def _pieces(
        self, prompt_ids: list[int], params: Mapping[str, Any], session_id: str | None, media: Mapping[str, Any]
    ) -> AsyncGenerator[TokenChunk]:
        if media:
            raise EngineError(f"llama.cpp takes no {', '.join(sorted(media))} beside token ids")
        sampling, limit, seed = self._sampling(params), params["max_tokens"], params.get("seed")
        ids: list[int] = []
        reason: str | None = None
        async with self._slot(session_id) as slot:
            while reason is None:
                prefix = [*prompt_ids, *ids]
                body = {**sampling, "prompt": prefix, "id_slot": slot, "repeat_last_n": len(prefix)}
                body["n_predict"] = min(_BLOCK if ids else _FIRST_BLOCK, limit - len(ids))
                if seed is not None:  # each block has a random sequence of its own
                    body["seed"] = random.Random(f"{seed}/{len(prefix)}").getrandbits(31)
                answer = await self.post_json("/completion", body, retry=not ids)
                read = answer.get("tokens_evaluated")
                if isinstance(read, int) and read != len(prefix):
                    raise EngineError(f"{self.base_url} sampled after {read} tokens, the prompt has {len(prefix)}")
                block, entries = _tokens(answer)
                end = await self._stop(params, ids, block)
                if end or answer.get("stop_type") == "eos":
                    reason = "stop"
                elif len(ids) + len(block) >= limit or answer.get("truncated"):
                    reason = "length"
                kept = block[:end] if end else block
                logprobs = await self._logprobs(body, kept, _aligned(block, entries))
                ids += kept
                yield TokenChunk(kept, logprobs, finish_reason=reason)

    async def _stop(self, params: Mapping[str, Any], ids: Sequence[int], block: Sequence[int]) -> int:
        """How many tokens of the block are left once a stop has ended it; 0 without one."""
        stops, strings = params.get("stop_token_ids") or (), params.get("stop") or ()
        end = next((count for count, token in enumerate(block, 1) if token in stops), 0)
        kept = block[:end] if end else block
        tail = ids[-max(map(len, map(str.encode, strings)), default=1) :]  # a token is a byte at least
        if not strings or not await self._holds(strings, [*tail, *kept]):
            return end
        for count in range(1, len(kept)):
            if await self._holds(strings, [*tail, *kept[:count]]):
                return count
        return len(kept)

    async def _holds(self, strings: Sequence[str], ids: list[int]) -> bool:
        text = (await self.post_json("/detokenize", {"tokens": ids}))["content"]
        return any(string in text for string in strings)

    def _sampling(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters in llama.cpp's words, everything that the server may have other defaults for included."""
        if unknown := not_honoured(params, _HONOURED):
            raise EngineError(f"llama.cpp can't honour {', '.join(sorted(unknown))}: leave it out")
        wanted = {name: neutral if params.get(name) is None else params[name] for name, neutral in NEUTRAL.items()}
        wanted["top_k"] = max(wanted["top_k"], 0)
        penalties = any(wanted[name] != NEUTRAL[name] for name in _PENALTIES)
        truncation = [name for name in _TRUNCATION if wanted[name] not in (NEUTRAL[name], 0)]
        scaled = wanted["temperature"] not in (0, 1)
        if scaled and (penalties or truncation) and not self._warned:
            self._warned = True
            logger.warning(
                "%s: with a temperature of %s, llama.cpp only tells probabilities after %s; the rows say "
                "exact_logprobs=False. Sample with one of the two to train on them",
                self.base_url,
                wanted["temperature"],
                ", ".join([*truncation, *(["penalties"] if penalties else [])]),
            )
        return {
            **{_PENALTIES.get(name, name): value for name, value in wanted.items()},
            "dynatemp_range": 0.0,
            "mirostat": 0,
            "samplers": [*(["penalties"] if penalties else []), "temperature", *truncation],
            # Its logprobs leave the temperature out, its probabilities after sampling don't.
            "post_sampling_probs": scaled,
            "n_probs": 1,
            "return_tokens": True,
            "cache_prompt": True,
            "stream": False,
        }

    # -- logprobs ----------------------------------------------------------------------------------------

    async def _logprobs(
        self, body: Mapping[str, Any], ids: Sequence[int], entries: Sequence[Mapping[str, Any] | None]
    ) -> list[float]:
        logprobs = []
        for i, (token, entry) in enumerate(zip(ids, entries, strict=False)):  # entries go on after a stop
            if entry is None:
                value = await self._score([*body["prompt"], *ids[:i]], token, body)
            elif "logprob" in entry:
                value = entry["logprob"]
            else:
                value = math.log(entry["prob"]) if entry["prob"] > 0 else -math.inf
            logprobs.append(value)
        return logprobs

    async def _score(self, prefix: list[int], token: int, like: Mapping[str, Any]) -> float:
        """The logprob of a token after ``prefix``: read off what else could have come before a letter put there."""
        temperature = like["temperature"]
        for count in (_LIKELY, _ALL) if temperature in (0, 1) else (_ALL,):
            answer = await self.post_json(
                "/completion",
                {
                    "prompt": prefix,
                    "id_slot": like["id_slot"],
                    "n_predict": 1,
                    "n_probs": count,
                    "logit_bias": [[await self._any_letter(), 1e6]],
                    "samplers": [],
                    "temperature": 0.0,
                    "cache_prompt": True,
                },
                retry=False,
            )
            [entry] = answer["completion_probabilities"]
            found = {other["id"]: other["logprob"] for other in entry["top_logprobs"]}
            if token not in found:
                continue
            if temperature in (0, 1):
                return float(found[token])
            scaled = np.array(list(found.values())) / temperature
            return float(found[token] / temperature - np.logaddexp.reduce(scaled))
        raise EngineError(f"{self.base_url} does not tell the logprob of token {token}")

    async def _any_letter(self) -> int:
        """A token that is whole UTF-8."""
        if self._letter is None:
            self._letter = (await self.post_json("/tokenize", {"content": "a"}))["tokens"][-1]
        return self._letter

    async def _top_logprobs(self, prompt_ids: Sequence[int], temperature: float) -> dict[int, float]:
        sampling = self._sampling({"temperature": temperature})
        body = {**sampling, "prompt": list(prompt_ids), "n_predict": 1, "n_probs": 5}
        for entry in (await self.post_json("/completion", body)).get("completion_probabilities") or ():
            if "top_probs" in entry:
                return {top["id"]: math.log(top["prob"]) for top in entry["top_probs"] if top["prob"] > 0}
            return {top["id"]: top["logprob"] for top in entry["top_logprobs"]}
        return {}

    # -- slots -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _slot(self, session_id: str | None) -> AsyncIterator[int]:
        """A slot of the server to ourselves: if possible the one that holds the session's last turn."""
        loop = asyncio.get_running_loop()
        slots = self._slots.get(loop)
        if slots is None:
            count = (await self.get_json("/props")).get("total_slots")
            slots = self._slots.setdefault(loop, _Slots(count if isinstance(count, int) and count > 0 else 1))
        try:
            async with slots.take(session_id) as slot:
                yield slot
        except EngineError as error:
            if error.retry_after is not None and self._slots.get(loop) is slots:
                del self._slots[loop]  # a server that comes back may have another number
            raise


class _Slots:
    """The server's slots and who used them last."""

    def __init__(self, count: int) -> None:
        self._gate = asyncio.Semaphore(count)
        self._free: dict[int, str | None] = dict.fromkeys(range(count))  # the longest unused comes first

    @asynccontextmanager
    async def take(self, session_id: str | None) -> AsyncIterator[int]:
        async with self._gate:
            own = (slot for slot, last in self._free.items() if last is not None and last == session_id)
            slot = next(own, next(iter(self._free)))
            del self._free[slot]
            try:
                yield slot
            finally:
                self._free[slot] = session_id


def _tokens(answer: Mapping[str, Any]) -> tuple[list[int], list[dict[str, Any]]]:
    """The ids of a block, and what the server says about some of them."""
    ids, reason = answer.get("tokens"), answer.get("stop_type")
    if not isinstance(ids, list) or not ids:
        raise EngineError(f"llama.cpp gave no token ids (stop_type {reason!r}): a build from 2025 or later is needed")
    return ids, answer.get("completion_probabilities") or []


def _aligned(ids: Sequence[int], entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | None]:
    """For every token its entry; None where it has none, or where it is not clear which is its own."""
    forwards, backwards = enumerate(ids), zip(reversed(range(len(ids))), reversed(ids), strict=True)
    first = [next((i for i, token in forwards if token == entry["id"]), -1) for entry in entries]
    last = [next((i for i, token in backwards if token == entry["id"]), -1) for entry in reversed(entries)]
    if -1 in first:
        raise EngineError("llama.cpp gave logprobs of other tokens than it sampled")
    aligned: list[Mapping[str, Any] | None] = [None] * len(ids)
    # An entry is nowhere before its first place and nowhere behind its last.
    for entry, low, high in zip(entries, first, reversed(last), strict=True):
        if low == high:
            aligned[low] = entry
    return aligned

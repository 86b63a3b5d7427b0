"""A tiny trainable policy: numpy only, exact logprobs, no GPU. A stand-in so that the whole loop closes.

It plays the model behind the gateway (a ``StreamingBackend``) and learns from the rows that come back. It is
log-linear: every feature of the tokens so far (their last few, alone and together with the words of the message
being answered) picks one row of a weight matrix, and the sum ``s`` of these rows scores the next token ``v``::

    logit[v] = s[v]                                          what to write
               + sum over the places of v in the message being answered:
                     s[V + the token two places before]      what to copy: an operand, a tool's result
                     + s[2 V] if the token just before is the last one written       go on copying

So its gradient is short and exact. It sees token ids and nothing else.
Left out on purpose: hidden layers, optimizer state, batching, any claim to be a language model.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ..errors import EngineError
from ..rollout_gateway.sampling import StreamingEngine, TokenChunk, not_honoured
from ..rollout_gateway.traces.record import TraceRecord
from .math_tasks import transcripts

FOLDER = Path(__file__).parent / "data" / "tiny"
"""The policy's checkpoint folder, for a renderer: tokenizer and chat template."""

VOCAB_SIZE = 544
END_OF_TEXT, MESSAGE_START, MESSAGE_END = 0, 1, 2
"""Ids of the tokenizer's special tokens."""

_ROWS = 8192  # features are hashed into this many rows: a collision only makes two of them share one
_COLUMNS = 2 * VOCAB_SIZE + 1
_NGRAM = 4
_ANSWERED = 64  # how many tokens of the message being answered are looked at, from its end
_TRANSCRIPTS, _WARM_UP_RATE = 1500, 0.6
_CHUNK = 8  # tokens sampled in one go: about half a millisecond

_Weights = npt.NDArray[np.float32]  # (_ROWS, _COLUMNS)
_Floats = npt.NDArray[np.float64]


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@functools.cache
def _words() -> frozenset[int]:
    """Tokens with a letter in them."""
    decode = _tokenizer().decode
    return frozenset(token for token in range(VOCAB_SIZE) if any(map(str.isalpha, decode([token]))))


# -- the model -------------------------------------------------------------------------------------------


class _Context:
    """The tokens so far, and the message being answered: the last complete one (none at first)."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = list(ids)
        self._look_back()

    def append(self, token: int) -> None:
        self.ids.append(token)
        if token == MESSAGE_START:
            self._look_back()

    def _look_back(self) -> None:
        starts = [i for i, token in enumerate(self.ids) if token == MESSAGE_START]
        start, end = starts[-2:] if len(starts) > 1 else (0, 0)
        message = self.ids[max(start, end - _ANSWERED) : end]
        self._topic = tuple(sorted(_words().intersection(message)))
        # Place j of the arrays is place j + 2 of the message.
        self.places = np.array(message[2:], dtype=np.int64)
        self.keys = np.array(message[:-2], dtype=np.int64)
        where: dict[int, list[int]] = {}
        self._after: dict[int, list[int]] = {}
        for place, (token, before) in enumerate(zip(message[2:], message[1:], strict=False)):
            where.setdefault(token, []).append(place)
            self._after.setdefault(before, []).append(place)
        # A copied token stands in features as the place it comes from: what is learned with 17 holds for 23.
        self._origin = {token: VOCAB_SIZE + message[at[0]] for token, at in where.items() if len(at) == 1}

    def continuing(self) -> list[int]:
        """Places to go on copying from: those right after the last token written."""
        return self._after.get(self.ids[-1], []) if self.ids else []

    def rows(self) -> list[int]:
        """Weight rows of the features that hold now."""
        recent = tuple(self._origin.get(token, token) for token in self.ids[-_NGRAM:])
        contexts: list[tuple[int, tuple[int, ...]]] = [(n, recent[-n:]) for n in range(1, _NGRAM + 1)]
        contexts.append((0, recent[:-1]))  # whatever the last token is
        continuing = self.continuing()
        upcoming = int(self.places[continuing[-1]]) if continuing else 2 * VOCAB_SIZE
        features: list[tuple[Any, ...]] = [(), (self._origin.get(upcoming, upcoming),), *contexts]
        features += [(context, self._topic) for context in contexts]
        return [hash(feature) % _ROWS for feature in features]


def _logits(weights: _Weights, context: _Context, rows: list[int]) -> _Floats:
    """Scores of the next token, ``(VOCAB_SIZE,)``."""
    s: _Floats = weights[rows].sum(axis=0, dtype=np.float64)
    copy = s[VOCAB_SIZE + context.keys]
    copy[context.continuing()] += s[-1]
    s[:VOCAB_SIZE] += np.bincount(context.places, weights=copy, minlength=VOCAB_SIZE)
    return s[:VOCAB_SIZE]


def _backward(context: _Context, d_logits: _Floats) -> _Floats:
    """Gradient ``(_COLUMNS,)`` of every active row, given that of the logits: :func:`_logits` transposed."""
    d_copy = d_logits[context.places]
    d_keys = np.bincount(context.keys, weights=d_copy, minlength=VOCAB_SIZE)
    return np.concatenate([d_logits, d_keys, [d_copy[context.continuing()].sum()]])


def _log_softmax(logits: _Floats) -> _Floats:
    logits = logits - logits.max()
    logits -= np.log(np.exp(logits).sum())
    return logits


def _by_row(rows: list[list[int]], gradients: list[_Floats]) -> Iterator[tuple[int, _Floats]]:
    """Each touched row once, with the sum of its gradients: ``gradients[i]`` counts for each of ``rows[i]``."""
    if not rows:
        return
    values = np.array(gradients)
    tokens = np.repeat(np.arange(len(rows)), [len(active) for active in rows])
    flat = np.concatenate(rows)
    order = np.argsort(flat, kind="stable")
    touched, starts = np.unique(flat[order], return_index=True)
    for row, group in zip(touched, np.split(tokens[order], starts[1:]), strict=True):
        yield int(row), values[group].sum(axis=0)


@functools.cache
def warmed_up() -> _Weights:
    """Weights after supervised training on transcripts: speaks the format, chooses badly. Always the same."""
    weights = np.zeros((_ROWS, _COLUMNS), dtype=np.float32)
    for number, parts in enumerate(transcripts(seed=0, count=_TRANSCRIPTS)):
        rate = _WARM_UP_RATE * (1 - number / _TRANSCRIPTS)
        context = _Context([])
        for text, written in parts:
            for token in _tokenizer().encode(text, add_special_tokens=False).ids:
                if written:
                    rows = context.rows()
                    d_logits = -np.exp(_log_softmax(_logits(weights, context, rows)))
                    d_logits[token] += 1.0
                    weights[rows] += rate * _backward(context, d_logits)
                context.append(token)
    weights.setflags(write=False)
    return weights


# -- the engine and the learner ------------------------------------------------------------------------


class TinyPolicy(StreamingEngine):
    """The policy as an engine (``generate``, ``stream``) and as a learner (``update``).

    Starts from :func:`warmed_up`. ``version``: updates so far, reported as ``policy_version`` of every turn.
    A turn is sampled with the weights it started with, also when an update comes in between.
    """

    def __init__(self) -> None:
        self._state = (0, warmed_up())
        # One thread: sampling holds the interpreter lock, and a second one would only starve the event loop.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tiny-policy")

    @property
    def version(self) -> int:
        return self._state[0]

    async def stream(
        self,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        **media: Any,
    ) -> AsyncGenerator[TokenChunk]:
        """Sample one answer in chunks of a few tokens.

        Honours ``max_tokens``, ``temperature`` (default 1; 0 takes the likeliest token and reports its logprob at 1),
        ``stop_token_ids`` (default: end of message or text) and ``seed``: the same seed and prompt give the same
        answer. Raises ``EngineError`` for parameters that it doesn't know how to honour.
        """
        if any(media.values()):
            raise EngineError("the tiny policy reads text only: send no images")
        chunks = _sample(*self._state, list(prompt_ids), dict(sampling_params))
        loop = asyncio.get_running_loop()
        while True:
            chunk = await loop.run_in_executor(self._worker, next, chunks)
            yield chunk
            if chunk.finish_reason:
                return

    def update(
        self,
        records: Sequence[TraceRecord],
        advantages: Sequence[float],
        *,
        learning_rate: float,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """One policy-gradient step on rows sampled at ``temperature``; ``advantages``: one a record.

        Ascends, with A the advantage of record i, N the number of records, t its tokens with loss mask 1::

            1/N  sum_i A_i  sum_t ratio_t * grad log pi(token_t),   ratio_t = pi(token_t) / captured probability

        Returns ``tokens`` (trained), ``entropy`` (mean per trained token, nats), ``grad_norm`` and
        ``max_logprob_gap``: the largest |logprob here - captured logprob|. On rows of the present version it is
        zero up to the rounding to float32, or some token, prefix or mask is not what was sampled.
        Raises ``ValueError`` where the two lengths differ. Takes a fraction of a second: call it in a thread.
        """
        if len(records) != len(advantages):
            raise ValueError(f"{len(records)} records, but {len(advantages)} advantages")
        version, old = self._state
        rows: list[list[int]] = []
        gradients: list[_Floats] = []
        gap = entropy = 0.0
        for record, advantage in zip(records, advantages, strict=True):
            for context, token, captured in _sampled(record):
                active = context.rows()
                logprobs = _log_softmax(_logits(old, context, active) / temperature)
                d_logits = -np.exp(logprobs)
                entropy += float(d_logits @ logprobs)
                d_logits[token] += 1.0
                difference = float(logprobs[token]) - captured
                gap = max(gap, abs(difference))
                d_logits *= advantage * math.exp(difference) / (temperature * len(records))
                rows.append(active)
                gradients.append(_backward(context, d_logits))
        new = old.copy()
        square = 0.0
        for row, gradient in _by_row(rows, gradients):
            new[row] += learning_rate * gradient
            square += float(gradient @ gradient)
        self._state = (version + 1, new)
        return {
            "tokens": float(len(rows)),
            "entropy": entropy / max(len(rows), 1),
            "grad_norm": math.sqrt(square),
            "max_logprob_gap": gap,
        }


def _sampled(record: TraceRecord) -> Iterator[tuple[_Context, int, float]]:
    """Every token with loss mask 1: the context it was sampled in, the token, its captured logprob."""
    context = _Context(record.token_ids[: record.prompt_length])
    response = record.token_ids[record.prompt_length :]
    for token, mask, captured in zip(response, record.loss_mask, record.logprobs, strict=True):
        if mask:
            yield context, token, captured
        context.append(token)


_HONOURED = {"max_tokens", "max_new_tokens", "temperature", "seed", "stop_token_ids"}


def _sample(version: int, weights: _Weights, prompt_ids: list[int], params: dict[str, Any]) -> Iterator[TokenChunk]:
    """The answer in chunks; the last one has a finish reason."""
    for name, value in not_honoured(params, _HONOURED).items():
        raise EngineError(f"the tiny policy can't honour {name}={value!r}: leave it out")
    if any(not 0 <= token < VOCAB_SIZE for token in prompt_ids):
        raise EngineError(f"prompt_ids must be in 0..{VOCAB_SIZE - 1}: render with the tokenizer in {FOLDER.name}/")
    limit = params.get("max_tokens") or params.get("max_new_tokens") or 0
    if limit < 1:
        raise EngineError("max_tokens must be at least 1")
    temperature = params.get("temperature")
    temperature = 1.0 if temperature is None else float(temperature)
    if not 0.0 <= temperature < math.inf:
        raise EngineError(f"temperature={temperature}: 0 or a positive number is required")
    stops = set(params.get("stop_token_ids") or (MESSAGE_END, END_OF_TEXT))
    seed = params.get("seed")
    # The prompt's length tells the turns of a session apart, which share its seed.
    rng = np.random.default_rng(None if seed is None else [abs(seed), len(prompt_ids)])
    context = _Context(prompt_ids)
    ids: list[int] = []
    logprobs: list[float] = []
    for count in range(1, limit + 1):
        scores = _log_softmax(_logits(weights, context, context.rows()) / (temperature or 1.0))
        if temperature:
            cumulated = np.exp(scores).cumsum()
            token = int(cumulated.searchsorted(rng.random() * cumulated[-1], side="right"))
        else:
            token = int(scores.argmax())
        context.append(token)
        ids.append(token)
        logprobs.append(float(scores[token]))
        reason = "stop" if token in stops else "length" if count == limit else None
        if reason or len(ids) == _CHUNK:
            yield TokenChunk(ids, logprobs, version, reason)
            ids, logprobs = [], []
        if reason:
            return

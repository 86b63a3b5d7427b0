"""Tinker: the SDK's sampling client, against the hosted service or a SkyRL server.

What differs between versions of the SDK is in :func:`finished` and :meth:`TinkerBackend.connect`, and nowhere else.
"""

from __future__ import annotations

import asyncio
import inspect
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ...errors import EngineError, SetupError, require
from .base import RETRY_AFTER, TurnRecord, check_output, not_honoured

_TRANSIENT = ("APIConnectionError", "InternalServerError", "RateLimitError", "ConflictError")
_HONOURED = {"max_tokens", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids"}
_FOR_SKYRL = ", for a SkyRL server 'agentcore-rl-toolkit[tinker-skyrl]'"


class TinkerBackend:
    """A sampling client of the Tinker SDK. An answer comes in one piece, and nothing can abort it on the server.

    ``client``: a ``tinker.SamplingClient``; :meth:`connect` makes one. ``decode``: token ids to text, e.g. the
    renderer's; needed for stop strings, which are looked for in the whole answer: Tinker takes ids or strings, never
    both. ``policy_version``: the version of the client's weights; :meth:`update` changes both. ``timeout``: seconds
    that one answer may take, the SDK's own retries included. ``scaled_logprobs``: whether the service's logprobs are
    ``log_softmax(logits / temperature)``; SkyRL's leave the temperature out, so other temperatures than 0 and 1 are
    refused by default.
    """

    def __init__(
        self,
        client: Any,
        *,
        decode: Callable[[list[int]], str] | None = None,
        policy_version: int | None = None,
        timeout: float | None = 3600.0,
        scaled_logprobs: bool = False,
    ) -> None:
        self._tinker = require("tinker", "tinker-api", _FOR_SKYRL)
        self.client, self.policy_version, self.timeout = client, policy_version, timeout
        self.stop_kind = "ids" if decode is None else "both"
        self._decode, self._scaled = decode, scaled_logprobs

    @classmethod
    async def connect(
        cls,
        *,
        base_model: str | None = None,
        model_path: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        **options: Any,
    ) -> TinkerBackend:
        """A backend for a base model, or for weights saved at ``model_path`` (``tinker://…``).

        ``base_url``, ``api_key``: else from ``TINKER_BASE_URL`` and ``TINKER_API_KEY``. ``options``: of the
        constructor. Raises ``SetupError`` if the service refuses (key, model), ``EngineError`` if it can't be reached.
        """
        tinker = require("tinker", "tinker-api", _FOR_SKYRL)
        named = {"base_url": base_url, "api_key": api_key}
        weights = {"base_model": base_model, "model_path": model_path}

        def open_client() -> Any:  # blocks, in older versions until the client is there
            service = tinker.ServiceClient(**{name: value for name, value in named.items() if value is not None})
            return service.create_sampling_client(**{n: value for n, value in weights.items() if value is not None})

        try:
            client = await finished(await asyncio.to_thread(open_client))
        except tinker.TinkerError as error:
            failed = _engine_error(tinker, error)
            raise (failed if failed.retry_after is not None else SetupError(str(failed))) from error
        return cls(client, **options)

    def update(self, client: Any, policy_version: int | None = None) -> None:
        """Sample from another client from the next request on; those that run end with the one they began with."""
        self.client, self.policy_version = client, policy_version

    async def generate(
        self,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        **media: Any,
    ) -> TurnRecord:
        """One answer. Raises ``EngineError``."""
        if media:
            raise EngineError(f"Tinker takes no {', '.join(sorted(media))} beside token ids")
        client, version = self.client, self.policy_version
        params = self._params(sampling_params)
        try:
            async with asyncio.timeout(self.timeout):
                response = await finished(
                    client.sample(self._tinker.ModelInput.from_ints(list(prompt_ids)), 1, sampling_params=params)
                )
        except TimeoutError as error:
            raise EngineError(f"Tinker gave no answer in {self.timeout} s", retry_after=RETRY_AFTER) from error
        except self._tinker.TinkerError as error:
            raise _engine_error(self._tinker, error) from error
        [sequence] = response.sequences
        record = TurnRecord(
            prompt_ids=prompt_ids,
            output_ids=[int(token) for token in sequence.tokens],
            finish_reason=str(sequence.stop_reason),
            output_log_probs=list(sequence.logprobs if sequence.logprobs is not None else ()),
            policy_version=version,
        )
        _check(record)
        self._cut(record, sampling_params.get("stop") or ())
        return record

    def _params(self, params: dict[str, Any]) -> Any:
        """Tinker's ``SamplingParams``. Stop ids are always named: SkyRL's JAX engine ends at no token by itself."""
        for name, value in not_honoured(params, _HONOURED).items():
            raise EngineError(f"Tinker can't honour {name}={value!r}: leave it out")
        if params.get("stop") and self._decode is None:
            raise EngineError("stop strings need TinkerBackend(…, decode=renderer.decode)")
        temperature = 1.0 if params.get("temperature") is None else float(params["temperature"])
        if temperature not in (0.0, 1.0) and not self._scaled:
            raise EngineError(
                f"temperature {temperature} is refused: the service's logprobs may leave it out. Sample at temperature "
                "1 (sampling_overrides={'temperature': 1.0}), or say TinkerBackend(…, scaled_logprobs=True)"
            )
        chosen = {name: params[name] for name in ("seed", "top_k", "top_p") if params.get(name) is not None}
        if chosen.get("top_k") == 0:
            chosen["top_k"] = -1
        stops = list(params.get("stop_token_ids") or ()) or None  # an empty list would take even the model's own away
        limit = params["max_tokens"]
        return self._tinker.SamplingParams(max_tokens=limit, temperature=temperature, stop=stops, **chosen)

    def _cut(self, record: TurnRecord, strings: Sequence[str]) -> None:
        """End the answer at the token that completes a stop string."""
        if not strings or self._decode is None:
            return
        ids = record.output_ids

        def holds(count: int) -> bool:
            assert self._decode is not None
            text = self._decode(ids[:count])
            return any(string in text for string in strings)

        if holds(len(ids)):
            end = bisect_left(range(len(ids)), True, key=holds)
            record.output_ids, record.output_log_probs = ids[:end], record.output_log_probs[:end]
            record.finish_reason = "stop"


async def finished(call: Any) -> Any:
    """The outcome of a call to the SDK, whatever its version returns.

    Before 0.38, ``sample`` gives a ``concurrent.futures.Future`` and a client is made while the caller waits; since,
    both give something to be awaited (which still is such a future, and warns who treats it so).
    """
    if inspect.isawaitable(call):
        return await call
    if isinstance(call, Future):
        return await asyncio.wrap_future(call)
    return call


def _check(record: TurnRecord) -> None:
    if not record.output_ids:
        raise EngineError("Tinker gave an answer without tokens")
    if problem := check_output(record.output_ids, record.output_log_probs):
        raise EngineError(f"Tinker gave {problem}")
    record.output_log_probs = [float(logprob) for logprob in record.output_log_probs]
    if record.finish_reason not in ("stop", "length"):
        raise EngineError(f"Tinker ended its answer with the reason {record.finish_reason!r}")


def _engine_error(tinker: Any, error: Exception) -> EngineError:
    transient = isinstance(error, tuple(getattr(tinker, name) for name in _TRANSIENT if hasattr(tinker, name)))
    return EngineError(f"Tinker failed: {error}", retry_after=RETRY_AFTER if transient else None)

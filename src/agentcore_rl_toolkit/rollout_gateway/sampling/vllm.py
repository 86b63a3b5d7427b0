"""vLLM: ``/inference/v1/generate`` where it is served, else ``/v1/completions`` with token ids."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from ...errors import EngineError, SetupError
from ._http import StatusError
from ._tokens import TokenServer, in_their_words, versions_of
from .base import TokenChunk

logger = logging.getLogger(__name__)

_GENERATE, _COMPLETIONS = "/inference/v1/generate", "/v1/completions"
_MEDIA = frozenset({"features", "content_parts"})
_OWN_NAMES = {"min_new_tokens": "min_tokens"}
_NOT_SENT = frozenset({"max_new_tokens", "adapter", "top_logprobs"})
_TOP = 5
_MAX_TOP = 20  # more is refused unless the server is started with --max-logprobs


class VllmBackend(TokenServer):
    """A vLLM server (``vllm serve``), version 0.10.2 or newer.

    ``base_url``: its address, without ``/v1``. ``model``: the served model's name, where it serves several.
    Start it with ``--logprobs-mode processed_logprobs`` to sample at any temperature; at temperature 1 the default
    will do. The server's own sampling defaults never apply. The weights' versions are taken from the server where it
    reports numbers. Other options: :class:`HttpEngine` (key, headers, timeouts, retries) and :class:`TokenServer`.
    """

    top_logprobs = True
    unscaled_logprobs = "Start vLLM with --logprobs-mode processed_logprobs"

    def __init__(self, base_url: str, *, model: str | None = None, **options: Any) -> None:
        super().__init__(base_url.rstrip("/").removesuffix("/v1"), **options)
        self.model = model
        self._path: str | None = None

    async def context_window(self) -> int | None:
        """The model's window in tokens, None if the server does not say. Raises ``EngineError``."""
        return window_of(await self.get_json("/v1/models"), self.model)

    async def _pieces(
        self, prompt_ids: list[int], params: Mapping[str, Any], session_id: str | None, media: Mapping[str, Any]
    ) -> AsyncGenerator[TokenChunk]:
        if unknown := media.keys() - _MEDIA:
            raise EngineError(f"vLLM takes no {', '.join(sorted(unknown))} beside token ids")
        name, rank = self._routing(session_id)
        headers = {"X-Session-ID": name} if name else {}
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        path = self._path or _GENERATE
        top = params.get("top_logprobs", 0)
        asked = min(top + 1, _MAX_TOP) if top else 0  # the sampled token takes one of the places
        body = {**self._body(path, prompt_ids, params, logprobs=asked), **media, "stream": True}
        count = 0
        async with aclosing(self.events(path, body, headers=headers)) as events:
            async for event in events:
                for choice in event.get("choices") or ():
                    if not media:  # which becomes tokens of its own
                        told = choice.get("prompt_token_ids") or event.get("prompt_token_ids")
                        check_prompt(self.base_url, told, prompt_ids)
                    piece = self._piece(choice, top)
                    count += len(piece.output_ids)
                    piece.policy_version = versions_of(choice.get("weight_versions"), count)
                    yield piece

    def _body(self, path: str, prompt_ids: Sequence[int], params: Mapping[str, Any], logprobs: int) -> dict[str, Any]:
        sampling = in_their_words(params, _OWN_NAMES, _NOT_SENT)
        sampling.update(logprobs=logprobs, skip_special_tokens=False, include_stop_str_in_output=True)
        model = params.get("adapter") or self.adapter or self.model
        body: dict[str, Any] = {"model": model} if model else {}
        if path == _GENERATE:
            # Text is only needed to look for stop strings in it.
            sampling["detokenize"] = bool(sampling.get("stop"))
            return {**body, "token_ids": list(prompt_ids), "sampling_params": sampling}
        own = {"return_token_ids": True, "return_tokens_as_token_ids": True, "return_weight_versions": True}
        return {**body, "prompt": list(prompt_ids), **sampling, **own}

    def _piece(self, choice: Mapping[str, Any], top: int) -> TokenChunk:
        ids = choice.get("token_ids")
        if not isinstance(ids, list):
            raise EngineError(f"{self.base_url} gave no token ids: vLLM 0.10.2 or newer is needed")
        named, logprobs = sampled_tokens(choice.get("logprobs") or {})
        check_named(self.base_url, named, ids)
        extra: dict[str, Any] = {"top_logprobs": top_tokens(choice.get("logprobs") or {}, top)} if top else {}
        if self.routed_experts and choice.get("routed_experts"):
            extra["routed_experts"] = _array(choice["routed_experts"])
        return TokenChunk(ids, logprobs, finish_reason=choice.get("finish_reason"), extra=extra)

    async def _top_logprobs(self, prompt_ids: Sequence[int], temperature: float) -> dict[int, float]:
        params = {"max_tokens": 1, "temperature": temperature}
        for path in (self._path,) if self._path else (_GENERATE, _COMPLETIONS):
            try:
                answer = await self.post_json(path, self._body(path, prompt_ids, params, logprobs=_TOP))
            except StatusError as error:
                if error.status not in (403, 404, 405, 501) or path == _COMPLETIONS:
                    if error.retry_after is None:
                        self._path = path  # it is there, it only refuses to tell the most likely tokens
                    raise
                continue  # an older server, or one started without --enable-scale-out
            self._path = path
            choices = (answer or {}).get("choices") or [{}]
            if not (tops := top_tokens(choices[0].get("logprobs") or {}, _TOP)) or not tops[0]:
                raise SetupError(f"{self.base_url} gives no logprobs: start vLLM with --max-logprobs {_TOP} or more")
            return dict(tops[0])
        raise AssertionError("the last path returns or raises")


def window_of(models: Any, name: str | None) -> int | None:
    """The window, in tokens, that ``/v1/models`` tells of a model; None where it tells none."""
    served = (models or {}).get("data") or [{}]
    named = [model for model in served if model.get("id") == name] or served
    window = named[0].get("max_model_len")
    return window if isinstance(window, int) else None


def check_prompt(url: str, told: object, prompt_ids: Sequence[int]) -> None:
    """What the server says it was conditioned on, if it does, must be what it was sent."""
    if told is not None and told != list(prompt_ids):
        raise EngineError(f"{url} sampled after another prompt than it was sent")


def check_named(url: str, named: Sequence[int | None], ids: Sequence[int]) -> None:
    """Logprobs that name the tokens they are of must name the sampled ones. Their number is checked elsewhere."""
    if len(named) == len(ids) and any(a is not None and a != b for a, b in zip(named, ids, strict=True)):
        raise EngineError(f"{url} gave logprobs of other tokens than it sampled")


def sampled_tokens(logprobs: Mapping[str, Any]) -> tuple[list[int | None], list[float]]:
    """Which tokens the logprobs are of, and their values, in any of the three forms that vLLM has used."""
    if "token_logprobs" in logprobs:
        return [_token(name) for name in logprobs.get("tokens") or ()], list(logprobs["token_logprobs"])
    content = logprobs.get("content") or []
    return [_token(entry.get("token_id", entry.get("token"))) for entry in content], [e["logprob"] for e in content]


def top_tokens(logprobs: Mapping[str, Any], count: int) -> list[list[tuple[int, float]]]:
    """The most likely tokens beside each sampled one, best first."""
    if "token_logprobs" in logprobs:
        named = [list((entry or {}).items()) for entry in logprobs.get("top_logprobs") or ()]
    else:
        content = logprobs.get("content") or ()
        named = [
            [(top.get("token_id", top.get("token")), top["logprob"]) for top in entry.get("top_logprobs") or ()]
            for entry in content
        ]
    # The sampled token comes first, whatever its rank.
    return [
        sorted(
            ((token, value) for name, value in pairs if (token := _token(name)) is not None and value is not None),
            key=lambda top: -top[1],
        )[:count]
        for pairs in named
    ]


def _token(name: object) -> int | None:
    """The id in ``7`` or ``"token_id:7"``; None for a token spelled out."""
    if isinstance(name, int):
        return name
    digits = name.removeprefix("token_id:") if isinstance(name, str) and name.startswith("token_id:") else ""
    return int(digits) if digits.isascii() and digits.isdecimal() else None


def _array(encoded: str) -> np.ndarray[Any, Any]:
    """Routed experts: ``(tokens of prompt and answer - 1, layers, experts per token)``, an integer dtype."""
    array: np.ndarray[Any, Any] = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    return array

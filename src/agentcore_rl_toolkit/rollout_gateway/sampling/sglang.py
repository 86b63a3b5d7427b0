"""SGLang: ``/generate`` with ``input_ids``."""

from __future__ import annotations

import asyncio
import base64
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from ...errors import EngineError, SetupError
from ._tokens import TokenServer, in_their_words, version_of, versions_of
from .base import RETRY_AFTER, TokenChunk

logger = logging.getLogger(__name__)

_MEDIA = frozenset({"image_data", "video_data", "audio_data"})
_OWN_NAMES = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
_NOT_SENT = frozenset({"adapter", "max_new_tokens", "top_logprobs"})
_TOP = 5
_REPEATED = 1000


class SglangBackend(TokenServer):
    """An SGLang server (``python -m sglang.launch_server``), with or without ``--incremental-streaming-output``.

    ``base_url``: its address. Weights are labelled by ``weight_version`` of its update calls: give numbers. A request
    aborted by a weight update is an ``EngineError`` with ``retry_after``. Other options: :class:`HttpEngine` (key,
    headers, timeouts, retries) and :class:`TokenServer`.
    """

    top_logprobs = True
    unscaled_logprobs = "Start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"

    def __init__(self, base_url: str, **options: Any) -> None:
        super().__init__(base_url, **options)
        self._aborts: set[asyncio.Task[None]] = set()
        self._warned = False

    async def context_window(self) -> int | None:
        """The model's window in tokens, None if the server does not say. Raises ``EngineError``."""
        window = (await self.get_json("/server_info") or {}).get("context_length")
        return window if isinstance(window, int) else None

    async def aclose(self) -> None:
        loop = asyncio.get_running_loop()
        if own := [abort for abort in self._aborts if abort.get_loop() is loop]:
            await asyncio.wait(own, timeout=2.0)
        await super().aclose()

    async def _pieces(
        self, prompt_ids: list[int], params: Mapping[str, Any], session_id: str | None, media: Mapping[str, Any]
    ) -> AsyncGenerator[TokenChunk]:
        if unknown := media.keys() - _MEDIA:
            raise EngineError(f"SGLang takes no {', '.join(sorted(unknown))} beside token ids")
        rid = uuid.uuid4().hex
        name, rank = self._routing(session_id)
        body = {**self._body(prompt_ids, params), **media, "rid": rid, "stream": True}
        if rank is not None:
            body["routed_dp_rank"] = body["data_parallel_rank"] = rank  # its name before and after 0.5.6
        answer = _Answer(prompt_ids, self.base_url, media=bool(media))
        ended = False
        try:
            async with aclosing(self.events("/generate", body, headers={"X-SMG-Routing-Key": name or rid})) as events:
                async for event in events:
                    piece = answer.take(event)
                    if answer.repeated > _REPEATED and not self._warned:
                        self._warned = True
                        logger.warning(
                            "%s sends all tokens so far with every new one, which costs more the longer an answer is: "
                            "start it with --incremental-streaming-output",
                            self.base_url,
                        )
                    ended = piece.finish_reason is not None
                    if self.routed_experts and (experts := event["meta_info"].get("routed_experts")):
                        piece.extra["routed_experts"] = _array(experts, len(prompt_ids) + len(answer.ids) - 1)
                    yield piece
        finally:
            if not ended:
                self._abort(rid)

    def _body(self, prompt_ids: Sequence[int], params: Mapping[str, Any]) -> dict[str, Any]:
        sampling = in_their_words(params, _OWN_NAMES, _NOT_SENT)
        sampling.update(skip_special_tokens=False, no_stop_trim=True)
        body = {
            "input_ids": list(prompt_ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": params.get("top_logprobs", 0),
            "return_text_in_logprobs": False,
        }
        if adapter := params.get("adapter") or self.adapter:
            body["lora_path"] = adapter
        if self.routed_experts:
            body["return_routed_experts"] = True
        return body

    def _abort(self, rid: str) -> None:
        """Closing the connection aborts too, but not through every proxy. Nobody waits for the answer."""
        task = asyncio.get_running_loop().create_task(self._send_abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _send_abort(self, rid: str) -> None:
        try:
            await self.post_json("/abort_request", {"rid": rid})
        except EngineError as error:
            logger.debug("abort of %s: %s", rid, error)

    async def _top_logprobs(self, prompt_ids: Sequence[int], temperature: float) -> dict[int, float]:
        body = self._body(prompt_ids, {"max_tokens": 1, "temperature": temperature, "top_logprobs": _TOP})
        meta = (await self.post_json("/generate", body) or {}).get("meta_info") or {}
        tops = _tops(meta.get("output_top_logprobs") or [])
        if not tops or not tops[0]:
            raise SetupError(f"{self.base_url} gives no logprobs: is it a generation server?")
        return dict(tops[0])


class _Answer:
    """Puts an answer together from events that hold either what is new or everything so far."""

    def __init__(self, prompt_ids: Sequence[int], url: str, *, media: bool = False) -> None:
        self.prompt_ids, self.url, self.media = prompt_ids, url, media
        self.ids: list[int] = []
        self.repeated = 0
        """Logprobs of the last event that earlier ones held too."""

    def take(self, event: Mapping[str, Any]) -> TokenChunk:
        """What is new in an event. The logprobs name the tokens they are of, so they are what counts."""
        meta = event.get("meta_info") or {}
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise self._aborted(reason)
        triples = meta.get("output_token_logprobs")
        if not isinstance(triples, list):
            raise EngineError(f"{self.url} gave no output_token_logprobs")
        prompt = meta.get("prompt_tokens")
        if isinstance(prompt, int) and prompt != len(self.prompt_ids) and not self.media:
            problem = f"sampled after {prompt} tokens, the prompt has {len(self.prompt_ids)}"
            raise EngineError(f"{self.url} {problem}: is it started with --allow-auto-truncate?")
        seen, completed = len(self.ids), meta.get("completion_tokens")
        if not isinstance(completed, int):
            raise EngineError(f"{self.url} gave no completion_tokens")
        start = seen if len(triples) >= completed else 0
        new = triples[start:]
        self.repeated = start
        new_ids = [triple[1] for triple in new]
        self.ids += new_ids
        self._reconcile(event.get("output_ids"), new_ids, completed)
        versions = versions_of(meta.get("weight_versions"), len(self.ids))
        version = version_of(meta.get("weight_version"))
        return TokenChunk(
            new_ids,
            [triple[0] for triple in new],
            policy_version=version if versions is None else versions[seen:],
            finish_reason=reason.get("type"),
            extra={"top_logprobs": _tops(tops[start:])} if (tops := meta.get("output_top_logprobs")) else {},
        )

    def _reconcile(self, ids: object, new_ids: list[int], completed: int) -> None:
        """``output_ids`` must tell the same story: all tokens, the new ones, or all after some of the prompt's last."""
        problem = f"{self.url} gave output_ids that its logprobs are not of"
        if len(self.ids) < completed:
            raise EngineError(f"{self.url} gave {len(self.ids)} logprobs for {completed} tokens")
        if ids is None or ids in (new_ids, self.ids):
            return
        if not isinstance(ids, list) or len(ids) <= len(self.ids):
            raise EngineError(problem)
        head = len(ids) - len(self.ids)
        if ids[head:] != self.ids or ids[:head] != list(self.prompt_ids[-head:]):
            raise EngineError(problem)

    def _aborted(self, reason: Mapping[str, Any]) -> EngineError:
        status = reason.get("status_code")
        refused = isinstance(status, int) and 400 <= status < 500 and status != 429
        message = f"{self.url} aborted the request: {reason.get('message') or 'no reason given'}"
        return EngineError(message, retry_after=None if refused else RETRY_AFTER)


def _tops(entries: Sequence[Sequence[Sequence[Any]] | None]) -> list[list[tuple[int, float]]]:
    """The most likely tokens beside each sampled one, best first."""
    return [[(top[1], top[0]) for top in entry or () if top[0] is not None] for entry in entries]


def _array(encoded: str, tokens: int) -> np.ndarray[Any, Any]:
    """Routed experts: ``(tokens of prompt and answer - 1, layers * experts per token)``, int32."""
    flat = np.frombuffer(base64.b64decode(encoded), np.int32)
    if tokens < 1 or not len(flat) or len(flat) % tokens:
        raise EngineError(f"SGLang gave {len(flat)} routed experts for {tokens} tokens")
    return flat.reshape(tokens, -1)

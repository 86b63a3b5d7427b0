"""OpenAI completions (https://platform.openai.com/docs/api-reference/completions): prompts that clients render."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...errors import GatewayError
from ..parsed import ContentDelta, Delta
from .base import (
    JSON,
    Answer,
    CallIds,
    Choice,
    WireRequest,
    a_list,
    bad_request,
    event,
    flag,
    ignored,
    model_name,
    obj,
)
from .openai_chat import FIELDS_OF_SAMPLING, encode_error, sampling_of, usage

_CANNOT = {"echo", "logit_bias", "suffix"}
_HONOURED = {"best_of", "logprobs", "model", "prompt", "return_token_ids", "stream", "stream_options", "user"}
_KNOWN = frozenset(_HONOURED | FIELDS_OF_SAMPLING | _CANNOT)


class OpenAICompletions:
    """The wire of ``POST /v1/completions``."""

    id_prefix = "cmpl-"
    growing_list: str | None = None

    def decode(self, body: JSON) -> WireRequest:
        for name in _CANNOT & body.keys():
            if body[name]:
                raise bad_request(name, "not supported")
        sampling = sampling_of(body)
        n = sampling.pop("n", 1)
        if body.get("best_of") not in (None, n):
            raise bad_request("best_of", "only as many as n are supported")
        options = obj(body, "stream_options")
        return WireRequest(
            raw_messages=[],
            decode_messages=lambda start: [],
            prompt=_prompt(body.get("prompt")),
            n=n,
            sampling=sampling,
            model=model_name(body),
            stream=flag(body, "stream"),
            stream_usage=flag(options, "include_usage", "stream_options.include_usage"),
            logprobs=_wants_logprobs(body.get("logprobs")),
            token_ids=flag(body, "return_token_ids"),
            ignored=ignored(body, _KNOWN),
        )

    def encode(self, request: WireRequest, answer: Answer) -> dict[str, Any]:
        head = _head(answer.id, answer.created, answer.model)
        choices = [
            {"index": i, "text": choice.message.content, **_end(request, choice)}
            for i, choice in enumerate(answer.choices)
        ]
        return {**head, "choices": choices, "usage": usage(answer)}

    def encode_error(self, error: GatewayError) -> dict[str, Any]:
        return encode_error(error)

    def stream(self, answer_id: str, created: int, request: WireRequest, call_ids: Sequence[CallIds]) -> _Stream:
        return _Stream(_head(answer_id, created, request.model), request)


class _Stream:
    """``data: {chunk}`` events, closed by ``data: [DONE]``."""

    def __init__(self, head: dict[str, Any], request: WireRequest) -> None:
        self._head, self._request = head, request

    def start(self, prompt_tokens: int) -> bytes:
        return b""

    def deltas(self, deltas: Iterable[Delta], choice: int = 0) -> bytes:
        return b"".join(self._text(choice, delta.text) for delta in deltas if isinstance(delta, ContentDelta))

    def finish(self, answer: Answer) -> bytes:
        events = b"".join(
            self._chunk({"index": i, "text": "", **_end(self._request, choice)})
            for i, choice in enumerate(answer.choices)
        )
        if self._request.stream_usage:
            events += event({**self._head, "choices": [], "usage": usage(answer)})
        return events + b"data: [DONE]\n\n"

    def error(self, error: GatewayError) -> bytes:
        return event(encode_error(error))

    def _text(self, index: int, text: str) -> bytes:
        return self._chunk({"index": index, "text": text, "logprobs": None, "finish_reason": None})

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return event({**self._head, "choices": [choice]})


def _prompt(given: object) -> str | list[int]:
    """Text, or token ids; vendors also take a list of one of them."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        prompt: str | list[int] = given
    else:
        prompt = a_list(given, "prompt")
        if any(isinstance(i, str | list) for i in prompt):
            raise bad_request("prompt", "one prompt a request is supported: send several requests")
        if not all(type(i) is int and 0 <= i < 2**31 for i in prompt):
            raise bad_request("prompt", "a string or a list of token ids is required")
    if not prompt:
        raise bad_request("prompt", "at least one token is required")
    return prompt


def _wants_logprobs(value: object) -> bool:
    if value is None or value is False:
        return False
    if value not in (True, 0, 1):
        raise bad_request("logprobs", "0 or 1, for the sampled tokens: others are to be had from chat completions")
    return True


def _head(answer_id: str, created: int, model: str) -> dict[str, Any]:
    return {"id": answer_id, "object": "text_completion", "created": created, "model": model}


def _end(request: WireRequest, choice: Choice) -> dict[str, Any]:
    end: dict[str, Any] = {"logprobs": None, "finish_reason": choice.finish_reason}
    if choice.tokens is not None:
        offsets = [0]
        for token in choice.tokens:
            offsets.append(offsets[-1] + len(token.text))
        end["logprobs"] = {
            "tokens": [token.text for token in choice.tokens],
            "token_logprobs": [token.logprob for token in choice.tokens],
            "top_logprobs": None,
            "text_offset": offsets[:-1],
        }
    if request.token_ids:
        end["token_ids"] = list(choice.token_ids)
    return end

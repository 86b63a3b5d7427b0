"""Chat proxy: ``/v1/chat/completions`` of an engine that renders and parses by itself, and tells the tokens."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from ...errors import EngineError, SetupError
from ..messages import Message, Tool
from ..parsed import CallArgumentsDelta, CallStartDelta, ContentDelta, Delta, ReasoningDelta
from ._http import StatusError
from ._tokens import CheckedServer, in_their_words, version_of
from .base import ChatChunk
from .vllm import check_named, sampled_tokens, top_tokens, window_of

_CHAT = "/v1/chat/completions"
_OWN_NAMES = {"min_new_tokens": "min_tokens"}
_NOT_SENT = frozenset({"max_new_tokens", "adapter"})
_TOP = 5
_ASKED = {
    "logprobs": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "include_stop_str_in_output": True,
}
_ASKED_OF_SGLANG = {
    "return_prompt_token_ids": True,
    "return_meta_info": True,
    "no_stop_trim": True,
}
"""Each server ignores what only the other knows."""
_NOT_STREAMED = re.compile(r"return_\w*token_ids.*stream|stream.*return_\w*token_ids")
"""What SGLang says of a request for both."""
_NO_IDS = (
    "gave no {}: vLLM 0.10.2 or newer is needed, or an SGLang whose chat completions know return_token_ids "
    "(or return_meta_info and return_prompt_token_ids)"
)


class ChatProxyBackend(CheckedServer):
    """An engine that renders chats and parses answers itself: for models whose template or tool format has no
    renderer here. vLLM 0.10.2 or newer (``--enable-auto-tool-choice --tool-call-parser … --reasoning-parser …``), or
    an SGLang that returns token ids from its chat completions.

    ``base_url``: its address, without ``/v1``. ``model``: the served model's name, where it serves several.
    ``streams``: False for servers that can't stream token ids (SGLang's chat completions): answers then come whole.
    Other options: :class:`HttpEngine` (key, headers, timeouts, retries) and :class:`CheckedServer`.
    """

    top_logprobs = True
    unscaled_logprobs = (
        "Start vLLM with --logprobs-mode processed_logprobs, or SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
    )

    def __init__(self, base_url: str, *, model: str | None = None, streams: bool = True, **options: Any) -> None:
        super().__init__(base_url.rstrip("/").removesuffix("/v1"), **options)
        self.model, self.streams = model, streams

    # -- the seam ----------------------------------------------------------------------------------------

    async def chat(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        sampling_params: dict[str, Any],
        variables: Mapping[str, Any],
        session_id: str | None = None,
    ) -> AsyncGenerator[ChatChunk]:
        """One answer while it is sampled. Raises ``EngineError``."""
        await self._usable((), sampling_params)
        body = {**self._conversation(messages, tools, variables), **self._sampling(sampling_params)}
        pieces = self._pieces(body, sampling_params.get("top_logprobs", 0), session_id)
        async with aclosing(self._checked(pieces, sampling_params["max_tokens"])) as checked:
            async for piece in checked:
                yield piece

    async def count_tokens(
        self, *, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any]
    ) -> int:
        """The length of the prompt, as the server's ``/tokenize`` counts it. Raises ``EngineError``."""
        answer = await self.post_json("/tokenize", self._conversation(messages, tools, variables))
        count = answer.get("count") if isinstance(answer, dict) else None
        if not isinstance(count, int) or isinstance(count, bool):
            raise EngineError(f"{self.base_url} gave no count for a chat at /tokenize")
        return count

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens spelled out. Raises ``EngineError``."""
        body = {**self._model({}), "tokens": list(ids), "skip_special_tokens": False}
        answer = await self.post_json("/detokenize", body)
        text = answer.get("prompt", answer.get("text")) if isinstance(answer, dict) else None
        if not isinstance(text, str):
            raise EngineError(f"{self.base_url} gave no text at /detokenize")
        return text

    async def context_window(self) -> int | None:
        """The model's window in tokens, None if the server does not say. Raises ``EngineError``."""
        return window_of(await self.get_json("/v1/models"), self.model)

    # -- requests ----------------------------------------------------------------------------------------

    def _model(self, params: Mapping[str, Any]) -> dict[str, Any]:
        model = params.get("adapter") or self.adapter or self.model
        return {"model": model} if model else {}

    def _conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any]
    ) -> dict[str, Any]:
        body: dict[str, Any] = {**self._model({}), "messages": [_wire(message) for message in messages]}
        if tools:
            body["tools"] = list(tools)
        if variables:
            body["chat_template_kwargs"] = dict(variables)
        if "reasoning_effort" in variables:  # not every model has it from its template
            body["reasoning_effort"] = variables["reasoning_effort"]
        return body

    def _sampling(self, params: Mapping[str, Any]) -> dict[str, Any]:
        sampling = in_their_words(params, _OWN_NAMES, _NOT_SENT)
        if not sampling.get("stop_token_ids"):
            sampling.pop("stop_token_ids", None)
        return {**self._model(params), **sampling, **_ASKED, **_ASKED_OF_SGLANG}

    async def _pieces(self, body: dict[str, Any], top: int, session_id: str | None) -> AsyncGenerator[ChatChunk]:
        name, rank = self._routing(session_id)
        headers = {"X-Session-ID": name, "X-SMG-Routing-Key": name} if name else {}
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        if self.streams:
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        answer = _Answer(self.base_url, top)
        try:
            async with aclosing(self.events(_CHAT, body, headers=headers)) as events:
                async for event in events:
                    if chunk := answer.take(event):
                        yield chunk
        except StatusError as error:
            if self.streams and error.status == 400 and _NOT_STREAMED.search(str(error)):
                hint = "tells no token ids while it streams: use ChatProxyBackend(…, streams=False)"
                raise EngineError(f"{self.base_url} {hint} ({error})") from error
            raise
        answer.check_whole()

    async def _top_logprobs(self, prompt_ids: Sequence[int], temperature: float) -> Mapping[Any, float]:
        """Of the answer to a short chat: this server takes no tokens."""
        body = self._conversation([{"role": "user", "content": "1 2 3"}], (), {})
        body |= self._sampling({"max_tokens": 1, "temperature": temperature, "top_logprobs": _TOP})
        choices = (await self.post_json(_CHAT, body) or {}).get("choices") or [{}]
        content = (choices[0].get("logprobs") or {}).get("content") or [{}]
        tops = {top["token"]: top["logprob"] for top in content[0].get("top_logprobs") or ()}
        if not tops:
            raise SetupError(f"{self.base_url} gives no logprobs: start vLLM with --max-logprobs {_TOP} or more")
        return tops


def _wire(message: Message) -> dict[str, Any]:
    """A canonical message in OpenAI's words: arguments are text there."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


class _Answer:
    """Reads a chat completion, streamed or whole."""

    def __init__(self, url: str, top: int) -> None:
        self._url, self._top = url, top
        self._prompt: list[int] = []
        self._count = 0
        self._usage: int | None = None
        self._prompt_usage: int | None = None
        self._calls: list[str | None] = []
        """The ids of the calls begun, and at which of the server's indices the last one is."""
        self._index: int | None = None

    def take(self, event: Mapping[str, Any]) -> ChatChunk | None:
        """What is new in an event; None where it has nothing of the answer."""
        usage = event.get("usage") or {}
        self._usage = usage.get("completion_tokens", self._usage)
        self._prompt_usage = usage.get("prompt_tokens", self._prompt_usage)
        choices = event.get("choices") or ()
        if not choices:
            return None
        if len(choices) > 1:
            raise EngineError(f"{self._url} gave {len(choices)} answers to one question")
        choice, meta = choices[0], choices[0].get("meta_info") or {}
        ids, logprobs = self._tokens(choice, meta)
        self._count += len(ids)
        chunk = ChatChunk(ids, logprobs, policy_version=version_of(meta.get("weight_version")))
        chunk.finish_reason = _finish_reason(choice.get("finish_reason"))
        chunk.deltas = self._deltas(choice.get("delta") or choice.get("message") or {})
        prompt = event.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if prompt and self._prompt and prompt != self._prompt:
            raise EngineError(f"{self._url} told two prompts of one answer")
        if prompt and not self._prompt:
            chunk.prompt_ids = self._prompt = prompt
        if ids and not self._prompt:
            raise EngineError(f"{self._url} {_NO_IDS.format('prompt_token_ids')}")
        if chunk.deltas and not self._count:
            raise EngineError(f"{self._url} {_NO_IDS.format('token_ids')}")
        content = (choice.get("logprobs") or {}).get("content") or ()
        chunk.extra["texts"] = _texts(ids, content)
        if self._top:
            chunk.extra["top_logprobs"] = top_tokens({"content": content}, self._top)
        return chunk

    def check_whole(self) -> None:
        """What only shows at the end: whether the server kept tokens to itself."""
        if self._prompt_usage is not None and self._prompt and self._prompt_usage != len(self._prompt):
            problem = f"sampled after {self._prompt_usage} tokens and told {len(self._prompt)}"
            raise EngineError(f"{self._url} {problem}: the prompt is not the one in prompt_token_ids")
        if self._usage is not None and self._usage != self._count:
            raise EngineError(
                f"{self._url} sampled {self._usage} tokens and told {self._count}: vLLM before 0.12 loses some while "
                "it streams with a tool parser; use a newer one, or ChatProxyBackend(…, streams=False)"
            )

    def _tokens(self, choice: Mapping[str, Any], meta: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        ids, triples = choice.get("token_ids"), meta.get("output_token_logprobs")
        if isinstance(triples, list):
            named, logprobs = [triple[1] for triple in triples], [triple[0] for triple in triples]
            ids = named if ids is None else ids
        else:
            named, logprobs = sampled_tokens(choice.get("logprobs") or {})
            if logprobs and ids is None:
                raise EngineError(f"{self._url} {_NO_IDS.format('token_ids')}")
        ids = ids or []
        check_named(self._url, named, ids)
        return ids, logprobs

    def _deltas(self, said: Mapping[str, Any]) -> list[Delta]:
        deltas: list[Delta] = []
        if reasoning := said.get("reasoning_content") or said.get("reasoning"):
            deltas.append(ReasoningDelta(reasoning))
        if content := said.get("content"):
            deltas.append(ContentDelta(content))
        for number, call in enumerate(said.get("tool_calls") or ()):
            deltas += self._call(call, call.get("index", number))
        return deltas

    def _call(self, call: Mapping[str, Any], index: int) -> list[Delta]:
        function, call_id = call.get("function") or {}, call.get("id")
        deltas: list[Delta] = []
        # Some servers give every call the index 0: a name with an id not seen before begins another one.
        if index != self._index or (call_id and function.get("name") and call_id != self._calls[-1]):
            self._index = index
            self._calls.append(call_id)
            deltas.append(CallStartDelta(len(self._calls) - 1, function.get("name") or "", call_id))
        if arguments := function.get("arguments"):
            deltas.append(CallArgumentsDelta(len(self._calls) - 1, arguments))
        return deltas


def _finish_reason(reason: str | None) -> str | None:
    return "stop" if reason in ("tool_calls", "function_call") else reason


def _texts(ids: Sequence[int], content: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The text of the sampled tokens and of those beside them, where the server spells them out."""
    texts: dict[int, str] = {}
    if len(ids) == len(content):
        for token, entry in zip(ids, content, strict=True):
            if entry.get("bytes") is not None:
                texts[token] = bytes(entry["bytes"]).decode("utf-8", "replace")
    return texts

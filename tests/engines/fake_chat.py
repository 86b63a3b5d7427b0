"""An engine of chats: it renders with a real template and tokenizer, samples, parses, and tells its tokens, in the
words of vLLM's ``/v1/chat/completions`` (or SGLang's). All of it independent of our own renderer and parsers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import jinja2
from aiohttp import web
from tokenizers import Tokenizer

from agentcore_rl_toolkit.rollout_gateway.testing import oracle_logprobs
from gateway.support import TINY, encode

from .fakes import VOCABULARY, FakeServer

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages if m.role == "user" %}{% set last.user = messages.index(m) %}{% endfor %}
{%- for m in messages %}
{%- if m.role == "bad" %}{{ raise_exception("this template knows no such role") }}{% endif %}
{{- "<|im_start|>" + m.role + "\\n" }}
{%- if m.reasoning_content and (not drop or loop.index0 > last.user) %}
{{- "<think>" + m.reasoning_content + "</think>" }}
{%- endif %}
{{- m.content or "" }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>{"name": ' + call.function.name | tojson + ', "arguments": ' }}
{{- call.function.arguments | tojson + "}</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""

Message = dict[str, Any]
_TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
END = encode("<|im_end|>")


def decode(ids: list[int]) -> str:
    return str(_TOKENIZER.decode(ids, skip_special_tokens=False))


def says(message: Message) -> str:
    """The text that a model samples to say a message."""
    calls = "".join(
        f'<tool_call>{{"name": "{c["function"]["name"]}", "arguments": {c["function"]["arguments"]}}}</tool_call>'
        for c in message.get("tool_calls", ())
    )
    reasoning = f"<think>{message['reasoning_content']}</think>" if message.get("reasoning_content") else ""
    return reasoning + (message.get("content") or "") + calls


class FakeChat(FakeServer):
    """``script``: the messages asked to the text that is sampled, the closer left out.

    Faults: ``drops`` (the template drops reasoning before the last user message), ``spells`` (a token a character),
    ``no_ids``, ``no_prompt_ids``, ``extra_logprob``, ``other_tokens``, ``lost`` (tokens of the middle are not told),
    ``wrong_prompt``, ``same_index`` (every call is number 0), ``sglang`` (ids beside the choice, no streams),
    ``meta`` (SGLang's ``meta_info``), ``no_tokenize``, and those of :class:`FakeServer`.
    """

    def __init__(self, *faults: str, script: Callable[[list[Message]], str], **options: Any) -> None:
        super().__init__(*faults, **options)
        self.say = script
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = self._raise
        self._template = environment.from_string(TEMPLATE)

    def _raise(self, problem: str) -> None:
        raise jinja2.TemplateError(problem)

    def routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/chat/completions", self.completions)
        if "no_tokenize" not in self.faults:
            router.add_post("/tokenize", self.tokenize)
            router.add_post("/detokenize", self.detokenize)
        router.add_get("/health", self.health)
        router.add_get("/v1/models", self.models)

    def chats(self) -> list[dict[str, Any]]:
        """The bodies of all chats, but for the probes."""
        return [body for path, body, _ in self.requests if "chat" in path and "1 2 3" not in str(body["messages"])]

    def render(self, body: dict[str, Any]) -> list[int]:
        messages = []
        for message in body["messages"]:
            calls = [
                {**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}}
                for c in message.get("tool_calls", ())
            ]
            messages.append({**message, "tool_calls": calls})
        variables = {"add_generation_prompt": True, "drop": "drops" in self.faults}
        return encode(self._template.render(messages=messages, tools=body.get("tools"), **variables))

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": 4096}]})

    async def tokenize(self, http: web.Request) -> web.Response:
        ids = self.render(await self.body(http))
        return web.json_response({"count": len(ids), "max_model_len": 4096, "tokens": ids})

    async def detokenize(self, http: web.Request) -> web.Response:
        return web.json_response({"prompt": decode((await self.body(http))["tokens"])})

    async def completions(self, http: web.Request) -> web.StreamResponse:
        body = await self.body(http)
        if "sglang" in self.faults and body.get("stream"):
            error = {"message": "return_token_ids is not supported with stream=true", "code": 400}
            return web.json_response({"object": "error", **error}, status=400)
        try:
            prompt = self.render(body)
        except jinja2.TemplateError as error:
            return web.json_response({"error": {"message": str(error), "code": 400}}, status=400)
        if len(prompt) > 4096:
            error = {"message": "This model's maximum context length is 4096 tokens.", "code": 400}
            return web.json_response({"error": error}, status=400)
        if body["max_tokens"] == 1 and not body.get("stream") and body["top_logprobs"] == 5:  # the probe
            tops = [{"token": f"token_id:{i}", "logprob": x} for x, i in self.top(body["temperature"], 5)]
            content = [{"token": "token_id:0", "logprob": tops[0]["logprob"], "top_logprobs": tops}]
            return web.json_response({"choices": [{"index": 0, "logprobs": {"content": content}}]})
        ids, reason = self._sample(body)
        async with self.work():
            return await self._answer(http, body, prompt, ids, reason)

    def _sample(self, body: dict[str, Any]) -> tuple[list[int], str]:
        text = self.say(body["messages"])
        whole = [*(t for c in text for t in encode(c)), *END] if "spells" in self.faults else [*encode(text), *END]
        ids: list[int] = []
        for token in whole[: body["max_tokens"]]:
            ids.append(token)
            if token in END or any(stop in decode(ids) for stop in body.get("stop") or ()):
                return ids, "stop"
        return ids, "length"

    async def _answer(
        self, http: web.Request, body: dict[str, Any], prompt: list[int], ids: list[int], reason: str
    ) -> web.StreamResponse:
        logprobs: list[float | None] = list(oracle_logprobs(prompt, ids))
        if "null" in self.faults:
            logprobs[1] = None
        reported = [5, *prompt[1:]] if "wrong_prompt" in self.faults else prompt
        prompt_ids = {} if "no_prompt_ids" in self.faults else {"prompt_token_ids": reported}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        told: list[Any] = ["", "", []]

        def choice(start: int, end: int) -> dict[str, Any]:
            done = end >= len(ids)
            part, named, scores = ids[start:end], ids[start:end], logprobs[start:end]
            if "extra_logprob" in self.faults and done:
                named, scores = [*named, 1], [*scores, -1.0]
            if "other_tokens" in self.faults:
                named = [(token + 1) % VOCABULARY for token in named]
            if "lost" in self.faults and start and not done:
                part, named, scores = [], [], []
            value: dict[str, Any] = {"index": 0, "finish_reason": None, "logprobs": {"content": []}}
            for token, score in zip(named, scores, strict=True):
                entry = {"token": f"token_id:{token}", "logprob": score, "bytes": list(decode([token]).encode())}
                best = [(score, token), *self.top(1.0, body.get("top_logprobs") or 0)][: body.get("top_logprobs") or 0]
                tops = [{"token": f"token_id:{i}", "logprob": x} for x, i in best]
                value["logprobs"]["content"].append({**entry, "top_logprobs": tops})
            if "meta" in self.faults:
                triples = [[score, token, None] for token, score in zip(named, scores, strict=True)]
                value |= {"meta_info": {"output_token_logprobs": triples, "weight_version": "7"}, **prompt_ids}
            elif "no_ids" not in self.faults:
                value["token_ids"] = part
            if "sglang" in self.faults:
                value |= prompt_ids
            text = decode(ids[:end])
            for stop in () if body.get("include_stop_str_in_output") else body.get("stop") or ():
                text = text.partition(stop)[0]
            said = parse(text, done)
            if done:
                value["finish_reason"] = "tool_calls" if said[2] and reason == "stop" else reason
            value["message" if not body.get("stream") else "delta"] = self._new(told, said)
            return value

        if not body.get("stream"):
            await asyncio.sleep(self.delay * len(ids))
            beside = {} if {"sglang", "meta"} & self.faults else prompt_ids
            return web.json_response({**beside, "choices": [choice(0, len(ids))], "usage": usage})

        def event(start: int, end: int) -> dict[str, Any]:
            if end == 0:
                return {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], **prompt_ids}
            if start >= len(ids):
                return {"choices": [], "usage": usage}
            return {"choices": [choice(start, end)]}

        return await self.stream(http, [(0, 0), *self.spans(len(ids)), (len(ids), len(ids))], event)

    def _new(self, told: list[Any], said: tuple[str, str, list[dict[str, Any]]]) -> dict[str, Any]:
        """What of a message was not told yet, as a delta."""
        reasoning, content, calls = said[0][len(told[0]) :], said[1][len(told[1]) :], said[2][len(told[2]) :]
        delta: dict[str, Any] = {}
        if reasoning:
            delta["reasoning"] = reasoning
        if content:
            delta["content"] = content
        for number, call in enumerate(calls, len(told[2])):
            index = 0 if "same_index" in self.faults else number
            known = {"id": f"call-{len(self.requests)}-{number}", "type": "function"}
            delta.setdefault("tool_calls", []).append({"index": index, **known, "function": call})
        told[:] = said
        return delta


def parse(text: str, done: bool) -> tuple[str, str, list[dict[str, Any]]]:
    """``(reasoning, content, calls)`` of what was sampled so far; a marker that has only begun is held back."""
    text = text.removesuffix("<|im_end|>")
    if not done:
        text = re.sub(r"<[^>]*$", "", text)
    reasoning = ""
    if text.startswith("<think>"):
        reasoning, _, text = text.removeprefix("<think>").partition("</think>")
    content, *parts = text.split("<tool_call>")
    calls = []
    for part in parts:
        if "</tool_call>" in part:
            value = json.loads(part.partition("</tool_call>")[0])
            calls.append({"name": value["name"], "arguments": json.dumps(value["arguments"])})
    return reasoning, content, calls

"""A gateway on loopback, spoken to over real HTTP."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from tokenizers import Tokenizer

import agentcore_rl_toolkit.local
from agentcore_rl_toolkit.rollout_gateway import ChatBackend, HfTemplateRenderer, RolloutGateway, Session, gateway_app
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend

TINY = Path(agentcore_rl_toolkit.local.__file__).parent / "data" / "tiny"
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}, "digits": {"type": "number"}},
            "required": ["expression"],
        },
    },
}


class GenerateOnly:
    """The same engine without streaming."""

    def __init__(self, backend: ScriptedBackend) -> None:
        self._backend = backend

    async def generate(self, **request: Any) -> Any:
        return await self._backend.generate(**request)


@dataclass
class Client:
    """A chat client of one session that keeps nothing: messages go in, the parsed answer comes out."""

    http: aiohttp.ClientSession
    url: str
    session: Session

    async def post(self, body: Any, *, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(
            f"{self.session.base_url}/chat/completions", data=data, headers=headers or {}
        ) as response:
            text = await response.text()
            if response.content_type == "text/event-stream":
                return response.status, sse(text)
            return response.status, json.loads(text)

    async def ask(self, messages: list[dict[str, Any]], *, stream: bool = False, **fields: Any) -> dict[str, Any]:
        """The assistant's message; streamed answers are put together from their deltas."""
        headers = fields.pop("headers", None)
        status, data = await self.post(
            {"model": "m", "messages": messages, "stream": stream, **fields}, headers=headers
        )
        assert status == 200, data
        return assemble(data) if stream else data["choices"][0]["message"]


def sse(text: str) -> list[dict[str, Any]]:
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(e) if e != "[DONE]" else {"done": True} for e in events]


def assemble(events: list[dict[str, Any]]) -> dict[str, Any]:
    assert events[-1] == {"done": True}, events
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for event in events[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            if "reasoning_content" in delta:
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message


@asynccontextmanager
async def serving(backend: Any, *, rendered_by: Any = None, **options: Any) -> AsyncIterator[RolloutGateway]:
    """A gateway that listens on loopback, with the tiny tokenizer unless another renderer is given or the
    engine takes chats."""
    own = None if isinstance(backend, ChatBackend) else rendered_by or renderer(TINY)
    gateway = RolloutGateway(backend=backend, renderer=own, **options)
    runner = web.AppRunner(gateway_app(gateway), handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    gateway.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield gateway
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_of(gateway: RolloutGateway, **limits: Any) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as http:
        yield Client(http, gateway.base_url, gateway.create_session(**limits))


@functools.cache
def renderer(tokenizer: Path) -> HfTemplateRenderer:
    return HfTemplateRenderer(tokenizer)


def encode(text: str, tokenizer: Path = TINY) -> list[int]:
    """Independent of our renderer: the tokenizers library itself."""
    return list(_tokenizer(tokenizer).encode(text, add_special_tokens=False).ids)


@functools.cache
def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))

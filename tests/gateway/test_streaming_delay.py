"""How long a client waits for what the engine has already sampled, over every streaming wire and a real server."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from statistics import median
from typing import Any

import aiohttp
import pytest

from agentcore_rl_toolkit.rollout_gateway import RolloutGateway, ThreadedGatewayServer
from agentcore_rl_toolkit.rollout_gateway.sampling import TokenChunk
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend

from .support import TINY, encode, renderer

TOKEN_TIME = 0.02
"""50 tokens a second."""
REQUESTS = 11
USER = {"role": "user", "content": "What is 1+1?"}
WIRES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", {"messages": [USER]}),
    "responses": ("/responses", {"input": [USER]}),
    "anthropic": ("/messages", {"messages": [USER], "max_tokens": 100}),
    "completions": ("/completions", {"prompt": "1+1="}),
}


class Clocked(ScriptedBackend):
    """Notes when it hands out the first token of each answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.first_tokens: list[float] = []

    async def stream(self, **request: Any) -> AsyncIterator[TokenChunk]:
        first = True
        async for chunk in super().stream(**request):
            if first:
                self.first_tokens.append(time.perf_counter())
                first = False
            yield chunk


def text_of(event: dict[str, Any]) -> str:
    """The sampled text that an event of any wire carries."""
    if event.get("choices"):
        choice = event["choices"][0]
        return choice.get("text") or choice.get("delta", {}).get("content") or ""
    delta = event.get("delta", "")
    return delta if isinstance(delta, str) else delta.get("text", "")


async def first_delta(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> float:
    """When the first text of an answer was here; the rest is read to its end."""
    arrived = 0.0
    async with http.post(url, json={"model": "m", "stream": True, **body}) as response:
        assert response.status == 200
        async for line in response.content:
            now = time.perf_counter()
            if not arrived and line.startswith(b"data: {") and text_of(json.loads(line[6:])):
                arrived = now
    assert arrived
    return arrived


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
async def test_the_first_delta_follows_the_first_token(wire: str) -> None:
    path, body = WIRES[wire]
    answer = encode("Two, and nothing else.<|im_end|>")
    backend = Clocked(lambda _: answer, chunk=1, delay=TOKEN_TIME)
    with ThreadedGatewayServer(RolloutGateway(backend=backend, renderer=renderer(TINY))) as server:
        session = server.create_session()
        async with aiohttp.ClientSession() as http:
            arrivals = [await first_delta(http, session.base_url + path, body) for _ in range(REQUESTS)]
    delays = [arrival - token for arrival, token in zip(arrivals, backend.first_tokens, strict=True)]
    assert min(delays) > 0
    assert median(delays) <= 1.2 * TOKEN_TIME, sorted(delays)

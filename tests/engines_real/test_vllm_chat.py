"""``ChatProxyBackend`` against a real vLLM on the CPU, which renders and parses (``make test-vllm``)."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from agentcore_rl_toolkit.rollout_gateway import ChatProxyBackend
from engines.test_gateway import talk
from gateway.support import CALCULATOR, Client, serving

from .test_vllm import TOKENIZER, folder, pytestmark, right, scores, unfinished, vllm  # noqa: F401 - fixtures


@pytest.fixture(scope="module")
def server(folder):  # noqa: F811
    options = ("--logprobs-mode", "processed_logprobs", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with vllm(folder, *options) as url:
        yield url


async def test_every_trained_token_of_32_sessions_is_true(server, right):  # noqa: F811
    async with (
        ChatProxyBackend(server) as backend,
        serving(backend) as gateway,
        aiohttp.ClientSession() as http,
    ):
        assert await backend.verify() is True
        assert await backend.context_window() == 1024
        # An untrained model spells words in unusual tokens: where it says but one, turns follow each other in a row.
        sessions = [gateway.create_session(sampling_overrides={"max_tokens": 1 + 23 * (i % 2)}) for i in range(32)]
        await asyncio.gather(*(talk(http, s, 3, stream=i % 4 < 2) for i, s in enumerate(sessions)))
        rows = [row for s in sessions for row in await gateway.finish_session(s.session_id)]
    apart = []
    for row in rows:
        expected = right(row.token_ids[: row.prompt_length], row.token_ids[row.prompt_length :])
        apart += [abs(a - b) for mask, a, b in zip(row.loss_mask, row.logprobs, expected, strict=True) if mask]
        assert row.response == TOKENIZER.decode(row.token_ids[row.prompt_length :], skip_special_tokens=False)
        assert row.metadata["fork"] in (None, "rendered_differently")
    assert len(apart) > 16 * 3 * 10
    assert sum(len(row.metadata["turns"]) == 3 for row in rows) > 4
    assert max(apart) < 1e-4
    assert await unfinished(server) == 0


async def test_tools_limits_logprobs_and_hanging_up(server, right):  # noqa: F811
    question = [{"role": "user", "content": "What is 1+2?"}]
    async with (
        ChatProxyBackend(server) as backend,
        serving(backend) as gateway,
        aiohttp.ClientSession() as http,
    ):
        asked = {"messages": question, "tools": [CALCULATOR], "variables": {}}
        prompt = await backend.count_tokens(**asked)
        client = Client(http, gateway.base_url, gateway.create_session(max_context_tokens=prompt + 7))
        for stream in (False, True):
            body = {"messages": question, "tools": [CALCULATOR], "stream": stream, "logprobs": True}
            status, data = await client.post({**body, "top_logprobs": 2, "stop_token_ids": [1]})
            assert status == 200, data
        [first, *_] = await gateway.finish_session(client.session.session_id)
        assert (first.prompt_length, len(first.loss_mask) <= 7) == (prompt, True)
        client = Client(http, gateway.base_url, gateway.create_session())
        status, data = await client.post({"messages": [{"role": "user", "content": "Hi " * 2000}], "max_tokens": 5})
        assert (status, data["error"]["code"]) == (400, "context_length_exceeded")
        body = {"messages": question, "stream": True, "max_tokens": 900}
        async with http.post(f"{client.session.base_url}/chat/completions", json=body) as response:
            await response.content.readany()
            response.close()
        for _ in range(100):
            if not await unfinished(server):
                break
            await asyncio.sleep(0.05)
        assert await unfinished(server) == 0
        assert await gateway.finish_session(client.session.session_id) == []

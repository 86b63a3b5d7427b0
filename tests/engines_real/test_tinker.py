"""The Tinker SDK against a real SkyRL server. ``make test-engines`` runs it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from agentcore_rl_toolkit.errors import EngineError, SetupError
from agentcore_rl_toolkit.rollout_gateway import (
    HfTemplateRenderer,
    RolloutGateway,
    ThreadedGatewayServer,
    TinkerBackend,
    TraceRecord,
)
from agentcore_rl_toolkit.rollout_gateway.sampling.tinker import finished
from agentcore_rl_toolkit.rollout_gateway.testing import ENGINE_CHECKS, EngineUnderTest, Skipped

from .skyrl import SkyrlServer

# Each length of prompt and answer is compiled anew, for up to 15 s: lengths are few here, and 16 apart.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]
END = 2
LIMIT = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyrlServer]:
    server = SkyrlServer(tmp_path_factory.mktemp("skyrl"))
    server.start()
    yield server
    with contextlib.suppress(ProcessLookupError):
        server.kill(signal.SIGTERM)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-none")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture(scope="module")
def renderer(server: SkyrlServer) -> HfTemplateRenderer:
    return HfTemplateRenderer(server.model)


@pytest.fixture
async def engine(server: SkyrlServer, renderer: HfTemplateRenderer, key: None) -> TinkerBackend:
    return await TinkerBackend.connect(base_model=str(server.model), base_url=server.url, decode=renderer.decode)


async def scored(engine: TinkerBackend, ids: list[int]) -> list[float]:
    """The logprob of every token but the first, by SkyRL's forward pass over the whole row."""
    import tinker

    logprobs = await finished(engine.client.compute_logprobs(tinker.ModelInput.from_ints(ids)))
    return list(logprobs[-(len(ids) - 1) :])  # some servers put a None before the first


@pytest.mark.parametrize("name", ENGINE_CHECKS)
async def test_conformance(name, engine, renderer):
    under_test = EngineUnderTest(
        engine,
        vocabulary_size=544,
        prompts=[[1, 5, 6, 7], [1, 9, 8, 7, 5]],
        stop_token_ids=[END],
        decode=renderer.decode,
        long=64,
    )
    try:
        await ENGINE_CHECKS[name](under_test)
    except Skipped as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"temperature": 0.0}])
async def test_logprobs_are_those_of_the_forward_pass(engine, params):
    prompt = [1, 5, 6, 7]
    sampling = {"max_tokens": LIMIT, "temperature": 1.0, "seed": 1, "stop_token_ids": [END], **params}
    record = await engine.generate(prompt_ids=prompt, sampling_params=sampling)
    right = await scored(engine, prompt + record.output_ids)
    assert record.output_log_probs == pytest.approx(right[len(prompt) - 1 :], abs=1e-4)


async def test_skyrl_leaves_the_temperature_out_so_others_are_refused(server, engine):
    sampling = {"max_tokens": LIMIT, "temperature": 0.5, "seed": 1, "stop_token_ids": [END]}
    with pytest.raises(EngineError, match="sampling_overrides"):
        await engine.generate(prompt_ids=[1, 5, 6, 7], sampling_params=sampling)
    trusting = TinkerBackend(engine.client, scaled_logprobs=True)
    record = await trusting.generate(prompt_ids=[1, 5, 6, 7], sampling_params=sampling)
    right = await scored(engine, [1, 5, 6, 7, *record.output_ids])
    assert record.output_log_probs == pytest.approx(right[3:], abs=1e-4)  # of temperature 1: the refusal is needed


async def test_eight_conversations_are_eight_rows_with_the_logprobs_of_the_forward_pass(engine, renderer):
    gateway = RolloutGateway(
        backend=engine, renderer=renderer, sampling_overrides={"temperature": 1.0, "max_tokens": LIMIT}
    )
    server = await asyncio.to_thread(ThreadedGatewayServer(gateway).start)

    async def converse(http: aiohttp.ClientSession, number: int) -> list[TraceRecord]:
        session = server.create_session()
        messages: list[dict[str, Any]] = []
        headers = {"Authorization": f"Bearer {session.api_key}"}
        for _ in range(2):
            messages.append({"role": "user", "content": f"What is {10 + number} plus 2?"})
            body = {"model": "tiny", "messages": messages}
            async with http.post(f"{session.base_url}/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                messages.append((await answer.json())["choices"][0]["message"])
        return await server.finish_session(session.session_id, reward=1.0)

    try:
        async with aiohttp.ClientSession() as http:
            conversations = await asyncio.gather(*(converse(http, number) for number in range(8)))
    finally:
        await asyncio.to_thread(server.shutdown)
    for [row] in conversations:  # linear: one row each
        assert len(row.metadata["turns"]) == 2
    row = conversations[0][0]
    right = (await scored(engine, row.token_ids))[row.prompt_length - 1 :]
    assert sum(row.loss_mask) > 1
    for mask, logprob, value in zip(row.loss_mask, row.logprobs, right, strict=True):
        assert logprob == (pytest.approx(value, abs=1e-3) if mask else 0.0)


async def test_a_missing_key_says_so(monkeypatch, server):
    monkeypatch.delenv("TINKER_API_KEY")
    assert "TINKER_API_KEY" not in os.environ
    with pytest.raises(SetupError, match=r"(?i)api.key"):
        await TinkerBackend.connect(base_model="x", base_url=server.url)


async def test_a_server_that_dies_is_a_retryable_error_and_its_return_is_enough(server, engine):
    sampling = {"max_tokens": LIMIT, "stop_token_ids": [END]}
    engine.timeout = 5.0
    call = asyncio.create_task(engine.generate(prompt_ids=[1, 5, 6, 7], sampling_params=sampling))
    await asyncio.to_thread(server.kill)
    with contextlib.suppress(EngineError):
        await call  # it may have been quicker
    with pytest.raises(EngineError) as caught:
        await engine.generate(prompt_ids=[1, 5, 6, 7], sampling_params=sampling)
    assert caught.value.retry_after is not None
    await asyncio.to_thread(server.start)
    engine.timeout = 120.0
    assert (await engine.generate(prompt_ids=[1, 5, 6, 7], sampling_params=sampling)).output_ids

"""Engines behind a real gateway: every trained token true, whatever the server does, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import random

import aiohttp
import pytest

from agentcore_rl_toolkit.rollout_gateway import ReplicaRouter, SglangBackend, Timeouts, VllmBackend
from agentcore_rl_toolkit.rollout_gateway.testing import check_records
from gateway.support import assemble, encode, serving, sse

from .fakes import FakeServer, FakeSglang, FakeVllm, serving_engine

WORDS = ["one", "two", "three", "red", "green", "blue", "é", "\n", "{", "}"]


def speak(prompt_ids: list[int]) -> list[int]:
    """A few words fixed by the prompt, ended by the tokenizer's own closer."""
    rng = random.Random(repr(prompt_ids))
    return encode(" ".join(rng.choices(WORDS, k=rng.randint(3, 12))) + "<|im_end|>")


async def talk(http: aiohttp.ClientSession, session, turns: int, stream: bool = False, patience: int = 1) -> int:
    """A conversation of so many turns; a turn that fails is asked again. How many failed, all with 502 or 503."""
    messages, failed = [{"role": "user", "content": f"Hello from {session.session_id}"}], 0
    while turns:
        body = {"model": "m", "messages": messages, "stream": stream}
        async with http.post(f"{session.base_url}/chat/completions", json=body) as response:
            text = await response.text()
        if response.status != 200 or '"error"' in text:
            assert response.status in (200, 502, 503), text
            assert "engine" in text
            failed += 1
            assert failed < patience, text
            await asyncio.sleep(0.1)
            continue
        content = _content(text) if stream else (await response.json())["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]
        turns -= 1
    return failed


async def at_work(server: FakeServer, requests: int) -> None:
    """Wait until the server samples so many answers."""
    async with asyncio.timeout(10.0):
        while server.running < requests:  # noqa: ASYNC110 - the server sets no event
            await asyncio.sleep(0.002)


def _content(text: str) -> str:
    return str(assemble(sse(text))["content"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        (FakeVllm, ()),
        (FakeVllm, ("no_generate",)),
        (FakeVllm, ("no_stream", "names")),
        (FakeSglang, ()),
        (FakeSglang, ("incremental",)),
        (FakeSglang, ("mixed", "prompt_tail")),
    ],
)
async def test_every_trained_token_is_true(kind, faults, stream):
    backend_kind = SglangBackend if kind is FakeSglang else VllmBackend
    async with (
        serving_engine(kind(*faults, script=speak, chunk=2)) as server,
        backend_kind(server.url, policy_version=5) as backend,
        serving(backend) as gateway,
        aiohttp.ClientSession() as http,
    ):
        session = gateway.create_session()
        await talk(http, session, 4, stream)
        [row] = await gateway.finish_session(session.session_id)
    assert check_records([row]) == sum(row.loss_mask) > 12
    assert row.policy_versions == [5 if mask else None for mask in row.loss_mask]


@pytest.mark.parametrize("kind", [FakeSglang, FakeVllm])
async def test_weights_that_change_during_a_turn_are_known_per_token(kind):
    def six(prompt_ids):
        return encode("one two three red green blue")[:6]

    backend_kind = SglangBackend if kind is FakeSglang else VllmBackend
    async with (
        serving_engine(kind(script=six, chunk=2, version="5")) as server,
        backend_kind(server.url) as backend,
        serving(backend) as gateway,
        aiohttp.ClientSession() as http,
    ):
        server.updates = [(3, "6")]
        session = gateway.create_session(sampling_overrides={"max_tokens": 6})
        await talk(http, session, 1)
        [row] = await gateway.finish_session(session.session_id)
    assert row.policy_versions == [5, 5, 5, 6, 6, 6]


@pytest.mark.parametrize("fault", ["extra_logprob", "null", "inf", "abort", "drop", "error_event", "over_limit"])
async def test_a_broken_answer_leaves_no_trace(fault):
    async with (
        serving_engine(FakeVllm(fault, script=speak, chunk=2)) as server,
        VllmBackend(server.url) as backend,
        serving(backend) as gateway,
        aiohttp.ClientSession() as http,
    ):
        session = gateway.create_session(sampling_overrides={"max_tokens": 4})
        for stream in (False, True):
            with pytest.raises(AssertionError, match="engine_error"):
                await talk(http, session, 1, stream)
        server.faults.clear()
        await talk(http, session, 1)
        [row] = await gateway.finish_session(session.session_id)
        assert check_records([row]) == 4


async def test_256_sessions_leave_nothing_behind():
    servers = [FakeVllm(script=speak, delay=0.002), FakeVllm(script=speak, delay=0.002)]
    for server in servers:
        await server.start()
    router = ReplicaRouter([VllmBackend(server.url, retries=0) for server in servers])
    connector = aiohttp.TCPConnector(limit=0)
    async with serving(router) as gateway, aiohttp.ClientSession(connector=connector) as http:
        sessions = [gateway.create_session() for _ in range(256)]
        talks = [asyncio.create_task(talk(http, s, 3, stream=i % 2 == 0)) for i, s in enumerate(sessions)]
        await asyncio.sleep(1.0)
        for impatient in talks[::8]:
            impatient.cancel()
        ends = await asyncio.gather(*talks, return_exceptions=True)
        assert sum(end == 0 for end in ends) >= 224
        assert all(end == 0 or isinstance(end, asyncio.CancelledError) for end in ends)
        for _ in range(200):
            if not any(server.running for server in servers):
                break
            await asyncio.sleep(0.01)
        assert [server.running for server in servers] == [0, 0], "requests went on"
        assert [replica.running for replica in router.replicas] == [0, 0]
        assert sum(server.peak for server in servers) > 100, "the sessions did not run side by side"
        records = [row for s in sessions for row in await gateway.finish_session(s.session_id)]
        assert check_records(records) == sum(sum(row.loss_mask) for row in records) > 256 * 6
        await router.aclose()
        await asyncio.sleep(0.05)
        assert [server.open_connections for server in servers] == [0, 0], "connections were left open"
    for server in servers:
        await server.stop()


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])
async def test_an_engine_killed_and_started_again(kind):
    server = kind(script=speak, delay=0.005, chunk=1)
    await server.start()
    backend_kind = SglangBackend if kind is FakeSglang else VllmBackend
    backend = backend_kind(server.url, retries=0, timeouts=Timeouts(connect=1.0, idle=2.0))
    async with serving(backend) as gateway, aiohttp.ClientSession() as http:
        sessions = [gateway.create_session() for _ in range(24)]
        early, late = sessions[:8], sessions[8:]
        talks = [asyncio.create_task(talk(http, session, 1)) for session in early]
        await asyncio.gather(*talks)
        talks = [asyncio.create_task(talk(http, s, 4, stream=i % 2 == 0, patience=40)) for i, s in enumerate(late)]
        await at_work(server, len(late) // 2)
        await server.stop()
        await asyncio.sleep(0.3)
        await server.start()
        failures = await asyncio.gather(*talks)
        assert sum(failures) >= len(late), "the kill hit nobody"
        rows = [await gateway.finish_session(session.session_id) for session in sessions]
        assert [len(of_session) for of_session in rows] == [1] * 24, "a failed turn left a branch"
        records = [row for of_session in rows for row in of_session]
        assert check_records(records) == sum(sum(row.loss_mask) for row in records)
        assert [len(row.metadata["turns"]) for row in records] == [1] * 8 + [4] * 16
        assert server.running == 0
    await backend.aclose()
    await server.stop()


async def test_one_replica_killed_is_not_noticed_by_turns_that_have_not_begun():
    servers = [FakeVllm(script=speak, delay=0.003, chunk=1) for _ in range(3)]
    for server in servers:
        await server.start()
    router = ReplicaRouter([VllmBackend(server.url, retries=0) for server in servers], cooldown=0.2)
    async with serving(router) as gateway, aiohttp.ClientSession() as http:
        sessions = [gateway.create_session() for _ in range(24)]
        talks = [asyncio.create_task(talk(http, session, 5, patience=3)) for session in sessions]
        await at_work(servers[0], 1)
        lost = servers[0].running
        await servers[0].stop()
        failures = await asyncio.gather(*talks)
        assert sum(failures) <= lost, "turns failed that had not begun"
        records = [row for s in sessions for row in await gateway.finish_session(s.session_id)]
        assert check_records(records) == sum(sum(row.loss_mask) for row in records)
        assert len(records) == 24
    await router.aclose()
    for server in servers:
        await server.stop()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "faults"),
    [(FakeVllm, ()), (FakeVllm, ("no_generate",)), (FakeVllm, ("names",)), (FakeSglang, ()), (FakeSglang, ("mixed",))],
)
async def test_clients_get_the_most_likely_tokens_where_they_ask(kind, faults, stream):
    backend_kind = SglangBackend if kind is FakeSglang else VllmBackend
    async with (
        serving_engine(kind(*faults, script=speak, chunk=2)) as server,
        backend_kind(server.url) as backend,
        serving(ReplicaRouter([backend])) as gateway,
        aiohttp.ClientSession() as http,
    ):
        session = gateway.create_session()
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream, "logprobs": True, "top_logprobs": 3}
        async with http.post(f"{session.base_url}/chat/completions", json=body) as response:
            text = await response.text()
    events = sse(text)[:-1] if stream else [json.loads(text)]
    logprobs = [choice["logprobs"] for event in events for choice in event["choices"] if choice.get("logprobs")]
    content = [entry for part in logprobs for entry in part["content"]]
    assert len(content) > 3
    best = [value for value, _ in server.top(1.0, 3)]
    for entry in content:
        # To vLLM the sampled token is one more candidate; SGLang's fake has it outside of them.
        right = best if kind is FakeSglang else sorted([entry["logprob"], *best], reverse=True)[:3]
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(right)

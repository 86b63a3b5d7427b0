"""Servers whose answers have another form than they should, or are another's: an ``EngineError``, never a row."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentcore_rl_toolkit.errors import EngineError
from agentcore_rl_toolkit.rollout_gateway import LlamaCppBackend, SglangBackend, VllmBackend
from agentcore_rl_toolkit.rollout_gateway.sampling import check_output
from agentcore_rl_toolkit.rollout_gateway.sampling._http import HttpEngine
from agentcore_rl_toolkit.rollout_gateway.sampling.chat import _Answer

from . import fakes

PROMPT, IDS = [1, 2, 3], [10, 11, 12]
STOP = {"type": "stop", "matched": 12}


def tops(temperature: float) -> list[tuple[float, int]]:
    return fakes.FakeServer().top(temperature, 5)


def vllm_choice(**lie: Any) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -1.0} for token in IDS]
    return {"index": 0, "token_ids": IDS, "finish_reason": "stop", "logprobs": {"content": content}} | lie


def vllm_tokens(ids: list[Any], logprobs: list[Any]) -> dict[str, Any]:
    content = [{"logprob": logprob} for logprob in logprobs]
    return {"choices": [vllm_choice(token_ids=ids, logprobs={"content": content})]}


def sglang_meta(**lie: Any) -> dict[str, Any]:
    triples = [[-1.0, token, None] for token in IDS]
    meta = {"completion_tokens": 3, "prompt_tokens": 3, "finish_reason": STOP, "output_token_logprobs": triples}
    return {"output_ids": IDS, "meta_info": meta | lie}


def llama_answer(**lie: Any) -> dict[str, Any]:
    probabilities = [{"id": token, "logprob": -1.0} for token in IDS]
    return {"tokens": IDS, "stop_type": "eos", "completion_probabilities": probabilities, "tokens_evaluated": 3} | lie


@asynccontextmanager
async def server(path: str, probe: Callable[[dict[str, Any]], Any], answer: Any) -> AsyncIterator[str]:
    async def handle(http: web.Request) -> web.Response:
        body = json.loads(await http.read())
        probing = not body.get("stream") if path != "/completion" else body["n_probs"] > 1
        return web.json_response(probe(body) if probing else answer)

    async def abort(_: web.Request) -> web.Response:
        return web.Response()

    async def props(_: web.Request) -> web.Response:
        return web.json_response({"total_slots": 1})

    app = web.Application()
    app.router.add_post(path, handle)
    app.router.add_get("/props", props)
    app.router.add_post("/abort_request", abort)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def vllm_probe(body: dict[str, Any]) -> Any:
    listed = [{"token_id": i, "logprob": x} for x, i in tops(body["sampling_params"]["temperature"])]
    return {"choices": [{"logprobs": {"content": [{"token_id": 1, "logprob": -1.0, "top_logprobs": listed}]}}]}


def sglang_probe(body: dict[str, Any]) -> Any:
    return {
        "meta_info": {"output_top_logprobs": [[[x, i, None] for x, i in tops(body["sampling_params"]["temperature"])]]}
    }


def llama_probe(body: dict[str, Any]) -> Any:
    if body["post_sampling_probs"]:
        listed = [{"id": i, "prob": math.exp(x)} for x, i in tops(body["temperature"])]
        return {"completion_probabilities": [{"id": 1, "top_probs": listed}]}
    return {"completion_probabilities": [{"id": 1, "top_logprobs": [{"id": i, "logprob": x} for x, i in tops(1.0)]}]}


SERVERS: dict[str, tuple[type[Any], str, Callable[[dict[str, Any]], Any]]] = {
    "vllm": (VllmBackend, "/inference/v1/generate", vllm_probe),
    "sglang": (SglangBackend, "/generate", sglang_probe),
    "llama.cpp": (LlamaCppBackend, "/completion", llama_probe),
}


async def ask(kind: str, answer: Any, **options: Any) -> Any:
    backend, path, probe = SERVERS[kind]
    params = {"max_tokens": 3, "stop_token_ids": [12]}
    async with server(path, probe, answer) as url, backend(url, retries=0, **options) as engine:
        return await engine.generate(prompt_ids=list(PROMPT), sampling_params=params)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [("vllm", {"choices": [vllm_choice()]}), ("sglang", sglang_meta()), ("llama.cpp", llama_answer())],
)
async def test_the_truth_is_believed(kind: str, answer: Any) -> None:
    record = await ask(kind, answer)
    assert (record.output_ids, record.output_log_probs, record.finish_reason) == (IDS, [-1.0] * 3, "stop")


@pytest.mark.parametrize(
    "answer",
    [
        [],
        "text",
        {"choices": ["text"]},
        {"choices": {"index": 0}},
        {"choices": [vllm_choice(logprobs=[-1.0] * 3)]},
        {"choices": [vllm_choice(logprobs={"content": ["text"] * 3})]},
        {"choices": [vllm_choice(logprobs={"content": [{"token_id": 10}] * 3})]},
        {"choices": [vllm_choice(routed_experts="!!!")]},
        {"choices": [vllm_choice(routed_experts=5)]},
        *(vllm_tokens([token], [-1.0]) for token in ("10", -1, 10.5, True, None, 2**31, [])),
        *(vllm_tokens([10], [logprob]) for logprob in ("NaN", [-1.0], {}, None)),
        {"choices": [vllm_choice(prompt_token_ids=[0, *PROMPT])]},
        {"choices": [vllm_choice()], "prompt_token_ids": [0, *PROMPT]},
    ],
)
async def test_vllm(answer: Any) -> None:
    with pytest.raises(EngineError):
        await ask("vllm", answer, routed_experts=True)


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {"meta_info": [1]},
        sglang_meta(finish_reason="stop"),
        sglang_meta(output_token_logprobs=[[-1.0]] * 3),
        sglang_meta(output_token_logprobs=[None] * 3),
        sglang_meta(output_top_logprobs=[[1]]),
        sglang_meta(routed_experts="!!!"),
        sglang_meta(routed_experts="AAAA"),
        sglang_meta(prompt_tokens=2),
    ],
)
async def test_sglang(answer: Any) -> None:
    with pytest.raises(EngineError):
        await ask("sglang", answer, routed_experts=True)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        llama_answer(completion_probabilities=[None]),
        llama_answer(completion_probabilities=[{"logprob": -1.0}]),
        llama_answer(completion_probabilities=[{"id": 10}]),
        llama_answer(completion_probabilities=[{"id": 10, "prob": "text"}]),
        llama_answer(completion_probabilities=[{"id": token, "logprob": "NaN"} for token in IDS]),
        llama_answer(tokens_evaluated=2),
    ],
)
async def test_llamacpp(answer: Any) -> None:
    with pytest.raises(EngineError):
        await ask("llama.cpp", answer)


@pytest.mark.parametrize("kind", SERVERS)
async def test_an_unreadable_answer_to_the_first_question(kind: str) -> None:
    backend, path, _ = SERVERS[kind]
    for lie in ([], {"choices": [5], "meta_info": {"output_top_logprobs": [5]}, "completion_probabilities": [5]}):
        async with server(path, lambda _, lie=lie: lie, None) as url, backend(url, retries=0) as engine:  # type: ignore[misc]
            with pytest.raises(EngineError):
                await engine.generate(prompt_ids=list(PROMPT), sampling_params={"max_tokens": 3})


async def test_versions_of_more_tokens_than_there_are_cost_nothing() -> None:
    lie = [{"version": "1", "start": 0, "end": 10**9}]
    began = time.monotonic()
    record = await ask("vllm", {"choices": [vllm_choice(weight_versions=lie)]})
    assert record.policy_version is None
    assert time.monotonic() - began < 5


def test_ids_of_numpy_are_ids() -> None:
    assert check_output(list(np.array([1, 2])), [-1.0, -2.0]) is None
    assert check_output([1, -2], [-1.0, -2.0]) == "-2 for a token id"


def chat_event(**lie: Any) -> dict[str, Any]:
    content = [{"token": f"token_id:{token}", "logprob": -1.0} for token in IDS]
    choice = {"index": 0, "delta": {"content": "text"}, "token_ids": IDS, "logprobs": {"content": content}}
    return {"choices": [choice], "prompt_token_ids": PROMPT} | lie


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 3}}, None),
        ({"usage": {"prompt_tokens": 4, "completion_tokens": 3}}, "sampled after 4 tokens and told 3"),
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 4}}, "sampled 4 tokens and told 3"),
        (chat_event(prompt_token_ids=[0]), "two prompts"),
    ],
)
def test_chats(last: dict[str, Any], problem: str | None) -> None:
    answer = _Answer("http://server", 0)
    chunk = answer.take(chat_event())
    assert chunk is not None
    assert (chunk.prompt_ids, chunk.output_ids) == (PROMPT, IDS)
    with pytest.raises(EngineError, match=problem) if problem else nullcontext():
        answer.take(last)
        answer.check_whole()


@pytest.mark.parametrize(("last", "again"), [(b"data: {half", True), (b"data: {half\n\n", False)])
async def test_an_event_that_is_cut_is_an_answer_broken_off(last: bytes, again: bool) -> None:
    async def handle(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(b'data: {"choices": []}\n\n' + last)
        return response  # which ends the body as if nothing was missing

    app = web.Application()
    app.router.add_post("/", handle)
    async with TestServer(app) as there, HttpEngine(str(there.make_url(""))) as engine:
        with pytest.raises(EngineError) as error:
            [event async for event in engine.events("/", {})]
    assert (error.value.retry_after is not None) == again

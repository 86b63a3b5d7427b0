"""``SglangBackend`` against a server with SGLang's shapes and its known faults."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest

from agentcore_rl_toolkit.errors import EngineError, SetupError
from agentcore_rl_toolkit.rollout_gateway import SglangBackend, Timeouts
from agentcore_rl_toolkit.rollout_gateway.testing import check_engine, oracle_logprobs

from .fakes import EOS, VOCABULARY, FakeSglang, answer, decode, serving_engine

PROMPT = [1, 2, 3]
REQUEST = {"prompt_ids": PROMPT, "sampling_params": {"max_tokens": 7, "max_new_tokens": 7, "stop_token_ids": [EOS]}}


@pytest.mark.parametrize(
    "variant", [(), ("incremental",), ("mixed",), ("prompt_tail",), ("incremental", "prompt_tail"), ("deaf",)]
)
async def test_every_kind_of_stream_conforms(variant):
    async with serving_engine(FakeSglang(*variant, delay=0.001)) as server, SglangBackend(server.url) as backend:
        results = await check_engine(
            backend,
            vocabulary_size=VOCABULARY,
            oracle=oracle_logprobs,
            tolerance=0.0,
            decode=decode,
            running=lambda: server.running,
            sampling={"temperature": 1.0},
            stop_token_ids=[EOS],
        )
        assert set(results.values()) == {"passed"}


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (("extra_logprob",), "output_ids that its logprobs are not of"),
        (("extra_logprob", "incremental"), "output_ids that its logprobs are not of"),
        (("lost_id",), "output_ids that its logprobs are not of"),
        (("lost_id", "incremental"), "output_ids that its logprobs are not of"),
        (("other_tokens",), "output_ids that its logprobs are not of"),
        (("no_logprobs",), "gives no logprobs: is it a generation server"),
        (("null",), "a sampled token the logprob None"),
        (("inf",), "a sampled token the logprob -3.4"),
        (("logits",), "logits instead of logprobs. Start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"),
        (("refuse",), "aborted the request: The input is longer"),
        (("error_event",), "answered 500: .*CUDA out of memory"),
    ],
)
async def test_a_broken_answer_is_an_error_for_good(faults, message):
    async with serving_engine(FakeSglang(*faults)) as server, SglangBackend(server.url) as backend:
        if "refuse" in faults:
            backend._verified = True  # this server refuses everything, the probe too
        with pytest.raises(EngineError, match=message) as caught:
            await backend.generate(**REQUEST)
        assert caught.value.retry_after is None


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (("abort",), "aborted the request: Abort in waiting queue"),
        (("abort", "incremental"), "aborted the request: Abort in waiting queue"),
        (("drop",), "could not be reached or broke off"),
        (("stall",), "could not be reached or broke off: Timeout on reading"),
    ],
)
async def test_a_weight_update_or_a_lost_server_may_be_asked_again(faults, message):
    async with (
        serving_engine(FakeSglang(*faults)) as server,
        SglangBackend(server.url, timeouts=Timeouts(idle=0.3)) as backend,
    ):
        with pytest.raises(EngineError, match=message) as caught:
            await backend.generate(**REQUEST)
        assert caught.value.retry_after is not None


async def test_hanging_up_aborts_by_request_id():
    async with serving_engine(FakeSglang("deaf", delay=0.01)) as server, SglangBackend(server.url) as backend:
        await backend.verify()
        async with aclosing(backend.stream(prompt_ids=PROMPT, sampling_params={"max_tokens": 400})) as chunks:
            await anext(chunks)
            assert server.running == 1
        call = asyncio.ensure_future(backend.generate(prompt_ids=PROMPT, sampling_params={"max_tokens": 400}))
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.wait([call])
        await backend.aclose()
        rids = [body["rid"] for _, body, _ in server.requests if body.get("stream")]
        assert sorted(server.abort_requests) == sorted(rids)
        assert len(set(rids)) == 2
        for _ in range(100):
            if not server.running:
                break
            await asyncio.sleep(0.01)
        assert server.running == 0


@pytest.mark.parametrize(("faults", "warnings"), [((), 1), (("incremental",), 0)])
async def test_a_server_that_repeats_itself_is_named_once(faults, warnings, caplog):
    server = FakeSglang(*faults, script=lambda ids: [7] * 1200, chunk=100)
    async with serving_engine(server), SglangBackend(server.url) as backend:
        for _ in range(2):
            await backend.generate(prompt_ids=PROMPT, sampling_params={"max_tokens": 1200})
    assert sum("--incremental-streaming-output" in record.message for record in caplog.records) == warnings


async def test_an_answer_that_ends_is_not_aborted():
    async with serving_engine(FakeSglang()) as server, SglangBackend(server.url) as backend:
        await backend.generate(**REQUEST)
        await backend.aclose()
        assert server.abort_requests == []
        assert server.connections == 1


@pytest.mark.parametrize("incremental", [False, True])
async def test_weights_that_change_on_the_way_are_reported_per_token(incremental):
    faults = ("incremental",) if incremental else ()
    async with serving_engine(FakeSglang(*faults, version="4")) as server, SglangBackend(server.url) as backend:
        server.updates = [(5, "5")]
        record = await backend.generate(**REQUEST)
        assert record.policy_version == [4] * 5 + [5] * 2
        server.updates = []
        assert (await backend.generate(**REQUEST)).policy_version == 4
        server.version = "default"
        backend.policy_version = 9
        assert (await backend.generate(**REQUEST)).policy_version == 9


async def test_the_server_is_told_everything():
    params = {"max_tokens": 5, "max_new_tokens": 5, "min_new_tokens": 2, "stop": ["xyz"], "seed": 7}
    async with (
        serving_engine(FakeSglang()) as server,
        SglangBackend(server.url, data_parallel=4, adapter="lora-a", routed_experts=True) as backend,
    ):
        for _ in range(2):
            record = await backend.generate(
                prompt_ids=PROMPT, sampling_params=params, session_id="the-secret-session-key", image_data=["data:x"]
            )
        path, body, _headers = server.requests[-1]
        assert path == "/generate"
        assert body.pop("rid")
        assert body == {
            "input_ids": PROMPT,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "return_text_in_logprobs": False,
            "stream": True,
            "lora_path": "lora-a",
            "return_routed_experts": True,
            "image_data": ["data:x"],
            "routed_dp_rank": body["data_parallel_rank"],
            "data_parallel_rank": body["routed_dp_rank"],
            "sampling_params": {
                "max_new_tokens": 5,
                "min_new_tokens": 2,
                "stop": ["xyz"],
                "sampling_seed": 7,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "repetition_penalty": 1.0,
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
        }
        keys = {h["X-SMG-Routing-Key"] for _, b, h in server.requests if b.get("stream")}
        assert len(keys) == 1
        assert body["routed_dp_rank"] in range(4)
        assert "secret" not in json.dumps(server.requests)
        assert record.extra["routed_experts"].shape == (len(PROMPT) + 5 - 1, 2)
        assert record.extra["routed_experts"].flatten().tolist() == list(range(14))
        assert await backend.context_window() == 4096
        with pytest.raises(EngineError, match="takes no pictures"):
            await backend.generate(**REQUEST, pictures=[b""])


async def test_logprobs_without_the_temperature_are_refused():
    hot = {"prompt_ids": PROMPT, "sampling_params": {"max_tokens": 3, "temperature": 0.7}}
    async with serving_engine(FakeSglang("unscaled")) as server, SglangBackend(server.url) as backend:
        with pytest.raises(EngineError, match="Start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"):
            await backend.generate(**hot)
        assert (await backend.generate(**REQUEST)).output_ids == answer(PROMPT)[:7]
    async with serving_engine(FakeSglang("logits")) as server, SglangBackend(server.url) as backend:
        with pytest.raises(SetupError, match="logits"):
            await backend.verify()

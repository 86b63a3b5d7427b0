"""``VllmBackend`` against a server with vLLM's shapes and its known faults."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from agentcore_rl_toolkit.errors import EngineError, SetupError
from agentcore_rl_toolkit.rollout_gateway import Timeouts, VllmBackend
from agentcore_rl_toolkit.rollout_gateway.testing import check_engine, oracle_logprobs

from .fakes import EOS, VOCABULARY, FakeVllm, answer, decode, serving_engine

PROMPT = [1, 2, 3]
REQUEST = {"prompt_ids": PROMPT, "sampling_params": {"max_tokens": 7, "max_new_tokens": 7, "stop_token_ids": [EOS]}}


def asked(server):
    return {
        "vocabulary_size": VOCABULARY,
        "oracle": oracle_logprobs,
        "tolerance": 0.0,
        "decode": decode,
        "running": lambda: server.running,
        "sampling": {"temperature": 1.0},
        "stop_token_ids": [EOS],
    }


@pytest.mark.parametrize("variant", [None, "no_generate", "disabled", "names", "late_finish", "unscaled"])
async def test_every_kind_of_server_conforms(variant):
    faults = (variant,) if variant else ()
    async with serving_engine(FakeVllm(*faults, delay=0.001)) as server, VllmBackend(server.url) as backend:
        results = await check_engine(backend, **asked(server))
        assert set(results.values()) == {"passed"}
        assert server.open_connections <= 8


async def test_a_server_that_answers_in_one_piece_does_all_but_stream():
    async with serving_engine(FakeVllm("no_stream")) as server, VllmBackend(server.url) as backend:
        with pytest.raises(AssertionError, match=r"1 of 9 engine checks failed:\nreal_streaming: .* came in one chunk"):
            await check_engine(backend, **asked(server))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("extra_logprob", "gave 2 logprobs for 1 tokens"),
        ("no_ids", "gave no token ids: vLLM 0.10.2 or newer is needed"),
        ("other_tokens", "logprobs of other tokens than it sampled"),
        ("no_logprobs", "gives no logprobs: start vLLM with --max-logprobs 5 or more"),
        ("null", "a sampled token the logprob None"),
        ("inf", "a sampled token the logprob -9999.0"),
        ("nan", "a sampled token the logprob nan"),
        ("logits", "logits instead of logprobs. Start vLLM with --logprobs-mode processed_logprobs"),
        ("over_limit", "sampled 8 tokens, max_tokens was less"),
        ("error_event", "answered 500: .*CUDA out of memory"),
        ("garbage", "answered what is no JSON: {half"),
    ],
)
@pytest.mark.parametrize("older", [False, True])
async def test_a_broken_answer_is_an_error_for_good(fault, message, older):
    faults = (fault, "no_generate") if older else (fault,)
    async with serving_engine(FakeVllm(*faults)) as server, VllmBackend(server.url) as backend:
        with pytest.raises(EngineError, match=message) as caught:
            await backend.generate(**REQUEST)
        assert caught.value.retry_after is None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("abort", "aborted the request"),
        ("silent_abort", "broke its answer off after 3 tokens"),
        ("drop", "could not be reached or broke off"),
        ("stall", "could not be reached or broke off: Timeout on reading"),
    ],
)
async def test_an_answer_that_ends_too_early_may_be_asked_for_again(fault, message):
    async with (
        serving_engine(FakeVllm(fault)) as server,
        VllmBackend(server.url, timeouts=Timeouts(idle=0.3)) as backend,
    ):
        with pytest.raises(EngineError, match=message) as caught:
            await backend.generate(**REQUEST)
        assert caught.value.retry_after is not None
        samples = [body for _, body, _ in server.requests if body.get("stream")]
        assert len(samples) == 1, "sampled again after the first token"


async def test_a_trimmed_stop_token_is_an_error():
    stop = answer(PROMPT)[4]
    request = {"prompt_ids": PROMPT, "sampling_params": {"max_tokens": 7, "stop_token_ids": [stop]}}
    async with serving_engine(FakeVllm("trimmed_stop")) as server, VllmBackend(server.url) as backend:
        with pytest.raises(EngineError, match="gave 2 logprobs for 1 tokens"):
            await backend.generate(**request)


async def test_one_token_is_an_answer():
    async with serving_engine(FakeVllm(script=lambda _: [EOS])) as server, VllmBackend(server.url) as backend:
        record = await backend.generate(**REQUEST)
    assert (record.output_ids, record.finish_reason) == ([EOS], "stop")
    assert record.output_log_probs == oracle_logprobs(PROMPT, [EOS])


async def test_raw_logprobs_are_refused_where_the_temperature_is_not_one():
    hot = {"prompt_ids": PROMPT, "sampling_params": {"max_tokens": 3, "temperature": 0.7}}
    async with serving_engine(FakeVllm("unscaled")) as server, VllmBackend(server.url) as backend:
        assert await backend.verify() is False
        with pytest.raises(
            EngineError, match=r"temperature 0\.7\. Start vLLM with --logprobs-mode processed_logprobs, or"
        ):
            await backend.generate(**hot)
        assert (await backend.generate(**REQUEST)).output_log_probs == oracle_logprobs(PROMPT, answer(PROMPT)[:7])
    async with serving_engine(FakeVllm()) as server, VllmBackend(server.url) as backend:
        assert await backend.verify() is True
        record = await backend.generate(**hot)
        assert record.output_log_probs == [x / 0.7 for x in oracle_logprobs(PROMPT, record.output_ids)]
    async with serving_engine(FakeVllm("uniform")) as server, VllmBackend(server.url) as backend:
        assert await backend.verify() is None
        await backend.generate(**hot)
    async with serving_engine(FakeVllm("logits")) as server, VllmBackend(server.url) as backend:
        with pytest.raises(SetupError, match="logits instead of logprobs"):
            await backend.verify()


@pytest.mark.parametrize("faults", [("no_tops",), ("no_tops", "no_generate")])
async def test_a_server_that_tells_no_likely_tokens_serves_all_the_same(faults, caplog):
    async with serving_engine(FakeVllm(*faults)) as server, VllmBackend(server.url) as backend:
        record = await backend.generate(**REQUEST)
        assert record.output_log_probs == oracle_logprobs(PROMPT, record.output_ids)
    assert "can't see which logprobs" in caplog.text


async def test_the_server_is_told_everything_and_its_own_defaults_never_apply():
    params = {
        "max_tokens": 5,
        "max_new_tokens": 5,
        "min_new_tokens": 2,
        "stop": ["xyz"],
        "stop_token_ids": [EOS],
        "seed": 7,
        "adapter": "lora-a",
        "temperature": None,
        "min_p": None,
    }
    async with (
        serving_engine(FakeVllm()) as server,
        VllmBackend(f"{server.url}/v1", api_key="sk-1", headers={"X-Team": "a"}, data_parallel=4) as backend,
    ):
        await backend.generate(prompt_ids=PROMPT, sampling_params=params, session_id="the-secret-session-key")
        await backend.generate(prompt_ids=PROMPT, sampling_params=params, session_id="the-secret-session-key")
        path, body, headers = server.requests[-1]
        assert path == "/inference/v1/generate"
        assert (body["token_ids"], body["model"], body["stream"]) == (PROMPT, "lora-a", True)
        assert body["sampling_params"] == {
            "max_tokens": 5,
            "min_tokens": 2,
            "stop": ["xyz"],
            "stop_token_ids": [EOS],
            "seed": 7,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "detokenize": True,
        }
        assert (headers["Authorization"], headers["X-Team"]) == ("Bearer sk-1", "a")
        routed = [(h["X-Session-ID"], h["X-data-parallel-rank"]) for _, b, h in server.requests if b.get("stream")]
        assert len(set(routed)) == 1
        assert int(routed[0][1]) < 4
        assert "secret" not in json.dumps(server.requests), "the session's key left the gateway"
        assert server.connections == 1, "connections are not used again"


async def test_an_unknown_model_and_a_prompt_too_long_say_so():
    async with serving_engine(FakeVllm()) as server:
        async with VllmBackend(server.url, model="nope") as backend:
            with pytest.raises(EngineError, match=r"404: .*The model does not exist"):
                await backend.generate(**REQUEST)
        async with VllmBackend(server.url) as backend:
            assert await backend.context_window() == 4096
            with pytest.raises(EngineError, match="maximum context length is 4096 tokens") as caught:
                await backend.generate(prompt_ids=[1] * 5000, sampling_params={"max_tokens": 2})
            assert caught.value.retry_after is None
            with pytest.raises(EngineError, match="takes no pictures"):
                await backend.generate(**REQUEST, pictures=[b""])
        with pytest.raises(EngineError, match="need max_tokens"):
            await backend.generate(prompt_ids=PROMPT, sampling_params={})


async def test_versions_and_routed_experts():
    async with serving_engine(FakeVllm(version="12")) as server:
        async with VllmBackend(server.url, routed_experts=True, policy_version=3) as backend:
            record = await backend.generate(**REQUEST)
            assert record.policy_version == 12, "the server's word counts"
            assert record.extra["routed_experts"].shape == (len(PROMPT) + 7 - 1, 2, 1)
        server.version = "default"
        async with VllmBackend(server.url, policy_version=3) as backend:
            assert (await backend.generate(**REQUEST)).policy_version == 3


async def test_a_busy_server_is_asked_again_but_not_for_ever():
    async with serving_engine(FakeVllm()) as server, VllmBackend(server.url, retries=2) as backend:
        server.busy = 2
        await backend.generate(**REQUEST)
        server.busy = 3
        with pytest.raises(EngineError, match="503: overloaded") as caught:
            await backend.generate(**REQUEST)
        assert caught.value.retry_after == 0.0


async def test_nobody_there():
    async with serving_engine(FakeVllm()) as server:
        url = server.url
    async with VllmBackend(url, retries=1) as backend:
        assert not await backend.healthy()
        with pytest.raises(EngineError, match="could not be reached") as caught:
            await backend.generate(**REQUEST)
        assert caught.value.retry_after is not None
    with pytest.raises(ValueError, match="http:// or https://"):
        VllmBackend("localhost:8000")


async def test_secrets_stay_out_of_errors():
    async with serving_engine(FakeVllm()) as server:
        server.echo = "neither sk-secret-1 nor hunter2 may leave"
        async with VllmBackend(server.url, api_key="sk-secret-1") as backend:
            with pytest.raises(EngineError, match=r"neither \[redacted\] nor hunter2 may"):
                await backend.generate(**REQUEST)
        async with VllmBackend(server.url, headers={"X-Api-Key": "hunter2"}) as backend:
            with pytest.raises(EngineError, match=r"neither sk-secret-1 nor \[redacted\] may"):
                await backend.generate(**REQUEST)
        address = server.url.replace("http://", "http://me:hunter2@")
        async with VllmBackend(address) as backend:
            with pytest.raises(EngineError, match=r"neither sk-secret-1 nor \[redacted\] may"):
                await backend.generate(**REQUEST)
        assert server.requests[-1][2]["Authorization"].startswith("Basic ")
    async with VllmBackend(address, retries=0) as backend:
        assert backend.base_url == server.url
        with pytest.raises(EngineError, match="could not be reached") as caught:
            await backend.generate(**REQUEST)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match="two ways to say who you are"):
        VllmBackend(address, api_key="sk-secret-1")


async def test_one_backend_serves_several_event_loops():
    async with serving_engine(FakeVllm()) as server:
        backend = VllmBackend(server.url)

        async def elsewhere() -> int:
            async with backend:
                return len((await backend.generate(**REQUEST)).output_ids)

        async with backend:
            counts = await asyncio.gather(*(asyncio.to_thread(asyncio.run, elsewhere()) for _ in range(3)), elsewhere())
        assert counts == [7] * 4


def test_the_fakes_distribution_is_one():
    """Else the probe of logprobs would be tested against nonsense."""
    assert math.fsum(math.exp(x) for x, _ in FakeVllm().top(2.0, 20)) == pytest.approx(1.0)

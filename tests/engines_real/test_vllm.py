"""``VllmBackend`` against a real vLLM on the CPU (``make test-vllm``); the right logprobs come from transformers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer

import agentcore_rl_toolkit.local
from agentcore_rl_toolkit.errors import EngineError
from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer, VllmBackend
from agentcore_rl_toolkit.rollout_gateway.testing import check_engine
from engines.test_gateway import talk
from gateway.support import serving

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of torch and transformers
]

TINY = Path(agentcore_rl_toolkit.local.__file__).parent / "data" / "tiny"
TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
EOS = TOKENIZER.token_to_id("<|im_end|>")
VOCABULARY = TOKENIZER.get_vocab_size()
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny random Qwen3 over our tiny tokenizer, with sampling defaults that must never apply."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            eos_token_id=EOS,
            bos_token_id=None,
        )
    )
    model.lm_head.weight.data.normal_(0, 0.25)  # else every token is equally likely
    model.generation_config.update(eos_token_id=EOS, do_sample=True, temperature=0.3, top_k=5, top_p=0.5)
    target = tmp_path_factory.mktemp("model")
    model.save_pretrained(target)
    for file in TINY.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return Path(target)


@pytest.fixture(scope="module")
def scores(folder):
    """By another implementation: logprobs of the whole vocabulary at each of the last ``count`` positions."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def score(ids, count, temperature=1.0):
        with torch.no_grad():
            logits = model(torch.tensor([list(ids)])).logits[0, -count:].double()
        return torch.log_softmax(logits / (temperature or 1.0), -1).tolist()

    return score


@pytest.fixture(scope="module")
def right(scores):
    """The right logprobs of an answer: ``right(prompt, output, temperature)``."""

    def score(prompt, output, temperature=1.0):
        rows = scores([*prompt, *output[:-1]], len(output), temperature)
        return [row[token] for row, token in zip(rows, output, strict=True)]

    return score


@contextmanager
def vllm(folder: Path, *options: str) -> Iterator[str]:
    """A server; yields its address. Nothing of it is left afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "32", *options]
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "2",
    }
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 300
        while not _answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield url
    finally:
        for kind, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, kind)
                process.wait(seconds)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def server(folder):
    with vllm(folder, "--logprobs-mode", "processed_logprobs", "--enable-scale-out") as url:
        yield url


async def unfinished(url: str) -> int:
    """How many requests vLLM says it is working on."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    counts = [float(line.split()[-1]) for line in lines if line.startswith(names)]
    assert counts, "vLLM has renamed its metrics"
    return int(sum(counts))


@pytest.mark.parametrize("endpoint", ["/inference/v1/generate", "/v1/completions"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
async def test_it_conforms(server, right, endpoint, temperature):
    async with VllmBackend(server) as backend:
        assert await backend.verify() is True
        assert backend._path == "/inference/v1/generate"
        backend._path = endpoint
        results = await check_engine(
            backend,
            vocabulary_size=VOCABULARY,
            sampling={"temperature": temperature, "seed": 7},
            stop_token_ids=[EOS],
            oracle=lambda prompt, output: right(prompt, output, temperature),
            tolerance=1e-4,
            decode=lambda ids: TOKENIZER.decode(ids, skip_special_tokens=False),
            running=lambda: unfinished(server),
            long=900,
        )
    assert set(results.values()) == {"passed"}


async def test_every_trained_token_of_32_sessions_is_true(server, right):
    async with (
        VllmBackend(server) as backend,
        serving(backend, rendered_by=HfTemplateRenderer(TINY)) as gateway,
        aiohttp.ClientSession() as http,
    ):
        sessions = [gateway.create_session(sampling_overrides={"max_tokens": 24}) for _ in range(32)]
        await asyncio.gather(*(talk(http, s, 3, stream=i % 2 == 0) for i, s in enumerate(sessions)))
        rows = [row for s in sessions for row in await gateway.finish_session(s.session_id)]
    assert len(rows) == 32
    apart = []
    for row in rows:
        scores = right(row.token_ids[: row.prompt_length], row.token_ids[row.prompt_length :])
        apart += [abs(a - b) for mask, a, b in zip(row.loss_mask, row.logprobs, scores, strict=True) if mask]
    assert len(apart) > 32 * 3
    assert max(apart) < 1e-4
    assert await unfinished(server) == 0


async def test_the_most_likely_tokens_and_the_window(server, scores):
    params = {"max_tokens": 4, "top_logprobs": 3, "seed": 1, "stop_token_ids": [EOS]}
    async with VllmBackend(server) as backend:
        assert await backend.context_window() == 1024
        assert await backend.healthy()
        for path in ("/inference/v1/generate", "/v1/completions"):
            backend._path = path
            record = await backend.generate(prompt_ids=PROMPT, sampling_params=params)
            rows = scores([*PROMPT, *record.output_ids[:-1]], len(record.output_ids))
            for tops, row in zip(record.extra["top_logprobs"], rows, strict=True):
                best = sorted(range(VOCABULARY), key=lambda token: -row[token])[:3]
                assert [token for token, _ in tops] == best
                assert [value for _, value in tops] == pytest.approx([row[token] for token in best], abs=1e-4)
        with pytest.raises(EngineError, match="maximum context length"):
            await backend.generate(prompt_ids=[5] * 2000, sampling_params=params)


async def test_raw_logprobs_are_recognised_and_refused_where_they_are_wrong(folder, right):
    with vllm(folder) as url:
        async with VllmBackend(url) as backend:
            assert await backend.verify() is False
            assert backend._path == "/v1/completions", "not started with --enable-scale-out"
            record = await backend.generate(prompt_ids=PROMPT, sampling_params={"max_tokens": 8})
            assert record.output_log_probs == pytest.approx(right(PROMPT, record.output_ids), abs=1e-4)
            with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
                await backend.generate(prompt_ids=PROMPT, sampling_params={"max_tokens": 8, "temperature": 0.5})

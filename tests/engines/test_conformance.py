"""The suite itself: a good engine passes, and each way to be wrong is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentcore_rl_toolkit.rollout_gateway.testing import (
    ENGINE_CHECKS,
    EngineUnderTest,
    ScriptedBackend,
    Skipped,
    check_engine,
    conformance,
    oracle_logprobs,
)

VOCABULARY = 1000


def answer(prompt_ids: list[int]) -> list[int]:
    rng = random.Random(repr(prompt_ids))
    return [rng.randrange(VOCABULARY) for _ in range(400)]


class GoodBackend(ScriptedBackend):
    """Honours stop tokens, which a scripted answer does not."""

    async def stream(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **rest: Any) -> Any:
        stops = set(sampling_params["stop_token_ids"])
        whole = answer(prompt_ids)
        end = next((i for i, token in enumerate(whole) if token in stops), len(whole))
        one = ScriptedBackend([whole[: end + 1]], delay=0.001)
        async for chunk in one.stream(prompt_ids=prompt_ids, sampling_params=sampling_params):
            yield chunk


async def test_a_good_engine_passes():
    results = await check_engine(GoodBackend([]), vocabulary_size=VOCABULARY, oracle=oracle_logprobs, tolerance=0.0)
    assert results.pop("stop_string") == "skipped: no decode given"
    assert set(results.values()) == {"passed"}


class Wrong(GoodBackend):
    """A good engine whose whole answers are spoilt by ``fault``."""

    def __init__(self, fault: Callable[[Any], Any]) -> None:
        super().__init__([])
        self.fault = fault

    async def generate(self, **request: Any) -> Any:
        return self.fault(await super().generate(**request))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda r: replace(r, output_log_probs=r.output_log_probs[1:]), "output_log_probs"),
        (lambda r: replace(r, output_log_probs=[-x for x in r.output_log_probs]), "logits, or probabilities"),
        (lambda r: replace(r, output_log_probs=[float("-inf")] * len(r.output_ids)), "raise EngineError instead"),
        (lambda r: replace(r, output_ids=[VOCABULARY] * len(r.output_ids)), "not in the vocabulary"),
        (lambda r: replace(r, finish_reason="abort"), "finish_reason 'abort'"),
        (lambda r: replace(r, finish_reason="length"), "'length' after 1 of 16 tokens"),
        (
            lambda r: (
                r
                if r.finish_reason == "length" or len(r.output_ids) == 1
                else replace(r, output_ids=r.output_ids[:-1], output_log_probs=r.output_log_probs[:-1])
            ),
            "the stop included",
        ),
        (lambda r: replace(r, policy_version=[1]), "one per token"),
        (lambda r: replace(r, prompt_ids=[]), "prompt_ids"),
        (lambda r: replace(r, output_log_probs=[x - 0.01 for x in r.output_log_probs]), "right is"),
    ],
)
async def test_a_wrong_engine_is_found(fault, message):
    with pytest.raises(AssertionError, match=message):
        await check_engine(Wrong(fault), vocabulary_size=VOCABULARY, oracle=oracle_logprobs)


@pytest.mark.parametrize("name", ENGINE_CHECKS)
async def test_one_pytest_test_per_check(name):
    engine = EngineUnderTest(GoodBackend([]), VOCABULARY)
    if name == "stop_string":
        with pytest.raises(Skipped, match="no decode given"):
            await ENGINE_CHECKS[name](engine)
    else:
        await ENGINE_CHECKS[name](engine)


async def test_what_an_engine_declares_is_heeded():
    class Declared:
        """No streaming, no stop tokens, never asked for fewer than 20 tokens."""

        min_new_tokens = 20
        stop_kind = "strings"

        def __init__(self):
            self.backend = GoodBackend([])

        async def generate(self, *, sampling_params, **rest):
            assert sampling_params["max_tokens"] >= 20
            return await self.backend.generate(sampling_params={**sampling_params, "stop_token_ids": []}, **rest)

    results = await check_engine(Declared(), vocabulary_size=VOCABULARY)
    assert {name: why for name, why in results.items() if why != "passed"} == {
        "stop_token": "skipped: the engine declares stop_kind='strings'",
        "stop_string": "skipped: no decode given",
        "streaming": "skipped: the engine does not stream",
        "real_streaming": "skipped: the engine does not stream",
    }


async def test_work_that_goes_on_after_a_cancellation_is_found(monkeypatch):
    monkeypatch.setattr(conformance, "_SETTLE", 0.2)
    started = 0

    class Deaf(GoodBackend):
        async def stream(self, **request):
            nonlocal started
            started += 1
            async for chunk in super().stream(**request):
                yield chunk

    with pytest.raises(
        AssertionError, match=r"cancellation: AssertionError: after aclose\(\) the engine still works on 1"
    ):
        await check_engine(Deaf([]), vocabulary_size=VOCABULARY, running=lambda: started)

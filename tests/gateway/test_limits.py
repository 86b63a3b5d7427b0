"""What bounds a session, and what is left of it: deadlines, budgets, inexact logprobs, answers that fail together."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import EngineError
from agentcore_rl_toolkit.rollout_gateway import RolloutGateway, Status
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records

from .support import TINY, GenerateOnly, client_of, encode, renderer, serving
from .wires import WIRES

USER = {"role": "user", "content": "What is 1+1?"}
LONG = "one two three four five six seven eight nine ten<|im_end|>"


class Delayed(ScriptedBackend):
    """Fast at first, then so slow that only a deadline ends it."""

    async def stream(self, **request: Any):
        self.delay = 0.0 if not self.calls else 0.3
        async for chunk in super().stream(**request):
            yield chunk


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_gives_up_what_is_sampled_and_keeps_what_was(wire, stream):
    backend = Delayed(lambda _: encode(LONG), chunk=1)
    async with serving(backend) as gateway, client_of(gateway, deadline=1.0) as client:
        talker = WIRES[wire](client)
        begin = time.monotonic()
        first = await talker.ask([USER])
        status, data = await talker.post(talker.body([USER, first, USER], stream=stream))
        assert 0.5 < time.monotonic() - begin < 2.5
        assert status == (200 if stream else 400)  # a stream that has begun says it at its end
        assert "the session's time (1 s) is used up" in talker.error(data)
        assert backend.aborted == 1
        status, data = await talker.post(talker.body([USER, first, USER], stream=stream))
        assert (status, "time (1 s) is used up" in talker.error(data)) == (400, True)
        if wire == "chat":
            assert data["error"]["code"] == "deadline_exceeded"
        assert len(backend.calls) == 2  # the engine did not hear of the third
        [row] = await gateway.finish_session(client.session.session_id, reward=1.0)
    assert row.token_ids[row.prompt_length :] == encode(LONG)
    assert row.status == Status.COMPLETED
    assert check_records([row]) == len(encode(LONG))


async def test_a_deadline_aborts_an_engine_that_cannot_stream():
    class Waits(GenerateOnly):
        cancelled = 0

        async def generate(self, **request: Any) -> Any:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

    backend = Waits(ScriptedBackend([]))
    async with serving(backend) as gateway, client_of(gateway, deadline=0.2) as client:
        for n in (1, 2):
            status, data = await client.post({"messages": [USER], "n": n})
            assert (status, data["error"]["code"]) == (400, "deadline_exceeded")
        assert backend.cancelled == 1
        assert await gateway.finish_session(client.session.session_id) == []


async def test_sessions_without_a_deadline_or_before_it_are_served():
    async with serving(ScriptedBackend(lambda _: encode("x<|im_end|>"))) as gateway:
        for limits in ({}, {"deadline": 60.0}):
            async with client_of(gateway, **limits) as client:
                assert (await client.ask([USER]))["content"] == "x"


# -- logprobs that are not those of the distribution sampled from ------------------------------------------------

INEXACT = [("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("presence_penalty", 0.5), ("temperature", 0)]


@pytest.mark.parametrize("field", INEXACT, ids=lambda f: f[0])
async def test_inexact_turns_are_refused_masked_or_told(field, caplog):
    [name, value] = field
    backend = ScriptedBackend(lambda _: encode("word<|im_end|>"))
    words = len(encode("word<|im_end|>"))
    async with serving(backend, inexact="refuse") as gateway, client_of(gateway) as client:
        status, data = await client.post({"messages": [USER], name: value})
        assert (status, data["error"]["param"]) == (400, name)
        first = await client.ask([USER])  # nothing of it is left, and exact ones are welcome
        [row] = await gateway.finish_session(client.session.session_id)
        assert check_records([row]) == words
    async with serving(backend, inexact="mask") as gateway, client_of(gateway) as client:
        first = await client.ask([USER])
        await client.ask([USER, first, USER], **{name: value})
        [row] = await gateway.finish_session(client.session.session_id)
        assert row.metadata["exact_logprobs"] is False
        assert [turn["trained"] for turn in row.metadata["turns"]] == [True, False]
        assert [turn["exact_logprobs"] for turn in row.metadata["turns"]] == [True, False]
        assert check_records([row]) == words
        assert row.loss_mask == [1] * words + [0] * (row.response_length - words)
    caplog.clear()
    async with serving(backend) as gateway, client_of(gateway) as client:  # warn
        for _ in range(3):
            await client.ask([USER], **{name: value})
        rows = await gateway.finish_session(client.session.session_id)
        assert check_records(rows, sampled_twice=True) == 3 * words
        assert not any(row.metadata["exact_logprobs"] for row in rows)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([text for text in warnings if "inexact" in text and name in text]) == 1  # once a session


async def test_neutral_values_are_exact():
    neutral = {"top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0, "repetition_penalty": 1, "temperature": 0.5}
    async with (
        serving(ScriptedBackend(lambda _: encode("word<|im_end|>")), inexact="refuse") as gateway,
        client_of(gateway) as client,
    ):
        for fields in (neutral, {"top_k": -1, "temperature": 1}):
            await client.ask([USER], **fields)


async def test_overrides_make_a_request_exact():
    backend = ScriptedBackend(lambda _: encode("word<|im_end|>"))
    overrides = {"top_p": 1.0, "temperature": 1.0, "top_k": -1}
    async with (
        serving(backend, inexact="refuse") as gateway,
        client_of(gateway, sampling_overrides=overrides) as client,
    ):
        await client.ask([USER], top_p=0.5, temperature=0, top_k=3)
        [row] = await gateway.finish_session(client.session.session_id)
    assert row.metadata["exact_logprobs"] is True


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="inexact: 'warn' or 'mask' or 'refuse'"):
        RolloutGateway(backend=ScriptedBackend([]), renderer=renderer(TINY), inexact="ignore")  # type: ignore[arg-type]


# -- several answers of one request --------------------------------------------------------------------------------


class OneFails(ScriptedBackend):
    """Of the calls with these numbers none gives its last chunk."""

    failing: tuple[int, ...] = ()

    async def stream(self, **request: Any):
        number = len(self.calls)
        async for chunk in super().stream(**request):
            if chunk.finish_reason and number in self.failing:
                await asyncio.sleep(0.05)  # until the others are done
                raise EngineError("out of memory")
            yield chunk


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failing", [1, 2])
async def test_where_one_choice_fails_nothing_is_kept(stream, failing):
    backend = OneFails(lambda prompt: encode(f"n{len(prompt)}<|im_end|>"))
    backend.failing = (failing,)
    async with serving(backend) as gateway, client_of(gateway, max_turns=3) as client:
        first = await client.ask([USER])
        history = [USER, first, USER]
        status, data = await client.post({"messages": history, "n": 2, "stream": stream})
        assert status == (200 if stream else 502)
        assert "out of memory" in str(data[-1] if stream else data)
        tree = client.session.tree
        assert len(tree.turns) == 1
        assert client.session.sampled_tokens == len(tree.turns[0].output_ids)
        assert client.session.sampling == 0
        # Two of three turns are left, and the row simply goes on.
        status, data = await client.post({"messages": history, "n": 2, "stream": stream})
        assert status == 200
        status, data = await client.post({"messages": history})
        assert (status, data["error"]["code"]) == (400, "turn_limit_exceeded")
        rows = await gateway.finish_session(client.session.session_id)
    assert [row.metadata["fork"] for row in rows] == [None, None]
    assert [[t.get("choice") for t in row.metadata["turns"]] for row in rows] == [[None, 0], [None, 1]]
    check_records(rows, sampled_twice=True)


async def test_a_prompt_of_the_clients_own_goes_on_after_a_choice_failed():
    backend = OneFails(lambda prompt: encode(f"n{len(prompt)}<|im_end|>"))
    backend.failing = (1,)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    async with serving(backend) as gateway, client_of(gateway) as client:

        async def complete(prompt: str, n: int) -> tuple[int, Any]:
            url = f"{client.session.base_url}/completions"
            async with client.http.post(url, json={"prompt": prompt, "n": n}) as response:
                return response.status, await response.json()

        _, data = await complete(prompt, 1)
        longer = prompt + data["choices"][0]["text"] + "<|im_end|>\n" + prompt
        assert (await complete(longer, 2))[0] == 502
        assert (await complete(longer, 1))[0] == 200
        [row] = await gateway.finish_session(client.session.session_id)
    assert len(row.metadata["turns"]) == 2


async def test_choices_side_by_side_stay_within_the_budget():
    backend = ScriptedBackend(lambda _: encode("word<|im_end|>"), delay=0.05)
    async with serving(backend) as gateway, client_of(gateway, max_turns=5) as client:
        answers = await asyncio.gather(*(client.post({"messages": [USER], "n": 2}) for _ in range(5)))
        assert sorted(status for status, _ in answers) == [200, 200, 400, 400, 400]
        assert len(await gateway.finish_session(client.session.session_id)) == 4


async def test_an_answer_is_limited_to_the_tokens_that_are_left():
    backend = ScriptedBackend(lambda _: encode(LONG))
    async with serving(backend) as gateway, client_of(gateway, max_total_tokens=10) as client:
        first = await client.ask([USER], max_tokens=7)
        second = await client.ask([USER, first, USER])
        assert [params["max_tokens"] for _, params in backend.calls] == [7, 3]
        status, data = await client.post({"messages": [USER, first, USER, second, USER]})
        assert (status, data["error"]["code"]) == (400, "token_limit_exceeded")
        [row] = await gateway.finish_session(client.session.session_id)
    assert sum(row.loss_mask) == 10


async def test_a_cancelled_finish_leaves_the_session():
    backend = ScriptedBackend(lambda _: encode(LONG), chunk=1, delay=0.05)
    async with serving(backend) as gateway, client_of(gateway) as client:
        running = asyncio.create_task(client.post({"messages": [USER]}))
        await asyncio.sleep(0.1)
        finishing = asyncio.create_task(gateway.finish_session(client.session.session_id))
        await asyncio.sleep(0.05)
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
        assert (await running)[0] == 200
        [row] = await gateway.finish_session(client.session.session_id)
    assert row.response_length > 0


@pytest.mark.parametrize(
    "limits",
    [
        {"max_turns": 0},
        {"max_total_tokens": 0},
        {"min_response_tokens": 0},
        {"max_context_tokens": -1},
        {"deadline": float("nan")},
    ],
)
def test_limits_that_allow_nothing_are_refused(limits):
    gateway = RolloutGateway(backend=ScriptedBackend([]), renderer=renderer(TINY))
    with pytest.raises(ValueError, match=next(iter(limits))):
        gateway.create_session(**limits)
    assert len(gateway.sessions) == 0

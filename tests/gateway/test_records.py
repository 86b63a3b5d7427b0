"""What records and answers tell: statuses, rewards of turns, policy versions, the likeliest tokens, ties."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import EngineError
from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer, RolloutGateway, Status, ThreadedGatewayServer
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records, oracle_logprobs

from .support import TINY, GenerateOnly, client_of, encode, renderer, serving
from .test_prefill import OPEN_REASONING
from .wires import WIRES

USER = {"role": "user", "content": "What is 1+1?"}
ENGINES = pytest.mark.parametrize("engine", [lambda b: b, GenerateOnly], ids=["streams", "whole"])
STREAM = pytest.mark.parametrize("stream", [False, True])


# -- status ------------------------------------------------------------------------------------------------------


class Faulty(ScriptedBackend):
    """On demand fails behind the first chunk, or stalls there."""

    fails = stalls = False

    async def stream(self, **request: Any):
        async for chunk in super().stream(**request):
            yield chunk
            if self.fails:
                raise EngineError("out of memory")
            if self.stalls:
                await asyncio.sleep(30)


@STREAM
async def test_a_row_whose_last_request_failed_is_failed_until_one_succeeds(stream):
    backend = Faulty(lambda _: encode("a longer answer<|im_end|>"), chunk=1)
    async with serving(backend) as gateway:
        for later in (None, "the same", "another"):
            async with client_of(gateway) as client:
                first = await client.ask([USER])
                backend.fails = True
                for n in (2, 1):
                    status, data = await client.post({"messages": [USER, first, USER], "stream": stream, "n": n})
                    assert status == (200 if stream else 502), data
                backend.fails = False
                if later:
                    say = USER if later == "the same" else {"role": "user", "content": later}
                    await client.ask([USER, first, say])
                [row] = await gateway.finish_session(client.session.session_id)
            assert row.status == (Status.COMPLETED if later else Status.FAILED)
            assert row.metadata["fork"] is None
            check_records([row])


async def test_other_rows_and_client_errors_do_not_fail_a_row():
    backend = Faulty(lambda _: encode("a longer answer<|im_end|>"), chunk=1)
    async with serving(backend) as gateway, client_of(gateway) as client:
        first = await client.ask([USER])
        status, _ = await client.post({"messages": [USER, first, {"role": "wizard"}]})
        assert status == 400
        status, _ = await client.post({"messages": [USER, first, USER], "top_logprobs": 1, "logprobs": True})
        assert status == 400
        backend.fails = True
        status, _ = await client.post({"messages": [{"role": "user", "content": "elsewhere"}]})
        assert status == 502
        [row] = await gateway.finish_session(client.session.session_id)
    assert row.status == Status.COMPLETED


@STREAM
async def test_a_client_that_hung_up_and_never_came_back_is_aborted(stream):
    backend = Faulty(lambda _: encode("a longer answer<|im_end|>"), chunk=1)
    async with serving(backend) as gateway:
        for back in (False, True):
            async with client_of(gateway) as client:
                first = await client.ask([USER])
                backend.stalls = True
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(client.post({"messages": [USER, first, USER], "stream": stream}), 0.2)
                backend.stalls = False
                await until(lambda client=client: not client.session.sampling)
                if back:
                    await client.ask([USER, first, USER])
                [row] = await gateway.finish_session(client.session.session_id)
            assert row.status == (Status.COMPLETED if back else Status.ABORTED)
            assert len(row.metadata["turns"]) == 1 + back
            check_records([row])


@STREAM
async def test_a_request_that_the_sessions_end_cut_makes_its_row_aborted(stream):
    backend = Faulty(lambda _: encode("a longer answer<|im_end|>"), chunk=1)
    async with serving(backend) as gateway, client_of(gateway) as client:
        first = await client.ask([USER])
        other = await client.ask([{"role": "user", "content": "other"}])
        assert other["content"] == "a longer answer"
        backend.stalls = True
        running = asyncio.ensure_future(client.post({"messages": [USER, first, USER], "stream": stream}))
        await until(lambda: client.session.sampling)
        rows = await gateway.finish_session(client.session.session_id, wait=0.1)
        assert [row.status for row in rows] == [Status.ABORTED, Status.COMPLETED]
        running.cancel()
        await asyncio.wait([running])
    assert backend.aborted == 1
    check_records(rows)


async def test_a_row_that_ends_in_a_cut_answer_is_truncated():
    backend = ScriptedBackend(lambda _: encode("a longer answer<|im_end|>"))
    async with serving(backend) as gateway, client_of(gateway) as client:
        first = await client.ask([USER], max_tokens=2)
        second = await client.ask([USER, first, USER])
        await client.ask([USER, first, USER, second, USER], max_tokens=2)
        await client.ask([{"role": "user", "content": "other"}])
        rows = await gateway.finish_session(client.session.session_id)
    assert [row.status for row in rows] == [Status.TRUNCATED, Status.COMPLETED]
    assert [turn["finish_reason"] for turn in rows[0].metadata["turns"]] == ["length", "stop", "length"]


async def until(condition: Any) -> None:
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


# -- rewards of turns ----------------------------------------------------------------------------------------------


async def test_each_row_has_the_rewards_of_its_own_turns():
    backend = ScriptedBackend(lambda prompt: encode(f"n{len(prompt)}<|im_end|>"))
    async with serving(backend) as gateway, client_of(gateway) as client:
        one = await client.ask([USER])
        two = await client.ask([USER, one, USER])
        side = await client.ask([{"role": "user", "content": "A sub-agent's task."}])
        await client.ask([USER, one, {"role": "user", "content": "otherwise"}])
        await client.ask([USER, one, USER, two, USER])
        await client.ask([{"role": "user", "content": "A sub-agent's task."}, side, USER])
        session_id = client.session.session_id
        for wrong in ([], [1.0], [1.0] * 7):
            with pytest.raises(ValueError, match=f"turn_rewards: {len(wrong)} given, but 6 turns"):
                await gateway.finish_session(session_id, turn_rewards=wrong)
        for options in (
            {"turn_rewards": [0.0] * 5 + [math.nan]},
            {"reward": math.inf},
            {"turn_rewards": ["much"] * 6},
        ):
            with pytest.raises((ValueError, TypeError)):
                await gateway.finish_session(session_id, **options)
        assert gateway.sessions.get(client.session.api_key) is client.session
        rows = await gateway.finish_session(session_id, reward=0.5, turn_rewards=[0, 1, 2, 3, 4, 5])
        with pytest.raises(KeyError):
            await gateway.finish_session(session_id, turn_rewards=[])
    assert [row.turn_rewards for row in rows] == [[0.0, 3.0], [0.0, 1.0, 4.0], [2.0, 5.0]]
    assert all(len(row.turn_rewards) == len(row.metadata["turns"]) for row in rows)
    assert [row.metadata["fork"] for row in rows] == ["branch", None, "new_conversation"]
    assert {row.reward for row in rows} == {0.5}


async def test_a_session_that_stays_is_served_on():
    backend = ScriptedBackend(lambda _: encode("x<|im_end|>"))
    async with serving(backend) as gateway, client_of(gateway, session_id="a-caller-chosen-key-1") as client:
        first = await client.ask([USER])
        with pytest.raises(ValueError, match="turn_rewards"):
            await gateway.finish_session(client.session.session_id, turn_rewards=[1, 2])
        await client.ask([USER, first, USER])
        [row] = await gateway.finish_session(client.session.session_id, turn_rewards=[1, 2])
        assert row.turn_rewards == [1.0, 2.0]
        assert (await client.post({"messages": [USER]}))[0] == 410


def test_the_threaded_server_takes_turn_rewards_too():
    import openai

    gateway = RolloutGateway(backend=ScriptedBackend(lambda _: encode("x<|im_end|>")), renderer=renderer(TINY))
    with ThreadedGatewayServer(gateway) as server:
        session = server.create_session(deadline=60.0)
        with openai.OpenAI(base_url=session.base_url, api_key="EMPTY") as client:
            client.chat.completions.create(model="m", messages=[USER])
        with pytest.raises(ValueError, match="2 given, but 1 turns"):
            asyncio.run(server.finish_session(session.session_id, turn_rewards=[1.0, 2.0]))
        [row] = asyncio.run(server.finish_session(session.session_id, turn_rewards=[1.0]))
    assert row.turn_rewards == [1.0]


# -- policy versions -------------------------------------------------------------------------------------------------


class ChangesWeights(ScriptedBackend):
    """Reports the versions in the way that is asked for: per chunk, per token, or all at the end."""

    how = "chunk"

    def version(self, i: int) -> int:
        return 7 + i // 3

    async def stream(self, **request: Any):
        at = 0
        async for chunk in super().stream(**request):
            end = at + len(chunk.output_ids)
            match self.how:
                case "chunk":
                    chunk.policy_version = self.version(at)
                case "token":
                    chunk.policy_version = [self.version(i) for i in range(at, end)]
                case "end":
                    chunk.policy_version = [self.version(i) for i in range(end)] if chunk.finish_reason else None
                case "wrong":
                    chunk.policy_version = [1] * (len(chunk.output_ids) + 1)
            at = end
            yield chunk


@ENGINES
@pytest.mark.parametrize("how", ["chunk", "token", "end"])
async def test_versions_that_change_in_the_middle_are_those_of_their_tokens(engine, how):
    words = encode("one two three four five<|im_end|>")
    backend = ChangesWeights(lambda _: words, chunk=3)
    backend.how = how
    async with serving(engine(backend)) as gateway, client_of(gateway) as client:
        first = await client.ask([USER], stream=True)
        await client.ask([USER, first, USER])
        [row] = await gateway.finish_session(client.session.session_id)
    right = [backend.version(i) for i in range(len(words))]
    assert len(set(right)) > 2
    between = row.response_length - 2 * len(words)
    assert row.policy_versions == right + [None] * between + right
    assert [v is not None for v in row.policy_versions] == [bool(m) for m in row.loss_mask]


@ENGINES
async def test_versions_that_match_no_tokens_are_an_engine_error(engine):
    backend = ChangesWeights(lambda _: encode("one two three<|im_end|>"), chunk=2)
    backend.how = "wrong"
    async with serving(engine(backend)) as gateway, client_of(gateway) as client:
        status, data = await client.post({"messages": [USER]})
        assert (status, "policy_version" in data["error"]["message"]) == (502, True)
        assert await gateway.finish_session(client.session.session_id) == []


# -- the likeliest tokens --------------------------------------------------------------------------------------------


class Tops(ScriptedBackend):
    """Tells as many likeliest tokens as it is asked for: the sampled one, and its neighbours in the vocabulary."""

    top_logprobs = True
    forgets = False

    async def stream(self, **request: Any):
        k = request["sampling_params"].get("top_logprobs", 0)
        async for chunk in super().stream(**request):
            pairs = list(zip(chunk.output_ids, chunk.output_log_probs, strict=True))
            if k:
                chunk.extra["top_logprobs"] = [[(i + j, p - j) for j in range(k)] for i, p in pairs][self.forgets :]
            yield chunk


@ENGINES
@STREAM
async def test_the_likeliest_tokens_reach_the_client(engine, stream):
    words = encode("It is 2.<|im_end|>")
    backend = Tops(lambda _: words, chunk=2)
    served = engine(backend)
    served.top_logprobs = True
    async with serving(served) as gateway, client_of(gateway) as client:
        body = {"messages": [USER], "stream": stream, "logprobs": True}
        _, none = await client.post(body)
        _, tops = await client.post({**body, "top_logprobs": 3})
        rows = await gateway.finish_session(client.session.session_id)
    assert "top_logprobs" not in backend.calls[0][1]
    prompt, params = backend.calls[1]
    assert params["top_logprobs"] == 3
    logprobs = oracle_logprobs(prompt, words)
    decode = renderer(TINY).decode

    def told(token: int, logprob: float) -> dict[str, Any]:
        return {"token": decode([token]), "logprob": logprob, "bytes": list(decode([token]).encode())}

    right = [
        {**told(i, p), "top_logprobs": [told(i + j, p - j) for j in range(3)]}
        for i, p in zip(words, logprobs, strict=True)
    ]
    assert content(tops, stream) == right
    assert content(none, stream) == [{**entry, "top_logprobs": []} for entry in right]
    check_records(rows, sampled_twice=True)


def content(data: Any, stream: bool) -> list[dict[str, Any]]:
    choices = [c for event in data[:-1] for c in event["choices"]] if stream else data["choices"]
    return [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]


@STREAM
@pytest.mark.parametrize(
    ("backend", "fields"),
    [
        (ScriptedBackend, {"logprobs": True, "top_logprobs": 3}),
        (Tops, {"top_logprobs": 3}),
        (Tops, {"top_logprobs": 3, "logprobs": False}),
        (Tops, {"logprobs": True, "top_logprobs": 21}),
        (Tops, {"logprobs": True, "top_logprobs": -1}),
        (Tops, {"logprobs": True, "top_logprobs": "all"}),
    ],
)
async def test_top_logprobs_that_cannot_be_told_are_refused(backend, fields, stream):
    async with serving(backend([])) as gateway, client_of(gateway) as client:
        status, data = await client.post({"messages": [USER], "stream": stream, **fields})
        assert (status, data["error"]["param"]) == (400, "top_logprobs")
        assert await gateway.finish_session(client.session.session_id) == []


async def test_top_logprobs_of_none_ask_for_none():
    backend = ScriptedBackend(lambda _: encode("x<|im_end|>"))
    async with serving(backend) as gateway, client_of(gateway) as client:
        for fields in ({"top_logprobs": 0}, {"top_logprobs": None}, {"logprobs": True, "top_logprobs": 0}):
            assert (await client.post({"messages": [USER], **fields}))[0] == 200
    assert all("top_logprobs" not in params for _, params in backend.calls)


async def test_an_engine_that_forgets_some_is_at_fault():
    backend = Tops(lambda _: encode("It is 2.<|im_end|>"))
    backend.forgets = True
    async with serving(backend) as gateway, client_of(gateway) as client:
        status, data = await client.post({"messages": [USER], "logprobs": True, "top_logprobs": 1})
        assert (status, "top_logprobs for" in data["error"]["message"]) == (502, True)
        assert await gateway.finish_session(client.session.session_id) == []


# -- what else metadata says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
async def test_ties_are_counted_and_go_to_the_latest(wire):
    backend = ScriptedBackend(lambda _: encode("same<|im_end|>"))
    async with serving(backend) as gateway, client_of(gateway) as client:
        talker = WIRES[wire](client)
        first = await talker.ask([USER])
        await talker.ask([USER])
        await talker.ask([USER, first, USER])
        rows = await gateway.finish_session(client.session.session_id)
    assert [row.metadata["ties"] for row in rows] == [1, 1]
    assert [len(row.metadata["turns"]) for row in rows] == [1, 2]
    assert [row.metadata["abandoned"] for row in rows] == [True, False]
    assert rows[1].metadata["turns"][0]["fork"] == "retry"


async def test_turns_that_a_template_would_have_shown_otherwise_are_counted():
    """This template drops reasoning from history if the client does not send it; the model here still sees it."""
    source = OPEN_REASONING.replace("m.reasoning_content -", "m.reasoning_content and loop.last -")
    thinking = HfTemplateRenderer(TINY, chat_template=source)
    said = encode("Hm.\n</think>\n\nTwo.<|im_end|>")
    for history, rows_right in (("preserve", [2]), ("template", [0, 0, 0])):
        backend = ScriptedBackend(lambda _: said)
        async with serving(backend, rendered_by=thinking, history=history) as gateway, client_of(gateway) as client:
            talk: list[dict[str, Any]] = []
            for _ in range(3):
                talk.append(USER)
                talk.append(await client.ask(talk))
            rows = await gateway.finish_session(client.session.session_id)
        assert [row.metadata["template_divergent_turns"] for row in rows] == rows_right
        check_records(rows, sampled_twice=True)
        turns = [turn.get("template_divergence") for turn in rows[0].metadata["turns"]]
        if history == "preserve":
            assert turns == [None, "reasoning_dropped", "reasoning_dropped"]
        else:
            assert [row.metadata["fork"] for row in rows] == [None, "reasoning_dropped", "reasoning_dropped"]
        assert {row.metadata["history"] for row in rows} == {history}

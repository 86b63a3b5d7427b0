"""``run_rollouts`` against a real runtime, a real S3, a real gateway and real agent processes."""

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from functools import partialmethod

import pytest
from aiohttp import ClientSession, web
from tokenizers import Tokenizer

from agentcore_rl_toolkit import Outcome, Rollout, RolloutClient, run_rollouts
from agentcore_rl_toolkit.client._one import Order, judge
from agentcore_rl_toolkit.client._sweep import Pace
from agentcore_rl_toolkit.errors import SetupError
from agentcore_rl_toolkit.local import Lifecycle, LocalAgentCore
from agentcore_rl_toolkit.local.policy import FOLDER
from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer, RolloutGateway, ThreadedGatewayServer, gateway_app
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records
from agentcore_rl_toolkit.rollouts import _rollout, _Slot, session_seed

AGENT = """
import os, time
from openai import OpenAI
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()

@app.rollout_entrypoint
def solve(payload):
    config = payload["_rollout"]
    match payload["do"]:
        case "raise":
            raise ValueError(f"no luck with {config['api_key']}")
        case "die":
            os._exit(3)
        case "sleep":
            time.sleep(300)
        case "return":
            return payload["result"]
    client = OpenAI(base_url=config["base_url"], api_key=config["api_key"], max_retries=0)
    messages = [{"role": "user", "content": payload["prompt"]}]
    reply = client.chat.completions.create(model="m", messages=messages, max_tokens=payload.get("max_tokens", 20))
    return {"rewards": [0.0, 0.5], "reply": reply.choices[0].message.content, "url": config["base_url"]}

app.run()
"""

ASK = {"do": "ask", "prompt": "What is 6 times 7?"}
ANSWER = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode("42<|im_end|>", add_special_tokens=False).ids


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAgentCore]:
    folder = tmp_path_factory.mktemp("agent")
    (folder / "rl_app.py").write_text(AGENT)
    with (
        LocalAgentCore("python rl_app.py", cwd=folder, lifecycle=Lifecycle(stop_grace=1.0)) as local,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in local.environment().items():
            patch.setenv(name, value)
        yield local


@pytest.fixture
def client(local: LocalAgentCore) -> RolloutClient:
    return RolloutClient(local.agent_runtime_arn, local.bucket, "tests", tps_limit=1000, model_id="m")


@pytest.fixture
def engine() -> ScriptedBackend:
    return ScriptedBackend(lambda prompt_ids: ANSWER)


@pytest.fixture
def gateway(engine: ScriptedBackend) -> Iterator[ThreadedGatewayServer]:
    with ThreadedGatewayServer(RolloutGateway(backend=engine, renderer=HfTemplateRenderer(FOLDER))) as server:
        yield server


async def collect(*args: object, **options: object) -> list[Rollout]:
    rollouts = [rollout async for rollout in run_rollouts(*args, **options)]
    return sorted(rollouts, key=lambda r: (r.payload_index, r.sample_index))


async def assert_nothing_is_left(local: LocalAgentCore, gateway: ThreadedGatewayServer, pids: list[int] = ()) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (local.sessions() or any(map(alive, pids))):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    assert local.sessions() == []
    assert not any(map(alive, pids))
    assert len(gateway.gateway.sessions) == 0


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_rollout_joins_result_reward_and_records(client, gateway, engine, local):
    rollouts = await collect(client, gateway, [ASK, ASK], samples=2, run="joins", seed=3)

    assert [(r.payload_index, r.sample_index) for r in rollouts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rollout in rollouts:
        assert rollout.outcome is Outcome.SUCCEEDED
        assert rollout.error is None
        assert rollout.reward == 0.5  # the last of the list
        assert rollout.result["reply"] == "42"
        assert check_records(rollout.records) == len(ANSWER)
        assert [(r.reward, r.rollout_id) for r in rollout.records] == [(0.5, rollout.session_id)]
        phases = {"queued", "started", "running", "fetched", "finish"}
        assert phases | {"started_at", "total"} == set(rollout.timings)
        assert all(rollout.timings[phase] >= 0 for phase in phases)
        assert sum(rollout.timings[phase] for phase in phases) == pytest.approx(rollout.timings["total"], abs=0.05)
    assert rollouts[3].input_id == "joins-00000001-001"
    assert len({r.session_id for r in rollouts}) == 4
    seeds = {params["seed"] for _, params in engine.calls}
    assert seeds == {session_seed(3, payload, sample) for payload in (0, 1) for sample in (0, 1)}
    assert len(seeds) == 4
    await assert_nothing_is_left(local, gateway)


async def test_every_failure_has_its_type_and_ends_nothing_else(client, gateway, local):
    payloads = [
        {"do": "raise"},
        {"do": "die"},
        {"do": "sleep"},
        {"do": "return", "result": {"rewards": "high"}},
        {"do": "return", "result": ["not", "a", "dict"]},
        {"do": "return", "result": {"rewards": 1.0}, "odd": math.nan},  # not JSON: never sent
        {"do": "return", "result": {"answer": 42}},
        {"do": "return", "result": {"rewards": True}},
    ]
    rollouts = await collect(client, gateway, payloads, timeout=4.0)

    assert [r.outcome.value for r in rollouts] == [
        "agent_failed", "timed_out", "timed_out", "agent_failed", "agent_failed", "rejected",
        "succeeded", "succeeded",
    ]  # fmt: skip
    assert [r.reward for r in rollouts] == [None] * 7 + [1.0]
    raised, _, _, odd_reward, no_dict, *_ = rollouts
    assert "no luck with ***" in raised.error
    assert "traceback" in raised.result
    assert "'high'" in odd_reward.error
    assert "dict" in no_dict.error
    for rollout in rollouts[:6]:
        assert rollout.error
        assert rollout.failed
        assert rollout.records == []
    await assert_nothing_is_left(local, gateway)


async def test_an_agent_that_does_not_start_is_a_failure_of_the_runtime(client, gateway, local):
    arn = local.register("broken", [sys.executable, "-c", "raise SystemExit('no GPU here')"])
    broken = RolloutClient(arn, local.bucket, "tests", max_retry_attempts=0, model_id="m")
    [rollout] = await collect(broken, gateway, [ASK])
    assert (rollout.outcome, rollout.reward, rollout.records) == (Outcome.RUNTIME_FAILED, None, [])
    assert "no GPU here" in rollout.error
    await assert_nothing_is_left(local, gateway)


async def test_a_payload_that_the_agent_refuses_is_rejected(client, gateway, local):
    [rollout] = await collect(client, gateway, [ASK], sampling_params="hot")
    assert (rollout.outcome, rollout.reward, rollout.records) == (Outcome.REJECTED, None, [])
    assert "sampling_params" in rollout.error
    await assert_nothing_is_left(local, gateway)


async def test_a_cut_answer_is_truncated_and_keeps_its_reward(client, gateway):
    [rollout] = await collect(client, gateway, [{**ASK, "max_tokens": 1}])
    assert (rollout.outcome, rollout.reward) == (Outcome.TRUNCATED, 0.5)
    assert [r.status.value for r in rollout.records] == ["truncated"]
    assert not rollout.failed


async def test_a_name_that_was_used_before_gives_rows_all_the_same(client, gateway, local):
    first = await collect(client, gateway, [ASK], samples=2, run="again")
    second = await collect(client, gateway, [ASK], samples=2, run="again")
    assert [r.input_id for r in first] == [r.input_id for r in second]
    assert [len(r.records) for r in first + second] == [1] * 4
    assert len({r.session_id for r in first + second}) == 4


async def test_without_a_gateway_a_name_that_was_used_before_gives_its_results(client):
    returned = {"do": "return", "result": {"rewards": 1.0}}
    [first] = await collect(client, None, [returned], run="evaluated")
    [second] = await collect(client, None, [{**returned, "result": {"rewards": 0.0}}], run="evaluated")
    assert (first.reward, second.reward) == (1.0, 1.0)
    assert first.session_id == second.session_id


async def test_without_a_gateway_there_are_results_and_no_records(client, gateway):
    session = gateway.create_session()
    [rollout] = await collect(client, None, [ASK], base_url=session.base_url, api_key=session.api_key)
    assert (rollout.outcome, rollout.reward, rollout.records) == (Outcome.SUCCEEDED, 0.5, [])
    assert len(await gateway.finish_session(session.session_id)) == 1


async def test_agents_tell_the_gateway_when_their_results_are_written(client, gateway, monkeypatch):
    # The first sweep comes late, so that hints are what brings the results.
    monkeypatch.setattr(Order, "__init__", partialmethod(Order.__init__, pace=Pace(30.0, 30.0)))
    began = time.monotonic()
    rollouts = await collect(client, gateway, [ASK, {"do": "raise"}], samples=2, timeout=60.0)
    assert time.monotonic() - began < 25
    assert [r.outcome for r in rollouts] == 2 * [Outcome.SUCCEEDED] + 2 * [Outcome.AGENT_FAILED]


async def test_a_session_s_done_url_is_opened_by_its_key_alone(gateway):
    told: list[str] = []
    one = gateway.create_session(on_done=lambda: told.append("one"))
    two = gateway.create_session()  # nobody waits for it

    async def post(url: str, body: bytes = b"anything") -> int:
        async with ClientSession() as http, http.post(url, data=body) as response:
            return response.status

    assert [await post(one.done_url), await post(one.done_url), await post(two.done_url)] == [204, 204, 204]
    assert await post(one.done_url.replace(one.api_key, "guess")) == 401
    assert told == ["one", "one"]
    await gateway.finish_session(one.session_id)
    assert await post(one.done_url) == 410


async def test_a_gateway_that_died_is_told_by_the_agent(client, gateway, local):
    gateway.shutdown()
    [asked, returned] = await collect(client, gateway, [ASK, {"do": "return", "result": {"rewards": 1.0}}])
    assert (asked.outcome, asked.reward) == (Outcome.AGENT_FAILED, None)
    assert "onnection" in asked.error
    assert (returned.outcome, returned.reward) == (Outcome.RUNTIME_FAILED, None)
    assert "records are lost" in returned.error
    await assert_nothing_is_left(local, type("Gateway", (), {"gateway": type("G", (), {"sessions": []})}))


async def test_a_gateway_in_the_same_event_loop_works_as_well(client, engine):
    gateway = RolloutGateway(backend=engine, renderer=HfTemplateRenderer(FOLDER))
    runner = web.AppRunner(gateway_app(gateway))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gateway.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    [good, bad] = await collect(client, gateway, [ASK, {"do": "raise"}])
    await runner.cleanup()
    assert (good.outcome, check_records(good.records)) == (Outcome.SUCCEEDED, len(ANSWER))
    assert (bad.outcome, bad.records) == (Outcome.AGENT_FAILED, [])
    assert len(gateway.sessions) == 0


async def test_a_gateway_that_was_never_started_is_a_setup_error(client, engine):
    gateway = ThreadedGatewayServer(RolloutGateway(backend=engine, renderer=HfTemplateRenderer(FOLDER)))
    with pytest.raises(SetupError, match="start its server"):
        await collect(client, gateway, [ASK])


async def test_a_setup_error_ends_the_batch_at_once(client, gateway, local):
    wrong = RolloutClient(client.agent_runtime_arn[:-1] + "x", local.bucket, "tests", model_id="m")
    started = time.monotonic()
    with pytest.raises(SetupError):
        await collect(wrong, gateway, ({"do": "sleep"} for _ in range(100_000)), max_concurrent=4)
    assert time.monotonic() - started < 15
    await assert_nothing_is_left(local, gateway)


async def test_payloads_that_raise_end_the_batch_with_their_error(client, gateway, local):
    def payloads():
        yield {"do": "sleep"}
        raise RuntimeError("the data set is broken")

    with pytest.raises(RuntimeError, match="the data set is broken"):
        await collect(client, gateway, payloads())
    await assert_nothing_is_left(local, gateway)


async def test_cancelling_stops_the_sessions_and_forgets_them(client, gateway, local):
    batch = asyncio.create_task(collect(client, gateway, [{"do": "sleep"}] * 3))
    while len(pids := [s.pid for s in local.sessions() if s.pid]) < 3:  # noqa: ASYNC110 - processes set no event
        await asyncio.sleep(0.02)
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    await assert_nothing_is_left(local, gateway, pids)


async def test_cancelling_while_sessions_start_leaves_none(client, gateway, local):
    for delay in (0.0, 0.05, 0.15, 0.3):
        batch = asyncio.create_task(collect(client, gateway, [{"do": "sleep"}] * 3))
        await asyncio.sleep(delay)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        await asyncio.sleep(0.3)  # what was on its way has arrived
        await assert_nothing_is_left(local, gateway)


async def test_leaving_the_loop_early_stops_the_rest(client, gateway, local):
    payloads = [{"do": "return", "result": {}}, {"do": "sleep"}, {"do": "sleep"}]
    async with aclosing(run_rollouts(client, gateway, payloads)) as rollouts:
        async for rollout in rollouts:
            assert rollout.payload_index == 0
            break
    await assert_nothing_is_left(local, gateway)


async def test_no_more_than_max_concurrent_run_and_a_slow_consumer_holds_them_back(client, gateway, local):
    handed_out = most = 0

    def payloads():
        nonlocal handed_out
        while handed_out < 8:
            handed_out += 1
            yield {"do": "return", "result": {}}

    async with aclosing(run_rollouts(client, gateway, payloads(), max_concurrent=2)) as rollouts:
        await anext(rollouts)
        for _ in range(15):
            await asyncio.sleep(0.1)
            most = max(most, len(local.sessions()))
        assert handed_out <= 5  # one is here, two wait in the queue, each worker holds one
        async for _ in rollouts:
            most = max(most, len(local.sessions()))
    assert handed_out == 8
    assert 1 <= most <= 2


async def test_a_line_of_json_is_strict_and_holds_no_key(client, gateway):
    [rollout] = await collect(client, gateway, [ASK])
    line = rollout.to_json()
    assert "\n" not in line
    parsed = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert parsed["outcome"] == "succeeded"
    assert parsed["records"][0]["token_ids"] == rollout.records[0].token_ids
    assert parsed["result"]["url"].endswith("/sessions/***/v1")


@pytest.mark.parametrize("bad", [{"samples": 0}, {"max_concurrent": 0}])
async def test_numbers_below_one_are_refused(client, bad):
    with pytest.raises(ValueError, match="at least 1"):
        await collect(client, None, [ASK], **bad)


@pytest.mark.parametrize(
    ("result", "outcome", "reward"),
    [
        ({"rewards": 1}, "succeeded", 1.0),
        ({"rewards": [0.25, 0.75]}, "succeeded", 0.75),
        ({"rewards": []}, "succeeded", None),
        ({"reward": 0.0}, "succeeded", 0.0),
        ({"rewards": None, "reward": 2}, "succeeded", 2.0),
        ({}, "succeeded", None),
        ({"rewards": math.inf}, "agent_failed", None),
        ({"rewards": 10**400}, "agent_failed", None),
        ({"rewards": {"a": 1}}, "agent_failed", None),
        ({"rewards": ["1.0"]}, "agent_failed", None),
        ({"status_code": 500, "rewards": 1.0}, "agent_failed", None),
        ({"status_code": 500, "outcome": "runtime_failed"}, "runtime_failed", None),
    ],
)
def test_what_a_result_object_is_worth(result, outcome, reward):
    rollout = _rollout(_Slot("run", {}, 0, 0, 0), judge(result))
    assert (rollout.outcome.value, rollout.reward) == (outcome, reward)
    assert (rollout.error is None) == (outcome == "succeeded")


def test_session_seeds_differ_in_every_coordinate_and_fit_31_bits():
    seeds = {session_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert session_seed(1, 2, 3) == session_seed(1, 2, 3)

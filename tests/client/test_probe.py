"""Agents that die without a word, in a real runtime: the client asks whether they still run."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentcore_rl_toolkit import Outcome, RolloutClient
from agentcore_rl_toolkit.client import _sessions
from agentcore_rl_toolkit.errors import InvocationError, SetupError
from agentcore_rl_toolkit.local import Lifecycle, LocalAgentCore
from agentcore_rl_toolkit.protocol import PROBE_FIELD

from .conftest import ARN, BUCKET, Action, Forward, World, answer, garble, is_kind

AGENT = """
import asyncio, os, time
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()

def ran(payload):
    with open(os.environ["RUNS"], "a") as file:
        file.write(payload["name"] + "\\n")

async def block(payload):
    time.sleep(payload["seconds"])  # and with it the loop that answers invokes
    return {"rewards": 1.0}

@app.rollout_entrypoint
def work(payload):
    ran(payload)
    if payload["do"] == "block":
        return block(payload)
    time.sleep(payload["seconds"])
    if payload["do"] == "die":
        os._exit(9)
    return {"rewards": 1.0}

app.run()
"""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAgentCore]:
    folder = tmp_path_factory.mktemp("agent")
    (folder / "rl_app.py").write_text(AGENT)
    with (
        LocalAgentCore(
            "python rl_app.py", cwd=folder, env={"RUNS": str(folder / "runs")}, lifecycle=Lifecycle(stop_grace=1.0)
        ) as local,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RUNS", str(folder / "runs"))
        for name, value in local.environment().items():
            patch.setenv(name, value)
        yield local


def client_of(local: LocalAgentCore, interval: float | None) -> RolloutClient:
    arn = local.agent_runtime_arn
    return RolloutClient(
        arn, local.bucket, "probes", tps_limit=None, new_sessions_per_minute=None, probe_interval=interval
    )


def assert_no_session_is_left(local: LocalAgentCore) -> None:
    deadline = time.monotonic() + 15
    while local.sessions():
        assert time.monotonic() < deadline, local.sessions()
        time.sleep(0.05)


def test_a_lost_agent_is_told_long_before_the_timeout_and_the_others_go_on(
    local: LocalAgentCore, tmp_path: Path
) -> None:
    payloads = [
        {"name": "lost", "do": "die", "seconds": 0.2},
        {"name": "long", "do": "return", "seconds": 4.0},
        {"name": "blocked", "do": "block", "seconds": 4.0},
        {"name": "short", "do": "return", "seconds": 0.0},
    ]

    def run() -> list[Any]:
        with client_of(local, 0.5) as client:
            return list(client.run_batch(payloads, 4, timeout=120, ordered=True, run_dir=tmp_path))

    began = time.monotonic()
    lost, *others = run()
    assert time.monotonic() - began < 30
    assert (lost.outcome, lost.success, lost.attempts) == (Outcome.RUNTIME_FAILED, False, 1)
    assert "lost its rollout" in lost.error
    assert [item.outcome for item in others] == [Outcome.SUCCEEDED] * 3
    runs = Path(os.environ["RUNS"])
    assert sorted(runs.read_text().split()) == ["blocked", "long", "lost", "short"]  # asked many times, run once
    assert_no_session_is_left(local)
    again = run()  # a second attempt, for the lost one alone
    assert [item.attempts for item in again] == [2, 1, 1, 1]
    assert sorted(runs.read_text().split()) == ["blocked", "long", "lost", "lost", "short"]
    assert_no_session_is_left(local)


def test_a_probe_that_meets_the_end_of_its_session_starts_none_anew(local: LocalAgentCore) -> None:
    payloads = [{"name": "many", "do": "return", "seconds": i % 7 / 10} for i in range(40)]
    with client_of(local, 0.01) as client:
        items = list(client.run_batch(payloads, 20, timeout=60))
        assert [item.outcome for item in items] == [Outcome.SUCCEEDED] * 40
        assert_no_session_is_left(local)


def test_a_single_future_is_told_as_well(local: LocalAgentCore) -> None:
    with client_of(local, 0.3) as client:
        future = client.invoke({"name": "single", "do": "die", "seconds": 0.1})
        with pytest.raises(InvocationError, match="lost its rollout"):
            future.result(timeout=60)
    assert_no_session_is_left(local)


def probing(asked: Callable[[Any], Awaitable[web.Response]]) -> Action:
    """An agent that says that it can be asked. ``asked``: its answer, given how to let the stub answer."""

    async def act(request: web.Request, forward: Forward) -> web.Response:
        if PROBE_FIELD in (await request.json())["_rollout"]:
            return await asked(forward)
        real = await forward()
        assert isinstance(real.body, bytes)
        return web.json_response({**json.loads(real.body), "probes": True})

    return act


def status(text: str) -> web.Response:
    return web.json_response({"status": text})


def test_probes_that_agents_hold_up_start_no_session_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that wait behind others: the stub takes each for an invoke."""

    async def late(forward: Forward) -> web.Response:
        await asyncio.sleep(2.0)
        return await forward()

    monkeypatch.setattr(_sessions, "_PROBES", 2)
    world.runtime.on(is_kind("invoke"), probing(late))
    client = world.client(probe_interval=0.2)
    items = list(client.run_batch([{"seconds": 1.0}] * 6, 6, timeout=30))
    assert [item.success for item in items] == [True] * 6
    time.sleep(3.0)
    assert world.stub.open == {}


def test_a_result_that_was_cut_on_its_way_is_not_taken_for_a_lost_one(world: World) -> None:
    cut = 0

    async def honest(_: Forward) -> web.Response:
        return status("unknown" if cut else "processing")

    async def cut_twice(request: web.Request, forward: Forward) -> web.StreamResponse:
        nonlocal cut
        whole = await forward()
        if whole.status != 200 or cut == 2:
            return whole
        cut += 1
        return await garble(5)(request, forward)

    world.runtime.on(is_kind("invoke"), probing(honest))
    world.s3.on(is_kind("get"), cut_twice)
    items = list(world.client(probe_interval=0.05).run_batch([{"seconds": 1.0}], 1, timeout=30))
    assert [item.outcome for item in items] == [Outcome.SUCCEEDED]
    assert cut == 2


def test_a_result_that_may_not_be_read_for_a_while_is_not_taken_for_a_lost_one(world: World) -> None:
    """S3 has said of it before that it is not there: so forbidden means something else."""
    began = time.monotonic()

    async def honest(_: Forward) -> web.Response:
        return status("processing" if time.monotonic() - began < 1.5 else "unknown")

    async def forbid(request: web.Request, forward: Forward) -> web.StreamResponse:
        away = 1.0 < time.monotonic() - began < 3.0
        return await (answer(403, error="AccessDenied")(request, forward) if away else forward())

    world.runtime.on(is_kind("invoke"), probing(honest))
    world.s3.on(is_kind("get"), forbid)
    items = list(world.client(probe_interval=0.1).run_batch([{"seconds": 1.2}], 1, timeout=30))
    assert [item.outcome for item in items] == [Outcome.SUCCEEDED]


def test_an_odd_answer_to_a_probe_is_not_the_last_word(world: World) -> None:
    answers = [web.Response(text="[" * 200_000), web.Response(text="7"), status("processing"), status("unknown")]
    asked = iter(answers)

    async def odd(_: Forward) -> web.Response:
        return next(asked)

    world.runtime.on(is_kind("invoke"), probing(odd))
    items = list(world.client(probe_interval=0.1).run_batch([{"seconds": 20.0}], 1, timeout=30))
    assert [item.outcome for item in items] == [Outcome.RUNTIME_FAILED]
    assert "lost its rollout" in str(items[0].error)


@pytest.mark.slow
def test_workers_of_one_server_are_not_asked_in_each_other_s_place(local: LocalAgentCore, tmp_path: Path) -> None:
    (tmp_path / "app_module.py").write_text(AGENT.replace("app.run()", ""))
    command = "python -m uvicorn app_module:app --workers 2 --port {port}"
    runs = {"RUNS": str(tmp_path / "runs")}
    with (
        LocalAgentCore(command, cwd=tmp_path, env=runs, lifecycle=Lifecycle(stop_grace=1.0)) as workers,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in workers.environment().items():
            patch.setenv(name, value)
        with client_of(workers, 0.2) as client:
            payloads = [{"name": f"n{i}", "do": "return", "seconds": 3.0} for i in range(3)]
            assert [item.outcome for item in client.run_batch(payloads, 3, timeout=60)] == [Outcome.SUCCEEDED] * 3


def test_a_rollout_with_an_address_of_its_own_is_asked_for_by_it(local: LocalAgentCore) -> None:
    with client_of(local, 0.3) as client:
        future = client.invoke({"name": "elsewhere", "do": "return", "seconds": 2.0}, exp_id="other")
        assert future.result(timeout=60)["rewards"] == 1.0
        assert future.result_key.startswith("other/")


def test_agents_that_know_no_probe_are_not_asked(world: World) -> None:
    items = list(world.client(probe_interval=0.05).run_batch([{"seconds": 1.0}] * 5, 5))
    assert [item.success for item in items] == [True] * 5
    assert world.stub.counts["invoke"] == 5


def test_the_interval_is_checked() -> None:
    with pytest.raises(SetupError, match="probe_interval"):
        RolloutClient(ARN, BUCKET, "exp", probe_interval=0)

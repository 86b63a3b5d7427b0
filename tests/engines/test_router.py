"""``ReplicaRouter`` over fake servers: affinity, load, failover, versions."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing, asynccontextmanager, contextmanager

import pytest

from agentcore_rl_toolkit.errors import EngineError
from agentcore_rl_toolkit.rollout_gateway import ReplicaRouter, SglangBackend, VllmBackend
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_engine, oracle_logprobs

from .fakes import EOS, VOCABULARY, FakeSglang, FakeVllm, answer, decode

PROMPT = [1, 2, 3]


def request(session: str | None = None, tokens: int = 6) -> dict:
    return {"prompt_ids": PROMPT, "sampling_params": {"max_tokens": tokens}, "session_id": session}


@asynccontextmanager
async def replicas(*servers, **options):
    """The servers, started, behind a router."""
    for server in servers:
        await server.start()
    kind = SglangBackend if isinstance(servers[0], FakeSglang) else VllmBackend
    router = ReplicaRouter([kind(server.url, retries=0) for server in servers], **options)
    for replica in router.replicas:
        await replica.backend.verify()
    for server in servers:
        server.requests.clear()
    try:
        yield router
    finally:
        await router.aclose()
        for server in servers:
            await server.stop()


@contextmanager
def busy(replica):
    """Within, new sessions go to the others."""
    replica.running += 10
    yield
    replica.running -= 10


async def test_a_router_is_an_engine():
    servers = [FakeVllm(delay=0.001), FakeVllm(delay=0.001)]
    async with replicas(*servers) as router:
        results = await check_engine(
            router,
            vocabulary_size=VOCABULARY,
            oracle=oracle_logprobs,
            decode=decode,
            running=lambda: sum(server.running for server in servers),
            stop_token_ids=[EOS],
        )
        assert set(results.values()) == {"passed"}
        assert [replica.running for replica in router.replicas] == [0, 0]


async def test_a_session_stays_and_new_ones_go_where_the_least_runs():
    servers = [FakeVllm(delay=0.005), FakeVllm(delay=0.005), FakeVllm(delay=0.005)]
    async with replicas(*servers) as router:
        for _ in range(3):
            await asyncio.gather(*(router.generate(**request(f"session-{i}")) for i in range(9)))
        seen = [Counter(h["X-Session-ID"] for _, _, h in server.requests) for server in servers]
        assert [set(counter.values()) for counter in seen] == [{3}, {3}, {3}], "a session moved"
        assert [len(counter) for counter in seen] == [3, 3, 3]


async def test_a_turn_that_has_not_begun_goes_to_another_replica_and_its_session_with_it():
    dead, alive = FakeVllm(), FakeVllm()
    async with replicas(dead, alive, cooldown=30.0) as router:
        await router.generate(**request("mine"))
        assert (len(dead.requests), len(alive.requests)) == (1, 0)
        await dead.stop()
        for _ in range(3):
            assert (await router.generate(**request("mine"))).output_ids == answer(PROMPT)[:6]
        assert len(alive.requests) == 3
        down = router.replicas[0]
        assert down.failures == 1
        assert "could not be reached" in down.error


async def test_a_turn_that_has_begun_fails_typed():
    broken, other = FakeVllm("drop"), FakeVllm()
    async with replicas(broken, other, cooldown=30.0) as router:
        with pytest.raises(EngineError, match="broke off") as caught:
            await router.generate(**request("mine"))
        assert caught.value.retry_after is not None
        assert other.requests == [], "sampled twice"
        await router.generate(**request("mine"))
        assert len(other.requests) == 1


async def test_what_is_wrong_with_the_request_is_no_fault_of_the_replica():
    servers = [FakeVllm(), FakeVllm()]
    async with replicas(*servers) as router:
        with pytest.raises(EngineError, match="maximum context length"):
            await router.generate(prompt_ids=[1] * 5000, sampling_params={"max_tokens": 2})
        assert [replica.failures for replica in router.replicas] == [0, 0]
        assert sorted(len(server.requests) for server in servers) == [0, 1]


async def test_a_server_whose_engine_is_dead_is_no_fault_of_the_request():
    sick, well = FakeVllm(), FakeVllm()
    async with replicas(sick, well, cooldown=0.05) as router:
        sick.broken = 500
        assert (await router.generate(**request("mine"))).output_ids == answer(PROMPT)[:6], "not healthy: the next one"
        assert len(sick.requests) == 1
        await asyncio.sleep(0.1)
        for i in range(4):
            await router.generate(**request(f"new-{i}"))
        assert len(sick.requests) == 1, "a turn was sent to a server that says it is not healthy"
        assert "still not healthy after" in router.replicas[0].error
        sick.broken, well.broken = 0, 0
        await asyncio.sleep(0.3)
        await asyncio.gather(*(router.generate(**request(f"newer-{i}")) for i in range(4)))
        assert len(sick.requests) > 1


async def test_a_request_that_a_healthy_server_fails_at_takes_no_replica_down():
    servers = [FakeVllm(), FakeVllm()]
    async with replicas(*servers) as router:
        for server in servers:
            server.broken = 501
        with pytest.raises(EngineError, match="500"):
            await router.generate(**request())
        assert [replica.failures for replica in router.replicas] == [0, 0]


@pytest.mark.parametrize("status", [400, 501])
async def test_a_replica_that_alone_refuses_everything_rests_until_it_serves_again(status):
    sick, well = FakeVllm(), FakeVllm()
    returned = []

    async def load(backend, version):
        returned.append(backend.base_url)

    async with replicas(sick, well, cooldown=0.2, max_refusals=3, on_return=load) as router:
        home = router.replicas[0]
        with busy(router.replicas[1]):
            for i in range(4):
                await router.generate(**request(f"s{i}"))
        sick.broken = status
        sick.requests.clear()
        for i in range(2):
            with pytest.raises(EngineError, match=f"answered {400 if status == 400 else 500}"):
                await router.generate(**request(f"s{i}"))
        assert home.failures == 0, "after two sessions"
        for i in range(2, 4):
            assert (await router.generate(**request(f"s{i}"))).output_ids == answer(PROMPT)[:6]
        assert (len(sick.requests), home.failures) == (3, 1), "it rests from the third on"
        await router.generate(**request("s0"))
        assert len(sick.requests) == 3, "a session stayed at a replica that rests"

        await asyncio.sleep(0.25)
        await asyncio.gather(*(router.generate(**request(f"new-{i}")) for i in range(4)))
        assert (len(sick.requests), home.failures) == (4, 2), "one turn tries it, and is answered elsewhere"
        assert home.down_until - home.failed_at == pytest.approx(0.4)

        sick.broken = 0
        await asyncio.sleep(0.45)
        await asyncio.gather(*(router.generate(**request(f"newer-{i}")) for i in range(4)))
        assert (home.failures, home.refusals) == (0, 0)
        assert returned == [sick.url] * 2


async def test_requests_that_nobody_answers_rest_no_replica_however_many_they_are():
    servers = [FakeVllm(), FakeVllm()]
    async with replicas(*servers, max_refusals=3) as router:
        for i in range(12):
            with pytest.raises(EngineError, match="maximum context length"):
                await router.generate(prompt_ids=[1] * 5000, sampling_params={"max_tokens": 2}, session_id=f"s{i % 2}")
        assert [replica.failures for replica in router.replicas] == [0, 0]
        assert sum(len(server.requests) for server in servers) < 2 * 12, "every one of them was sent twice"
        for server in servers:
            server.requests.clear()
        await asyncio.gather(*(router.generate(**request(f"s{i}")) for i in range(2)))
        assert [len(server.requests) for server in servers] == [2, 0], "a session moved"


@pytest.mark.parametrize("fault", ["nan", "error_event"])
async def test_a_replica_that_breaks_one_answer_after_the_other_off_rests(fault):
    sick, well = FakeVllm(), FakeVllm()
    async with replicas(sick, well, max_refusals=3, cooldown=30.0) as router:
        home = router.replicas[0]
        sick.faults = {fault}
        for i in range(3):
            assert home.failures == 0
            with busy(router.replicas[1]), pytest.raises(EngineError):
                await router.generate(**request(f"s{i}", 30))
        assert (home.failures, len(well.requests)) == (1, 0), "an answer that had begun was sampled twice"
        assert (await router.generate(**request("s0", 30))).output_ids == answer(PROMPT)[:30]


async def test_the_last_replica_that_is_trusted_does_not_rest():
    servers = [FakeVllm(), FakeVllm()]
    async with replicas(*servers, max_refusals=2, cooldown=30.0) as router:
        for server in servers:
            server.broken = 501
        for i in range(8):
            with pytest.raises(EngineError, match="500"):
                await router.generate(**request(f"s{i}"))
        assert [replica.failures for replica in router.replicas] == [0, 0]
        servers[1].broken = 0
        with busy(router.replicas[0]):
            await router.generate(**request("well"))
        with busy(router.replicas[1]):
            await router.generate(**request("sick"))
        assert [replica.failures for replica in router.replicas] == [1, 0]


async def test_all_down_is_an_error_that_may_pass():
    servers = [FakeVllm(), FakeVllm()]
    async with replicas(*servers, cooldown=30.0) as router:
        for server in servers:
            await server.stop()
        for _ in range(2):
            with pytest.raises(EngineError, match="could not be reached") as caught:
                await router.generate(**request())
            assert caught.value.retry_after is not None
        await servers[1].start()
        await router.generate(**request())
        assert router.replicas[1].failures == 0


async def test_a_replica_that_comes_back_gets_its_weights_before_one_turn_tries_it():
    first, second = FakeVllm(), FakeVllm()
    returned = []

    async def load(backend, version):
        returned.append((backend.base_url, version))

    async with replicas(first, second, cooldown=0.1, on_return=load, policy_version=3) as router:
        await first.stop()
        await router.generate(**request("a"))
        assert router.replicas[0].failures == 1
        await first.start()
        await asyncio.sleep(0.15)
        first.requests.clear()
        await asyncio.gather(*(router.generate(**request(f"new-{i}")) for i in range(4)))
        assert returned == [(first.url, 3)]
        assert router.replicas[0].failures == 0
        assert len(first.requests) == 1, "all at once on a replica that may still be down"
        await asyncio.gather(*(router.generate(**request(f"newer-{i}")) for i in range(4)))
        assert len(first.requests) == 3


async def test_the_rest_grows_with_every_failure_and_ends_with_success():
    first, second = FakeVllm(), FakeVllm()
    async with replicas(first, second, cooldown=0.05, max_cooldown=0.15) as router:
        await first.stop()
        rests = []
        replica = router.replicas[0]
        for i in range(4):
            with busy(router.replicas[1]):
                await router.generate(**request(f"s{i}"))
            rests.append(round(replica.down_until - replica.failed_at, 3))
            await asyncio.sleep(0.2)
        assert rests == [0.05, 0.1, 0.15, 0.15]
        assert replica.error.count("still not healthy") == 1, "the message grows with every failure"


async def test_no_turn_is_sampled_by_two_versions():
    servers = [FakeSglang(delay=0.01, version="1"), FakeSglang(delay=0.01, version="1")]
    async with replicas(*servers, policy_version=1) as router:
        turns = [asyncio.create_task(router.generate(**request(f"s{i}"))) for i in range(6)]
        await asyncio.sleep(0.02)
        async with router.updating(wait=10.0):
            assert [server.running for server in servers] == [0, 0]
            late = asyncio.create_task(router.generate(**request("late")))
            await asyncio.sleep(0.05)
            assert [server.running for server in servers] == [0, 0], "a turn began during the update"
            for server in servers:
                server.version = "2"
            with pytest.raises(RuntimeError, match="being updated already"):
                async with router.updating():
                    pass
        assert [(await turn).policy_version for turn in turns] == [1] * 6
        assert (await late).policy_version == 2
        assert router.policy_version == 2


async def test_a_turn_that_takes_too_long_is_aborted_by_the_update():
    servers = [FakeVllm(delay=0.02), FakeVllm(delay=0.02)]
    async with replicas(*servers, policy_version=1) as router:
        turns = [asyncio.create_task(router.generate(**request(f"s{i}", 300))) for i in range(4)]
        await asyncio.sleep(0.2)
        async with router.updating(7, wait=0.05):
            for _ in range(100):
                if not any(server.running for server in servers):
                    break
                await asyncio.sleep(0.01)
            assert [server.running for server in servers] == [0, 0], "the engine goes on"
        for error in await asyncio.gather(*turns, return_exceptions=True):
            assert isinstance(error, EngineError)
            assert "the weights are being updated" in str(error)
            assert error.retry_after is not None
        assert [replica.failures for replica in router.replicas] == [0, 0]
        assert (await router.generate(**request())).policy_version == 7


async def test_a_returning_replica_does_not_get_the_old_weights_after_an_update():
    first, second = FakeVllm(), FakeVllm()
    loading, loaded = asyncio.Event(), []

    async def load(backend, version):
        loading.set()
        if version == 1:
            await asyncio.sleep(0.5)
        loaded.append(version)

    async with replicas(first, second, cooldown=0.05, on_return=load, policy_version=1) as router:
        await first.stop()
        await router.generate(**request("a"))
        await first.start()
        await asyncio.sleep(0.1)
        turn = asyncio.create_task(router.generate(**request("b")))
        await asyncio.wait_for(loading.wait(), 5.0)
        async with router.updating(2):
            loaded.append("update")
        with pytest.raises(EngineError, match="the weights are being updated"):
            await turn
        await asyncio.sleep(0.6)
        assert (await router.generate(**request("c"))).policy_version == 2
        await router.generate(**request("d"))
        assert loaded == ["update", 2]


async def test_a_turn_from_before_a_failure_does_not_end_the_rest():
    first, second = FakeVllm(delay=0.02), FakeVllm()
    async with (
        replicas(first, second, cooldown=30.0) as router,
        aclosing(router.stream(**request("long", 40))) as chunks,
    ):
        await anext(chunks)
        first.broken = 500
        with busy(router.replicas[1]):
            await router.generate(**request("other"))
        replica = router.replicas[0]
        assert replica.failures == 1
        await anext(chunks)
        assert replica.failures == 1
        assert replica.down_until > 0.0


async def test_a_replica_may_fail_for_days():
    first, second = FakeVllm(), FakeVllm()
    async with replicas(first, second) as router:
        router.replicas[0].failures = 5_000
        await router.generate(**request())


async def test_an_update_that_fails_keeps_the_version_and_lets_turns_pass():
    async with replicas(FakeVllm(), policy_version=1) as router:
        with pytest.raises(OSError, match="disk"):
            async with router.updating():
                raise OSError("disk")
        assert (await router.generate(**request())).policy_version == 1


async def test_a_replica_with_other_weights_gets_no_turn():
    stale, good = FakeSglang(version="1"), FakeSglang(version="2")
    async with replicas(stale, good, policy_version=2, cooldown=30.0) as router:
        records = [await router.generate(**request(f"s{i}")) for i in range(3)]
        assert [record.policy_version for record in records] == [2, 2, 2]
        assert "samples with weights 1, current are 2" in router.replicas[0].error
        assert len(stale.requests) == 1


async def test_an_update_from_another_threads_loop():
    async with replicas(FakeVllm(delay=0.002), policy_version=1) as router:
        turns = [asyncio.create_task(router.generate(**request(f"s{i}", 30))) for i in range(8)]
        await asyncio.sleep(0.01)

        async def update() -> None:
            async with router.updating(2, wait=5.0):
                await asyncio.sleep(0.05)

        updating = asyncio.create_task(asyncio.to_thread(asyncio.run, update()))
        while not router._gate.closed:  # noqa: ASYNC110 - another thread closes it
            await asyncio.sleep(0.001)
        late = await router.generate(**request("late"))
        await updating
        assert late.policy_version == 2
        assert {(await turn).policy_version for turn in turns} == {1}


async def test_engines_without_streaming_are_routed_too():
    class Whole:
        """Answers in one piece."""

        def __init__(self) -> None:
            self.backend = ScriptedBackend(answer)

        async def generate(self, **call):
            return await self.backend.generate(**call)

    router = ReplicaRouter([Whole(), Whole()])
    record = await router.generate(**request())
    assert record.output_ids == answer(PROMPT)[:6]
    async with aclosing(router.stream(**request())) as chunks:
        assert [chunk.finish_reason async for chunk in chunks] == ["length"]
    with pytest.raises(ValueError, match="at least one engine"):
        ReplicaRouter([])

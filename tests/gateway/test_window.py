"""The model's window: the session's, else the engine's own."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.errors import EngineError
from agentcore_rl_toolkit.rollout_gateway.sampling.router import ReplicaRouter
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend

from .support import client_of, encode, serving

USER = {"role": "user", "content": "Hello"}


class Windowed(ScriptedBackend):
    """An engine that tells its window, or fails when it is asked the first time."""

    def __init__(self, window: int | None, *, fails: bool = False) -> None:
        super().__init__(lambda _: encode("x<|im_end|>"))
        self.window, self.fails, self.asked = window, fails, 0

    async def context_window(self) -> int | None:
        self.asked += 1
        if self.fails:
            self.fails = False
            raise EngineError("not there yet")
        return self.window


async def listed(client) -> int | None:
    async with client.http.get(f"{client.session.base_url}/models") as response:
        return (await response.json())["data"][0]["max_model_len"]


async def test_the_engines_window_is_the_sessions():
    backend = Windowed(30)
    async with serving(backend) as gateway, client_of(gateway) as client:
        assert await listed(client) == 30
        await client.ask([USER])
        (prompt, params), *_ = backend.calls
        assert params["max_tokens"] == 30 - len(prompt)
        status, data = await client.post({"messages": [{"role": "user", "content": "one " * 40}]})
        assert (status, data["error"]["code"]) == (400, "context_length_exceeded")
        assert backend.asked == 1


async def test_the_sessions_own_window_comes_first():
    backend = Windowed(30)
    async with serving(backend) as gateway, client_of(gateway, max_context_tokens=1000) as client:
        assert await listed(client) == 1000
        await client.ask([{"role": "user", "content": "one " * 40}])
        assert backend.asked == 0


@pytest.mark.parametrize("fails", [False, True])
async def test_an_engine_that_does_not_tell_sets_no_limit(fails: bool):
    backend = Windowed(None if not fails else 30, fails=fails)
    async with serving(backend) as gateway, client_of(gateway) as client:
        await client.ask([USER])
        assert backend.calls[0][1]["max_tokens"] == 4096
        await client.ask([USER])
        assert (backend.calls[1][1]["max_tokens"] < 30) is fails  # it is asked again after a failure


async def test_an_engine_is_never_asked_for_less_than_it_takes():
    backend = Windowed(30)
    backend.min_new_tokens = 12
    async with serving(backend) as gateway, client_of(gateway) as client:
        status, data = await client.post({"messages": [USER], "max_tokens": 11})
        assert (status, data["error"]["param"]) == (400, "max_tokens")
        await client.ask([USER], max_tokens=12)
        room = 30 - len(backend.calls[0][0])
        assert room >= 12
        longer = {"role": "user", "content": "Hello" + " one" * (room - 11)}
        status, data = await client.post({"messages": [longer]})
        assert (status, data["error"]["code"]) == (400, "context_length_exceeded")
    assert [params["max_tokens"] for _, params in backend.calls] == [12]


async def test_the_smallest_of_several_replicas_counts():
    router = ReplicaRouter([Windowed(50), Windowed(None), Windowed(30), Windowed(10, fails=True)])
    assert await router.context_window() == 30
    with pytest.raises(EngineError):
        await ReplicaRouter([Windowed(50, fails=True)]).context_window()

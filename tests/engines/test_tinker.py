"""What the versions of the Tinker SDK return; tests/engines_real runs one against a real server."""

import asyncio
from concurrent.futures import Future

import pytest

from agentcore_rl_toolkit.errors import MissingExtraError
from agentcore_rl_toolkit.rollout_gateway import TinkerBackend
from agentcore_rl_toolkit.rollout_gateway.sampling.tinker import finished


class AwaitableFuture(Future):
    """As of 0.38: still a concurrent future, but one that warns who treats it so (here: an error)."""

    def __init__(self, value: str) -> None:
        super().__init__()
        self._value = value

    def add_done_callback(self, callback: object) -> None:
        raise FutureWarning("await it")

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        return self._value


async def test_every_version_is_awaited_its_own_way():
    old: Future[str] = Future()
    asyncio.get_running_loop().call_later(0.01, old.set_result, "0.24")
    assert await finished(old) == "0.24"
    assert await finished(AwaitableFuture("0.38")) == "0.38"
    client = object()  # a client that was made while the caller waited
    assert await finished(client) is client


async def test_giving_up_cancels_the_call():
    call: Future[str] = Future()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await finished(call)
    assert call.cancelled()


async def test_without_the_sdk_it_says_what_to_install():
    with pytest.raises(MissingExtraError, match=r"toolkit\[tinker-api\]', for a SkyRL server .*\[tinker-skyrl\]"):
        TinkerBackend(object())

"""Requests that meet each other."""

from __future__ import annotations

import asyncio
from typing import Any

from agentcore_rl_toolkit.errors import EngineError
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records

from .support import client_of, encode, serving

USER = {"role": "user", "content": "a"}
RETRY = {"x-stainless-retry-count": "1"}


async def test_a_retry_joins_no_choice_that_may_be_taken_back():
    """Of two choices the second is there before the first fails, and both are taken back."""
    fails, answers, asked = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Engine(ScriptedBackend):
        async def stream(self, **request: Any):
            match len(self.calls):
                case 0:
                    self.calls.append(([], {}))
                    await fails.wait()
                    raise EngineError("the first choice fails")
                case 1:
                    self.calls.append(([], {}))
                    asked.set()
                    await answers.wait()
            async for chunk in super().stream(**request):
                yield chunk

    backend = Engine(lambda _: encode("Yes.<|im_end|>"))
    async with serving(backend) as gateway, client_of(gateway) as client:
        two = asyncio.create_task(client.post({"messages": [USER], "n": 2}))
        await asked.wait()
        again = asyncio.create_task(client.post({"messages": [USER], "logprobs": True}, headers=RETRY))
        await asyncio.sleep(0.05)
        answers.set()
        await asyncio.sleep(0.05)
        fails.set()
        (failed, _), (status, data) = await two, await again
        assert (failed, status) == (502, 200), data
        await client.ask([USER, data["choices"][0]["message"], USER])
        [row] = await gateway.finish_session(client.session.session_id)
    assert check_records([row]) == 2 * len(encode("Yes.<|im_end|>"))

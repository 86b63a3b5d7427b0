"""Work that grows with an answer is not done on the event loop."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend

from .support import TINY, client_of, encode, serving


class Likely(ScriptedBackend):
    top_logprobs = True

    async def stream(self, **request: Any):
        async for chunk in super().stream(**request):
            chunk.extra["top_logprobs"] = [[(i, -1.0) for i in range(20)] for _ in chunk.output_ids]
            yield chunk


@pytest.mark.parametrize("stream", [False, True])
async def test_the_texts_of_tokens_are_looked_up_once_each_and_elsewhere(stream: bool):
    looked_up: list[int] = []

    class Renderer(HfTemplateRenderer):
        def decode(self, ids: Any) -> str:
            if list(ids) in ([i] for i in range(20)):
                assert threading.current_thread() is not threading.main_thread()
                looked_up.extend(ids)
            return super().decode(ids)

    backend = Likely(lambda _: encode("Yes, yes, yes, yes.<|im_end|>"))
    async with serving(backend, rendered_by=Renderer(TINY)) as gateway, client_of(gateway) as client:
        body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, "stream": stream}
        status, data = await client.post(body)
    assert status == 200, data
    assert sorted(looked_up) == list(range(20))

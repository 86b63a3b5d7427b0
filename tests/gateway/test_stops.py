"""Stop strings that lie across each other."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend

from .support import GenerateOnly, client_of, encode, serving

USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(("stop", "content"), [(["yzq", "z"], "xy"), (["z", "yz"], "x"), (["zq", "yzq"], "x")])
@pytest.mark.parametrize("chunk", [1, 2, 100])
async def test_the_one_that_is_complete_first_counts_however_the_text_comes(stop, content, chunk):
    for stream in (False, True):
        backend = ScriptedBackend(lambda _: encode("xyzq<|im_end|>"), chunk=chunk)
        for engine in (backend, GenerateOnly(backend)):
            async with serving(engine) as gateway, client_of(gateway) as client:
                assert (await client.ask([USER], stream=stream, stop=stop))["content"] == content

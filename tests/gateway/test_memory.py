"""What a renderer remembers does not grow with what clients send."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer
from agentcore_rl_toolkit.rollout_gateway.render import hf, tails
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend

from .support import TINY, client_of, encode, serving


async def test_template_variables_that_change_with_every_request(monkeypatch: pytest.MonkeyPatch):
    for module in (hf, tails):
        monkeypatch.setattr(module, "MAX_SHAPES", 3)
    renderer = HfTemplateRenderer(TINY)
    backend = ScriptedBackend(lambda _: encode("Yes.<|im_end|>"))
    messages = [{"role": "user", "content": "a"}]
    async with serving(backend, rendered_by=renderer) as gateway, client_of(gateway) as client:
        for number in range(8):
            answer = await client.ask(messages, chat_template_kwargs={"request": number})
            messages += [answer, {"role": "user", "content": "b"}]
        [row] = await gateway.finish_session(client.session.session_id)
    assert sum(row.loss_mask) == 8 * len(encode("Yes.<|im_end|>"))
    assert len(renderer._divergence) <= 3
    assert len(renderer._traits.splicer._forms._forms) <= 3

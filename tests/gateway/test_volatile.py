"""System prompts that a harness changes with every request, over every wire."""

from __future__ import annotations

import re

import pytest

from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records
from agentcore_rl_toolkit.rollout_gateway.traces import TokenTree

from .support import TINY, client_of, encode, renderer, serving
from .wires import WIRES, Anthropic

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("volatile", [False, True])
@pytest.mark.parametrize("wire", WIRES)
async def test_what_the_session_names_does_not_make_a_new_conversation(wire, volatile):
    backend = ScriptedBackend(lambda _: encode("ok<|im_end|>"))
    patterns = [r"x-billing: \w+;\s*"] if volatile else []
    async with serving(backend) as gateway, client_of(gateway, volatile=patterns) as client:
        talker, history = WIRES[wire](client), [USER]
        for turn in range(3):
            system = {"role": "system", "content": f"x-billing: cch{turn};\nBe brief."}
            history += [await talker.ask([system, *history]), USER]
        rows = await gateway.finish_session(client.session.session_id)
    assert len(rows) == (1 if volatile else 3)
    check_records(rows)
    text = renderer(TINY).decode(backend.calls[-1][0])
    assert ("x-billing" in text) != volatile
    assert "Be brief." in text


async def test_a_block_of_which_nothing_is_left_goes_and_other_roles_stay():
    backend = ScriptedBackend(lambda _: encode("ok<|im_end|>"))
    said = {"role": "user", "content": "what is x-billing: abc;"}
    async with serving(backend) as gateway, client_of(gateway, volatile=["x-billing: [a-z]+;"]) as client:
        system = [{"type": "text", "text": "x-billing: abc;"}, {"type": "text", "text": "Be brief."}]
        await Anthropic(client).post({"max_tokens": 9, "system": system, "messages": [said]})
    text = renderer(TINY).decode(backend.calls[0][0])
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert "what is x-billing: abc;" in text


def test_a_pattern_that_is_none_is_refused_at_once():
    from agentcore_rl_toolkit.rollout_gateway import RolloutGateway

    gateway = RolloutGateway(backend=ScriptedBackend([]), renderer=renderer(TINY))
    with pytest.raises(re.error):
        gateway.create_session(volatile=["("])


async def test_a_cache_mark_that_moves_still_continues_by_plain_comparison(monkeypatch):
    """Claude Code marks the newest block of each request."""
    found = []
    tip = TokenTree.tip
    monkeypatch.setattr(TokenTree, "tip", lambda *args: found.append(tip(*args)) or found[-1])
    backend = ScriptedBackend(lambda _: encode("ok<|im_end|>"))
    async with serving(backend) as gateway, client_of(gateway) as client:
        history = []
        for turn in range(3):
            block = {"type": "text", "text": f"say {turn}"}
            marked = {"role": "user", "content": [{**block, "cache_control": {"type": "ephemeral"}}]}
            _, answer = await Anthropic(client).post({"max_tokens": 9, "system": "x", "messages": [*history, marked]})
            history += [{"role": "user", "content": [block]}, {"role": "assistant", "content": answer["content"]}]
    assert [turn is not None for turn in found] == [False, True, True]

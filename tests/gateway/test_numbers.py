"""Numbers that come back from a client in another form."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records

from .support import CALCULATOR, client_of, encode, serving

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": %s}}\n</tool_call><|im_end|>'
NINES = "9" * 400


@pytest.mark.parametrize(
    ("said", "replayed", "forks"),
    [
        ("1234567890123456789", "1234567890123456800", False),  # what JavaScript makes of it
        ("-12345678901234567890123", "-1.2345678901234568e+22", False),
        ("9007199254740992", "9007199254740991", True),
        (NINES, NINES, False),
        (NINES, NINES[1:], True),
    ],
)
async def test_long_integers_in_arguments_may_come_back_rounded(said: str, replayed: str, forks: bool):
    outputs = [encode(CALL % said), encode("Yes.<|im_end|>")]
    async with serving(ScriptedBackend(outputs)) as gateway, client_of(gateway) as client:
        messages = [{"role": "user", "content": "a"}]
        answer = await client.ask(messages, tools=[CALCULATOR])
        function = answer["tool_calls"][0]["function"]
        function["arguments"] = function["arguments"].replace(said, replayed)
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "2"}
        await client.ask([*messages, answer, result], tools=[CALCULATOR])
        rows = await gateway.finish_session(client.session.session_id)
    assert [row.metadata["fork"] for row in rows] == ([None, "edited"] if forks else [None])
    check_records(rows)

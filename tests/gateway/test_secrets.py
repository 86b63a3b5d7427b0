"""A session's key is in no log and no error, also where the caller chose it as the session's id."""

from __future__ import annotations

import logging

import pytest

from agentcore_rl_toolkit.errors import ContractError
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend

from .support import client_of, encode, serving

KEY = "a-key-that-nobody-should-read"


async def test_warnings_and_errors_do_not_tell_a_chosen_key(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    backend = ScriptedBackend(lambda _: encode("Yes.<|im_end|>"))
    async with serving(backend) as gateway, client_of(gateway, session_id=KEY) as client:
        await client.ask([{"role": "user", "content": "a"}], odd_field=1, temperature=0)
        with pytest.raises(ContractError, match="in use") as error:
            gateway.create_session(KEY)
        await gateway.finish_session(KEY)
        status, gone = await client.post({"messages": []})
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert (status, len(warned)) == (410, 2)
    assert KEY not in f"{caplog.text} {error.value} {gone}"

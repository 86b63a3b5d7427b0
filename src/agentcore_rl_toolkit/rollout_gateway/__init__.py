"""The capture layer: a chat API in front of a token-in/token-out engine that records every sampled token."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import require

if TYPE_CHECKING:
    from .gateway import RolloutGateway as RolloutGateway
    from .render.hf import HfTemplateRenderer as HfTemplateRenderer
    from .sampling import ChatBackend as ChatBackend
    from .sampling import ChatChunk as ChatChunk
    from .sampling import SamplingBackend as SamplingBackend
    from .sampling import TokenChunk as TokenChunk
    from .sampling import TurnRecord as TurnRecord
    from .sampling._http import Timeouts as Timeouts
    from .sampling.chat import ChatProxyBackend as ChatProxyBackend
    from .sampling.llamacpp import LlamaCppBackend as LlamaCppBackend
    from .sampling.router import ReplicaRouter as ReplicaRouter
    from .sampling.sglang import SglangBackend as SglangBackend
    from .sampling.tinker import TinkerBackend as TinkerBackend
    from .sampling.vllm import VllmBackend as VllmBackend
    from .server import ThreadedGatewayServer as ThreadedGatewayServer
    from .server import gateway_app as gateway_app
    from .sessions import Session as Session
    from .traces.record import Status as Status
    from .traces.record import TraceRecord as TraceRecord

_PUBLIC = {
    "ChatBackend": ("sampling", None),
    "ChatChunk": ("sampling", None),
    "ChatProxyBackend": ("sampling.chat", "aiohttp"),
    "HfTemplateRenderer": ("render.hf", "tokenizers"),
    "LlamaCppBackend": ("sampling.llamacpp", "aiohttp"),
    "ReplicaRouter": ("sampling.router", None),
    "RolloutGateway": ("gateway", "numpy"),
    "SamplingBackend": ("sampling", None),
    "Session": ("sessions", "numpy"),
    "SglangBackend": ("sampling.sglang", "aiohttp"),
    "Status": ("traces.record", "numpy"),
    "ThreadedGatewayServer": ("server", "aiohttp"),
    "TinkerBackend": ("sampling.tinker", "aiohttp"),
    "Timeouts": ("sampling._http", "aiohttp"),
    "TokenChunk": ("sampling", None),
    "TraceRecord": ("traces.record", "numpy"),
    "TurnRecord": ("sampling", None),
    "VllmBackend": ("sampling.vllm", "aiohttp"),
    "gateway_app": ("server", "aiohttp"),
}
"""Public name -> (module, package of the extra that it needs)."""

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, needs = _PUBLIC[name]
    if needs:
        require(needs, "gateway")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value

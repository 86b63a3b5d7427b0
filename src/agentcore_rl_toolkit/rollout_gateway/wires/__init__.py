"""The chat protocols agents speak. Each wire is a pure pair: decode a request, encode an answer."""

from .base import Answer, Wire, WireRequest
from .openai_chat import OpenAIChat

__all__ = ["Answer", "OpenAIChat", "Wire", "WireRequest"]

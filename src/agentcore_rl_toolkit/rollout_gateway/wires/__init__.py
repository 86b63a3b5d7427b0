"""The chat protocols agents speak. Each wire is a pure pair: decode a request, encode an answer."""

from .anthropic import AnthropicMessages
from .base import Answer, Choice, Wire, WireRequest
from .openai_chat import OpenAIChat
from .openai_completions import OpenAICompletions
from .openai_responses import OpenAIResponses

__all__ = [
    "Answer",
    "AnthropicMessages",
    "Choice",
    "OpenAIChat",
    "OpenAICompletions",
    "OpenAIResponses",
    "Wire",
    "WireRequest",
]

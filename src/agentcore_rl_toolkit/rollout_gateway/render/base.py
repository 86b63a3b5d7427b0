"""The rendering seam: what the gateway asks of a renderer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..messages import Message, Tool
from ..parsed import OutputParser


@dataclass(frozen=True, slots=True)
class Fork:
    """The renderer can't extend the held tokens; the conversation must start a new row. ``reason``: a short code."""

    reason: str


class Renderer(Protocol):
    """Messages to token ids and back. All methods are pure and may run in any thread."""

    stop_token_ids: list[int]
    """Tokens that end an answer; always sent to the engine."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, prefill: str = "", **variables: Any
    ) -> list[int]:
        """The whole conversation with the generation prompt, as the checkpoint's template writes it.

        ``prefill``: the beginning of the answer, where the client wrote it (given only then). ``variables``: template
        variables such as ``enable_thinking``. Raises ``RenderError``.
        """
        ...

    def extend(
        self, sampled: Sequence[int], answer: Message, new: Sequence[Message], *, prefill: str = "", **variables: Any
    ) -> list[int] | Fork:
        """The tokens that lead from an answer to the next: its closer, ``new`` and a generation prompt.

        ``sampled``: the answer's tokens as the engine gave them, ``answer`` its message. O(new messages).
        Raises ``RenderError``.
        """
        ...

    def divergence(
        self, messages: Sequence[Message], answered: int, tools: Sequence[Tool] = (), **variables: Any
    ) -> str | None:
        """How the template's rendering of ``messages`` differs from extending ``messages[:answered]``: a reason code
        (``reasoning_dropped``, ``content_moved``) or None. O(history), text only."""
        ...

    def usual_divergence(self, answer: Message, new: Sequence[Message], **variables: Any) -> str | None:
        """:meth:`divergence` for an answer and what follows it, learned once for each shape of them: O(1)."""
        ...

    def parser(self, *, prompt_ids: Sequence[int], tools: Sequence[Tool]) -> OutputParser:
        """A parser for one answer to ``prompt_ids``."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of text that the caller rendered: control tokens spelled in it are control tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens spelled out."""
        ...

    def call_id(self, parsed_id: str | None, number: int) -> str:
        """The id a client is given for a tool call: the sampled one, or one of the form the template accepts."""
        ...

"""What a template writes after an answer: found by rendering a short stub, never the history.

The stub is ``[user, answer, *new messages]`` where the answer's body is a sentinel. In the rendered text everything
after the sentinel, up to the end, is what has to follow the sampled body: the closer of the assistant's turn, the new
messages, the next generation prompt. The cost depends on the new messages alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import RenderError
from ..messages import Message
from .tails import TailForms
from .template import ChatTemplate

SENTINEL = "\U0010fffc0sentinel0\U0010fffc"
"""Stands for the sampled body in a stub; no template looks at it, no content contains it."""

_STUB_USER = "\U0010fffc1stub1\U0010fffc"
_USER: Message = {"role": "user", "content": _STUB_USER}


class NotAppended(Exception):
    """The template does not simply put new messages behind the answer (it drops, moves or rewrites them)."""


def text_answer() -> Message:
    """An answer without tool calls whose body is the sentinel."""
    return {"role": "assistant", "content": SENTINEL}


def call_answer(calls: Sequence[tuple[str, str]], arguments: Callable[[str], Any]) -> Message:
    """An answer with these ``(id, name)`` tool calls; the last one's arguments hold the sentinel."""
    last = len(calls) - 1
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": call_id,
                "function": {"name": name, "arguments": arguments(SENTINEL if i == last else "x")},
            }
            for i, (call_id, name) in enumerate(calls)
        ],
    }


def after_sentinel(text: str) -> str:
    """The text behind the last sentinel; raises ``RenderError`` where the template swallowed it."""
    _, found, rest = text.rpartition(SENTINEL)
    if not found:
        raise RenderError("the chat template drops or rewrites the assistant's text")
    return rest


class Splicer:
    """The tails of one template.

    ``closer``: what the template writes after the body of a final answer (``<|im_end|>\\n``).
    ``call_closer``: the same after tool calls, behind the calls' own closing marks; None where calls don't render.
    """

    def __init__(
        self,
        template: ChatTemplate,
        arguments: Callable[[str], Any],
        call_id: str,
        control: re.Pattern[str],
    ) -> None:
        self._template = template
        self._arguments = arguments
        self._probe_id = call_id
        self._forms = TailForms(self._rendered_tail, template.looked_for, template.compared)
        self.closer = after_sentinel(self._stub(text_answer(), [], generation_prompt=False))
        self._call_end = self.call_closer = ""
        try:
            calls = call_answer([(call_id, "f")], arguments)
            ending = after_sentinel(self._stub(calls, [], generation_prompt=False))
        except RenderError:
            self.calls = False
        else:
            self.calls = True
            self.call_closer = _common_suffix(ending, self.closer)
            for marker in control.finditer(ending):  # a control token is never cut: <|call|> and <|return|> end alike
                if marker.start() < len(ending) - len(self.call_closer) < marker.end():
                    self.call_closer = ending[marker.start() :]
            self._call_end = ending.removesuffix(self.call_closer)

    def closer_of(self, answer: Message) -> str:
        """What the template writes after the body of ``answer`` when it is the last message."""
        return self.call_closer if self.calls and answer.get("tool_calls") else self.closer

    def tail(self, answer: Message, new: Sequence[Message], **variables: Any) -> str:
        """What follows the body of ``answer``: its closer, ``new`` and the generation prompt, as text.

        Raises :class:`NotAppended` where the template does something else with the new messages.
        """
        return self._forms.tail(answer, new, variables)

    def _rendered_tail(self, answer: Message, new: Sequence[Message], variables: dict[str, Any]) -> str:
        rest = self._after_body(answer, new, variables)
        lost = (m for m in new if m["content"].strip() and not _shown(m["content"], rest))
        if _STUB_USER in rest or next(lost, None) is not None:
            raise NotAppended
        return rest

    def _after_body(self, answer: Message, new: Sequence[Message], variables: dict[str, Any]) -> str:
        calls = [(c["id"], c["function"]["name"]) for c in answer.get("tool_calls", ())]
        if not calls or not self.calls:
            return after_sentinel(self._stub(text_answer(), new, **variables))
        try:
            rest = after_sentinel(self._stub(call_answer(calls, self._arguments), new, **variables))
        except RenderError:
            # Some templates allow one call a turn; the results that follow render the same.
            rest = after_sentinel(self._stub(call_answer(calls[-1:], self._arguments), new, **variables))
        end = self._call_end.replace(self._probe_id, calls[-1][0])  # Mistral writes the id behind the arguments
        if not rest.startswith(end):
            raise NotAppended
        return rest[len(end) :]

    def _stub(
        self,
        answer: Message,
        new: Sequence[Message],
        *,
        generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        # Without tools: a template that repeats them at the last user message (Mistral) would show them again.
        return self._template.render([_USER, answer, *new], generation_prompt=generation_prompt, **variables)


def _shown(content: str, text: str) -> bool:
    """Whether a template put this content into the text: as it is, trimmed or quoted."""
    return content.strip() in text or json.dumps(content, ensure_ascii=False)[1:-1].strip() in text


def _common_suffix(a: str, b: str) -> str:
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return a[len(a) - n :]

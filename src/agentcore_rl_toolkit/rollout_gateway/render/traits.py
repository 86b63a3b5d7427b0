"""What a chat template is like, found out by asking it: no list of model names, no hashes of templates."""

from __future__ import annotations

import base64
import contextlib
import json
import re
from hashlib import blake2b
from typing import Any

from ...errors import RenderError
from ..messages import Message
from .splice import SENTINEL, Splicer, text_answer
from .template import ChatTemplate
from .text import TextEncoder

_CALL_ID = "abcdefghi"  # nine alphanumerics: what Mistral's templates insist on
_PLAIN_ID = re.compile(r"[A-Za-z0-9]{9}\Z")
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class TemplateTraits:
    """The traits of one template.

    ``arguments``: brings a call's arguments into the form the template takes (mapping or JSON text). ``takes_text``:
    arguments that are no JSON object may be passed as they are. ``reasoning_name``: the field it reads reasoning from,
    None where it reads none. ``reasoning_beside_content``: False where it refuses both beside a call (gpt-oss).
    ``takes_any_id``: False where it refuses call ids that are not nine alphanumerics (Mistral).
    ``reasoning_closer``: what it writes between reasoning and content. ``splicer``: its tails.
    """

    def __init__(self, template: ChatTemplate, text: TextEncoder) -> None:
        self._template, self._text = template, text
        self.arguments = next(
            (form for form in (_as_mapping, _as_text) if self._shows(form({"k": SENTINEL}))), _as_mapping
        )
        self.takes_text = self._shows(SENTINEL)
        self.takes_any_id = not self._shows(self.arguments({"k": SENTINEL})) or self._shows(
            self.arguments({"k": SENTINEL}), call_id="call_of-any form"
        )
        self.reasoning_name = next((n for n in _REASONING_NAMES if self._reasoning_shows(n)), None)
        self.reasoning_beside_content = self._takes_reasoning_beside_content()
        self.reasoning_closer = self._find_reasoning_closer()
        self.splicer = Splicer(template, lambda body: self.arguments({"k": body}), _CALL_ID, text.find_control)

    def stop_tokens(self) -> set[int]:
        """The control tokens that end an assistant's turn."""
        endings = [self.splicer.closer, self.splicer.call_closer]
        if not self.splicer.closer:  # the next role's marker ends the turn (GLM)
            for role in ("user", "tool"):
                with contextlib.suppress(RenderError):
                    endings.append(self.splicer.tail(text_answer(), [{"role": role, "content": "."}]))
        return {token for ending in endings if (token := self.first_control(ending)) is not None}

    def first_control(self, text: str) -> int | None:
        """The control token that ``text`` begins with."""
        match = self._text.find_control.match(text)
        return self._text.control[match[0]] if match else None

    def _answered(self, answer: Message) -> str:
        """The rendering of a conversation that ends with ``answer``, ``""`` where the template refuses it."""
        try:
            return self._template.render([{"role": "user", "content": "."}, answer], generation_prompt=False)
        except RenderError:
            return ""

    def call_id(self, call_id: str) -> str:
        """A call id as the template takes it: the same for the same id, so that call and result still match."""
        if self.takes_any_id or _PLAIN_ID.match(call_id):
            return call_id
        return base64.b32encode(blake2b(call_id.encode("utf-8", "replace"), digest_size=6).digest()).decode()[:9]

    def _shows(self, arguments: Any, call_id: str = _CALL_ID) -> bool:
        calls = [_call(arguments, call_id)]
        return SENTINEL in self._answered({"role": "assistant", "content": "", "tool_calls": calls})

    def _reasoning_shows(self, name: str) -> bool:
        return SENTINEL in self._answered({"role": "assistant", "content": "x", name: SENTINEL})

    def _takes_reasoning_beside_content(self) -> bool:
        if self.reasoning_name is None:
            return True
        calls = [_call(self.arguments({"k": "v"}))]
        answer = {"role": "assistant", "content": "x", self.reasoning_name: "y", "tool_calls": calls}
        return not self._shows(self.arguments({"k": SENTINEL})) or bool(self._answered(answer))

    def _find_reasoning_closer(self) -> str:
        if self.reasoning_name is None:  # it never shows reasoning again; the model writes it all the same (R1)
            return "</think>" if "</think>" in self._text.control else ""
        text = self._answered({"role": "assistant", "content": SENTINEL, self.reasoning_name: SENTINEL})
        parts = text.split(SENTINEL)
        return parts[1] if len(parts) == 3 else ""


def _call(arguments: Any, call_id: str = _CALL_ID) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": "f", "arguments": arguments}}


def _as_mapping(arguments: dict[str, Any]) -> Any:
    return arguments


def _as_text(arguments: dict[str, Any]) -> Any:
    return json.dumps(arguments, ensure_ascii=False)

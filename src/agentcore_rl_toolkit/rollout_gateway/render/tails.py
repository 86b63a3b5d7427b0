"""Tails without Jinja: the text around new messages is learned once for each shape of them.

What a template writes for a tool result is nearly always fixed text around the result. For each shape (how many calls
were answered, which roles follow) the tail is rendered with a dozen telling contents: blank edges, JSON, markup, empty.
Where inserting a content into the fixed text gives what the template gives for all of them, later tails of the shape
are put together by insertion (of the trimmed or quoted content, if that is what the template does). A template that
does more with contents fails that test and is always asked, and so is any template where a value holds a string that
the template looks for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..messages import Message

_CONTENTS = [
    "plain words", "", " ", "\n", "\n\nx\n", " x ", "\t\r\nx\r\n", '{"a": "b\\"c", "d": [1, null]}', "[1, 2]",
    '"q"', "<b>&'\"\\</b> {{ x }} {% if %}", "é\u2028\U0001f600", "123", "-1.5e3", "true", "None", "null", "%s {0} $x",
    "x" * 3000,
]  # fmt: skip
_PLAIN_ID = re.compile(r"[A-Za-z0-9]{9}\Z")
_MARK = re.compile("\ue123([0-9]+)\ue123")
_QUOTED_MARK = re.compile(f'"({_MARK.pattern.replace("(", "").replace(")", "")})"')

MAX_SHAPES = 1000
"""Shapes are remembered up to this many: they hold template variables, and those are the clients'."""

Form = tuple[Callable[[str], str], tuple[str | int, ...]]
"""A tail: what the template does to contents, then fixed text and the numbers of the values between."""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_TREATMENTS: tuple[Callable[[str], str], ...] = (str, str.strip, _quoted)
"""What templates do to contents: nothing, trimming, quoting."""


class TailForms:
    """The known forms of one template's tails. ``render``: asks the template."""

    def __init__(
        self,
        render: Callable[[Message, Sequence[Message], dict[str, Any]], str],
        looked_for: frozenset[str],
        compared: frozenset[str],
    ) -> None:
        self._render = render
        self._looked_for = re.compile("|".join(map(re.escape, sorted(looked_for))) or r"(?!)")
        self._compared = compared
        self._forms: dict[Any, Form | None] = {}

    def tail(self, answer: Message, new: Sequence[Message], variables: dict[str, Any]) -> str:
        """The tail after ``answer``, exactly as the template writes it."""
        if any(message["role"] == "assistant" for message in new):
            return self._render(answer, new, variables)
        values = _values(answer, new)
        if not all(map(self._is_ordinary, values, _kinds(answer, new))):
            return self._render(answer, new, variables)
        shape = (
            len(answer.get("tool_calls", ())),
            tuple((m["role"], "tool_call_id" in m, "name" in m) for m in new),
            repr(variables),
        )
        try:
            form = self._forms[shape]
        except KeyError:
            if len(self._forms) >= MAX_SHAPES:
                self._forms.clear()
            form = self._forms[shape] = self._learn(answer, new, variables)
        return _insert(form, values, _kinds(answer, new)) if form else self._render(answer, new, variables)

    def _is_ordinary(self, value: str, kind: str) -> bool:
        if kind == "id" and not _PLAIN_ID.match(value):
            return False
        return value not in self._compared and self._looked_for.search(value) is None

    def _learn(self, answer: Message, new: Sequence[Message], variables: dict[str, Any]) -> Form | None:
        kinds = _kinds(answer, new)
        marks = [f"{i:09d}" if kind == "id" else f"\ue123{i}\ue123" for i, kind in enumerate(kinds)]
        telling = [
            [content if k == "content" else f"id{i:07d}" if k == "id" else f"name_{i}" for i, k in enumerate(kinds)]
            for content in _CONTENTS
        ]
        try:
            text = self._render(*_filled(answer, new, marks), variables)
            rendered = [self._render(*_filled(answer, new, values), variables) for values in telling]
        except Exception:  # noqa: BLE001 - the template refuses one of them: it will be asked each time
            return None
        for i, kind in enumerate(kinds):
            if kind == "id":
                text = text.replace(marks[i], f"\ue123{i}\ue123")
        for treatment in _TREATMENTS:
            fixed = _QUOTED_MARK.sub(r"\1", text) if treatment is _quoted else text
            form: Form = (treatment, tuple(int(p) if i % 2 else p for i, p in enumerate(_MARK.split(fixed))))
            if all(_insert(form, v, kinds) == text for v, text in zip(telling, rendered, strict=True)):
                return form
        return None


def _insert(form: Form, values: Sequence[str], kinds: Sequence[str]) -> str:
    treatment, parts = form
    treated = [treatment(v) if kind == "content" else v for v, kind in zip(values, kinds, strict=True)]
    return "".join(treated[part] if isinstance(part, int) else part for part in parts)


def _kinds(answer: Message, new: Sequence[Message]) -> list[str]:
    """The kinds of the values that may show in a tail: ``id``, ``name`` or ``content``."""
    kinds = ["id", "name"] * len(answer.get("tool_calls", ()))
    for message in new:
        kinds.append("content")
        kinds += [kind for kind, field in (("id", "tool_call_id"), ("name", "name")) if field in message]
    return kinds


def _values(answer: Message, new: Sequence[Message]) -> list[str]:
    values: list[str] = []
    for call in answer.get("tool_calls", ()):
        values += [call["id"], call["function"]["name"]]
    for message in new:
        values.append(message["content"])
        values += [message[field] for field in ("tool_call_id", "name") if field in message]
    return values


def _filled(answer: Message, new: Sequence[Message], values: Sequence[str]) -> tuple[Message, list[Message]]:
    """The same shape with other values."""
    rest = iter(values)
    filled = dict(answer)
    if answer.get("tool_calls"):
        filled["tool_calls"] = [
            {"type": "function", "id": next(rest), "function": {"name": next(rest), "arguments": {}}}
            for _ in answer["tool_calls"]
        ]
    messages = []
    for message in new:
        messages.append({**message, "content": next(rest)})
        messages[-1].update({field: next(rest) for field in ("tool_call_id", "name") if field in message})
    return filled, messages

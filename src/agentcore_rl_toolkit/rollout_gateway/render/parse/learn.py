"""A format that is in no list, read off what the chat template writes for a stub call."""

from __future__ import annotations

import json
from typing import Any

from ....errors import RenderError
from ..template import ChatTemplate

_NAME, _KEY, _TEXT = "stub_tool", "stub_key", "stub text"
_USER = {"role": "user", "content": "."}
_LONGEST = 64
"""Characters that a marker may have; more is no marker but prose."""


def learn_section(template: str) -> tuple[str, str] | None:
    """``(opening, closing)`` of the calls, where the template writes each as a JSON object with name and arguments.

    ``("", …)`` if nothing stands before them; None if calls are written otherwise or not at all.
    """
    try:
        chat = ChatTemplate(template, {"bos_token": "", "eos_token": ""})
        prompt = chat.render([_USER])
        said = _said(prompt, _render_call(chat))
        closer = _said(prompt, chat.render([_USER, {"role": "assistant", "content": _TEXT}], generation_prompt=False))
    except RenderError:
        return None
    found = _find_object(said)
    if found is None:
        return None
    start, end = found
    opening = said[:start].rpartition("</think>")[2].strip().removesuffix("[").strip()
    closing = said[end:].removesuffix(closer.rpartition(_TEXT)[2]).strip().removeprefix("]").strip()
    return (opening, closing) if max(len(opening), len(closing)) <= _LONGEST else None


def _render_call(chat: ChatTemplate) -> str:
    parameters = {"type": "object", "properties": {_KEY: {"type": "string", "description": "."}}, "required": [_KEY]}
    tool = {"type": "function", "function": {"name": _NAME, "description": ".", "parameters": parameters}}
    refused = RenderError("no call")
    for arguments in ({_KEY: "."}, json.dumps({_KEY: "."})):
        call = {"type": "function", "id": "abcdefghi", "function": {"name": _NAME, "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        for tools in ([tool], []):
            try:
                return chat.render([_USER, answer], tools, generation_prompt=False)
            except RenderError as error:
                refused = error
    raise refused


def _said(prompt: str, whole: str) -> str:
    """What the answer adds: the text after the last line that opens a turn as the prompt's end does."""
    opening = prompt[-24:]
    while opening and opening not in whole:
        opening = opening[1:]
    return whole.rpartition(opening)[2] if opening else whole


def _find_object(text: str) -> tuple[int, int] | None:
    decoder = json.JSONDecoder()
    position = text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except ValueError:
            value, end = None, position
        if isinstance(value, dict) and _is_call(value):
            return position, end
        position = text.find("{", position + 1)
    return None


def _is_call(value: dict[str, Any]) -> bool:
    arguments = value.get("arguments") or value.get("parameters")
    return _NAME in (value.get("name"), value.get("tool_name")) and _KEY in str(arguments)

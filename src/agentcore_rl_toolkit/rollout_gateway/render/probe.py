"""The start-up check: is extending held tokens the same as rendering the whole conversation, for this template?

About twenty short conversations are rendered whole and by splice. Where the template keeps what came before, the two
must be equal, or held tokens are not extended in that situation (the row forks). Where the template rewrites what came
before, the report says so: there ``history="preserve"`` and a plain template server differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ...errors import RenderError
from ..messages import Message, Tool
from .splice import NotAppended

Kind = tuple[bool, str]
"""Whether the answer has tool calls, and the role of the message that follows it."""

_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a thing.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_USER: Message = {"role": "user", "content": "Where is it?"}
_AGAIN: Message = {"role": "user", "content": "And\nnow? <b>"}
_IDS = ("abcdefgh1", "abcdefgh2")


@dataclass(slots=True)
class Report:
    """The situations by what the probe found: ``same``, ``rewritten`` (with the reason), ``refused`` by the template,
    ``differing`` (with their kind)."""

    same: set[str] = field(default_factory=set)
    rewritten: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    differing: dict[str, Kind] = field(default_factory=dict)

    def line(self) -> str:
        """One log line: what holds and what forks."""
        parts = [f"splice equals full rendering for: {', '.join(sorted(self.same)) or 'nothing'}"]
        if self.rewritten:
            names = ", ".join(f"{name} ({reason})" for name, reason in sorted(self.rewritten.items()))
            parts.append(f'rewritten by the template, kept by history="preserve": {names}')
        else:
            parts.append('history="preserve" shows the model what a plain template server would')
        if self.differing:
            parts.append(f"not extended, rows fork: {', '.join(sorted(self.differing))}")
        if self.refused:
            parts.append(f"refused by the template: {', '.join(sorted(self.refused))}")
        return "; ".join(parts)


def probe(
    whole: Callable[[Sequence[Message], Sequence[Tool], bool], str],
    closer: Callable[[Message], str],
    tail: Callable[[Message, Sequence[Message]], str],
    divergence: Callable[[Sequence[Message], int, Sequence[Tool]], str | None],
) -> Report:
    """Run the check. ``whole(messages, tools, generation_prompt)`` renders everything, ``tail(answer, new)`` the
    splice, ``closer(answer)`` is what follows an answer's body, ``divergence`` names a rewriting."""
    report = Report()
    for name, messages, answered, tools in _conversations():
        answer, new = messages[answered - 1], messages[answered:]
        try:
            reason = divergence(messages, answered, tools)
            if reason:
                tail(answer, new)  # must be possible all the same
                report.rewritten[name] = reason
                continue
            said = whole(messages[:answered], tools, False).removesuffix(closer(answer))
            expected = whole(messages, tools, True).removeprefix(said)
            if tail(answer, new) == expected:
                report.same.add(name)
            else:
                report.differing[name] = (bool(answer.get("tool_calls")), new[0]["role"])
        except NotAppended:
            report.differing[name] = (bool(answer.get("tool_calls")), new[0]["role"])
        except RenderError:
            report.refused.add(name)
    report.same -= {*report.rewritten, *report.differing}
    return report


def _conversations() -> Iterator[tuple[str, list[Message], int, list[Tool]]]:
    """``(situation, messages, messages up to the answer, tools)``."""
    for start, tools in (([_USER], [_TOOL]), ([_SYSTEM, _USER], [_TOOL]), ([_SYSTEM, _USER], [])):
        for thinking in ("", "Hm."):
            said = " after reasoning" if thinking else ""
            text = _answer("Here.", thinking)
            yield f"new user{said}", [*start, text, _AGAIN], len(start) + 1, tools
            for calls in (1, 2) if tools else ():
                loop = [*start, _answer("" if thinking else "Wait.", thinking, calls), *_results(calls)]
                yield f"{'tool results' if calls > 1 else 'tool result'}{said}", loop, len(start) + 1, tools
                yield f"new user after tools{said}", [*loop, text, _AGAIN], len(loop) + 1, tools


def _answer(content: str, reasoning: str, calls: int = 0) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": i, "function": {"name": "find", "arguments": {"q": "x"}}} for i in _IDS[:calls]
        ]
    return message


def _results(calls: int) -> list[Message]:
    return [{"role": "tool", "content": "in the\n{box}", "tool_call_id": i} for i in _IDS[:calls]]

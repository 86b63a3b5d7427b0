"""The formats, as data, and how a checkpoint's own is recognised."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace

from .calls import CallFactory, JsonCall, RawCall
from .core import Format, Think
from .learn import learn_section
from .markup import dsml, gemma, glm, markup, minimax, qwen_xml
from .vocabulary import Vocabulary

HARMONY = ("<|channel|>", "<|message|>", "<|start|>")
"""Tokens by which a harmony checkpoint is known: it is read by its own grammar."""

_THINKS = (
    Think(),
    Think("[THINK]", "[/THINK]", after_open=0, before_close=0, after_close=0),
    Think("<|channel>thought", "<channel|>", after_close=0),
)
_TIGHT = (0, 0, 0)

# How an answer begins that is a bare call; anything else that begins with a brace is an answer in JSON.
_BARE = tuple(
    "{" + space + f'"{key}"'
    for key in ("name", "tool_name", "type", "parameters")
    for space in ("", " ", "\n", "\n  ", "\n    ")
)


def _json(*, hold: bool = False, strict: bool = False) -> Callable[[Vocabulary], CallFactory]:
    return lambda _: lambda tools: JsonCall(hold=hold, strict=strict)


def _raw(header: str, padding: str = " \t\r\n") -> Callable[[Vocabulary], CallFactory]:
    """``header``: a pattern in which ``«…»`` stands for a marker."""

    def for_vocabulary(vocabulary: Vocabulary) -> CallFactory:
        pattern = re.compile(re.sub("«(.*?)»", lambda m: re.escape(vocabulary.compile(m[1])), header))
        return lambda tools: RawCall(pattern, padding=padding)

    return for_vocabulary


_DEEPSEEK = Format(
    "deepseek",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    before_call=0,
)

_HERMES = Format("hermes", "<tool_call>", "</tool_call>", _json())
_LLAMA = Format(
    "llama",
    "{",
    "}",
    _json(hold=True, strict=True),
    section=("<|python_tag|>", ""),
    objects=True,
    bare=_BARE,
    separators=";,",
    before_call=0,
)

# Each with the pattern by which a template is known (the first that fits is taken), and the newlines around its
# reasoning where they are not the usual ones.
_KNOWN: tuple[tuple[str, Format, tuple[int, int, int] | None], ...] = (
    (
        r"<\|tool_call>",
        Format("gemma4", "<|tool_call>", "<tool_call|>", markup(gemma), before_call=0),
        None,
    ),
    (
        r"<\|tool_calls_section_begin\|>",
        Format(
            "kimi",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            _raw(
                r"\s*(?=(?P<id>\S+:\d+)\s*«<|tool_call_argument_begin|>»)?"
                r"(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?\s*«<|tool_call_argument_begin|>»"
            ),
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            before_call=0,
            inner=("<|tool_call_argument_begin|>",),
        ),
        _TIGHT,
    ),
    (
        r"<minimax:tool_call>",
        Format(
            "minimax",
            '<invoke name="',
            "</invoke>",
            markup(minimax),
            section=("<minimax:tool_call>", "</minimax:tool_call>"),
        ),
        None,
    ),
    *(
        (
            rf"(?:dsml_token \+ '|<｜DSML｜){block}>",
            Format(
                "dsml",
                '<｜DSML｜invoke name="',
                "</｜DSML｜invoke>",
                markup(dsml),
                section=(f"<｜DSML｜{block}>", f"</｜DSML｜{block}>"),
                before_call=2,
                inner=("｜DSML｜",),
            ),
            _TIGHT,
        )
        for block in ("tool_calls", "function_calls")
    ),
    (
        r"<｜tool▁sep｜>.*```json",
        replace(
            _DEEPSEEK,
            name="deepseek-v3",
            call=_raw(
                r"\s*\w*«<｜tool▁sep｜>»[ \t]*(?P<name>[^\s]+)[ \t]*\n\s*(?:```(?:json)?[ \t]*\n|(?=\{))", " \t\r\n`"
            ),
            inner=("<｜tool▁sep｜>",),
        ),
        None,
    ),
    (
        r"<｜tool▁call▁begin｜>",
        replace(
            _DEEPSEEK, call=_raw(r"\s*(?P<name>[^\s\ud800-\udfff]+)\s*«<｜tool▁sep｜>»"), inner=("<｜tool▁sep｜>",)
        ),
        _TIGHT,
    ),
    (
        r"\[ARGS\]",
        Format(
            "mistral",
            "[TOOL_CALLS]",
            call=_raw(r"\s*(?P<name>[^\s\ud800-\udfff]+)\s*(?:«[CALL_ID]»(?P<id>[^\s\ud800-\udfff]*)\s*)?«[ARGS]»"),
            before_call=0,
            inner=("[CALL_ID]", "[ARGS]"),
        ),
        None,
    ),
    (
        r"\[TOOL_CALLS\]",
        Format(
            "mistral-list",
            "{",
            "}",
            _json(hold=True),
            section=("[TOOL_CALLS]", ""),
            objects=True,
            separators="[],",
            before_call=0,
        ),
        None,
    ),
    (
        r"<arg_key>",
        Format(
            "glm",
            "<tool_call>",
            "</tool_call>",
            markup(glm),
            inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        (0, 0, 1),
    ),
    (r"<function=", Format("xml", "<tool_call>", "</tool_call>", markup(qwen_xml), before_call=2), None),
    (r"<tool_call>", _HERMES, None),
    (r"<\|python_tag\|>|<\|start_header_id\|>.*tool_calls", _LLAMA, None),
)


def find_format(template: str, added: Collection[str]) -> Format:
    """The format whose markers the chat template writes; ``text`` (no calls) if none is found.

    ``added``: the added tokens of the vocabulary.
    """
    for pattern, form, newlines in _KNOWN:  # noqa: B007
        if re.search(pattern, template, re.DOTALL):
            break
    else:
        form, newlines = _learned(template), None
    if form.name == "text" and "<tool_call>" in added:  # the prompt may ask for what the template doesn't write
        form = _HERMES
    think = next((t for t in _THINKS if t.close in added or t.close in template), None)
    if think and newlines:
        think = replace(think, after_open=newlines[0], before_close=newlines[1], after_close=newlines[2])
    return replace(form, think=think)


def _learned(template: str) -> Format:
    section = learn_section(template)
    if section is None:
        return Format("text")
    known = replace(_LLAMA, name="json", section=section, separators="[],;")
    return replace(known, bare=(), call=_json(hold=True)) if section[0] else replace(known, section=None)

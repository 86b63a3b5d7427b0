"""Chat templates: the checkpoint's own Jinja text, in a sandbox, as Hugging Face runs it."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...errors import RenderError
from ..messages import Message, Tool


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks assistant text for loss masks; to us it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda pattern: dt.datetime.now().strftime(pattern)
    return env


class ChatTemplate:
    """A compiled chat template with the checkpoint's special tokens (``bos_token`` …) as variables.

    ``looked_for``: strings the template looks for inside others (``'</think>' in content``); ``compared``: strings it
    compares whole values with. A message that holds none of them is treated like any other.
    """

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        self.source = source
        self._variables = variables
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self.looked_for, self.compared = _literals(environment.parse(source))
        except jinja2.TemplateError as error:
            raise RenderError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as text. Raises ``RenderError`` with the template's own words where it refuses."""
        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **{**self._variables, **variables},
            )
        except Exception as error:  # a template is foreign code: any exception is its refusal
            raise RenderError(f"the chat template refuses this conversation: {error}") from error


_STRIP = {"strip", "lstrip", "rstrip", "trim"}


def _literals(tree: nodes.Template) -> tuple[frozenset[str], frozenset[str]]:
    looked_for: set[str] = set()
    compared: set[str] = set()
    for compare in tree.find_all(nodes.Compare):
        contains = any(operand.op in ("in", "notin") for operand in compare.ops)
        (looked_for if contains else compared).update(_strings(compare))
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr not in _STRIP:
            looked_for.update(s for argument in call.args for s in _strings(argument))
    for use in tree.find_all((nodes.Filter, nodes.Test)):
        looked_for.update(s for argument in use.args for s in _strings(argument))
    return frozenset(looked_for - {""}), frozenset(compared)


def _strings(node: nodes.Node) -> set[str]:
    found = {c.value for c in node.find_all(nodes.Const) if isinstance(c.value, str)}
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        found.add(node.value)
    return found

"""Calls whose arguments are written as tags: read when the call ends, turned into JSON by the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .calls import Call, CallFactory, Tools
from .jsontext import is_value
from .vocabulary import Vocabulary

Typed = Callable[[str, str], str]
"""``(parameter name, value as written) -> JSON text``."""


@dataclass(frozen=True)
class Notation:
    """``name``: finds the name (group 1) with what ends it, from the start of the call; ``last``: the same once the
    call has ended. ``arguments``: the JSON object that the text after the name says, None if it is malformed."""

    name: re.Pattern[str]
    arguments: Callable[[str, Typed], str | None]
    last: re.Pattern[str] | None = None


class MarkupCall(Call):
    def __init__(self, notation: Notation, vocabulary: Vocabulary, tools: Tools) -> None:
        super().__init__()
        self._notation = notation
        self._spell = vocabulary.spell
        self._tools = tools
        self._parts: list[str] = []
        self._after_name = 0

    def feed(self, text: str) -> str:
        if self.name:
            self._parts.append(text)
            return ""
        if match := self._find_name(self._notation.name, text):
            self._named(match)
        return ""

    def close(self, *, closed: bool) -> str:
        if not self.name:
            last = self._notation.last or self._notation.name
            if match := self._notation.name.match(self.text) or last.match(self.text):
                self._named(match)
        body = self.text[self._after_name :] + "".join(self._parts)
        schema = _parameters(self._tools, self.name)
        try:
            arguments = self._notation.arguments(
                body, lambda key, value: typed(self._spell(value), _property(schema, key), schema)
            )
        except RecursionError:
            arguments = None
        self._set_status(closed=closed, ok=arguments is not None)
        return body.strip() if arguments is None or not closed else arguments

    def _named(self, match: re.Match[str]) -> None:
        self.name = match[1]
        self._after_name = match.end()


def markup(notation: Callable[[Vocabulary], Notation]) -> Callable[[Vocabulary], CallFactory]:
    """A call factory for a notation, made once per vocabulary."""

    def for_vocabulary(vocabulary: Vocabulary) -> CallFactory:
        made = notation(vocabulary)
        return lambda tools: MarkupCall(made, vocabulary, tools)

    return for_vocabulary


# -- the notations ---------------------------------------------------------------------------------------


def qwen_xml(_: Vocabulary) -> Notation:
    """``<function=NAME>\\n<parameter=K>\\nV\\n</parameter>\\n</function>``"""
    # A value ends where the next tag follows its end tag: code may quote the tags.
    parameter = re.compile(
        r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>\s*\Z))", re.DOTALL
    )
    return Notation(re.compile(r"\s*<function=([^>\s]+)>"), _sequence(parameter, r"\s*</function>\s*"))


def glm(vocabulary: Vocabulary) -> Notation:
    """``NAME\\n<arg_key>K</arg_key>\\n<arg_value>V</arg_value>\\n``"""
    key, key_end, value, value_end = (
        re.escape(vocabulary.compile(tag)) for tag in ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    )
    pair = re.compile(
        rf"\s*{key}(.*?){key_end}\s*{value}(.*?){value_end}(?=\s*(?:{key}|\Z))",
        re.DOTALL,
    )
    return Notation(re.compile(rf"\s*(\S+?)(?=\n|{key})"), _sequence(pair, r"\s*"), last=re.compile(r"\s*(\S+)\s*\Z"))


def minimax(_: Vocabulary) -> Notation:
    """``NAME"><parameter name="K">V</parameter>\\n``, after ``<invoke name="``"""
    parameter = re.compile(r'\s*<parameter name="([^"]*)">(.*?)</parameter>(?=\s*(?:<parameter name="|\Z))', re.DOTALL)
    return Notation(re.compile(r'([^"\n]+)"\s*>'), _sequence(parameter, r"\s*"))


def dsml(vocabulary: Vocabulary) -> Notation:
    """``NAME">\\n<｜DSML｜parameter name="K" string="true">V</｜DSML｜parameter>\\n``, after its opening tag"""
    tag = re.escape(vocabulary.compile("｜DSML｜"))
    parameter = re.compile(
        rf'\s*<{tag}parameter name="([^"]*)"(?: string="(true|false)")?>(.*?)</{tag}parameter>'
        rf"(?=\s*(?:<{tag}parameter|\Z))",
        re.DOTALL,
    )

    def arguments(text: str, typed_by_schema: Typed) -> str | None:
        def member(match: re.Match[str]) -> tuple[str, str]:
            key, is_string, value = match.groups()
            if is_string == "true":
                return key, dumps(vocabulary.spell(value))
            if is_string == "false" and is_value(value):
                return key, value.strip()
            return key, typed_by_schema(key, value)

        return _collect(text, parameter, member, r"\s*")

    return Notation(re.compile(r'([^"\n]+)"\s*>'), arguments)


def gemma(vocabulary: Vocabulary) -> Notation:
    """``call:NAME{k:<|"|>text<|"|>,n:5,list:[…]}``"""
    quote = re.escape(vocabulary.compile('<|"|>'))
    token = re.compile(
        rf"\s*(?:{quote}(?P<text>.*?){quote}|(?P<sign>[{{}}\[\],:])|(?P<word>[^{{}}\[\],:]+))", re.DOTALL
    )

    def arguments(text: str, _: Typed) -> str | None:
        tokens = list(token.finditer(text.strip()))
        try:
            value, rest = _gemma_value(tokens, 0, vocabulary.spell)
        except (IndexError, ValueError):
            return None
        return value if rest == len(tokens) and value.startswith("{") else None

    return Notation(re.compile(r"\s*call:([^{\s]+)(?=\s*\{)"), arguments)


def _gemma_value(tokens: list[re.Match[str]], i: int, spell: Callable[[str], str]) -> tuple[str, int]:
    """``(JSON text, index after it)`` of the value that begins at token ``i``."""
    token = tokens[i]
    if token["text"] is not None:
        return dumps(spell(token["text"])), i + 1
    if token["word"] is not None:
        word = _PYTHON.get(token["word"].strip(), token["word"].strip())
        return word if is_value(word) else dumps(spell(word)), i + 1
    closing = {"{": "}", "[": "]"}.get(token["sign"])
    if closing is None:
        raise ValueError(token["sign"])
    parts: list[str] = []
    i += 1
    while tokens[i]["sign"] != closing:
        if parts:
            if tokens[i]["sign"] != ",":
                raise ValueError("no comma")
            i += 1
        key = ""
        if closing == "}":
            if tokens[i]["sign"] is not None or tokens[i + 1]["sign"] != ":":
                raise ValueError("no key")
            key = dumps(spell(tokens[i]["text"] or (tokens[i]["word"] or "").strip())) + ": "
            i += 2
        value, i = _gemma_value(tokens, i, spell)
        parts.append(key + value)
    inside = ", ".join(parts)
    return (f"{{{inside}}}" if closing == "}" else f"[{inside}]"), i + 1


def _sequence(member: re.Pattern[str], end: str) -> Callable[[str, Typed], str | None]:
    """Arguments written one after the other, each matching ``member`` (groups key and value)."""
    return lambda text, typed_by_schema: _collect(
        text, member, lambda m: (m[1].strip(), typed_by_schema(m[1].strip(), m[2])), end
    )


def _collect(
    text: str, member: re.Pattern[str], read: Callable[[re.Match[str]], tuple[str, str]], end: str
) -> str | None:
    found: dict[str, str] = {}
    position = 0
    while match := member.match(text, position):
        key, value = read(match)
        found[key] = value
        position = match.end()
    if not re.compile(end).fullmatch(text, position):
        return None
    return "{" + ", ".join(f"{dumps(key)}: {value}" for key, value in found.items()) + "}"


# -- types -------------------------------------------------------------------------------------------------

_PYTHON = {"True": "true", "False": "false", "None": "null"}


def typed(value: str, schema: dict[str, Any], root: dict[str, Any]) -> str:
    """``value``, written as plain text, as JSON: a string wherever the schema allows one or says nothing.

    ``root``: the schema that holds the definitions which ``schema`` may refer to. Numbers keep their form (``1e3``).
    What is not of its type stays a string.
    """
    types = _types(schema, root)
    plain = _PYTHON.get(value.strip(), value.strip())
    if "null" in types and plain == "null":
        return "null"
    if not types or "string" in types or not is_value(plain):
        return dumps(value)
    return plain


def _types(schema: Any, root: dict[str, Any], depth: int = 0) -> set[str]:
    if not isinstance(schema, dict) or depth > 8:
        return set()
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#/"):
        target: Any = root
        for part in ref[2:].split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        return _types(target, root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(k) for k in kind}
    options = [o for key in ("anyOf", "oneOf", "allOf") for o in schema.get(key) or ()]
    if options:
        return set().union(*(_types(option, root, depth + 1) for option in options))
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return {names.get(type(value), "object") for value in schema.get("enum") or ()}


def _parameters(tools: Tools, name: str) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function") or tool
        if function.get("name") == name:
            schema = function.get("parameters")
            return schema if isinstance(schema, dict) else {}
    return {}


def _property(schema: dict[str, Any], key: str) -> dict[str, Any]:
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, dict) else None
    return found if isinstance(found, dict) else {}


def dumps(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)

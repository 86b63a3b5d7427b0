"""Sampled token ids to reasoning, content and tool calls, for the formats that open models use.

:func:`parser_for` finds a checkpoint's format; a parser of one's own is any ``ParserFactory``.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from .core import Grammar
from .formats import HARMONY, find_format
from .harmony import HarmonyGrammar

__all__ = ["parser_for"]


def parser_for(tokenizer: Tokenizer, template: str) -> Grammar | HarmonyGrammar:
    """The parser of a checkpoint's answers (a ``ParserFactory``), found by the markers in its chat template and
    vocabulary. ``.name`` says which: ``"text"`` where no call format is known (content and reasoning only)."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    if added.issuperset(HARMONY) and "<|channel|>" in template:
        return HarmonyGrammar(tokenizer)
    return Grammar(tokenizer, find_format(template, added))

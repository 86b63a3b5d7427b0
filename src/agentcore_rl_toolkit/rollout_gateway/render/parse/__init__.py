"""Sampled token ids to reasoning, content and tool calls, for the formats that open models use."""

from __future__ import annotations

from tokenizers import Tokenizer

from .calls import JsonCall
from .core import Format, Grammar, Think

__all__ = ["parser_for"]


def parser_for(tokenizer: Tokenizer, template: str) -> Grammar:
    """The parser for a checkpoint, found by the markers in its chat template and vocabulary."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    think = Think() if "</think>" in template or "</think>" in added else None
    if "<tool_call>" in template or "<tool_call>" in added:
        form = Format("hermes", "<tool_call>", "</tool_call>", lambda *_: JsonCall(), think=think)
    else:
        form = Format("text", think=think)
    return Grammar(tokenizer, form)

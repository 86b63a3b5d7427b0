"""Real vocabularies and templates: what a template writes of an assistant message parses back to that message."""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from agentcore_rl_toolkit.errors import RenderError
from agentcore_rl_toolkit.rollout_gateway.parsed import ParsedMessage
from agentcore_rl_toolkit.rollout_gateway.render.parse import parser_for
from agentcore_rl_toolkit.rollout_gateway.render.template import ChatTemplate

ROOT = Path(__file__).parents[1]
FOLDER = Path(os.environ.get("AGENTCORE_RL_TOKENIZERS", ROOT.parent / "shared" / "tokenizers"))
CHECKPOINTS = sorted(p.name for p in FOLDER.iterdir() if (p / "tokenizer.json").is_file()) if FOLDER.is_dir() else []
FORMATS = {
    "deepseek-v3": "deepseek-v3",
    "deepseek-v3.1": "deepseek",
    "deepseek-v4": "dsml",
    "glm4.5-surrogate": "glm",
    "gpt-oss": "harmony",
    "minimax-m2-surrogate": "minimax",
    "mistral-nemo": "mistral-list",
    "mistral-small-3.2": "mistral",
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "qwen3-2507": "hermes",
    "qwen3-coder": "xml",
    "qwen3.5": "xml",
    "qwen3.6": "xml",
    "smollm2": "text",
    "smollm3-surrogate": "hermes",
}
SHOWS_NO_CALLS = ("smollm2", "smollm3-surrogate")
SHOWS_NO_REASONING = (
    "deepseek-v3", "deepseek-v3.1", "mistral-nemo", "mistral-small-3.2", "qwen2.5", "qwen3-coder", "smollm2",
    "smollm3-surrogate", "qwen3-2507",
)  # fmt: skip
"""Templates that write no ``reasoning_content``."""

pytestmark = pytest.mark.skipif(
    not CHECKPOINTS, reason=f"no tokenizer folders in {FOLDER}: set AGENTCORE_RL_TOKENIZERS to a folder that has them"
)

SCHEMA = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "limit": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "near": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Find.", "parameters": SCHEMA}}
    for name in ("web_search", "now")
]
FULL = {
    "query": 'größe "x" \\ {é} 日本語 😀\n  line </x> & <y>',
    "limit": 3,
    "exact": True,
    "tags": ["a", "b c"],
    "near": {"lat": 1.5},
}
ONE, TWO = ("web_search", FULL), ("now", {"near": None, "exact": False})
REASONING, CONTENT = "First, é.\n\nThen {think} 😀.", "Let me look.\n\n* größe — 日本語 😀"
ANSWERS: dict[str, tuple[str, str, list[tuple[str, dict[str, Any]]]]] = {
    "text": ("", CONTENT, []),
    "reasoned": (REASONING, CONTENT, []),
    "call": ("", "", [ONE]),
    "text and call": ("", CONTENT, [ONE]),
    "reasoned call": (REASONING, "", [ONE]),
    "all": (REASONING, CONTENT, [ONE, TWO]),
    "no arguments": ("", "", [("now", {})]),
}


@functools.cache
def checkpoint(name: str) -> tuple[Tokenizer, ChatTemplate, Any]:
    folder = FOLDER / name
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    special = {k: v for k, v in config.items() if k.endswith("_token") and isinstance(v, str)}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = ChatTemplate((folder / "chat_template.jinja").read_text("utf-8"), special)
    return tokenizer, template, parser_for(tokenizer, template.source)


def emission(name: str, answer: str) -> tuple[list[int], list[int]]:
    """The ids of ``(prompt, assistant's part)`` as the template writes them, up to the end token."""
    tokenizer, template, _ = checkpoint(name)
    reasoning, content, calls = ANSWERS[answer]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message |= {"thinking": reasoning} if name == "gpt-oss" else {"reasoning_content": reasoning}
    if calls:
        as_text = name == "deepseek-v3"  # this template adds the arguments to a string
        message["tool_calls"] = [
            {
                "type": "function",
                "id": f"abcdefgh{i}",
                "function": {"name": tool, "arguments": json.dumps(a, ensure_ascii=False) if as_text else a},
            }
            for i, (tool, a) in enumerate(calls)
        ]
    asked = [{"role": "user", "content": "Hello?"}]
    prompt = template.render(asked, TOOLS, generation_prompt=True, enable_thinking=True)
    whole = template.render([*asked, message], TOOLS, generation_prompt=False, enable_thinking=True)
    asked_ids, ids = (list(tokenizer.encode(text, add_special_tokens=False).ids) for text in (prompt, whole))
    shared = next((i for i, (a, b) in enumerate(zip(asked_ids, ids, strict=False)) if a != b), len(asked_ids))
    assert shared >= len(asked_ids) - 4  # a prompt may open the reasoning that an answer lacks
    said = tokenizer.decode(ids[shared:], skip_special_tokens=False)
    end = "<|user|>" if name.startswith("glm") else ""
    return asked_ids[:shared], list(tokenizer.encode(said.removesuffix("\n") + end, add_special_tokens=False).ids)


def cases() -> Iterator[Any]:
    for name in CHECKPOINTS:
        for answer, (reasoning, _, calls) in ANSWERS.items():
            if name in FORMATS and not (calls and name in SHOWS_NO_CALLS):
                if reasoning and name in SHOWS_NO_REASONING:
                    continue
                yield pytest.param(name, answer, id=f"{name}-{answer}")


def expected(name: str, answer: str) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    """What of the answer the template writes at all."""
    reasoning, content, calls = ANSWERS[answer]
    if name == "gpt-oss" and calls:
        if content:
            reasoning, content = content, ""  # written to the analysis channel
        calls = calls[:1]
    if name.startswith("mistral") and calls:
        content = ""
    return reasoning, content, calls


@pytest.mark.parametrize(("name", "answer"), list(cases()))
def test_what_the_template_writes_parses_back(name: str, answer: str) -> None:
    tokenizer, _, factory = checkpoint(name)
    assert factory.name == FORMATS[name]
    try:
        prompt_ids, ids = emission(name, answer)
    except RenderError:
        assert name == "gpt-oss"
        assert answer == "all"  # this template refuses content beside reasoning and a call
        return
    message = one_chunk(factory, prompt_ids, ids)

    reasoning, content, calls = expected(name, answer)
    assert message.reasoning == reasoning
    assert message.content == content
    assert [(c.name, json.loads(c.arguments), c.status) for c in message.tool_calls] == [(*c, "ok") for c in calls]
    assert not message.ill_formed
    assert message.raw == tokenizer.decode(ids, skip_special_tokens=False)
    if name.startswith("mistral"):
        assert [c.id for c in message.tool_calls] == [f"abcdefgh{i}" for i in range(len(calls))]

    for width in (1, 3):
        parser = factory(prompt_ids=prompt_ids, tools=TOOLS)
        for start in range(0, len(ids), width):
            parser.feed(ids[start : start + width])
        assert parser.finish("stop")[1] == message


def one_chunk(factory: Any, prompt_ids: list[int], ids: list[int]) -> ParsedMessage:
    parser = factory(prompt_ids=prompt_ids, tools=TOOLS)
    parser.feed(ids)
    message = parser.finish("stop")[1]
    assert isinstance(message, ParsedMessage)
    return message


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_raw_is_what_the_tokenizer_decodes(name: str) -> None:
    tokenizer, _, factory = checkpoint(name)
    rng = random.Random(7)
    added = list(tokenizer.get_added_tokens_decoder())
    for _ in range(150):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(20)] + rng.choices(added, k=4)
        rng.shuffle(ids)
        parser = factory(prompt_ids=[], tools=[])
        for token in ids:
            parser.feed([token])
        assert parser.finish("length")[1].raw == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_markers_spelled_in_ordinary_tokens_are_content(name: str) -> None:
    tokenizer, _, factory = checkpoint(name)
    if factory.name == "harmony":
        ids = tokenizer.encode("<|channel|>final<|message|>", add_special_tokens=False).ids
    else:
        ids = []
    spelled = ""
    for token in tokenizer.get_added_tokens_decoder().values():
        text = token.content
        if len(text) > 3 and text.isascii() and not text.isspace():
            spelled += text
            ids += [i for char in text for i in tokenizer.encode(char, add_special_tokens=False).ids]
    message = one_chunk(factory, [], ids)
    assert (message.content, message.reasoning, message.tool_calls) == (spelled, "", [])
    assert not message.ill_formed


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_characters_split_over_tokens(name: str) -> None:
    tokenizer, _, factory = checkpoint(name)
    head = "<|channel|>final<|message|>" if factory.name == "harmony" else ""
    text = "𓀀 ꧁ é 👩‍👩‍👧 ツ"
    ids = tokenizer.encode(head + text, add_special_tokens=False).ids
    parser = factory(prompt_ids=[], tools=[])
    said = "".join(delta.text for token in ids for delta in parser.feed([token]))
    assert said == text
    assert "\ufffd" not in said
    assert parser.finish("length")[1].content == text

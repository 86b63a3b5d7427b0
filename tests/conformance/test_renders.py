"""Renders are the template's: first prompts and what is appended to them, token by token, against transformers."""

from __future__ import annotations

import random

import jinja2
import pytest

from agentcore_rl_toolkit.errors import RenderError

from .conversations import conversation
from .families import LOOKUP, Family, Message


@pytest.fixture
def references(family: Family):
    """Errors of a template, by transformers: jinja's own and what its Python raises."""
    return (jinja2.TemplateError, TypeError, AttributeError, KeyError, ValueError)


def check_first_render(family: Family, messages: list[Message], errors: tuple[type[Exception], ...]) -> bool:
    try:
        expected = family.ids(messages, tools=family.calls)
    except errors:
        with pytest.raises(RenderError):
            family.renderer.render(messages, [LOOKUP] if family.calls else [])
        return False
    assert family.renderer.render(messages, [LOOKUP] if family.calls else []) == expected
    return True


def check_tails(family: Family, messages: list[Message], errors: tuple[type[Exception], ...]) -> int:
    """Compare every tail of the conversation that the template's own rendering keeps as a continuation."""
    compared = 0
    answered = [n for n, m in enumerate(messages, 1) if m["role"] == "assistant"]
    for depth, after in zip(answered, [*answered, len(messages) + 1][1:], strict=True):
        answer, new = messages[depth - 1], messages[depth : after - 1]
        if not new:
            continue
        try:
            prompt = family.text(messages[: depth - 1], tools=family.calls)
            said = family.text(messages[:depth], tools=family.calls, prompt=False)
            whole = family.text([*messages[:depth], *new], tools=family.calls)
        except errors:
            continue
        body, stop = split_answer(family, said, whole)
        if not (said.startswith(prompt) and len(body) >= len(prompt) and whole.startswith(body + stop)):
            continue  # the template rewrites the answer: there is nothing to compare with
        output = family.encode(body[len(prompt) :] + stop)
        tail = family.renderer.extend(output, answer, new)
        assert tail == family.encode(whole[len(body) :])[1:]
        compared += 1
    return compared


def split_answer(family: Family, said: str, whole: str) -> tuple[str, str]:
    """The rendered conversation up to the answer's end, and the stop token that ends it."""
    if family.name == "glm4.5-surrogate":  # the next role's marker
        stop = next((s for s in ("<|observation|>", "<|user|>") if whole[len(said) :].startswith(s)), "?")
        return said, stop
    said = said.rstrip("\n")
    stop = next((t for t in family.special.values() if said.endswith(t)), "?")
    return said.removesuffix(stop), stop


def check(family: Family, count: int, errors: tuple[type[Exception], ...], *, seed: int) -> None:
    rng = random.Random(f"{family.name} {seed}")
    rendered = tails = 0
    for _ in range(count):
        messages = conversation(family, rng)
        rendered += check_first_render(family, messages, errors)
        tails += check_tails(family, messages, errors)
    assert rendered > count * 0.8, f"the reference refused {count - rendered} of {count} conversations"
    assert tails > count * 0.05, f"only {tails} tails were comparable"


@pytest.mark.timeout(120)
def test_random_conversations_render_as_transformers_renders_them(family: Family, references):
    check(family, 12, references, seed=0)


@pytest.mark.conformance
@pytest.mark.timeout(600)
def test_many_random_conversations_render_as_transformers_renders_them(family: Family, references):
    check(family, 160, references, seed=1)

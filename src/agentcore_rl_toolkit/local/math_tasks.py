"""Arithmetic questions for the demo's agent, and transcripts of a badly trained agent that answers them."""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_OPERATIONS: dict[str, Callable[[int, int], float]] = {
    "*": operator.mul,
    "+": operator.add,
    "-": operator.sub,
    "/": operator.truediv,
}

# What the transcripts' agent is like, as probabilities. More knowledge learns surer, less starts lower.
_GUESSES, _KNOWS_OPERATOR, _KNOWS_ORDER = 0.4, 0.4, 0.7


@dataclass(frozen=True, slots=True)
class _Form:
    """One way to ask for ``a <sign> b``."""

    question: str
    sign: str


_FORMS = (
    _Form("What is {a} times {b}?", "*"),
    _Form("What is {a} plus {b}?", "+"),
    _Form("What is {a} minus {b}?", "-"),
    _Form("What is {a} divided by {b}?", "/"),
    _Form("Subtract {b} from {a}.", "-"),
    _Form("How often does {b} go into {a}?", "/"),
)


def _operands(sign: str, rng: random.Random) -> tuple[int, int]:
    """Two different numbers of one or two digits whose result has at most three."""
    if sign == "/":
        quotient, b = rng.sample(range(3, 10), 2)
        return quotient * b, b
    if sign == "*":
        a, b = rng.sample(range(11, 32), 2)
        return a, b
    larger, smaller = sorted(rng.sample(range(11, 100), 2), reverse=True)
    return (larger, smaller) if sign == "-" else (smaller, larger)


def math_tasks(seed: int, count: int = 144) -> list[dict[str, Any]]:
    """``count`` payloads ``{"prompt": "What is 17 times 23?", "answer": 391}``, the same for the same seed.

    The six forms of question take turns in a shuffled order: each six hold every form once.
    """
    rng = random.Random(seed)
    tasks: list[dict[str, Any]] = []
    while len(tasks) < count:
        for form in rng.sample(_FORMS, len(_FORMS)):
            a, b = _operands(form.sign, rng)
            answer = int(_OPERATIONS[form.sign](a, b))
            tasks.append({"prompt": form.question.format(a=a, b=b), "answer": answer})
    return tasks[:count]


def transcripts(seed: int, count: int) -> Iterator[list[tuple[str, bool]]]:
    """Conversations of an agent that has learned to speak the format, but not what to say.

    It often just repeats a number of the question; otherwise it calculates, often with the wrong operator or operands.
    Yields ``count`` conversations in ChatML, each as parts ``(text, written by the agent)``.
    """
    rng = random.Random(seed)
    for _ in range(count):
        form = rng.choice(_FORMS)
        a, b = _operands(form.sign, rng)
        ask = f"<|im_start|>user\n{form.question.format(a=a, b=b)}<|im_end|>\n<|im_start|>assistant\n"
        if rng.random() < _GUESSES:
            yield [(ask, False), (_answer(str(rng.choice((a, b)))), True)]
            continue
        sign = form.sign if rng.random() < _KNOWS_OPERATOR else rng.choice("+-*/")
        left, right = (a, b) if rng.random() < _KNOWS_ORDER else (b, a)
        call = json.dumps({"name": "calculator", "arguments": {"expression": f"{left} {sign} {right}"}})
        result = f"{round(_OPERATIONS[sign](left, right), 2):.12g}"
        reply = f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n"
        yield [
            (ask, False),
            (f"<tool_call>\n{call}\n</tool_call><|im_end|>", True),
            (f"{reply}<|im_start|>assistant\n", False),
            (_answer(result), True),
        ]


def _answer(number: str) -> str:
    return f"The answer is {number}.<|im_end|>"

"""Random conversations as agents have them."""

from __future__ import annotations

import random
from typing import Any

from .families import Family, Message, Said

WORDS = (
    "the quick brown fox", "Zürich", "", " ", "\n", "a\n\nb", "  indented", "trailing \n", "1e3", '{"a": [1, 2]}',
    "if x < 3 && y > 4: print('ok')", "数学の問題", "naïve café", "🦜🌍", "\t\ttabs", "# Title\n- item\n- item",
    "x" * 50, "https://example.com/?q=1&r=2", "a\r\nb", "def f(x):\n    return x\n", "null", "True", "3.14159",
    "\u00a0nbsp\u2028", "%s {0}",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    "x", "", "two words", "line\nbreak", 'quo"te', "ünï", 1, -2.5, 0, 10**12, True, False, None, [1, "a"],
    {"k": {"l": []}},
)  # fmt: skip


def words(rng: random.Random, *, blank: bool = True) -> str:
    text = rng.choice(["", " ", "\n"]).join(rng.choice(WORDS) for _ in range(rng.randint(1, 4)))
    return text if blank or text.strip() else "Well."


def arguments(rng: random.Random) -> dict[str, Any]:
    return {name: rng.choice(VALUES) for name in rng.sample(["query", "limit", "exact", "b", "a"], rng.randint(0, 4))}


def conversation(family: Family, rng: random.Random) -> list[Message]:
    """Ends with a user message or tool results. Arguments are mappings, or text where the template takes only that."""
    messages: list[Message] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": words(rng, blank=False)})
    number = 0
    for turn in range(rng.randint(1, 4)):
        # Numbered: Mistral's template takes every user message that equals the last one for the last one.
        messages.append({"role": "user", "content": f"{turn}{words(rng)}"})
        while family.renders_calls and rng.random() < 0.5:
            count = rng.randint(1, 3) if family.parallel else 1
            calls = tuple(arguments(rng) for _ in range(count))
            said = Said(rng.choice(["", "", words(rng)]) if family.mixes else "", calls, reasoning(family, rng))
            answer = said.message(arguments_as_text=family.arguments_as_text)
            for call in answer["tool_calls"]:
                call["id"] = f"call{number:05d}"
                number += 1
            messages.append(answer)
            messages += [
                {"role": "tool", "tool_call_id": c["id"], "name": "lookup", "content": words(rng)}
                for c in answer["tool_calls"]
            ]
        messages.append(Said(words(rng, blank=False), (), reasoning(family, rng)).message(arguments_as_text=False))
    return messages[: rng.choice([n for n, m in enumerate(messages, 1) if m["role"] in ("user", "tool")])]


def reasoning(family: Family, rng: random.Random) -> str | None:
    """Reasoning where the template shows it; trimmed, as parsers hand it out."""
    return words(rng).strip() or None if family.reasons and rng.random() < 0.7 else None

"""What every driver shares: the task, its tool, where the model is, and how the outcome is told.

Drivers run in the harness's own environment and know nothing of this project.
"""

import asyncio
import json
import os
import sys

MODE = sys.argv[1]
URL, KEY, MODEL = (os.environ[f"HARNESS_{name}"] for name in ("URL", "KEY", "MODEL"))
SYSTEM = "You are careful. Use the calculator."
PROMPT = "What is 6 * 7? And that plus 8, and that minus 2?"
AGAIN = "Please say that once more."
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
FUNCTION = {"name": "calculator", "description": "Evaluate an arithmetic expression.", "parameters": SCHEMA}

_ran = []


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: the expression, for example 3 * (4 + 5)
    """
    _ran.append(expression)
    return str(eval(expression, {"__builtins__": {}}))


def run(modes):
    """Run what MODE names: a function, or a coroutine function, that returns the answer, or (answer, deltas)."""
    outcome = modes[MODE]()
    if asyncio.iscoroutine(outcome):
        outcome = asyncio.run(outcome)
    answer, deltas = outcome if isinstance(outcome, tuple) else (outcome, None)
    print()  # whatever the harness wrote before
    print(json.dumps({"answer": answer, "deltas": deltas, "tool_calls": _ran}))

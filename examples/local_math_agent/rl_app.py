"""A math agent with a calculator: a plain loop around the stock ``openai`` client.

Only the decorator and the ``rewards`` in the returned dict are there for training.
"""

import ast
import json
import operator
import re

from openai import OpenAI

from agentcore_rl_toolkit import AgentCoreRLApp

SYSTEM_PROMPT = "You are a math assistant. Use the calculator, then give the answer."
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example 3 * (4 + 5)"}},
            "required": ["expression"],
        },
    },
}
MAX_TURNS = 4
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}

app = AgentCoreRLApp()


def calculate(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float()):
            return node.value
        case ast.BinOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](calculate(node.left), calculate(node.right))
        case ast.UnaryOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](calculate(node.operand))
    raise ValueError("only numbers, + - * / and parentheses are understood")


def call_tool(call) -> str:
    """The tool's answer as text. Errors are answers too: the model reads them and may do better."""
    try:
        if call.function.name != "calculator":
            return f"Error: there is no tool {call.function.name!r}"
        expression = json.loads(call.function.arguments)["expression"]
        return f"{round(calculate(ast.parse(expression, mode='eval').body), 2):.12g}"
    except (ArithmeticError, KeyError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        return f"Error: {type(error).__name__}: {error}"


@app.rollout_entrypoint
def solve(payload: dict) -> dict:
    config = payload["_rollout"]
    client = OpenAI(base_url=config["base_url"], api_key=config.get("api_key") or "EMPTY")
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": payload["prompt"]}]
    turns = 0
    while turns < MAX_TURNS:
        turns += 1
        completion = client.chat.completions.create(
            model=config["model_id"],
            messages=messages,
            tools=[CALCULATOR],
            **config.get("sampling_params") or {},
        )
        reply = completion.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            break
        messages += [{"role": "tool", "tool_call_id": call.id, "content": call_tool(call)} for call in reply.tool_calls]

    numbers = re.findall(r"-?\d+(?:\.\d+)?", reply.content or "")
    correct = bool(numbers) and float(numbers[-1]) == payload["answer"]
    return {"rewards": float(correct), "metrics": {"turns": turns}}


if __name__ == "__main__":
    app.run()

"""LiteLLM's completion(), through its OpenAI and its Anthropic provider, and responses()."""

import json

import litellm
from _task import FUNCTION, KEY, MODEL, PROMPT, SYSTEM, URL, calculator, run

WHERE = {"api_base": URL, "api_key": KEY}


def loop(provider, stream):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
    tools, deltas = [{"type": "function", "function": FUNCTION}], 0
    while True:
        answer = litellm.completion(f"{provider}/{MODEL}", messages, tools=tools, stream=stream, **WHERE)
        if stream:
            chunks = list(answer)
            deltas += len(chunks)
            answer = litellm.stream_chunk_builder(chunks, messages=messages)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content, deltas
        messages.append(message.model_dump())
        for call in message.tool_calls:
            value = calculator(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": value})


def responses():
    items, tools = [{"role": "user", "content": PROMPT}], [{"type": "function", **FUNCTION}]
    while True:
        answer = litellm.responses(items, f"openai/{MODEL}", instructions=SYSTEM, tools=tools, **WHERE)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        for call in calls:
            value = calculator(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": value})


run(
    {
        "chat": lambda: loop("openai", False),
        "chat-stream": lambda: loop("openai", True),
        "anthropic": lambda: loop("anthropic", False),
        "anthropic-stream": lambda: loop("anthropic", True),
        "responses": responses,
    }
)

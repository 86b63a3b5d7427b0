"""The `openai` SDK: tool loops over chat completions and Responses."""

import json

from _task import FUNCTION, KEY, MODEL, PROMPT, SYSTEM, URL, calculator, run
from openai import AsyncOpenAI, OpenAI

CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS = [{"type": "function", **FUNCTION}]


def asked():
    return [{"role": "developer", "content": SYSTEM}, {"role": "user", "content": PROMPT}]


def results(message):
    for call in message.tool_calls:
        value = calculator(**json.loads(call.function.arguments))
        yield {"role": "tool", "tool_call_id": call.id, "content": value}


def chat():
    client, messages = OpenAI(base_url=URL, api_key=KEY), asked()
    while True:
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        messages += [message, *results(message)]


async def chat_async():
    client, messages = AsyncOpenAI(base_url=URL, api_key=KEY), asked()
    while True:
        answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        messages += [message.model_dump(exclude_none=True), *results(message)]


def chat_stream():
    client, messages, deltas = OpenAI(base_url=URL, api_key=KEY), asked(), 0
    while True:
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=CHAT_TOOLS) as stream:
            deltas += sum(event.type == "chunk" for event in stream)
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content, deltas
        messages += [message.model_dump(exclude_none=True), *results(message)]


async def chat_async_stream():
    client, messages, deltas = AsyncOpenAI(base_url=URL, api_key=KEY), asked(), 0
    while True:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        content, calls = "", {}
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=messages, tools=CHAT_TOOLS, **options
        ):
            deltas += 1
            if not chunk.choices:
                assert chunk.usage.completion_tokens > 0
                continue
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for call in delta.tool_calls or ():
                if call.index not in calls:
                    calls[call.index] = call.model_dump()
                else:
                    calls[call.index]["function"]["arguments"] += call.function.arguments
        if not calls:
            return content, deltas
        messages.append({"role": "assistant", "content": content or None, "tool_calls": list(calls.values())})
        for call in calls.values():
            value = calculator(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": value})


def outputs(response):
    for item in response.output:
        if item.type == "function_call":
            value = calculator(**json.loads(item.arguments))
            yield {"type": "function_call_output", "call_id": item.call_id, "output": value}


def responses():
    client, items = OpenAI(base_url=URL, api_key=KEY), [{"role": "user", "content": PROMPT}]
    while True:
        answer = client.responses.create(
            model=MODEL, instructions=SYSTEM, input=items, tools=RESPONSES_TOOLS, store=False
        )
        done = list(outputs(answer))
        if not done:
            return answer.output_text
        items += [*answer.output, *done]


def responses_previous():
    client, items, previous = OpenAI(base_url=URL, api_key=KEY), PROMPT, None
    while True:
        answer = client.responses.create(
            model=MODEL, instructions=SYSTEM, input=items, tools=RESPONSES_TOOLS, previous_response_id=previous
        )
        items, previous = list(outputs(answer)), answer.id
        if not items:
            return answer.output_text


async def responses_async_stream():
    client, items, deltas = AsyncOpenAI(base_url=URL, api_key=KEY), [{"role": "user", "content": PROMPT}], 0
    while True:
        async with client.responses.stream(
            model=MODEL, instructions=SYSTEM, input=items, tools=RESPONSES_TOOLS, store=False
        ) as stream:
            async for event in stream:
                deltas += event.type.endswith(".delta")
            answer = await stream.get_final_response()
        done = list(outputs(answer))
        if not done:
            return answer.output_text, deltas
        items += [*answer.output, *done]


run(
    {
        "chat": chat,
        "chat-async": chat_async,
        "chat-stream": chat_stream,
        "chat-async-stream": chat_async_stream,
        "responses": responses,
        "responses-previous": responses_previous,
        "responses-async-stream": responses_async_stream,
    }
)

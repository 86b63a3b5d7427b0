"""The `anthropic` SDK: tool loops by hand, and its own tool runner."""

from _task import FUNCTION, KEY, MODEL, PROMPT, SCHEMA, SYSTEM, URL, calculator, run
from anthropic import Anthropic, AsyncAnthropic, beta_tool

TOOL = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": SCHEMA}
FIELDS = {"model": MODEL, "max_tokens": 4096, "system": SYSTEM, "tools": [TOOL]}


def asked():
    return [{"role": "user", "content": PROMPT}]


def went_on(message):
    """The messages that follow an answer with calls."""
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": calculator(**block.input)}
        for block in message.content
        if block.type == "tool_use"
    ]
    return [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


def text(message):
    return "".join(block.text for block in message.content if block.type == "text")


def whole():
    client, messages = Anthropic(base_url=URL, api_key=KEY), asked()
    while True:
        message = client.messages.create(messages=messages, **FIELDS)
        if message.stop_reason != "tool_use":
            return text(message)
        messages += went_on(message)


async def whole_async():
    client, messages = AsyncAnthropic(base_url=URL, auth_token=KEY, api_key=None), asked()
    while True:
        message = await client.messages.create(messages=messages, **FIELDS)
        if message.stop_reason != "tool_use":
            return text(message)
        counted = await client.messages.count_tokens(
            messages=messages, model=MODEL, system=SYSTEM, tools=FIELDS["tools"]
        )
        assert counted.input_tokens == message.usage.input_tokens
        messages += went_on(message)


def stream():
    client, messages, deltas = Anthropic(base_url=URL, api_key=KEY), asked(), 0
    while True:
        with client.messages.stream(messages=messages, **FIELDS) as events:
            deltas += sum(event.type == "content_block_delta" for event in events)
            message = events.get_final_message()
        if message.stop_reason != "tool_use":
            return text(message), deltas
        messages += went_on(message)


async def stream_async():
    client, messages, deltas = AsyncAnthropic(base_url=URL, api_key=KEY), asked(), 0
    while True:
        async with client.messages.stream(messages=messages, **FIELDS) as events:
            async for event in events:
                deltas += event.type == "content_block_delta"
            message = await events.get_final_message()
        if message.stop_reason != "tool_use":
            return text(message), deltas
        messages += went_on(message)


def tool_runner():
    client = Anthropic(base_url=URL, api_key=KEY)
    fields = {**FIELDS, "tools": [beta_tool(calculator)]}
    return text(client.beta.messages.tool_runner(messages=asked(), **fields).until_done())


run(
    {
        "whole": whole,
        "whole-async": whole_async,
        "stream": stream,
        "stream-async": stream_async,
        "tool-runner": tool_runner,
    }
)

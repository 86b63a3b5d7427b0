"""Pydantic AI with each of its models that a base URL can lead here."""

from _task import KEY, MODE, MODEL, PROMPT, SYSTEM, URL, calculator, run
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def agent():
    if MODE.startswith("anthropic"):
        model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
    else:
        model_class = OpenAIResponsesModel if MODE.startswith("responses") else OpenAIChatModel
        model = model_class(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    return Agent(model, system_prompt=SYSTEM, tools=[calculator])


def whole():
    return agent().run_sync(PROMPT).output


async def stream():
    deltas = 0

    async def count(context, events):
        nonlocal deltas
        async for event in events:
            deltas += event.event_kind == "part_delta"

    return (await agent().run(PROMPT, event_stream_handler=count)).output, deltas


run(
    {
        f"{wire}{how}": function
        for wire in ("chat", "responses", "anthropic")
        for how, function in (("", whole), ("-stream", stream))
    }
)

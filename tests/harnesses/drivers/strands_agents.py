"""Strands agents with each of its models that a base URL can lead here."""

from _task import KEY, MODEL, PROMPT, SYSTEM, URL, calculator, run
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

CLIENT = {"api_key": KEY, "base_url": URL}


def talk(model):
    deltas = 0

    def count(**event):
        nonlocal deltas
        deltas += "contentBlockDelta" in event.get("event", {})

    agent = Agent(model=model, tools=[tool(calculator)], system_prompt=SYSTEM, callback_handler=count)
    return str(agent(PROMPT)).strip(), deltas


run(
    {
        "chat": lambda: talk(OpenAIModel(client_args=CLIENT, model_id=MODEL)),
        "responses": lambda: talk(OpenAIResponsesModel(client_args=CLIENT, model_id=MODEL)),
        "anthropic": lambda: talk(AnthropicModel(client_args=CLIENT, model_id=MODEL, max_tokens=4096)),
    }
)

"""The OpenAI Agents SDK, over Responses and over chat completions."""

from _task import KEY, MODE, MODEL, PROMPT, SYSTEM, URL, calculator, run
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
model_class = OpenAIResponsesModel if MODE.startswith("responses") else OpenAIChatCompletionsModel
model = model_class(model=MODEL, openai_client=AsyncOpenAI(base_url=URL, api_key=KEY))
agent = Agent(name="calculating", instructions=SYSTEM, tools=[function_tool(calculator)], model=model)


async def whole():
    return (await Runner.run(agent, PROMPT)).final_output


async def stream():
    result, deltas = Runner.run_streamed(agent, PROMPT), 0
    async for event in result.stream_events():
        deltas += event.type == "raw_response_event" and event.data.type.endswith(".delta")
    return result.final_output, deltas


async def delegated():
    """The calculating agent as the tool of another: two conversations in one session."""
    tool = agent.as_tool("calculating", "Calculates.")
    manager = Agent(name="manager", instructions="Delegate.", tools=[tool], model=model)
    return (await Runner.run(manager, "Ask the calculating agent.")).final_output


run({"responses": whole, "responses-stream": stream, "chat": whole, "chat-stream": stream, "chat-delegated": delegated})

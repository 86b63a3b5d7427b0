"""smolagents: its agent that calls tools, and its agent that writes code."""

from _task import KEY, MODEL, PROMPT, URL, calculator, run
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


def talk(agent_class, stream, **options):
    model = OpenAIModel(model_id=MODEL, api_base=URL, api_key=KEY, **options)
    agent = agent_class(tools=[tool(calculator)], model=model, stream_outputs=stream, verbosity_level=0)
    return agent.run(PROMPT)


# The agent asks for a forced tool call, which a policy that is to learn when to call can't be given.
run(
    {
        "tools": lambda: talk(ToolCallingAgent, False, tool_choice="auto"),
        "tools-stream": lambda: talk(ToolCallingAgent, True, tool_choice="auto"),
        "code": lambda: talk(CodeAgent, False),
        "code-stream": lambda: talk(CodeAgent, True),
    }
)

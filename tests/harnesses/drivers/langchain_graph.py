"""LangChain's chat models in a LangGraph loop."""

from _task import KEY, MODE, MODEL, PROMPT, SYSTEM, URL, calculator, run
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

TOOLS = [tool(calculator)]


def graph():
    if MODE.startswith("anthropic"):
        model = ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_tokens=4096)
    else:
        model = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, use_responses_api=MODE.startswith("responses"))
    bound = model.bind_tools(TOOLS)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(TOOLS))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


ASKED = {"messages": [("system", SYSTEM), ("user", PROMPT)]}


def whole():
    return graph().invoke(ASKED)["messages"][-1].text


def stream():
    deltas = []
    for message, meta in graph().stream(ASKED, stream_mode="messages"):
        if meta["langgraph_node"] == "model":
            deltas.append((message.id, message.text))
    last = deltas[-1][0]
    return "".join(text for message_id, text in deltas if message_id == last), len(deltas)


run(
    {
        f"{wire}{how}": function
        for wire in ("chat", "responses", "anthropic")
        for how, function in (("", whole), ("-stream", stream))
    }
)

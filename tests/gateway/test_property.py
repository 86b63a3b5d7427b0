"""The oracle property: whatever clients and engines do, no trained token has a wrong logprob or a wrong prefix.

Random conversations over every wire, those included whose clients render prompts themselves: branches, equal requests,
marked retries, replays written another way, edits, answers that begin in the request or go on where they were cut,
streaming and not, engine faults in the middle, clients that hang up, random token ids as answers. The engine's logprob
is a hash of all tokens before and the token itself, so the records prove themselves.
"""

from __future__ import annotations

import asyncio
import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcore_rl_toolkit.errors import EngineError
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records

from .support import CALCULATOR, GenerateOnly, client_of, encode, serving
from .wires import WIRES, Talker

words = st.sampled_from(["2", "yes.", "ünï ✓", " spaced ", "", "<|im_end|>", "</tool_call>", "a\nb", "{"])
arguments = st.sampled_from(['{"expression":  "1+1"}', '{"digits": 1e3, "expression": "a"}', "{}", '{"a": ', "[1]"])
answers = st.one_of(
    st.builds(lambda w: w + "<|im_end|>", words),
    st.builds(
        lambda w, a, end: f'{w}<tool_call>\n{{"name": "calculator", "arguments": {a}}}\n</tool_call>{end}',
        words,
        arguments,
        st.sampled_from(["<|im_end|>", ""]),
    ),
    st.just("<tool_call>\n{}\n</tool_call><|im_end|>"),
)
outputs = st.one_of(
    answers.map(encode), st.lists(st.integers(0, 400), min_size=1, max_size=12), st.just(encode("<|im_end|>"))
)


def plans(outputs: st.SearchStrategy[list[int]]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Conversations in which the engine says ``outputs``."""
    actions = ["go on"] * 6 + ["repeat", "retry", "branch", "edit", "fault", "hang up", "parallel"]
    actions += ["begin", "begin", "continue", "continue"]
    step = st.fixed_dictionaries(
        {
            "action": st.sampled_from(actions),
            "output": outputs,
            "say": words,
            "stream": st.booleans(),
            "max_tokens": st.sampled_from([None, 1, 3, 50]),
            "drift": st.sampled_from([None, "rekey", "object", "null", "spaces"]),
            "chunk": st.integers(1, 5),
        }
    )
    return st.lists(step, min_size=1, max_size=8)


class Engine(ScriptedBackend):
    """Says what the step says; on demand fails after the first chunk, or stalls until the client is gone."""

    def __init__(self) -> None:
        super().__init__(lambda _: self.output)
        self.output: list[int] = []
        self.fault = self.stall = False

    async def stream(self, **request: Any):
        async for chunk in super().stream(**request):
            if self.fault and chunk.finish_reason:
                raise EngineError("fault in the middle")
            if self.stall:
                await asyncio.sleep(30)
            yield chunk


def drifted(message: dict[str, Any], how: str | None) -> dict[str, Any]:
    """The same assistant message as another client would send it back."""
    message = deepcopy(message)
    for call in message.get("tool_calls", ()):
        call["id"] = "renamed"
        value = call["function"]["arguments"]
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                continue
        if how == "rekey" and isinstance(value, dict):
            call["function"]["arguments"] = json.dumps(dict(reversed(value.items())), separators=(",", ":"))
        if how == "object" and isinstance(value, dict):
            call["function"]["arguments"] = value
    if how == "null" and not message.get("content"):
        message["content"] = None
    if how == "spaces" and message.get("content"):
        message["content"] = message["content"].strip() + "\n"
    return message


class Rendering(Talker):
    """A client of ``/completions`` that renders ChatML itself and sends it as text."""

    path = "/completions"

    def body(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        del fields["tools"]
        return {"prompt": self.prompt(messages), "return_token_ids": True, **fields}

    def prompt(self, messages: list[dict[str, Any]]) -> str | list[int]:
        said = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return said + "<|im_start|>assistant\n"

    def message(self, data: Any) -> dict[str, Any]:
        choices = [c for event in data[:-1] for c in event["choices"]] if isinstance(data, list) else data["choices"]
        text = "".join(choice["text"] for choice in choices)
        return {"role": "assistant", "content": text, "ids": choices[-1]["token_ids"]}


class Tokenizing(Rendering):
    """The same, but it sends token ids, and what was sampled as it was sampled."""

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        end, ids = encode("<|im_end|>"), []
        for message in messages:
            said = message.get("ids") or encode(message["content"])
            ids += encode(f"<|im_start|>{message['role']}\n") + said + end * (said[-1:] != end) + encode("\n")
        return ids + encode("<|im_start|>assistant\n")


PROMPTS = {"completions-text": Rendering, "completions-ids": Tokenizing}


class Talk:
    """One client's view: histories that were answered, and what was delivered."""

    def __init__(self, talker: Talker, engine: Engine) -> None:
        self.talker, self.engine = talker, engine
        self.histories: list[list[dict[str, Any]]] = [[]]
        self.delivered = 0

    async def take(self, step: dict[str, Any]) -> None:
        engine, action = self.engine, step["action"]
        engine.output, engine.chunk = step["output"], step["chunk"]
        engine.fault, engine.stall = action == "fault", action == "hang up"
        request = self.request(step)
        limit = {"max_tokens": step["max_tokens"]} if step["max_tokens"] else {}
        body = self.talker.body(request, tools=[CALCULATOR], stream=step["stream"], **limit)
        if action == "hang up":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(self.talker.post(body), 0.05)
            return
        headers = {"x-stainless-retry-count": "1"} if action == "retry" else None
        calls = len(engine.calls)
        posts = [self.talker.post(body, headers=headers) for _ in range(3 if action == "parallel" else 1)]
        for status, data in await asyncio.gather(*posts):
            if action in ("begin", "continue") and status == 400:  # e.g. a template that opens reasoning
                assert "continue" in self.talker.error(data)
                continue
            self.digest(request, status, data, faulty=action == "fault")
        if action == "retry" and len(engine.calls) == calls:
            self.delivered -= 1  # the earlier answer once more

    def request(self, step: dict[str, Any]) -> list[dict[str, Any]]:
        history = self.histories[-1]
        if step["action"] == "continue" and history:
            return [*history[:-1], drifted(history[-1], step["drift"])]
        match step["action"]:
            case "repeat" | "retry" | "parallel" if history:
                return history[:-1]
            case "branch" if len(self.histories) > 2:
                history = self.histories[len(self.histories) // 2]
            case "edit" if history:
                history = [{**history[0], "content": history[0]["content"] + "!"}, *history[1:]]
        if history and history[-1].get("tool_calls"):
            ids = [call["id"] for call in history[-1]["tool_calls"]]
            new = [{"role": "tool", "tool_call_id": i, "content": step["say"]} for i in ids]
        else:
            new = [{"role": "user", "content": step["say"]}]
        if step["action"] == "begin":
            new.append({"role": "assistant", "content": step["say"]})
        return [*[drifted(m, step["drift"]) if m["role"] == "assistant" else m for m in history], *new]

    def digest(self, request: list[dict[str, Any]], status: int, data: Any, *, faulty: bool) -> None:
        if faulty:
            assert status in (200, 502)
            assert "fault in the middle" in self.talker.error(data)
            return
        assert status == 200, data
        answer = self.talker.message(data)
        if request[-1]["role"] == "assistant":
            *request, begun = request
            answer = {**begun, **answer, "content": (begun["content"] or "") + (answer["content"] or "")}
        self.histories.append([*request, answer])
        self.delivered += 1


async def converse(
    plan: list[dict[str, Any]],
    *,
    wire: str = "chat",
    streaming_engine: bool,
    history: str,
    rendered_by: Any = None,
    allowed_forks: frozenset[str] = frozenset(),
) -> None:
    """``allowed_forks``: reasons why rows of a linear conversation may fork in ``history="preserve"``."""
    engine = Engine()
    backend = engine if streaming_engine else GenerateOnly(engine)
    async with (
        serving(backend, rendered_by=rendered_by, history=history) as gateway,
        client_of(gateway) as client,
    ):
        talk = Talk((WIRES | PROMPTS)[wire](client), engine)
        for step in plan:
            await talk.take(step)
        linear = all(step["action"] in ("go on", "fault", "hang up") for step in plan)
        tree = client.session.tree
        rows = await gateway.finish_session(client.session.session_id)
    turns = tree.delivered()
    assert len(turns) == talk.delivered
    trained = check_records(rows, sampled_twice=True)
    abandoned = rows[0].metadata["abandoned_turns"] if rows else 0
    assert len(rows) == sum(not any(t.parent is turn for t in turns) for turn in turns)
    if not abandoned:
        assert trained == sum(len(turn.output_ids) for turn in turns)
    if linear and rows and history == "preserve":
        assert {row.metadata["fork"] for row in rows[1:]} <= allowed_forks
        assert rows[0].metadata["fork"] is None


@pytest.mark.parametrize("streaming_engine", [True, False])
@pytest.mark.parametrize("history", ["preserve", "template"])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.timeout(240)
def test_no_trained_token_is_ever_wrong(wire, streaming_engine, history):
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(plans(outputs))
    def run(plan):
        asyncio.run(converse(plan, wire=wire, streaming_engine=streaming_engine, history=history))

    run()


@pytest.mark.parametrize("streaming_engine", [True, False])
@pytest.mark.parametrize("wire", PROMPTS)
@pytest.mark.timeout(240)
def test_nor_where_the_client_renders_itself(wire, streaming_engine):
    # Text that does not survive its way through tokens and back, or is sent back otherwise, begins a row of its own.
    allowed = frozenset({"new_conversation"} if wire == "completions-text" else ())

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(plans(outputs))
    def run(plan):
        asyncio.run(
            converse(plan, wire=wire, streaming_engine=streaming_engine, history="preserve", allowed_forks=allowed)
        )

    run()

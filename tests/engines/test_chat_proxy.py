"""The chat proxy: an engine that renders and parses by itself, and every trained token true all the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from agentcore_rl_toolkit.rollout_gateway import ChatProxyBackend, RolloutGateway, VllmBackend
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records
from gateway.support import CALCULATOR, Client, serving
from gateway.wires import WIRES, Chat

from .fake_chat import FakeChat, decode, says
from .fakes import serving_engine


def call(expression: str) -> dict[str, Any]:
    arguments = json.dumps({"expression": expression}, ensure_ascii=False)
    return {"type": "function", "function": {"name": "calculator", "arguments": arguments}}


PLAN = [
    {"reasoning_content": "I add first.", "content": "Let me see.", "tool_calls": [call("1+2"), call("3*é")]},
    {"reasoning_content": "Now I know.", "content": "It is three."},
    {"content": "You are welcome."},
]


def script(messages: list[dict[str, Any]]) -> str:
    """The next message of the plan, by how many were said."""
    return says(PLAN[sum(message["role"] == "assistant" for message in messages) % len(PLAN)])


def words(messages: list[dict[str, Any]]) -> str:
    return "one two three red green blue " * 3


@asynccontextmanager
async def proxied(
    *faults: str, **options: Any
) -> AsyncIterator[tuple[FakeChat, RolloutGateway, aiohttp.ClientSession]]:
    """A fake engine, a gateway that forwards to it, and an HTTP client."""
    engine = FakeChat(*faults, script=options.pop("script", script), chunk=2, delay=options.pop("delay", 0.0))
    streams = options.pop("streams", True)
    async with (
        serving_engine(engine) as server,
        ChatProxyBackend(server.url, streams=streams, retries=0) as backend,
        serving(backend, **options) as gateway,
        aiohttp.ClientSession() as http,
    ):
        yield server, gateway, http


async def aborted(server: FakeChat) -> None:
    """Wait until the engine has noticed that nobody wants its answer."""
    for _ in range(100):
        if server.aborted:
            break
        await asyncio.sleep(0.02)
    assert (server.aborted, server.running) == (1, 0)


async def converse(talker: Any, *, stream: bool = False, reasoning: bool = True, **fields: Any) -> list[dict[str, Any]]:
    """Three turns with tools; returns the conversation."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Calculate."}]
    for following in (
        lambda m: [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in m["tool_calls"]],
        lambda m: [{"role": "user", "content": "Thanks!"}],
        lambda m: [],
    ):
        answer = await talker.ask(messages, tools=[CALCULATOR], stream=stream, **fields)
        message = {"role": "assistant", **answer}
        if not reasoning:
            message.pop("reasoning_content", None)
        messages += [message, *following(answer)]
    return messages


def said(messages: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (
            m.get("reasoning_content", ""),
            m["content"] or "",
            [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in m.get("tool_calls", ())],
        )
        for m in messages
        if m["role"] == "assistant"
    ]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_is_one_row_on_every_wire(wire, stream):
    async with proxied() as (server, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        messages = await converse(WIRES[wire](client), stream=stream)
        assert said(messages) == said([{"role": "assistant", **m} for m in PLAN])
        [row] = await gateway.finish_session(client.session.session_id, reward=1.0)
    sampled = [decode(row.token_ids[row.prompt_length :][a:b]) for a, b in (t["span"] for t in row.metadata["turns"])]
    assert sampled == [says(m) + "<|im_end|>" for m in PLAN]
    assert check_records([row]) == sum(row.loss_mask) > 40
    assert row.metadata["fork"] is None
    assert row.response == decode(row.token_ids[row.prompt_length :])
    assert [(t["finish_reason"], t["trained"]) for t in row.metadata["turns"]] == [("stop", True)] * 3
    assert server.running == 0


async def test_streaming_and_not_are_the_same():
    rows = []
    for stream in (False, True):
        async with proxied() as (_, gateway, http):
            client = Client(http, gateway.base_url, gateway.create_session())
            await converse(Chat(client), stream=stream)
            rows += await gateway.finish_session(client.session.session_id)
    assert len(rows) == 2
    assert rows[0].token_ids == rows[1].token_ids
    assert rows[0].logprobs == rows[1].logprobs
    assert rows[0].loss_mask == rows[1].loss_mask


async def test_the_first_delta_leaves_before_the_last_token_is_sampled():
    async with proxied(script=words, delay=0.02) as (server, gateway, http):
        session = gateway.create_session()
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        async with http.post(f"{session.base_url}/chat/completions", json=body) as response:
            seen = b""
            while b'"content":"one' not in seen.replace(b'": "', b'":"'):
                seen += await response.content.readany()
            assert server.running == 1, "the engine was done already"
            assert b"[DONE]" in await response.read()


async def test_a_client_that_hangs_up_aborts_the_engine_and_leaves_no_trace():
    async with proxied(script=words, delay=0.05) as (server, gateway, http):
        session = gateway.create_session()
        client = Client(http, gateway.base_url, session)
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        async with http.post(f"{session.base_url}/chat/completions", json=body) as response:
            await response.content.readany()
            response.close()
        await aborted(server)
        server.delay = 0.0
        await client.ask([{"role": "user", "content": "Hi"}])
        [row] = await gateway.finish_session(session.session_id)
    assert len(row.metadata["turns"]) == 1
    check_records([row])


# -- history -----------------------------------------------------------------------------------------------


async def test_reasoning_that_a_client_leaves_out_goes_to_the_engine_again():
    async with proxied() as (server, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        await converse(Chat(client), reasoning=False)
        assert [m.get("reasoning_content") for m in server.chats()[-1]["messages"] if m["role"] == "assistant"] == [
            "I add first.",
            "Now I know.",
        ]
        [row] = await gateway.finish_session(client.session.session_id)
    assert len(row.metadata["turns"]) == 3
    check_records([row])


@pytest.mark.parametrize(
    ("faults", "history", "turns"), [(("drops",), "preserve", [2, 1]), ((), "template", [1, 1, 1])]
)
async def test_reasoning_that_is_dropped_begins_another_row(faults, history, turns):
    async with proxied(*faults, history=history) as (_, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        await converse(Chat(client), reasoning=history == "preserve")
        rows = await gateway.finish_session(client.session.session_id)
    assert [len(row.metadata["turns"]) for row in rows] == turns
    assert [row.metadata["fork"] for row in rows] == [None] + ["rendered_differently"] * (len(turns) - 1)
    assert check_records(rows) == sum(sum(row.loss_mask) for row in rows)


async def test_tokens_that_the_engine_would_not_write_so_begin_another_row():
    async with proxied("spells") as (_, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        await converse(Chat(client))
        rows = await gateway.finish_session(client.session.session_id)
    assert [row.metadata["fork"] for row in rows] == [None, "rendered_differently", "rendered_differently"]
    check_records(rows)


async def test_a_row_goes_on_from_the_last_turn_that_is_still_as_it_was():
    """The second answer is spelled, so the third prompt begins with the first turn only."""
    async with proxied() as (server, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        messages = [{"role": "user", "content": "Hi"}]
        for turn in range(4):
            server.faults = {"spells"} if turn == 1 else set()
            messages += [await client.ask(messages), {"role": "user", "content": "Go on"}]
        rows = await gateway.finish_session(client.session.session_id)
    assert [len(row.metadata["turns"]) for row in rows] == [2, 3]
    assert [[t["trained"] for t in row.metadata["turns"]] for row in rows] == [[True, True], [False, True, True]]
    assert [row.metadata["fork"] for row in rows] == [None, "rendered_differently"]
    check_records(rows)


async def test_branches_sub_agents_and_other_tools():
    async with proxied(script=lambda m: f"About {m[-1]['content']}") as (_, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        first = [{"role": "user", "content": "one"}]
        first.append(await client.ask(first))
        await client.ask([*first, {"role": "user", "content": "red"}])
        await client.ask([*first, {"role": "user", "content": "blue"}])
        await client.ask([{"role": "system", "content": "You help"}, {"role": "user", "content": "two"}])
        await client.ask([*first, {"role": "user", "content": "red"}], tools=[CALCULATOR])
        rows = await gateway.finish_session(client.session.session_id)
    assert [row.metadata["fork"] for row in rows] == [None, "branch", "new_conversation", "tools_changed"]
    assert check_records(rows) == sum(sum(row.loss_mask) for row in rows)


async def test_several_answers_to_one_question_and_a_retry():
    async with proxied(script=words) as (server, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        body = {"messages": [{"role": "user", "content": "Hi"}], "n": 3}
        status, data = await client.post(body)
        assert status == 200
        assert [c["message"]["content"] for c in data["choices"]] == [words([])] * 3
        status, again = await client.post(body, headers={"x-stainless-retry-count": "1"})
        assert again["choices"] == data["choices"]
        assert again["usage"] == data["usage"]
        assert len(server.chats()) == 3, "a retry was sampled again"
        rows = await gateway.finish_session(client.session.session_id)
    assert len(rows) == 3
    assert [row.metadata["fork"] for row in rows] == [None] * 3
    check_records(rows, sampled_twice=True)


async def test_a_retry_of_a_turn_that_began_a_row():
    async with proxied("drops") as (server, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        messages = (await converse(Chat(client)))[:-1]
        asked = len(server.chats())
        again = await client.ask(messages, tools=[CALCULATOR], headers={"x-stainless-retry-count": "1"})
        assert again["content"] == "You are welcome."
        assert len(server.chats()) == asked


# -- what is asked -------------------------------------------------------------------------------------------


async def test_the_trainer_has_the_last_word_on_sampling():
    async with proxied(script=words) as (server, gateway, http):
        session = gateway.create_session(
            sampling_defaults={"top_k": 7, "max_tokens": 9},
            sampling_overrides={"temperature": 1.0, "adapter": "lora-a"},
        )
        client = Client(http, gateway.base_url, session)
        variables = {"chat_template_kwargs": {"enable_thinking": False}, "stop_token_ids": [3]}
        await client.ask([{"role": "user", "content": "Hi"}], temperature=0.3, **variables)
        await client.ask([{"role": "user", "content": "Hi"}], max_tokens=3)
        one, two = server.chats()
        rows = await gateway.finish_session(session.session_id)
    assert (one["temperature"], one["top_k"], one["top_p"], one["max_tokens"]) == (1.0, 7, 1.0, 9)
    assert (one["stop_token_ids"], one["chat_template_kwargs"]) == ([3], {"enable_thinking": False})
    assert (one["model"], one["return_token_ids"], one["logprobs"]) == ("lora-a", True, True)
    assert two["max_tokens"] == 3
    assert [len(row.metadata["turns"]) for row in rows] == [1, 1]
    assert [row.status for row in rows] == ["truncated", "truncated"]
    assert not any(row.metadata["exact_logprobs"] for row in rows), "top_k cuts the distribution"
    check_records(rows, sampled_twice=True)


async def test_a_limit_is_clamped_to_the_window_and_a_long_prompt_refused():
    async with proxied(script=words) as (server, gateway, http):
        talker = WIRES["anthropic"](Client(http, gateway.base_url, gateway.create_session()))
        question = [{"role": "user", "content": "Hi"}]
        status, counted = await talker.post(talker.body(question), path="/messages/count_tokens")
        assert status == 200
        prompt = counted["input_tokens"]
        session = gateway.create_session(max_context_tokens=prompt + 5)
        client = Client(http, gateway.base_url, session)
        status, data = await client.post({"messages": question, "max_tokens": 50})
        assert (status, data["choices"][0]["finish_reason"]) == (200, "length")
        assert data["usage"] == {"prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5}
        status, data = await client.post({"messages": [{"role": "user", "content": "Hi " * 9}]})
        assert (status, data["error"]["code"]) == (400, "context_length_exceeded")
        assert len(server.chats()) == 1
        [row] = await gateway.finish_session(session.session_id)
    assert check_records([row]) == 5


async def test_turns_time_and_answers_nobody_used():
    async with proxied(script=words) as (server, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session(max_turns=3))
        first = [{"role": "user", "content": "Hi"}]
        await client.ask(first)
        answer = await client.ask(first)
        await client.ask([*first, answer, {"role": "user", "content": "Go on"}])
        status, data = await client.post({"messages": first})
        assert (status, data["error"]["code"]) == (400, "turn_limit_exceeded")
        rows = await gateway.finish_session(client.session.session_id)
        assert sorted(len(row.metadata["turns"]) for row in rows) == [1, 2]
        assert [row.metadata["abandoned"] for row in rows if not sum(row.loss_mask)] == [True]
        server.delay = 0.05
        client = Client(http, gateway.base_url, gateway.create_session(deadline=0.2))
        status, data = await client.post({"messages": first})
        assert (status, data["error"]["code"]) == (400, "deadline_exceeded")
        await aborted(server)


async def test_64_sessions_side_by_side_leave_nothing_behind():
    async with proxied(delay=0.001) as (server, gateway, http):
        clients = [Client(http, gateway.base_url, gateway.create_session()) for _ in range(64)]
        await asyncio.gather(*(converse(Chat(client), stream=i % 2 == 0) for i, client in enumerate(clients)))
        assert server.peak > 20, "they did not run side by side"
        for client in clients:
            [row] = await gateway.finish_session(client.session.session_id)
            assert check_records([row]) == sum(row.loss_mask) > 40
        await gateway.backend.aclose()
        await asyncio.sleep(0.05)
        assert (server.running, server.open_connections, len(gateway.sessions)) == (0, 0, 0)


async def test_a_stop_string_is_kept_in_the_tokens_and_taken_from_the_text():
    async with proxied(script=words) as (_, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        assert (await client.ask([{"role": "user", "content": "Hi"}], stop=["red"], stream=True))["content"] == (
            "one two three "
        )
        [row] = await gateway.finish_session(client.session.session_id)
    assert row.response == "one two three red"
    assert row.metadata["turns"][0]["stop_sequence"] == "red"
    check_records([row])


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_get_logprobs_with_the_text_of_the_tokens(stream):
    async with proxied(script=lambda _: "red blue") as (_, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "stream": stream}
        _, data = await client.post(body)
        [row] = await gateway.finish_session(client.session.session_id)
    parts = [c["logprobs"] for e in (data[:-1] if stream else [data]) for c in e["choices"] if c.get("logprobs")]
    content = [entry for part in parts for entry in part["content"]]
    assert "".join(entry["token"] for entry in content) == "red blue<|im_end|>"
    assert [entry["logprob"] for entry in content] == row.logprobs


async def test_calls_that_all_have_the_same_number_stay_apart():
    async with proxied("same_index") as (_, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        messages = await converse(Chat(client), stream=True)
        assert said(messages) == said([{"role": "assistant", **m} for m in PLAN])


async def test_one_call_at_most_where_the_client_asks_for_that():
    async with proxied() as (_, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        question = [{"role": "user", "content": "Calculate."}]
        answer = await client.ask(question, tools=[CALCULATOR], parallel_tool_calls=False)
        assert [c["function"]["arguments"] for c in answer["tool_calls"]] == ['{"expression": "1+2"}']


# -- servers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sglang", "meta"])
@pytest.mark.parametrize("stream", [False, True])
async def test_servers_that_do_not_stream_token_ids(kind, stream):
    async with proxied(kind, streams=False) as (server, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        messages = await converse(Chat(client), stream=stream)
        assert said(messages) == said([{"role": "assistant", **m} for m in PLAN])
        assert not any(body.get("stream") for body in server.chats())
        [row] = await gateway.finish_session(client.session.session_id)
    assert check_records([row]) == sum(row.loss_mask)
    assert set(row.policy_versions or ()) == ({7, None} if kind == "meta" else set())


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("no_ids", "gave no token_ids: vLLM 0.10.2 or newer"),
        ("no_prompt_ids", "gave no prompt_token_ids: vLLM 0.10.2 or newer"),
        ("extra_logprob", "logprobs for"),
        ("other_tokens", "logprobs of other tokens"),
        ("null", "None"),
        ("lost", "streams=False"),
        ("drop", "broke off"),
        ("error_event", "CUDA out of memory"),
        ("logits", "--logprobs-mode processed_logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_broken_answer_is_said_so_and_leaves_no_trace(fault, told, stream):
    async with proxied(fault, script=words) as (server, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        status, data = await client.post({"messages": [{"role": "user", "content": "Hi"}], "stream": stream})
        error = (data[-1] if isinstance(data, list) else data)["error"]
        assert error["code"] == "engine_error"
        assert told in error["message"]
        assert status in (200, 502, 503)
        server.faults.clear()
        await client.ask([{"role": "user", "content": "Hi"}])
        [row] = await gateway.finish_session(client.session.session_id)
    assert len(row.metadata["turns"]) == 1
    check_records([row])
    assert server.running == 0


async def test_a_server_that_streams_no_token_ids_is_said_so():
    async with proxied("sglang", script=words) as (_, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        status, data = await client.post({"messages": [{"role": "user", "content": "Hi"}]})
        assert (status, data["error"]["code"]) == (502, "engine_error")
        assert "streams=False" in data["error"]["message"]


async def test_logprobs_of_another_temperature_are_refused():
    async with proxied("unscaled", script=words) as (_, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        status, data = await client.post({"messages": [{"role": "user", "content": "Hi"}], "temperature": 0.5})
        assert status == 502
        assert "--logprobs-mode processed_logprobs" in data["error"]["message"]
        await client.ask([{"role": "user", "content": "Hi"}], temperature=1.0)


async def test_a_failing_engine():
    async with proxied() as (server, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        server.broken = 500
        got, data = await client.post({"messages": [{"role": "user", "content": "Hi"}]})
        assert (got, data["error"]["code"]) == (502, "engine_error")
        server.broken = 0
        server.busy = 1
        got, data = await client.post({"messages": [{"role": "user", "content": "Hi"}]})
        assert (got, data["error"]["code"]) == (503, "engine_error")
        assert await gateway.finish_session(client.session.session_id) == []


async def test_another_prompt_than_ours_begins_another_row():
    """What the engine says it was conditioned on counts, whatever the conversation was."""
    async with proxied(script=words) as (server, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        messages = [{"role": "user", "content": "Hi"}]
        messages += [await client.ask(messages), {"role": "user", "content": "Go on"}]
        server.faults = {"wrong_prompt"}
        _, data = await client.post({"messages": messages})
        one, two = await gateway.finish_session(client.session.session_id)
    assert [one.metadata["fork"], two.metadata["fork"]] == [None, "rendered_differently"]
    assert two.token_ids[: two.prompt_length] == [5, *server.render({"messages": messages})[1:]]
    assert data["usage"]["prompt_tokens"] == two.prompt_length
    check_records([one])


async def test_what_the_template_refuses_is_the_clients_fault():
    async with proxied(script=words) as (server, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        server._template = server._template.environment.from_string('{{ raise_exception("user first") }}')
        server.requests.clear()
        status, data = await client.post({"messages": [{"role": "user", "content": "Hi"}]})
        assert (status, data["error"]["code"]) == (400, "invalid_request_error")
        assert "user first" in data["error"]["message"]


async def test_a_prompt_over_the_engines_own_window():
    async with proxied(script=words) as (server, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        long = [{"role": "user", "content": "Hi! " * 5000}]
        status, data = await client.post({"messages": long})
        assert (status, data["error"]["code"]) == (400, "context_length_exceeded")
        talker = WIRES["anthropic"](client)
        status, data = await talker.post(talker.body(long))
        assert (status, data["error"]["message"].partition(":")[0]) == (400, "prompt is too long")
        async with http.get(f"{client.session.base_url}/models") as response:
            assert (await response.json())["data"][0]["max_model_len"] == 4096
        await client.ask([{"role": "user", "content": "Hi"}])
        assert not [body for path, body, _ in server.requests if path == "/tokenize"], "nobody set a window"


async def test_an_engine_that_cannot_count_or_spell():
    async with proxied("no_tokenize", script=words) as (_, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session(max_context_tokens=100))
        status, data = await client.post({"messages": [{"role": "user", "content": "Hi"}]})
        assert status == 502
        assert "max_context_tokens needs" in data["error"]["message"]
        client.session.max_context_tokens = 0
        await client.ask([{"role": "user", "content": "Hi"}])
        [row] = await gateway.finish_session(client.session.session_id)
    assert row.response == ""
    check_records([row])


async def test_what_only_a_tokenizer_could_do_is_refused():
    async with proxied(script=words) as (_, gateway, http):
        client = Client(http, gateway.base_url, gateway.create_session())
        begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "one"}]
        status, data = await client.post({"messages": begun})
        assert (status, data["error"]["param"]) == (400, "messages")
        async with http.post(f"{client.session.base_url}/completions", json={"prompt": "Hi"}) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "prompt")


def test_a_renderer_belongs_to_token_engines_alone():
    with pytest.raises(ValueError, match="renderer"):
        RolloutGateway(backend=VllmBackend("http://127.0.0.1:1"))
    with pytest.raises(ValueError, match="renderer"):
        RolloutGateway(backend=ScriptedBackend([]), renderer=None)

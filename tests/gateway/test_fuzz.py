"""Malformed requests on every endpoint: an answer in JSON, never a 5xx, and the session goes on as if nothing was."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records

from .support import CALCULATOR, client_of, encode, serving
from .wires import WIRES, Talker

CALLED = {"type": "function", "id": "c1", "function": {"name": "calculator", "arguments": "{}"}}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "so", "reasoning_content": "why", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
    {"role": "user", "content": "go on"},
]
NUMBERS = {"temperature": 1.0, "top_p": 1.0, "top_k": 5, "max_tokens": 9, "seed": 1, "n": 1, "stop": ["x"]}
EXTRA: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        **NUMBERS,
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": True},
        "response_format": {"type": "text"},
        "logprobs": True,
        "parallel_tool_calls": True,
    },
    "/messages": {
        "stop_sequences": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "low"},
        "top_k": 5,
    },
    "/responses": {
        "instructions": "x",
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}},
        "include": ["reasoning.encrypted_content"],
        "previous_response_id": None,
        "metadata": {"a": "b"},
        "tool_choice": "auto",
        "truncation": "disabled",
    },
    "/completions": {**NUMBERS, "logprobs": 0, "return_token_ids": True, "best_of": 1},
}
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 1.5, 1e308, float("inf"), float("-inf"), float("nan"), "", "x",
    "user", "assistant", "text", "function", "a" * 2000, "\x00", "\ud800", "<|im_end|>", "\U0010fffd", "{{ x }}",
    "resp_0", "../..", [], [None], [[]], ["x"], [1, 2, 3], [{}], {}, {"type": "text"}, {"type": ["x"]}, {"text": 1},
    {"role": "user", "content": "x"}, {"role": "assistant"}, {"type": "tool_use"}, {"type": "reasoning"}, {"": ""},
    {"content": [{"content": [{"content": []}]}]}, {"type": "function", "function": {"name": "f", "parameters": []}},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        yield (*path, key)
        yield from places(inside, (*path, key))


def malformed(body: dict[str, Any], chance: random.Random) -> bytes:
    """One to three changes to a good request; now and then to its bytes."""
    body = copy.deepcopy(body)
    for _ in range(chance.randint(1, 3)):
        *way, last = chance.choice([*places(body), ("surprise",)])
        target: Any = body
        for key in way:
            target = target[key]
        match chance.randrange(5):
            case 0 if isinstance(target, list) or last in target:
                del target[last]
            case 1 if isinstance(target, list):
                target.insert(last, copy.deepcopy(chance.choice(JUNK)))
            case 2 if isinstance(target, dict):
                target[chance.choice([*target, "type", "role", "content", "id"])] = copy.deepcopy(chance.choice(JUNK))
            case _:
                target[last] = copy.deepcopy(chance.choice(JUNK))
    data = json.dumps(body).encode()
    if chance.random() < 0.1:
        at = chance.randrange(len(data))
        data = data[:at] + bytes([chance.randrange(256)]) + data[at + chance.randrange(3) :]
    return data


def good_request(talker: Talker, path: str, *, stream: bool) -> dict[str, Any]:
    if path == "/completions":
        return {"prompt": "hi", "stream": stream, **EXTRA[path]}
    return talker.body(HISTORY, tools=[CALCULATOR], stream=stream) | EXTRA[path]


async def fuzz(path: str, count: int, seed: int) -> None:
    chance = random.Random(seed)
    backend = ScriptedBackend(lambda _: encode("ok<|im_end|>"))
    async with serving(backend) as gateway, client_of(gateway) as client:
        kind = next((wire for wire in WIRES.values() if path.startswith(wire.path)), Talker)
        talker = kind(client)
        good = [good_request(talker, path.removesuffix("/count_tokens"), stream=stream) for stream in (False, True)]
        good[1].pop("n", None)
        for body in good:
            status, data = await talker.post(body, path=path)
            assert status == 200, data
        refused = 0

        async def once(data: bytes) -> None:
            nonlocal refused
            status, answer = await asyncio.wait_for(talker.post(data, path=path), 20)
            assert status in (200, 400), (status, answer, data)
            refused += status == 400
            if status == 400:
                assert client.session.api_key not in talker.error(answer)

        for _ in range(count // 10):
            await asyncio.gather(*(once(malformed(chance.choice(good), chance)) for _ in range(10)))
        assert count // 5 < refused < count
        status, data = await talker.post(good[0], path=path)
        assert status == 200, data
        assert not client.session.in_flight
        rows = await gateway.finish_session(client.session.session_id)
    assert check_records(rows, sampled_twice=True) or path.endswith("/count_tokens")


PATHS = ["/chat/completions", "/messages", "/messages/count_tokens", "/responses", "/completions"]


@pytest.mark.parametrize("path", PATHS)
def test_malformed_requests_do_no_harm(path):
    asyncio.run(fuzz(path, 300, seed=1))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", PATHS)
def test_twenty_thousand_malformed_requests_do_no_harm(path):
    for seed in range(40):
        asyncio.run(fuzz(path, 500, seed=100 + seed))

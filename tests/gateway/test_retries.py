"""Retries of parallel samples, with the openai SDK: what it sends again has the ``Idempotency-Key`` it had before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from agentcore_rl_toolkit.errors import EngineError
from agentcore_rl_toolkit.rollout_gateway import RolloutGateway, Session, sessions
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records

from .support import encode, serving

USER = {"role": "user", "content": "a"}


class Held(ScriptedBackend):
    """Each call's answer waits for its own ``go`` event; ``fails``: the calls that fail instead, from 0."""

    def __init__(self, *words: str, fails: tuple[int, ...] = ()) -> None:
        super().__init__([encode(f"{word}<|im_end|>") for word in words], chunk=1)
        self.go = [asyncio.Event() for _ in words]
        self.fails = fails

    async def stream(self, **request: Any):
        call = len(self.calls)
        chunks = super().stream(**request)
        first = await anext(chunks)
        try:
            await self.go[call].wait()
            if call in self.fails:
                raise EngineError("busy", retry_after=0.1)
            yield first
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()

    def release(self) -> None:
        for event in self.go:
            event.set()

    async def called(self, times: int) -> None:
        async with asyncio.timeout(5):
            while len(self.calls) < times:  # noqa: ASYNC110 - the engine has no event for it
                await asyncio.sleep(0.002)


class Sampler:
    """One prompt, asked through the SDK under one key or another."""

    def __init__(self, sdk: openai.AsyncOpenAI, gateway: RolloutGateway, session: Session) -> None:
        self.sdk, self.gateway, self.session = sdk, gateway, session

    async def __call__(self, key: str | None, *, stream: bool = False, retry: bool = False, **fields: Any) -> str:
        headers = {} if key is None else {"Idempotency-Key": key}
        if retry:
            headers["x-stainless-retry-count"] = "1"
        request = {"model": "m", "messages": [USER], "extra_headers": headers, **fields}
        if not stream:
            answer = await self.sdk.chat.completions.create(**request)
            return " ".join(choice.message.content for choice in answer.choices)
        chunks = await self.sdk.chat.completions.create(**request, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    def start(self, key: str | None, **options: Any) -> asyncio.Task[str]:
        return asyncio.create_task(self(key, **options))

    async def rows(self, samples: int) -> None:
        """Each sample is a row of its own, and true."""
        rows = await self.gateway.finish_session(self.session.session_id)
        assert len(rows) == samples
        check_records(rows, sampled_twice=True)  # two answers may begin alike


@asynccontextmanager
async def asking(backend: ScriptedBackend, **options: Any) -> AsyncIterator[Sampler]:
    async with serving(backend) as gateway:
        session = gateway.create_session()
        async with openai.AsyncOpenAI(
            base_url=session.base_url, api_key="EMPTY", **{"max_retries": 0, **options}
        ) as sdk:
            yield Sampler(sdk, gateway, session)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_gets_the_answer_of_its_own_key(stream):
    backend = Held("one", "two")
    backend.release()
    async with asking(backend) as ask:
        assert [await ask("a", stream=stream), await ask("b", stream=stream)] == ["one", "two"]
        for again in (False, True):
            assert await ask("a", stream=again, retry=True) == "one"
            assert await ask("b", stream=again) == "two", "a key that came before needs no other sign"
            assert await ask("a", stream=again) == "one"
        assert len(backend.calls) == 2
        await ask.rows(2)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_joins_the_request_of_its_own_key_while_that_is_answered(stream):
    backend = Held("one", "two")
    async with asking(backend) as ask:
        firsts = []
        for number, key in enumerate("ab", 1):
            firsts.append(ask.start(key, stream=stream))
            await backend.called(number)
        again = [ask.start(key, stream=again, retry=True) for key in "ab" for again in (False, True)]
        await asyncio.sleep(0.1)
        backend.go[1].set()
        assert await firsts[1] == await again[2] == await again[3] == "two"
        assert not any(task.done() for task in (firsts[0], *again[:2]))
        backend.go[0].set()
        assert await firsts[0] == await again[0] == await again[1] == "one"
        assert len(backend.calls) == 2
        await ask.rows(2)


async def test_the_sdk_sends_what_failed_again_and_gets_a_sample_of_its_own():
    backend = Held("lost", "two", "one", fails=(0,))
    async with asking(backend, max_retries=1) as ask:
        first = ask.start("a")
        await backend.called(1)
        backend.release()
        assert await ask("b") == "two"
        assert await first == "one", "another sample's answer"
        await ask.rows(2)


async def test_the_sdk_hangs_up_and_gets_a_sample_of_its_own():
    backend = Held("lost", "two", "one")
    backend.go[1].set()
    backend.go[2].set()
    async with asking(backend, max_retries=1) as ask:
        first = ask.start("a", timeout=0.5)
        await backend.called(1)
        assert await ask("b") == "two"
        assert await first == "one", "another sample's answer"
        assert backend.aborted == 1
        await ask.rows(2)


async def test_of_retries_side_by_side_that_find_nothing_one_is_sampled():
    backend = Held("lost", "one", fails=(0,))
    async with asking(backend) as ask:
        first = ask.start("a")
        await backend.called(1)
        again = [ask.start("a", retry=True) for _ in range(3)]
        await asyncio.sleep(0.1)
        backend.release()
        with pytest.raises(openai.InternalServerError):
            await first
        assert await asyncio.gather(*again) == ["one"] * 3
        await ask.rows(1)


async def test_a_retry_whose_key_is_not_known_gets_the_latest_answer_and_keeps_it():
    backend = Held("one", "two", "three")
    backend.release()
    async with asking(backend) as ask:
        await ask("a")
        await ask("b")
        assert await ask("never seen", retry=True) == "two"
        assert await ask("c") == "three"
        assert await ask("never seen") == "two"
        assert await ask(None, retry=True) == "three"
        await ask.rows(3)


async def test_a_key_is_of_one_prompt_and_one_number_of_answers():
    backend = Held("one", "two", "three", "four")
    backend.release()
    async with asking(backend) as ask:
        assert await ask("a") == "one"
        assert await ask("a", messages=[USER, USER]) == "two"
        both = await ask("a", n=2)
        assert sorted(both.split()) == ["four", "three"]
        assert await ask("b", n=1, retry=True) == "one"
        assert await ask("a", n=2) == both
        assert await ask("a", messages=[USER, USER]) == "two"
        assert await ask("a") == "one"
        await ask.rows(4)


@pytest.mark.parametrize("fails", [(), (0,)])
async def test_a_retry_without_a_key_joins_the_samples_of_an_equal_request(fails):
    backend = Held("one", "two", "three", "four", fails=fails)
    async with asking(backend) as ask:
        first = ask.start(None, n=2)
        await backend.called(2)
        again = ask.start(None, n=2, retry=True)
        await asyncio.sleep(0.1)
        assert len(backend.calls) == 2
        backend.release()
        if fails:
            with pytest.raises(openai.InternalServerError):
                await first
            assert sorted((await again).split()) == ["four", "three"]
        else:
            assert await again == await first
            assert len(backend.calls) == 2
        await ask.rows(2)


async def test_keys_are_kept_in_bounded_number(monkeypatch):
    monkeypatch.setattr(sessions, "_KEYS", 3)
    backend = ScriptedBackend(encode(f"{i}<|im_end|>") for i in range(100))
    async with asking(backend) as ask:
        for number in range(5):
            assert await ask(f"key-{number}") == str(number)
        assert await ask("key-2") == "2"
        assert await ask("key-1") == "5", "forgotten: a sample"

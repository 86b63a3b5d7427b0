"""The load: agents in a process of their own, so that their cost is not the gateway's. Standard library only.

Reads one JSON job from stdin, drives it, writes one JSON result to stdout. Every agent has its own connection, sends
bodies that grow with its history as an SDK's do, and sends each answer back exactly as the server's JSON gave it.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

_HEADERS = (
    "accept: application/json\r\naccept-encoding: identity\r\ncontent-type: application/json\r\n"
    "user-agent: OpenAI/Python 2.8.1\r\nx-stainless-lang: python\r\nx-stainless-package-version: 2.8.1\r\n"
    "x-stainless-os: Linux\r\nx-stainless-arch: x64\r\nx-stainless-runtime: CPython\r\n"
    "x-stainless-runtime-version: 3.11.7\r\nx-stainless-retry-count: 0\r\nx-stainless-read-timeout: 600\r\n"
)


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class LoadError(Exception):
    """A contender answered with something that is no turn."""


class Load:
    """``job``: host, port, sessions ([path, bearer] each), concurrency, turns, stream, pause (seconds, low and high),
    large (sessions that send one long first prompt, one every second), workload (path)."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        with open(job["workload"], encoding="utf-8") as file:
            self.texts = json.load(file)
        options: dict[str, Any] = {"model": "policy", "temperature": 1.0, "max_tokens": 1024}
        if job["stream"]:
            options |= {"stream": True, "stream_options": {"include_usage": True}}
        self.head = _dumps({**options, "tools": self.texts["tools"]})[:-1] + b',"messages":['
        self.system = _dumps({"role": "system", "content": self.texts["system"]})
        self.latencies: list[float] = []
        self.tokens = 0
        self.rng = random.Random(3)

    async def run(self) -> dict[str, Any]:
        waiting = list(enumerate(self.job["sessions"]))
        waiting.reverse()
        start = time.perf_counter()

        async def worker() -> None:
            while waiting:
                await self.agent(*waiting.pop())

        async with asyncio.TaskGroup() as group:
            for _ in range(self.job["concurrency"]):
                group.create_task(worker())
            for i, session in enumerate(self.job["large"]):
                group.create_task(self.large(i, session))
        wall = time.perf_counter() - start
        ordered = sorted(self.latencies)
        return {
            "turns": len(ordered),
            "tokens": self.tokens,
            "wall": wall,
            "p50": ordered[len(ordered) // 2],
            "p99": ordered[int(len(ordered) * 0.99)],
        }

    async def agent(self, number: int, session: tuple[str, str]) -> None:
        """One conversation over one connection."""
        reader, writer = await asyncio.open_connection(self.job["host"], self.job["port"], limit=2**26)
        results = self.texts["results"]
        history = self.system + b"," + _dumps({"role": "user", "content": f"{self.texts['user']} ({number})"})
        usage: dict[str, int] = {}
        if self.job["pause"]:
            await asyncio.sleep(self.rng.uniform(0, self.job["pause"][1]))
        for turn in range(self.job["turns"]):
            message, usage = await self.turn(reader, writer, session, history)
            call_id = message["tool_calls"][0]["id"]
            result = results[(number * 101 + turn) % len(results)]
            tool = {"role": "tool", "tool_call_id": call_id, "content": result}
            history += b"," + _dumps(message) + b"," + _dumps(tool)
            if self.job["pause"]:
                await asyncio.sleep(self.rng.uniform(*self.job["pause"]))
        self.tokens += usage["prompt_tokens"] + usage["completion_tokens"]
        writer.close()
        await writer.wait_closed()

    async def large(self, number: int, session: tuple[str, str]) -> None:
        await asyncio.sleep(1.0 + number)
        reader, writer = await asyncio.open_connection(self.job["host"], self.job["port"], limit=2**26)
        text = f"{number} {self.texts['large']}"
        await self.turn(reader, writer, session, self.system + b"," + _dumps({"role": "user", "content": text}))
        writer.close()
        await writer.wait_closed()

    async def turn(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: tuple[str, str], history: bytes
    ) -> tuple[dict[str, Any], dict[str, int]]:
        path, bearer = session
        body = self.head + history + b"]}"
        start = time.perf_counter()
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: {self.job['host']}:{self.job['port']}\r\n{_HEADERS}"
            f"authorization: Bearer {bearer}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        status, answer = await _response(reader)
        self.latencies.append(time.perf_counter() - start)
        if status != 200:
            raise LoadError(f"HTTP {status}: {answer[:500]!r}")
        message, usage = _streamed(answer) if self.job["stream"] else _whole(answer)
        if not message.get("tool_calls"):
            raise LoadError(f"the answer lost its tool call: {answer[:500]!r}")
        return message, usage


async def _response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status = int(head.split(" ", 2)[1])
    _, found, length = head.partition("content-length:")
    if found:
        return status, await reader.readexactly(int(length.split("\r\n", 1)[0]))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return status, body


def _whole(answer: bytes) -> tuple[dict[str, Any], dict[str, int]]:
    parsed = json.loads(answer)
    return parsed["choices"][0]["message"], parsed["usage"]


def _streamed(answer: bytes) -> tuple[dict[str, Any], dict[str, int]]:
    """A message put together from its deltas, as an SDK does it."""
    content, calls, usage = "", [], {}
    for event in answer.split(b"\n\n"):
        if not event.startswith(b"data: {"):
            continue
        chunk = json.loads(event[6:])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            for delta in choice["delta"].get("tool_calls") or ():
                if "id" in delta:
                    calls.append({**delta, "function": dict(delta["function"])})
                else:
                    calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    for call in calls:
        call.pop("index")
    return {"role": "assistant", "content": content or None, "tool_calls": calls}, usage


def main() -> None:
    try:
        json.dump(asyncio.run(Load(json.load(sys.stdin)).run()), sys.stdout)
    except* LoadError as errors:
        sys.exit(str(errors.exceptions[0]))


if __name__ == "__main__":
    main()

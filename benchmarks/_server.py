"""One contender in a process of its own, told what to do over stdin and stdout (one JSON object a line).

It runs under the contender's own interpreter: at the top only the standard library is imported.

Commands (``{"do": …}``): ``open`` sessions, ``finish`` them all, ``usage`` of CPU and memory so far, ``watch`` the
event loop's lag until ``unwatch``, ``profile`` into a file until ``unprofile``.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import ctypes
import gc
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
CHUNK = 10
"""Tokens a streaming engine hands out at once."""


class Contender:
    """What each of them can do. ``start`` listens and returns the port."""

    def __init__(self, texts: dict[str, Any], tokenizer: str, options: dict[str, Any]) -> None:
        self.texts, self.tokenizer, self.options = texts, tokenizer, options
        self.answers = [answer["ids"] for answer in texts["answers"]]
        self.next = itertools.cycle(range(len(self.answers))).__next__

    async def start(self) -> int:
        raise NotImplementedError

    def open(self, number: int) -> tuple[str, str]:
        """``(path, bearer)`` of a new session."""
        return f"/sessions/{number}/v1/chat/completions", "EMPTY"

    async def finish(self, number: int) -> int:
        """End a session; how many training rows it gave (-1: makes none)."""
        return -1


class Bare(Contender):
    """Parses the body and answers as many bytes."""

    async def start(self) -> int:
        from aiohttp import web

        bodies = [_completion(answer["arguments"], 1000) for answer in self.texts["answers"]]

        async def handle(request: Any) -> Any:
            json.loads(await request.read())
            return web.Response(body=bodies[self.next()], content_type="application/json")

        return await self._listen(handle)

    async def _listen(self, handle: Any) -> int:
        from aiohttp import web

        app = web.Application(client_max_size=2**26)
        app.router.add_post("/sessions/{key}/v1/chat/completions", handle)
        return await _serve_aiohttp(app)


class Ideal(Bare):
    """Append-only: parses the body, encodes only the new message, decodes the answer, keeps the ids."""

    async def start(self) -> int:
        from array import array

        from _workload import CALL_PREFIX, CALL_SUFFIX, STOP, TAIL_PREFIX, TAIL_SUFFIX
        from aiohttp import web
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(Path(self.tokenizer) / "tokenizer.json"))
        self.held: dict[str, Any] = {}
        first, last = len(CALL_PREFIX), -len(CALL_SUFFIX + STOP)

        async def handle(request: Any) -> Any:
            body = json.loads(await request.read())
            messages = body["messages"]
            held = self.held.setdefault(request.match_info["key"], array("i"))
            new = messages[-1:] if held else [json.dumps(body["tools"]), *messages]
            text = "".join(m if isinstance(m, str) else m["content"] for m in new)
            held.extend(tokenizer.encode(TAIL_PREFIX + text + TAIL_SUFFIX, add_special_tokens=False).ids)
            prompt_tokens = len(held)
            ids = self.answers[self.next()]
            held.extend(ids)
            arguments = tokenizer.decode(ids, skip_special_tokens=False)[first:last]
            return web.Response(body=_completion(arguments, prompt_tokens), content_type="application/json")

        return await self._listen(handle)

    async def finish(self, number: int) -> int:
        self.held.pop(str(number), None)
        return -1


class Gateway(Contender):
    """This project's gateway. Options: ``stream`` (the engine streams), ``fast`` (the extra may be used)."""

    async def start(self) -> int:
        if not self.options.get("fast"):
            sys.modules.update(orjson=None, fastokens=None)  # type: ignore[dict-item]  # importing them now fails
        from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer, RolloutGateway, gateway_app
        from agentcore_rl_toolkit.rollout_gateway.sampling import TokenChunk, TurnRecord

        class Engine:
            async def generate(_, *, prompt_ids: list[int], sampling_params: Any, session_id: Any = None) -> TurnRecord:
                ids = list(self.answers[self.next()])
                return TurnRecord(prompt_ids, ids, "stop", [-0.5] * len(ids))

        class StreamingEngine(Engine):
            async def stream(_, *, prompt_ids: list[int], sampling_params: Any, session_id: Any = None) -> Any:
                ids = self.answers[self.next()]
                for start in range(0, len(ids), CHUNK):
                    piece = ids[start : start + CHUNK]
                    last = start + CHUNK >= len(ids)
                    yield TokenChunk(piece, [-0.5] * len(piece), finish_reason="stop" if last else None)

        engine = StreamingEngine() if self.options.get("stream") else Engine()
        self.gateway = RolloutGateway(
            backend=engine, renderer=HfTemplateRenderer(self.tokenizer), base_url=f"http://{HOST}"
        )
        self.sessions: dict[int, str] = {}
        return await _serve_aiohttp(gateway_app(self.gateway))

    def open(self, number: int) -> tuple[str, str]:
        session = self.gateway.create_session()
        self.sessions[number] = session.session_id
        return f"/sessions/{session.api_key}/v1/chat/completions", "EMPTY"

    async def finish(self, number: int) -> int:
        return len(await self.gateway.finish_session(self.sessions.pop(number), reward=1.0))


class Original(Contender):
    """The published toolkit, in its own environment. Option: ``history`` (tree or linear)."""

    async def start(self) -> int:
        from transformers import AutoTokenizer

        from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer, RolloutGateway, TurnRecord

        class Engine:
            async def generate(_, *, prompt_ids: list[int], sampling_params: Any, **rest: Any) -> Any:
                ids = list(self.answers[self.next()])
                return TurnRecord(prompt_ids, ids, "stop", [-0.5] * len(ids))

        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        self.gateway = RolloutGateway(
            backend=Engine(),
            renderer=HfTemplateRenderer(tokenizer),
            tokenizer=tokenizer,
            history_mode=self.options["history"],
        )
        return await _serve_aiohttp(self.gateway.app)

    def open(self, number: int) -> tuple[str, str]:
        self.gateway.create_session(f"session-{number}")
        return "/v1/chat/completions", f"session-{number}"

    async def finish(self, number: int) -> int:
        return len(await self.gateway.finish_session(f"session-{number}", reward=1.0))


class Rllm(Contender):
    """rLLM's gateway: forwards to an engine's HTTP API (option ``upstream``) and keeps the token ids of its answers."""

    async def start(self) -> int:
        import uvicorn
        from rllm_model_gateway.models import GatewayConfig, WorkerConfig
        from rllm_model_gateway.server import create_app

        worker = WorkerConfig(url=self.options["upstream"])
        self.app = create_app(GatewayConfig(workers=[worker], store_worker="memory", log_level="WARNING"))
        server = uvicorn.Server(uvicorn.Config(self.app, host=HOST, port=0, log_level="warning", access_log=False))
        self.task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - it has no event to wait for
            await asyncio.sleep(0.01)
        return int(server.servers[0].sockets[0].getsockname()[1])

    async def finish(self, number: int) -> int:
        traces = await self.app.state.store.get_session_traces(str(number))
        await self.app.state.sessions.delete_session(str(number))
        return len(traces)


class Upstream(Contender):
    """An engine's HTTP API as vLLM answers it, with token ids and logprobs. Its own cost is nobody's."""

    async def start(self) -> int:
        prompt = ",".join(str(10_000 + i % 7000) for i in range(100_000)).split(",")
        upstream = self

        class Connection(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                self.transport, self.buffer, self.need = transport, bytearray(), -1

            def data_received(self, data: bytes) -> None:
                self.buffer += data
                if self.need < 0 and (end := self.buffer.find(b"\r\n\r\n")) >= 0:
                    _, found, length = bytes(self.buffer[:end]).lower().partition(b"content-length:")
                    self.need = end + 4 + (int(length.split(b"\r\n", 1)[0]) if found else 0)
                if 0 <= self.need <= len(self.buffer):
                    body = self.buffer[: self.need]
                    del self.buffer[: self.need]
                    self.need = -1
                    answer = upstream._answer(prompt, 500 + 300 * body.count(b'"tool_call_id"'))
                    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                    self.transport.write(head % len(answer) + answer)

        server = await asyncio.get_running_loop().create_server(Connection, HOST, 0)
        self.server = server
        return int(server.sockets[0].getsockname()[1])

    def _answer(self, prompt: list[str], prompt_tokens: int) -> bytes:
        number = self.next()
        answer = json.loads(_completion(self.texts["answers"][number]["arguments"], prompt_tokens))
        ids = self.answers[number]
        answer["choices"][0]["token_ids"] = ids
        content = [{"token": str(i), "logprob": -0.51234567, "bytes": None, "top_logprobs": []} for i in ids]
        answer["choices"][0]["logprobs"] = {"content": content}
        ids_text = ",".join(prompt[:prompt_tokens])
        return json.dumps(answer)[:-1].encode() + f', "prompt_token_ids": [{ids_text}]}}'.encode()


def _completion(arguments: str, prompt_tokens: int) -> bytes:
    """An answer as the gateway under test writes it."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "run", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {
        "id": "chatcmpl-0123456789abcdef01234567",
        "object": "chat.completion",
        "created": 1800000000,
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 100, "total_tokens": prompt_tokens + 100},
    }
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


CONTENDERS: dict[str, type[Contender]] = {
    "bare": Bare,
    "ideal": Ideal,
    "gateway": Gateway,
    "original": Original,
    "rllm": Rllm,
    "upstream": Upstream,
}


async def _serve_aiohttp(app: Any) -> int:
    from aiohttp import web

    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    return int(runner.addresses[0][1])


class Control:
    """Carries out the commands."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._opened = 0
        self._live: list[int] = []
        self._watch: asyncio.Task[None] | None = None
        self._lags: list[float] = []
        self._profile = cProfile.Profile()

    async def open(self, count: int) -> list[tuple[str, str]]:
        first, self._opened = self._opened, self._opened + count
        numbers = list(range(first, self._opened))
        self._live += numbers
        return [self._contender.open(number) for number in numbers]

    async def finish(self) -> dict[str, Any]:
        """Finish the sessions one by one: seconds each, and the longest that the loop stood still meanwhile."""
        walls, stalls, rows = [], [], []
        await self.watch()
        for number in self._live:
            self._lags.clear()
            start = time.perf_counter()
            rows.append(await self._contender.finish(number))
            walls.append(time.perf_counter() - start)
            await asyncio.sleep(0.003)
            stalls.append(max(self._lags))
        await self.unwatch()
        self._live.clear()
        return {"walls": walls, "stalls": stalls, "rows": rows}

    async def usage(self) -> dict[str, float]:
        cpu = time.process_time()
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        return {"cpu": cpu, "cpu_after": time.process_time(), "rss": _rss()}

    async def watch(self) -> None:
        self._lags.clear()
        self._watch = asyncio.create_task(self._tick())
        await asyncio.sleep(0)

    async def unwatch(self) -> list[float]:
        assert self._watch is not None
        self._watch.cancel()
        return self._lags

    async def _tick(self, step: float = 0.001) -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(step)
            self._lags.append(time.perf_counter() - start - step)

    async def profile(self) -> None:
        self._profile.enable()

    async def unprofile(self, file: str) -> None:
        self._profile.disable()
        self._profile.dump_stats(file)


def _rss() -> int:
    """Resident bytes; 0 where the system doesn't say."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


async def serve(contender: Contender) -> None:
    """Start it and carry out commands until stdin ends."""
    control = Control(contender)
    out = os.fdopen(os.dup(1), "w")  # libraries may print: the channel is ours alone
    os.dup2(2, 1)
    print(json.dumps({"port": await contender.start()}), file=out, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        result = await getattr(control, command.pop("do"))(**command)
        print(json.dumps({"result": result}), file=out, flush=True)
    os._exit(0)


def main(name: str, workload: str, tokenizer: str, options: str) -> None:
    texts = json.loads(Path(workload).read_text("utf-8"))
    asyncio.run(serve(CONTENDERS[name](texts, tokenizer, json.loads(options))))


if __name__ == "__main__":
    main(*sys.argv[1:5])

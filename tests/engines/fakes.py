"""vLLM and SGLang as small HTTP servers: the shapes their documentation and sources give, and their known faults.

Both run the same "model": its answer is fixed by the prompt, its logprobs are the oracle's (a hash of everything before
a token, and the token), divided by the temperature as a server should. ``faults`` switches one way to be wrong on.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import math
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from aiohttp import web

from agentcore_rl_toolkit.rollout_gateway.testing import oracle_logprobs

VOCABULARY = 1000
EOS = 999


def answer(prompt_ids: list[int]) -> list[int]:
    """400 tokens fixed by the prompt, then the end."""
    rng = random.Random(repr(prompt_ids))
    return [*(rng.randrange(EOS) for _ in range(400)), EOS]


def decode(ids: Iterable[int]) -> str:
    """The fakes' tokenizer: every token is a word."""
    return "".join(f"w{i} " for i in ids)


class FakeServer:
    """What both servers share. ``script``: the model. ``delay``: seconds per token. ``faults``: names, see the readers.

    ``running``, ``peak``: requests being sampled, and the most there were; ``aborted``: how many the client gave up;
    ``requests``: ``(path, body, headers)`` of all; ``connections``: TCP connections opened.
    """

    def __init__(
        self,
        *faults: str,
        script: Callable[[list[int]], list[int]] = answer,
        delay: float = 0.0,
        chunk: int = 3,
        version: str = "default",
    ) -> None:
        self.faults, self.script, self.delay, self.chunk, self.version = set(faults), script, delay, chunk, version
        self.running = self.peak = self.aborted = 0
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.peers: set[Any] = set()
        self.busy = 0
        """How many requests are answered 503."""
        self.echo = ""
        """The text of the 403 with which every request is answered."""
        self.broken = 0
        """500: every request fails, and the server is not healthy. 501: they fail, but it says it is. 400: it refuses
        every request, and says that it is healthy."""
        self.updates: list[tuple[int, str]] = []
        """Weight updates in the middle of an answer: after how many tokens, to which version."""
        self.url = ""
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=2**28)
        self.routes(app.router)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """As abruptly as a killed process: every connection is cut."""
        if self._runner is None:
            return
        for handler in list(self._runner.server.connections if self._runner.server else ()):
            if handler.transport is not None:
                handler.transport.abort()
        await self._runner.cleanup()
        self._runner = None

    def routes(self, router: web.UrlDispatcher) -> None:
        raise NotImplementedError

    @property
    def connections(self) -> int:
        return len(self.peers)

    @property
    def open_connections(self) -> int:
        server = self._runner.server if self._runner else None
        return len(server.connections) if server else 0

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.broken == 500 else 200)

    async def body(self, http: web.Request) -> dict[str, Any]:
        self.peers.add(http.transport.get_extra_info("peername") if http.transport else None)
        body = json.loads(await http.read())
        self.requests.append((http.path, body, dict(http.headers)))
        if self.echo:
            raise web.HTTPForbidden(text=self.echo)
        if self.busy:
            self.busy -= 1
            raise web.HTTPServiceUnavailable(text="overloaded", headers={"Retry-After": "0"})
        if self.broken == 400:
            raise web.HTTPBadRequest(text='{"error": {"message": "The model does not exist here"}}')
        if self.broken:
            raise web.HTTPInternalServerError(text='{"error": {"message": "EngineCore encountered an issue"}}')
        return dict(body)

    def sample(self, prompt: list[int], params: dict[str, Any], limit: int) -> tuple[list[int], list[float], str, Any]:
        """The whole answer: ids, logprobs, finish reason, what stopped it."""
        whole = self.script(prompt)
        temperature = params.get("temperature", 1.0) or 1.0
        ids, reason, matched = [], "length", None
        for token in whole[:limit]:
            ids.append(token)
            stop = next((s for s in params.get("stop") or () if s in decode(ids)), None)
            if token == EOS or token in (params.get("stop_token_ids") or ()) or stop:
                reason, matched = "stop", stop or token
                break
        logprobs = oracle_logprobs(prompt, ids)
        if temperature != 1.0 and "unscaled" not in self.faults:
            logprobs = [x / temperature for x in logprobs]
        if "logits" in self.faults:
            logprobs = [x + 20 for x in logprobs]
        for fault, value in (("null", None), ("inf", self.infinity), ("nan", float("nan"))):
            if fault in self.faults:
                logprobs[len(logprobs) // 2] = value
        return ids, logprobs, reason, matched

    infinity = float("-inf")

    def top(self, temperature: float, k: int) -> list[tuple[float, int]]:
        """Logprobs of the most likely tokens of some distribution, ids 543, 542, …: the script says none of these."""
        scale = 1.0 if "unscaled" in self.faults else temperature or 1.0
        logits = [10.0 - 1.5 * i for i in range(20)]
        if "logits" in self.faults:
            return [(x, 543 - i) for i, x in enumerate(logits[:k])]
        if "uniform" in self.faults:
            logits = [1.0] * 20
        norm = math.log(sum(math.exp(x / scale) for x in logits))
        return [(x / scale - norm, 543 - i) for i, x in enumerate(logits[:k])]

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            yield
        except BaseException:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def stream(self, http: web.Request, spans: list[tuple[int, int]], event: Callable[[int, int], Any]) -> Any:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        for number, (start, end) in enumerate(spans):
            if self.delay:
                await asyncio.sleep(self.delay * max(end - start, 1))
            if number == 1 and "stall" in self.faults:
                await asyncio.sleep(30)
            if number == 1 and "drop" in self.faults and http.transport:
                http.transport.abort()
                return response
            if number == 1 and "error_event" in self.faults:
                error = {"message": "CUDA out of memory", "type": "InternalServerError", "code": 500}
                await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
                break
            if number == 1 and "garbage" in self.faults:
                await response.write(b"data: {half\n\n")
            value = event(start, end)
            if value is not None:
                await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def versions(self, end: int) -> list[dict[str, Any]]:
        bounds = [(0, self.version), *self.updates, (end, "")]
        return [
            {"version": version, "start": start, "end": min(stop, end)}
            for (start, version), (stop, _) in itertools.pairwise(bounds)
            if start < end or start == 0
        ]

    def spans(self, count: int) -> list[tuple[int, int]]:
        return [(i, min(i + self.chunk, count)) for i in range(0, count, self.chunk)]


class FakeVllm(FakeServer):
    """``/inference/v1/generate`` and ``/v1/completions``.

    Faults: ``no_generate`` (an older server), ``disabled`` (started without
    ``--enable-scale-out``), ``no_stream`` (answers in one piece although asked to stream),
    ``names`` (tokens in logprobs as ``token_id:7``), ``no_ids``, ``extra_logprob``, ``trimmed_stop`` (ids without the
    stop token, logprobs with it), ``other_tokens``, ``abort``, ``silent_abort`` (the end of the stream is the only
    sign), ``late_finish`` (the finish reason comes in an event without tokens), ``no_logprobs``, ``no_tops``
    (``--max-logprobs 0``),
    ``over_limit``.
    """

    infinity = -9999.0  # vLLM's word for it

    def routes(self, router: web.UrlDispatcher) -> None:
        if "no_generate" not in self.faults:
            router.add_post("/inference/v1/generate", self.generate)
        router.add_post("/v1/completions", self.completions)
        router.add_get("/v1/models", self.models)
        router.add_get("/health", self.health)

    async def models(self, _: web.Request) -> web.Response:
        data = [{"id": "tiny", "object": "model", "max_model_len": 4096}, {"id": "lora-a", "max_model_len": None}]
        return web.json_response({"object": "list", "data": data})

    async def generate(self, http: web.Request) -> web.StreamResponse:
        if "disabled" in self.faults:
            error = {"message": "Scale-out endpoints are disabled.", "type": "PermissionDeniedError", "code": 403}
            return web.json_response({"error": error}, status=403)
        body = await self.body(http)
        return await self._answer(http, body, body["token_ids"], body["sampling_params"], chat=True)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        body = await self.body(http)
        return await self._answer(http, body, body["prompt"], body, chat=False)

    async def _answer(
        self, http: web.Request, body: dict[str, Any], prompt: list[int], params: dict[str, Any], *, chat: bool
    ) -> web.StreamResponse:
        if body.get("model") not in (None, "tiny", "lora-a"):
            return web.json_response({"error": {"message": "The model does not exist.", "code": 404}}, status=404)
        if "no_tops" in self.faults and params["logprobs"]:
            error = {"message": "Requested sample logprobs of 5, which is greater than max allowed: 0", "code": 400}
            return web.json_response({"error": error}, status=400)
        if len(prompt) > 4096:
            error = {"message": "This model's maximum context length is 4096 tokens.", "code": 400}
            return web.json_response({"error": error}, status=400)
        ids, logprobs, reason, matched = self.sample(prompt, params, params.get("max_tokens", 16))
        if "over_limit" in self.faults:
            ids, logprobs = [*ids, 1], [*logprobs, -1.0]
        experts = np.arange(2 * (len(prompt) + len(ids) - 1), dtype=np.uint8).reshape(-1, 2, 1)

        def choice(start: int, end: int) -> dict[str, Any]:
            done = end >= len(ids)
            finish = reason if done else None
            part_ids, part = ids[start:end], logprobs[start:end]
            named = part_ids
            if done:
                if "extra_logprob" in self.faults:
                    part, named = [*part, -1.0], [*named, 0]
                if "trimmed_stop" in self.faults and reason == "stop":
                    part_ids = part_ids[:-1]
            if "other_tokens" in self.faults:
                named = [(token + 1) % VOCABULARY for token in named]
            value: dict[str, Any] = {"index": 0, "finish_reason": finish, "stop_reason": matched if done else None}
            best = self.top(params.get("temperature", 1.0), params["logprobs"])
            # The sampled token comes first and takes one of the places. (Not for the probe: with the oracle's value
            # in it, this would be no distribution.)
            first = [[(x, t)] if body.get("stream") else [] for t, x in zip(named, part, strict=True)]
            tops_of = [[*sampled, *best][: params["logprobs"]] for sampled in first]
            if chat:
                entries = [self._entry(t, x, top) for t, x, top in zip(named, part, tops_of, strict=True)]
                value["logprobs"] = {"content": entries}
            else:
                tokens = [f"token_id:{token}" for token in named]
                tops = [{f"token_id:{i}": x for x, i in top} for top in tops_of]
                value["logprobs"] = {"token_logprobs": part, "tokens": tokens, "top_logprobs": tops, "text_offset": []}
                value["text"] = decode(part_ids)
            if "no_logprobs" in self.faults:
                value["logprobs"] = None
            if "no_ids" not in self.faults and (chat or body.get("return_token_ids")):
                value["token_ids"] = part_ids
            if done:
                value["weight_versions"] = self.versions(len(ids))
                buffer = io.BytesIO()
                np.save(buffer, experts)
                value["routed_experts"] = base64.b64encode(buffer.getvalue()).decode()
            return value

        def event(start: int, end: int) -> dict[str, Any] | None:
            if "abort" in self.faults and start:
                empty = {"index": 0, "token_ids": [], "logprobs": {"content": []}, "finish_reason": "abort"}
                return {"choices": [empty | ({} if chat else {"logprobs": None, "text": ""})]}
            if "silent_abort" in self.faults and start:
                return None
            return {"choices": [choice(start, end)]}

        async with self.work():
            if not body.get("stream") or "no_stream" in self.faults:
                await asyncio.sleep(self.delay * len(ids))
                return web.json_response({"id": "x", "choices": [choice(0, len(ids))], "usage": {}})
            if "late_finish" in self.faults:
                return await self.stream(http, [*self.spans(len(ids)), (len(ids), len(ids))], self._late(event, ids))
            return await self.stream(http, self.spans(len(ids)), event)

    def _late(self, event: Callable[[int, int], Any], ids: list[int]) -> Callable[[int, int], Any]:
        def late(start: int, end: int) -> Any:
            value = event(start, end)
            if start < len(ids):
                value["choices"][0]["finish_reason"] = None
            return value

        return late

    def _entry(self, token: int, logprob: float | None, top: list[tuple[float, int]]) -> dict[str, Any]:
        if "names" in self.faults:
            tops = [{"token": f"token_id:{i}", "logprob": x} for x, i in top]
            return {"token": f"token_id:{token}", "logprob": logprob, "bytes": [], "top_logprobs": tops}
        tops = [{"token_id": i, "logprob": x, "rank": 1} for x, i in top]
        return {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": tops}


class FakeSglang(FakeServer):
    """``/generate`` and ``/abort_request``.

    Faults: ``incremental`` (events hold what is new; the default is everything so far), ``mixed`` (ids are new,
    logprobs are everything so far), ``prompt_tail`` (``output_ids`` begin with the prompt's last tokens),
    ``extra_logprob``, ``lost_id``, ``other_tokens``, ``abort`` (a weight update in the middle), ``refuse`` (an abort
    with status 400), ``no_logprobs``, ``deaf`` (behind a proxy: only ``/abort_request`` reaches the engine).
    """

    infinity = -3.4028234663852886e38  # SGLang's word for it

    def __init__(self, *faults: str, **options: Any) -> None:
        super().__init__(*faults, **options)
        self.rids: dict[str, asyncio.Event] = {}
        self.abort_requests: list[str] = []
        self.engines: list[asyncio.Task[None]] = []

    def routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/generate", self.generate)
        router.add_post("/abort_request", self.abort)
        router.add_get("/server_info", self.info)
        router.add_get("/health", self.health)

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"context_length": 4096, "model_path": "tiny"})

    async def abort(self, http: web.Request) -> web.Response:
        rid = json.loads(await http.read())["rid"]
        self.abort_requests.append(rid)
        if rid in self.rids:
            self.rids[rid].set()
        return web.Response()

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = await self.body(http)
        prompt, params = body["input_ids"], body["sampling_params"]
        ids, logprobs, reason, matched = self.sample(prompt, params, params.get("max_new_tokens", 128))
        finish = {"type": "stop", "matched": matched} if reason == "stop" else {"type": "length", "length": len(ids)}
        if "refuse" in self.faults:
            finish = {"type": "abort", "message": "The input is longer than the model's context", "status_code": 400}
            ids, logprobs = [], []
        triples: list[list[Any]] = [[x, token, None] for x, token in zip(logprobs, ids, strict=True)]
        top = [[x, i, None] for x, i in self.top(params.get("temperature", 1.0), body["top_logprobs_num"])]

        def event(start: int, end: int) -> dict[str, Any]:
            done = end >= len(ids)
            low = start if {"incremental", "mixed"} & self.faults else 0
            part = triples[(0 if "mixed" in self.faults else low) : end]
            part_ids = ids[low:end]
            if "prompt_tail" in self.faults and low == 0:
                part_ids = [*prompt[-2:], *part_ids]
            if "lost_id" in self.faults and done:
                part_ids = part_ids[1:]
            if "extra_logprob" in self.faults and done:
                part = [*part, [-1.0, 0, None]]
            if "other_tokens" in self.faults:
                part_ids = [(token + 1) % VOCABULARY for token in part_ids]
            meta: dict[str, Any] = {
                "id": body.get("rid"),
                "finish_reason": finish if done else None,
                "prompt_tokens": len(prompt),
                "completion_tokens": end,
                "weight_version": self.versions(end)[-1]["version"],
                "weight_versions": self.versions(end),
            }
            if "no_logprobs" not in self.faults:
                meta["output_token_logprobs"] = part
                meta["output_token_logprobs_length"] = len(part)
                meta["output_top_logprobs"] = [top] * len(part) if top else None
            if "abort" in self.faults and start:
                meta["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
            if body.get("return_routed_experts") and done:
                experts = np.arange(2 * (len(prompt) + len(ids) - 1), dtype=np.int32)
                meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
            return {"text": decode(ids[low:end]), "output_ids": part_ids, "meta_info": meta}

        spans = self.spans(len(ids)) or [(0, 0)]
        if "deaf" in self.faults and body.get("stream"):
            return await self._behind_proxy(body["rid"], http, spans, event)
        async with self.work():
            if not body.get("stream"):
                await asyncio.sleep(self.delay * len(ids))
                return web.json_response(event(0, len(ids)))
            return await self.stream(http, spans, event)

    async def _behind_proxy(self, rid: str, http: web.Request, spans: Any, event: Any) -> web.StreamResponse:
        """The engine goes on until it is told, or done; the connection's end tells it nothing."""
        told = self.rids[rid] = asyncio.Event()

        async def engine() -> None:
            async with self.work():
                await told.wait()

        self.engines.append(asyncio.create_task(engine()))
        response = await self.stream(http, spans, event)
        told.set()
        return response


@asynccontextmanager
async def serving_engine(server: FakeServer) -> AsyncIterator[FakeServer]:
    await server.start()
    try:
        yield server
    finally:
        await server.stop()

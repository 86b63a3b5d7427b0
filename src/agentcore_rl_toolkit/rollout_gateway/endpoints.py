"""One HTTP request and its response: who asks, what for, and how the answer leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from aiohttp import web

from ..errors import GatewayError
from .answers import CallIdBook, OnDeltas
from .body import read_body
from .fastjson import dumps, loads
from .gateway import RolloutGateway
from .names import random_hex
from .parsed import Delta
from .sessions import Session
from .traces import Turn
from .wires import Answer, AnthropicMessages, Choice, OpenAIChat, OpenAIResponses, Wire, WireRequest
from .wires.base import TokenLogprob, bad_request
from .wires.volatile import without_volatile

logger = logging.getLogger(__name__)

MAX_BODY = 64 * 1024 * 1024
KEEP_ALIVE = 10.0
"""Seconds without an event after which a stream gets a comment, so that nobody between takes it for dead."""

_RETRY_HEADER = "x-stainless-retry-count"
"""Set by the openai and anthropic SDKs; 1 or more on a request that they send again."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Session, web.Request], Awaitable[web.StreamResponse]]


def turn_handler(gateway: RolloutGateway, wire: Wire) -> Handler:
    """The handler of a wire's chat endpoint."""

    async def serve(session: Session, http: web.Request) -> web.StreamResponse:
        request = await _decode(gateway, wire, session, http)
        exchange = _Exchange(gateway, wire, session, request, http)
        return await (exchange.stream() if request.stream else exchange.whole())

    return _handler(gateway, wire, serve)


def count_tokens_handler(gateway: RolloutGateway, wire: AnthropicMessages) -> Handler:
    """How long the prompt of a request would be; nothing is sampled or kept."""

    async def serve(session: Session, http: web.Request) -> web.StreamResponse:
        request = wire.decode(await _body(session, http, wire), counting=True)
        return _json({"input_tokens": await gateway.count_tokens(session, request)})

    return _handler(gateway, wire, serve)


def done_handler(gateway: RolloutGateway) -> Handler:
    """Where an agent tells that its result is written. Which one, its key says: the body may say anything."""

    async def serve(session: Session, http: web.Request) -> web.StreamResponse:
        if session.on_done is not None:
            session.on_done()
        return web.Response(status=204)

    return _handler(gateway, OpenAIChat(), serve)


def _handler(gateway: RolloutGateway, wire: Wire, serve: Serve) -> Handler:
    """Finds the session; errors have the wire's own shape, whatever raised them."""

    async def handle(http: web.Request) -> web.StreamResponse:
        try:
            session = _session(gateway, http)
            task = asyncio.current_task()
            assert task is not None
            session.requests.add(task)
            try:
                return await serve(session, http)
            finally:
                session.requests.discard(task)
        except ConnectionError:  # the client hung up; an engine's are GatewayErrors
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer
            return _error_response(wire, _told(error))

    return handle


def _told(error: Exception) -> GatewayError:
    """What a client is told of an exception: never its text, unless that was written for clients."""
    match error:
        case GatewayError():
            return error
        case web.HTTPRequestEntityTooLarge():
            return GatewayError(413, f"the request is over {MAX_BODY} bytes", kind="request_too_large")
        case RecursionError():
            return bad_request("body", "nested too deeply")
    logger.error("a request failed inside the gateway", exc_info=error)
    return GatewayError(500, "internal error of the gateway; see its log", kind="internal_error")


async def _decode(gateway: RolloutGateway, wire: Wire, session: Session, http: web.Request) -> WireRequest:
    body = await _body(session, http, wire)
    if isinstance(wire, AnthropicMessages | OpenAIResponses) and (earlier := wire.earlier_id(body)) is not None:
        request = wire.decode(body, session.recall(earlier))
    else:
        request = wire.decode(body)
    request.model = request.model or gateway.model
    request.size = len(await http.read())  # it has been read: this only looks
    if request.ignored and (new := session.not_warned_of(request.ignored)):
        logger.warning("session %s: ignored without effect: %s", session.name, ", ".join(new))
    return request


class _Exchange:
    """One request and its response."""

    def __init__(
        self, gateway: RolloutGateway, wire: Wire, session: Session, request: WireRequest, http: web.Request
    ) -> None:
        self._gateway, self._wire, self._session = gateway, wire, session
        self._request, self._http = request, http
        self._id, self._created = wire.id_prefix + random_hex(24), int(time.time())
        self._prompt_tokens = 0

    async def whole(self) -> web.StreamResponse:
        turns = await self._turns(self._call_ids())
        response = _json(self._encode(await self._answer(turns)))
        await response.prepare(self._http)
        await response.write_eof()
        self._deliver(turns)
        return response

    def _encode(self, answer: Answer) -> dict[str, Any]:
        """The answer as its wire says it; kept, before it leaves, where a later request may name it."""
        encoded = self._wire.encode(self._request, answer)
        if self._request.kept_items is not None:
            self._session.remember(self._id, [*self._request.kept_items, encoded])
        return encoded

    async def stream(self) -> web.StreamResponse:
        books = self._call_ids()
        encoder = self._wire.stream(self._id, self._created, self._request, books)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        out = _EventStream(response, self._http)
        started = False

        async def send(deltas: list[Delta], choice: int = 0) -> None:
            nonlocal started
            start = b""
            if not started:  # errors before the first delta still get a status of their own
                started, start = True, encoder.start(self._prompt_tokens)
            await out.write(start + encoder.deltas(deltas, choice))

        with out.kept_alive():
            try:
                turns = await self._turns(books, send)
                await send([])
                answer = await self._answer(turns)
                if self._request.kept_items is not None:
                    self._encode(answer)
                await out.write(encoder.finish(answer))
            except Exception as error:
                if not response.prepared or isinstance(error, ConnectionError):
                    raise
                # Too late for a status: the stream says it. An answer of its own would garble it.
                await out.write(encoder.error(_told(error)))
                await response.write_eof()
                return response
        await response.write_eof()
        self._deliver(turns)
        return response

    def _call_ids(self) -> list[CallIdBook]:
        return [CallIdBook(self._gateway.renderer.call_id) for _ in range(self._request.n)]

    async def _turns(self, books: list[CallIdBook], send: OnDeltas | None = None) -> list[Turn]:
        return await self._gateway.take_turns(
            self._session,
            self._request,
            books,
            retry=_is_retry(self._http),
            idempotency_key=self._http.headers.get("Idempotency-Key") or None,
            on_prompt=self._on_prompt,
            on_deltas=send,
        )

    def _on_prompt(self, tokens: int) -> None:
        self._prompt_tokens = tokens

    def _deliver(self, turns: list[Turn]) -> None:
        for turn in turns:
            self._session.tree.deliver(turn)

    async def _answer(self, turns: list[Turn]) -> Answer:
        if self._request.logprobs:  # the text of each token, and of the likeliest ones: no work for the event loop
            choices = await asyncio.to_thread(lambda: [self._choice(turn) for turn in turns])
        else:
            choices = [self._choice(turn) for turn in turns]
        return Answer(
            id=self._id,
            created=self._created,
            model=self._request.model,
            prompt_tokens=self._prompt_tokens,
            choices=choices,
        )

    def _choice(self, turn: Turn) -> Choice:
        message = turn.message
        if turn.prefill:  # the client has the beginning
            message = replace(message, content=message.content[turn.prefill :])
        return Choice(
            message=message,
            call_ids=turn.call_ids,
            finish_reason=turn.finish_reason,
            stop_sequence=turn.stop_sequence,
            completion_tokens=turn.sampled_tokens,
            tokens=self._tokens(turn) if self._request.logprobs else None,
            token_ids=turn.output_ids,
        )

    def _tokens(self, turn: Turn) -> list[TokenLogprob]:
        @cache
        def text(token_id: int) -> str:
            return self._gateway.renderer.decode([token_id])

        tops = turn.top_logprobs or [[]] * turn.sampled_tokens
        return [
            TokenLogprob(text(token_id), logprob, [(text(i), p) for i, p in top])
            for token_id, logprob, top in zip(turn.output_ids, turn.logprobs, tops, strict=True)
        ]


class _EventStream:
    """Writes a response in pieces; a comment where nothing came for :data:`KEEP_ALIVE` seconds."""

    def __init__(self, response: web.StreamResponse, http: web.Request) -> None:
        self._response, self._http = response, http
        self._lock = asyncio.Lock()
        self._last = 0.0
        self._timer: asyncio.TimerHandle
        self._filler: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> None:
        async with self._lock:
            self._last = asyncio.get_running_loop().time()
            if not self._response.prepared:
                await self._response.prepare(self._http)
            if data:
                await self._response.write(data)

    @contextmanager
    def kept_alive(self) -> Iterator[None]:
        """Within, silence is filled. A timer, not a task: most streams never need it."""
        self._last = asyncio.get_running_loop().time()
        self._set_timer(KEEP_ALIVE)
        try:
            yield
        finally:
            self._timer.cancel()
            if self._filler:
                self._filler.cancel()

    def _set_timer(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(max(seconds, 0.01), self._tick)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        rest = self._last + KEEP_ALIVE - loop.time()
        if rest <= 0:
            if self._filler is None or self._filler.done():  # else the client does not even read the last one
                self._filler = loop.create_task(self._comment())
            rest = KEEP_ALIVE
        self._set_timer(rest)

    async def _comment(self) -> None:
        try:
            await self.write(b": keep-alive\n\n")
        except ConnectionError:  # the client is gone: its handler is being cancelled
            logger.debug("no one reads this stream any more")


# -- small endpoints -----------------------------------------------------------------------------------------


def models_handler(gateway: RolloutGateway) -> Handler:
    """The one model, in the words of both vendors, with the session's window where the request has a key."""

    async def handle(http: web.Request) -> web.StreamResponse:
        window = await _window(gateway, http)
        model: dict[str, Any] = {
            "id": gateway.model,
            "object": "model",
            "created": 0,
            "owned_by": "agentcore-rl-toolkit",
            "type": "model",
            "display_name": gateway.model,
            "created_at": "1970-01-01T00:00:00Z",
            "max_model_len": window,
            "max_input_tokens": window,
        }
        name = http.match_info.get("name")
        if name is None:
            ends = {"has_more": False, "first_id": gateway.model, "last_id": gateway.model}
            return _json({"object": "list", "data": [model], **ends})
        if name != gateway.model:
            error = GatewayError(404, f"there is no model {name!r}", kind="model_not_found", param="model")
            return _error_response(_wire_of(http), error)
        return _json(model)

    return handle


async def _window(gateway: RolloutGateway, http: web.Request) -> int | None:
    try:
        session = _session(gateway, http)
    except GatewayError:
        return None
    return await gateway.window(session)


async def healthz(_: web.Request) -> web.StreamResponse:
    return _json({"status": "ok"})


async def elsewhere(http: web.Request) -> web.StreamResponse:
    """Every path and method that nothing else serves. Some clients begin with ``HEAD /`` to see who is there."""
    if http.method == "HEAD":
        return web.Response()
    allowed: set[str] = set()
    for resource in http.app.router.resources():
        if resource is not http.match_info.route.resource:
            allowed |= (await resource.resolve(http))[1]
    if allowed:
        message = f"{http.method} is not allowed here, {' or '.join(sorted(allowed))} is"
        response = _error_response(_wire_of(http), GatewayError(405, message, kind="method_not_allowed"))
        response.headers["Allow"] = ", ".join(sorted(allowed))
        return response
    message = "there is nothing at this path: the APIs are under /v1, with which an OpenAI client's base_url must end"
    return _error_response(_wire_of(http), GatewayError(404, message, kind="not_found"))


def _wire_of(http: web.Request) -> Wire:
    """Whose errors a client expects at a path that no wire serves."""
    anthropic = "anthropic-version" in http.headers or "/messages" in http.path
    return AnthropicMessages() if anthropic else OpenAIChat()


# -- requests and responses ------------------------------------------------------------------------------------


def _session(gateway: RolloutGateway, http: web.Request) -> Session:
    """The session of a request's key: in the URL, else the Bearer token or ``x-api-key``, whichever is one."""
    if key := http.match_info.get("key"):
        return gateway.sessions.get(key)
    scheme, _, token = http.headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    other = http.headers.get("x-api-key")
    if not bearer or not other:
        return gateway.sessions.get(bearer or other)
    try:
        return gateway.sessions.get(other)
    except GatewayError as error:
        try:
            return gateway.sessions.get(bearer)
        except GatewayError as also:
            raise max(error, also, key=lambda e: e.status) from None  # "has ended" says more than "unknown"


def _is_retry(http: web.Request) -> bool:
    """Whether the client says that it sent this request before."""
    count = http.headers.get(_RETRY_HEADER, "0")
    return count.isdecimal() and int(count[:9]) >= 1


async def _body(session: Session, http: web.Request, wire: Wire) -> dict[str, Any]:
    try:
        data = await http.read()
    except web.RequestPayloadError as error:
        raise bad_request("body", f"can't be read as {http.headers.get('Content-Encoding', 'it is sent')}") from error
    try:
        if wire.growing_list and not session.volatile:
            body = read_body(data, wire.growing_list, session.tree.raw_messages())
        else:
            body = loads(data)
    except (ValueError, RecursionError) as error:
        raise bad_request("body", f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("body", "a JSON object is required")
    return without_volatile(body, session.volatile) if session.volatile else body


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=dumps(value), status=status, content_type="application/json", charset="utf-8")


def _error_response(wire: Wire, error: GatewayError) -> web.Response:
    response = _json(wire.encode_error(error), error.status)
    if error.status in (502, 503):
        response.headers["Retry-After"] = "1"
    return response

"""What every engine behind HTTP shares: one pool of connections, time limits, retries before the first token, SSE."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakKeyDictionary

import aiohttp
from yarl import URL

from ...errors import EngineError
from ..fastjson import dumps, loads
from .base import RETRY_AFTER

_SECRET_HEADER = re.compile("auth|key|token|secret|cookie", re.IGNORECASE)
_TRANSIENT = frozenset({408, 425, 429, 502, 503, 504})
_MAX_RETRY_AFTER = 60.0
_MAX_ERROR = 65_536
_DETAIL = 400
_HEALTH = 5.0
_CLOSING = 1.0
_KEEP_ALIVE = 4.0
"""Servers close idle connections after 5 seconds; a request may not meet one that is being closed."""
_LARGE = 256_000
"""Bytes of JSON that take a few ms to read: no work for the event loop."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds; None = unlimited. ``connect``: to open a connection. ``idle``: until the first token and between two
    pieces of a streamed answer; it covers queueing and prefill. ``total``: one whole request."""

    connect: float | None = 10.0
    idle: float | None = 600.0
    total: float | None = 3600.0


class HttpEngine:
    """Base of engines that are spoken to over HTTP.

    ``base_url``: address of the server. ``api_key``: sent as Bearer token. ``headers``: sent with every request.
    ``retries``: how often a request is sent again after a connection failed or the server was busy (408, 425, 429,
    502, 503, 504), never after a timeout, and only while nothing of an answer has arrived. An ``EngineError`` with
    ``retry_after`` says that the same request may succeed later or elsewhere; without, it will not.

    Each event loop has its own pool of connections; :meth:`aclose` (or ``async with``) closes the running loop's.
    """

    health_path = "/health"
    """Answers 200 where the server can serve."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeouts: Timeouts = Timeouts(),
        retries: int = 2,
    ) -> None:
        if not base_url.startswith(("http://", "https://")) or not URL(base_url).host:
            raise ValueError(f"base_url: an http:// or https:// address is required, got {base_url!r}")
        self._url, self.timeouts, self.retries = base_url.rstrip("/"), timeouts, retries
        self.base_url = str(URL(self._url).with_user(None))
        """The address without credentials: what errors and logs show."""
        if api_key and URL(self._url).user:
            raise ValueError("base_url: credentials in the address and an api_key are two ways to say who you are")
        named = [value.split()[-1] for name, value in (headers or {}).items() if _SECRET_HEADER.search(name) and value]
        self._secrets = [secret for secret in (api_key, URL(self._url).password, *named) if secret]
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()

    # -- requests ----------------------------------------------------------------------------------------

    async def get_json(self, path: str) -> Any:
        """The JSON object that answers a GET. Raises ``EngineError``."""
        async with self._answer("GET", path, None, None, idle=True) as response:
            value = await self._json(response)
        if not isinstance(value, dict):
            raise EngineError(f"{self.base_url}{path} gave no JSON object")
        return value

    async def post_json(
        self, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None, retry: bool = True
    ) -> Any:
        """The JSON answer to a POST; None for an empty one. Cancelling closes the connection, which aborts the
        engine. Only ``timeouts.total`` limits the wait. ``retry=False``: for a request that goes on where others
        ended. Raises ``EngineError``."""
        async with self._answer("POST", path, dumps(body), headers, idle=False, retry=retry) as response:
            return await self._json(response)

    async def events(
        self, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Any]:
        """The JSON values of a POST's server-sent events, up to ``[DONE]`` or the end of the answer; its one value if
        the server does not stream.

        Closing the iterator or cancelling closes the connection, which aborts the engine. Raises ``EngineError``,
        also for an event that is an error or a connection that breaks.
        """
        async with self._answer("POST", path, dumps(body), headers, idle=True) as response:
            if response.content_type == "application/json":  # a server that does not stream
                yield await self._json(response)
                return
            try:
                async for line, whole in _lines(response.content):
                    if line.startswith(b"error:"):  # some servers name the event instead of the value
                        raise self._refusal(response.status, line[6:].strip())
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        await _to_the_end(response)
                        return
                    try:
                        event = self._parse(data)
                    except EngineError as error:
                        raise error if whole else self._lost(EOFError("the end came within an event")) from error
                    if isinstance(event, dict) and event.get("error"):
                        raise self._refusal(_status_of(event["error"], response.status), data)
                    yield event
            except (aiohttp.ClientError, TimeoutError) as error:
                raise self._lost(error) from error

    async def healthy(self) -> bool:
        """Whether the server says, within a few seconds, that it can serve."""
        try:
            async with asyncio.timeout(_HEALTH):
                response = await self._send("GET", self.health_path, None, None, idle=True)
                await response.read()
        except (EngineError, aiohttp.ClientError, TimeoutError):
            return False
        return True

    # -- connections -------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close the running loop's connections. The engine may be used again afterwards."""
        if pool := self._pools.pop(asyncio.get_running_loop(), None):
            await pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _pool(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None or pool.closed:
            # No limit: the engine queues better than we do, and a waiting request would look like a slow engine.
            pool = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
            self._pools[loop] = pool
        return pool

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str] | None,
        *,
        idle: bool,
        retry: bool = True,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A 200 answer whose body is still to be read, after as many retries as are allowed."""
        attempt = 0
        while True:
            try:
                response = await self._send(method, path, data, headers, idle=idle)
                break
            except EngineError as error:
                retries = self.retries if retry and not isinstance(error.__cause__, TimeoutError) else 0
                if error.retry_after is None or attempt >= retries:
                    raise
                delay = min(max(error.retry_after, 0.1 * 2**attempt), _MAX_RETRY_AFTER)
            attempt += 1
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
        try:
            yield response
        finally:
            response.close()  # no effect once the body has been read

    async def _send(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str] | None, *, idle: bool
    ) -> aiohttp.ClientResponse:
        limits = aiohttp.ClientTimeout(
            total=self.timeouts.total,
            sock_connect=self.timeouts.connect,
            sock_read=self.timeouts.idle if idle else None,
        )
        try:
            response = await self._pool().request(
                method,
                self._url + path,
                data=data,
                headers={**self._headers, **(headers or {})},
                timeout=limits,
                allow_redirects=False,
            )
            if response.status == 200:
                return response
            try:
                text = await response.content.read(_MAX_ERROR)
            finally:
                response.close()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(error) from error
        raise self._refusal(response.status, text, response.headers.get("Retry-After"))

    async def _json(self, response: aiohttp.ClientResponse) -> Any:
        try:
            data = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(error) from error
        if len(data) > _LARGE:
            value = await asyncio.to_thread(self._parse, data)
        else:
            value = self._parse(data) if data.strip() else None
        if isinstance(value, dict) and value.get("error"):
            raise self._refusal(_status_of(value["error"], response.status), data)
        return value

    # -- errors ------------------------------------------------------------------------------------------

    def _parse(self, data: bytes) -> Any:
        try:
            return loads(data)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.base_url} answered what is no JSON: {self._hide(_text(data))}") from error

    def _lost(self, error: Exception) -> EngineError:
        reason = str(error) or type(error).__name__
        message = f"{self.base_url} could not be reached or broke off: {self._hide(reason)}"
        return EngineError(message, retry_after=RETRY_AFTER)

    def _refusal(self, status: int, data: bytes, retry_after: str | None = None) -> EngineError:
        seconds: float | None = None
        if status in _TRANSIENT:
            plain = (retry_after or "").strip()
            seconds = min(float(plain), _MAX_RETRY_AFTER) if plain.isascii() and plain.isdecimal() else RETRY_AFTER
        message = f"{self.base_url} answered {status}: {self._hide(_text(data))}"
        return StatusError(message, status=status, retry_after=seconds)

    def _hide(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "[redacted]")
        return text


class StatusError(EngineError):
    """The server refused a request. ``status``: its HTTP status, or the one named in an error inside a stream."""

    def __init__(self, message: str, *, status: int, retry_after: float | None = None) -> None:
        super().__init__(message, retry_after=retry_after)
        self.status = status


async def _to_the_end(response: aiohttp.ClientResponse) -> None:
    """Read on to the end of the body: only then the connection can be used again. The answer itself is complete."""
    with suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(_CLOSING):
            await response.read()


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[tuple[bytes, bool]]:
    """Lines of any length (aiohttp's own reader has a limit, which routed experts exceed), and whether each has an
    end."""
    parts: list[bytes] = []
    async for data in content.iter_any():
        if b"\n" not in data:
            parts.append(data)
            continue
        first, *lines = data.split(b"\n")
        yield b"".join((*parts, first)), True
        parts = [lines.pop()]
        for line in lines:
            yield line, True
    if any(parts):
        yield b"".join(parts), False


def _status_of(error: Any, default: int) -> int:
    """The HTTP status that an error inside an answer names."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and not isinstance(code, bool) and 400 <= code < 600 else default


def _text(data: bytes) -> str:
    text = data[: _DETAIL * 4].decode("utf-8", "replace").strip()
    return text[:_DETAIL] + ("…" if len(text) > _DETAIL else "")

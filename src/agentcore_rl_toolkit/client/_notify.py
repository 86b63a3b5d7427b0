"""The push hint: agents tell the client when a result is written. Only a hint: S3 stays the truth."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
from collections.abc import Callable
from urllib.parse import urlsplit

from ..errors import SetupError

__all__ = ["Listener"]

logger = logging.getLogger("agentcore_rl_toolkit.client")

_MOST_BYTES = 64 * 1024
_SECONDS = 10.0  # for one request
_LOOPBACK = frozenset({"127.0.0.1", "localhost"})


class Listener:
    """A small HTTP server on the background loop; ``on_done`` gets bucket and key of each result that is announced.

    ``address``: ``http://host:port`` as agents reach it; port 0 takes a free one. Raises ``SetupError`` if it is none.
    """

    def __init__(self, address: str, on_done: Callable[[str, str], None]) -> None:
        try:
            parts = urlsplit(address)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            parts, self._port = urlsplit(""), None
        if parts.scheme != "http" or not self._host or self._port is None or parts.path.strip("/"):
            raise SetupError(f"notify_address: http://host:port is required, got {address!r}")
        self._on_done = on_done
        self._path = f"/{secrets.token_urlsafe(24)}"  # who knows it was told by this client
        self._server: asyncio.Server | None = None
        self._lock = asyncio.Lock()

    async def url(self) -> str:
        """Listen, if it does not yet, and say where. Raises ``SetupError`` if the port is taken."""
        async with self._lock:
            if self._server is None:
                where = "127.0.0.1" if self._host in _LOOPBACK else None
                try:
                    self._server = await asyncio.start_server(self._serve, where, self._port, limit=_MOST_BYTES)
                except OSError as error:
                    raise SetupError(f"can't listen on port {self._port} ({error.strerror}): choose another") from None
                self._port = self._server.sockets[0].getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}{self._path}"

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status = "400 Bad Request"
        try:
            async with asyncio.timeout(_SECONDS):
                status = await self._answer(reader)
                writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
                await writer.drain()
        except (TimeoutError, OSError, ValueError, KeyError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            logger.debug("a hint could not be read")
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> str:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request, *lines = head.split("\r\n")
        method, path, _ = request.split(" ", 2)
        if method != "POST" or not hmac.compare_digest(path.encode("latin-1"), self._path.encode()):
            return "404 Not Found"
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", "0"))
        if not 0 <= length <= _MOST_BYTES:
            return "413 Content Too Large"
        hint = json.loads(await reader.readexactly(length))
        self._on_done(str(hint["s3_bucket"]), str(hint["result_key"]))
        return "204 No Content"

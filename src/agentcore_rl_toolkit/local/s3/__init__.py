"""A small S3: enough for results, for any unmodified AWS client, with S3's own answers.

Buckets (create, head, list, delete), PutObject, GetObject, HeadObject, DeleteObject, DeleteObjects and
ListObjectsV2, path-style, with conditional requests, ranges and checksums. Everything else, multipart uploads
first of all, is answered 501 NotImplemented, never half-done. Requests must carry an ``Authorization`` header, which
is not checked: it keeps web pages on this machine out. Encryption, ACLs, tags and storage classes are accepted and
ignored, CRC32C and CRC64NVME checksums are kept unchecked.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from agentcore_rl_toolkit.errors import SetupError

from .operations import operation, valid_bucket
from .store import ObjectStore
from .wire import MAX_OBJECT_BYTES, S3Error, decode, error_answer

__all__ = ["MAX_OBJECT_BYTES", "LocalS3"]

_log = logging.getLogger(__name__)


class LocalS3:
    """S3 on this machine, its state in one file below ``root`` (made if missing).

    ``buckets``: exist from the start. Raises ``SetupError`` for a name S3 would refuse, and when it starts
    in a directory that it can't use.
    """

    def __init__(self, root: Path, *, buckets: Iterable[str] = ()) -> None:
        self._root, self._buckets = Path(root), list(buckets)
        for name in self._buckets:
            if not valid_bucket(name):
                raise SetupError(f"bucket {name!r}: 3 to 63 lower-case letters, digits, '-' and '.' are required")

    def app(self) -> web.Application:
        """A new application; it opens the store when its runner is set up, and closes it at cleanup."""
        app = web.Application(
            client_max_size=MAX_OBJECT_BYTES,
            handler_args={"auto_decompress": False},  # a gzipped object must stay gzipped
        )
        app.router.add_route("*", r"/{path:[\s\S]*}", self._answer)
        app.cleanup_ctx.append(self._lifetime)
        return app

    async def _lifetime(self, _app: web.Application) -> AsyncIterator[None]:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._store = ObjectStore(self._root / "s3.sqlite3")
        except (OSError, sqlite3.Error) as error:
            raise SetupError(f"can't keep S3's objects in {self._root} ({error}): choose another directory") from None
        for name in self._buckets:
            self._store.add_bucket(name)
        # One thread for all work: calls are short, and the store wants them one at a time.
        with ThreadPoolExecutor(1, thread_name_prefix="local-s3") as self._worker:
            yield
        self._store.close()

    async def _answer(self, request: web.Request) -> web.Response:
        if (request.content_length or 0) > MAX_OBJECT_BYTES:  # before it is all sent
            return error_answer(request, S3Error("EntityTooLarge"))
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:  # the length was not announced
            return error_answer(request, S3Error("EntityTooLarge"))
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._perform, request, body)

    def _perform(self, request: web.Request, body: bytes) -> web.Response:
        try:
            call = decode(request, body)
            return operation(call)(self._store, call)
        except S3Error as error:
            return error_answer(request, error)
        except Exception:  # noqa: BLE001 - a bug of ours is a 500, and in the log
            _log.exception("%s %s failed", request.method, request.path)
            return error_answer(request, S3Error("InternalError"))

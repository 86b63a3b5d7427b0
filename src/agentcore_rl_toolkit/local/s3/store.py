"""Buckets and objects in one SQLite file: what S3 keeps, without its wire.

SQLite because its promises are those an object store needs: a write is there completely or not at all, also after
``kill -9``; two conditional writes can't both win; keys are compared byte by byte, S3's order of UTF-8 keys; and
a key is a value, never a path, so that ``../x`` and ``a`` beside ``a/b`` need no thought.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

_SCHEMA = """
CREATE TABLE IF NOT EXISTS buckets (name TEXT PRIMARY KEY, created INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS objects (
    bucket TEXT NOT NULL, key BLOB NOT NULL,
    etag TEXT NOT NULL, modified INTEGER NOT NULL, headers TEXT NOT NULL,
    body BLOB NOT NULL,  -- last: reading the others does not touch its pages
    PRIMARY KEY (bucket, key));
"""
_META = "key, etag, modified, length(body), headers"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object without its body.

    ``modified``: milliseconds since the epoch. ``size``: bytes. ``headers``: JSON object, parsed where it is needed.
    """

    key: bytes
    etag: str
    modified: int
    size: int
    headers: str


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing, ``entries`` in order: objects, and common prefixes as bare ``bytes``.

    ``next_start``: where the next page starts (inclusive), None if there is none.
    """

    entries: list[StoredObject | bytes]
    next_start: bytes | None


class ObjectStore:
    """The store behind :class:`.LocalS3`, used from one thread at a time.

    ``path``: the SQLite file, made if it is missing. Raises ``sqlite3.Error`` if it can't be used.
    """

    def __init__(self, path: Path) -> None:
        # Autocommit: transactions are opened where they are needed. Another process may hold the same file.
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
        # No fsync: what was acknowledged survives the death of every process, not a power cut. A plain rollback
        # journal, since WAL needs shared memory, which network file systems don't have.
        try:
            self._db.executescript(f"PRAGMA journal_mode=TRUNCATE; PRAGMA synchronous=OFF; {_SCHEMA}")
        except sqlite3.Error:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """What happens inside is one step: seen completely, or not at all if it raises."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def buckets(self) -> list[tuple[str, int]]:
        """Name and time of creation (milliseconds) of each bucket, by name."""
        return self._db.execute("SELECT name, created FROM buckets ORDER BY name").fetchall()

    def has_bucket(self, bucket: str) -> bool:
        return self._db.execute("SELECT 1 FROM buckets WHERE name = ?", [bucket]).fetchone() is not None

    def add_bucket(self, bucket: str) -> bool:
        """Whether the bucket is new."""
        row = [bucket, _now()]
        return self._db.execute("INSERT OR IGNORE INTO buckets VALUES (?, ?)", row).rowcount == 1

    def remove_bucket(self, bucket: str) -> None:
        self._db.execute("DELETE FROM buckets WHERE name = ?", [bucket])

    def head(self, bucket: str, key: bytes) -> StoredObject | None:
        query = f"SELECT {_META} FROM objects WHERE bucket = ? AND key = ?"
        row = self._db.execute(query, [bucket, key]).fetchone()
        return None if row is None else StoredObject(*row)

    def get(self, bucket: str, key: bytes) -> tuple[StoredObject, bytes] | None:
        query = f"SELECT {_META}, body FROM objects WHERE bucket = ? AND key = ?"
        row = self._db.execute(query, [bucket, key]).fetchone()
        return None if row is None else (StoredObject(*row[:-1]), row[-1])

    def put(self, bucket: str, key: bytes, body: bytes, etag: str, headers: dict[str, str]) -> None:
        row = [bucket, key, etag, _now(), json.dumps(headers), body]
        self._db.execute("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?)", row)

    def remove(self, bucket: str, key: bytes) -> None:
        self._db.execute("DELETE FROM objects WHERE bucket = ? AND key = ?", [bucket, key])

    def page(self, bucket: str, *, prefix: bytes, delimiter: bytes, start: bytes, limit: int) -> Page:
        """Up to ``limit`` entries of the keys with this prefix, from ``start`` on (inclusive).

        With a delimiter, keys that have it after the prefix are rolled up into one common prefix.
        """
        entries: list[StoredObject | bytes] = []
        position: bytes | None = max(start, prefix)
        while position is not None:
            position = self._extend(entries, bucket, prefix, delimiter, position, limit)
            if len(entries) == limit:
                more = position is not None and next(self._rows(bucket, prefix, position, 1), None) is not None
                return Page(entries, position if more else None)
        return Page(entries, None)

    def _extend(
        self, entries: list[StoredObject | bytes], bucket: str, prefix: bytes, delimiter: bytes,
        position: bytes, limit: int,
    ) -> bytes | None:  # fmt: skip
        """Append entries until the limit or a common prefix; where to go on, None at the end.

        Behind a common prefix the index is entered anew, so a million keys below it cost one step.
        """
        for stored in self._rows(bucket, prefix, position, limit - len(entries)):
            cut = stored.key.find(delimiter, len(prefix)) if delimiter else -1
            if cut >= 0:
                entries.append(stored.key[: cut + len(delimiter)])
                return behind(stored.key[: cut + len(delimiter)])
            entries.append(stored)
            position = stored.key + b"\0"
        return position if len(entries) == limit else None

    def _rows(self, bucket: str, prefix: bytes, start: bytes, limit: int) -> Iterator[StoredObject]:
        rows = self._db.execute(
            f"SELECT {_META} FROM objects WHERE bucket = ? AND key >= ? AND key < ? ORDER BY key LIMIT ?",
            [bucket, start, behind(prefix), limit],
        )
        return starmap(StoredObject, rows)


def behind(prefix: bytes) -> bytes:
    """The smallest byte string greater than everything that starts with ``prefix`` (UTF-8, so no 0xff)."""
    return prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else b"\xff"


def _now() -> int:
    return time.time_ns() // 1_000_000

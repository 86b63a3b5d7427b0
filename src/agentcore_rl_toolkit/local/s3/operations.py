"""S3's operations: each takes the store and a call, and answers or raises ``S3Error``."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from email.utils import formatdate, parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import quote
from xml.etree import ElementTree

from aiohttp import web

from .store import ObjectStore, Page, StoredObject, behind
from .wire import CHECKSUMS, MAX_METADATA_BYTES, Call, S3Error, escape, iso, xml

_MAX_PAGE = 1000

# -- buckets ---------------------------------------------------------------------------------------------


def _list_buckets(store: ObjectStore, call: Call) -> web.Response:
    buckets = "".join(
        f"<Bucket><Name>{name}</Name><CreationDate>{iso(created)}</CreationDate></Bucket>"
        for name, created in store.buckets()
    )
    owner = "<Owner><ID>local</ID></Owner>"
    return xml(f"<ListAllMyBucketsResult>{owner}<Buckets>{buckets}</Buckets></ListAllMyBucketsResult>")


def _create_bucket(store: ObjectStore, call: Call) -> web.Response:
    if not valid_bucket(call.bucket):
        raise S3Error("InvalidBucketName")
    if not store.add_bucket(call.bucket):
        raise S3Error("BucketAlreadyOwnedByYou")
    return web.Response(headers={"Location": f"/{call.bucket}"})


def _head_bucket(store: ObjectStore, call: Call) -> web.Response:
    _require_bucket(store, call)
    return web.Response()


def _delete_bucket(store: ObjectStore, call: Call) -> web.Response:
    with store.writing():
        _require_bucket(store, call)
        if store.page(call.bucket, prefix=b"", delimiter=b"", start=b"", limit=1).entries:
            raise S3Error("BucketNotEmpty")
        store.remove_bucket(call.bucket)
    return web.Response(status=204)


def _require_bucket(store: ObjectStore, call: Call) -> None:
    if not store.has_bucket(call.bucket):
        raise S3Error("NoSuchBucket")


def valid_bucket(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", name) is not None and ".." not in name
    return False


def _list_objects(store: ObjectStore, call: Call) -> web.Response:
    query = call.query
    encoding = query.get("encoding-type")
    if encoding not in (None, "url"):
        raise S3Error("InvalidArgument", "encoding-type: 'url' is the only one")
    prefix, delimiter, after = (query.get(n, "").encode() for n in ("prefix", "delimiter", "start-after"))
    limit = _limit(query.get("max-keys", str(_MAX_PAGE)))
    start = _start(query.get("continuation-token"), after, prefix, delimiter)
    _require_bucket(store, call)
    page = Page([], None)
    if limit:
        page = store.page(call.bucket, prefix=prefix, delimiter=delimiter, start=start, limit=limit)

    def text(value: bytes) -> str:
        return quote(value, safe="/") if encoding else escape(value.decode())

    fields = [
        ("Name", call.bucket),
        ("Prefix", text(prefix)),
        *([("Delimiter", text(delimiter))] if delimiter else []),
        *([("StartAfter", text(after))] if after else []),
        *([("EncodingType", encoding)] if encoding else []),
        ("MaxKeys", limit),
        ("KeyCount", len(page.entries)),
        ("IsTruncated", "false" if page.next_start is None else "true"),
        *((n, escape(query[p])) for n, p in [("ContinuationToken", "continuation-token")] if p in query),
        *([("NextContinuationToken", _token(page.next_start))] if page.next_start is not None else []),
    ]
    entries = "".join(
        f"<CommonPrefixes><Prefix>{text(entry)}</Prefix></CommonPrefixes>"
        if isinstance(entry, bytes)
        else f"<Contents><Key>{text(entry.key)}</Key><LastModified>{iso(entry.modified)}</LastModified>"
        f"<ETag>&quot;{entry.etag}&quot;</ETag><Size>{entry.size}</Size>"
        f"<StorageClass>STANDARD</StorageClass></Contents>"
        for entry in page.entries
    )
    head = "".join(f"<{name}>{value}</{name}>" for name, value in fields)
    return xml(f"<ListBucketResult>{head}{entries}</ListBucketResult>")


def _limit(value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", value):
        raise S3Error("InvalidArgument", "max-keys: a number from 0 to 2147483647 is required")
    return min(int(value), _MAX_PAGE)


def _start(token: str | None, after: bytes, prefix: bytes, delimiter: bytes) -> bytes:
    """The first key that may be listed. A token is just that, encoded, and wins over ``after``."""
    if token is not None:
        try:
            return base64.b64decode(token, altchars=b"-_", validate=True)
        except ValueError:
            raise S3Error("InvalidArgument", "The continuation token provided is incorrect") from None
    if delimiter and after.startswith(prefix) and (cut := after.find(delimiter, len(prefix))) >= 0:
        return behind(after[: cut + len(delimiter)])  # the common prefix comes before `after`
    return after + b"\0" if after else b""


def _token(start: bytes) -> str:
    return base64.urlsafe_b64encode(start).decode()


def _delete_objects(store: ObjectStore, call: Call) -> web.Response:
    try:
        root = ElementTree.fromstring(call.body)
    except ElementTree.ParseError:
        raise S3Error("MalformedXML") from None
    items = [{_local_name(field): field.text or "" for field in item} for item in root if _local_name(item) == "Object"]
    if not 1 <= len(items) <= _MAX_PAGE or not all(item.get("Key") for item in items):
        raise S3Error("MalformedXML")
    if any(item.keys() - {"Key"} for item in items):
        raise S3Error("NotImplemented", "DeleteObjects here takes keys alone.")
    with store.writing():
        _require_bucket(store, call)
        for item in items:
            store.remove(call.bucket, item["Key"].encode())
    quiet = any(_local_name(field) == "Quiet" and field.text == "true" for field in root)
    deleted = "" if quiet else "".join(f"<Deleted><Key>{escape(i['Key'])}</Key></Deleted>" for i in items)
    return xml(f"<DeleteResult>{deleted}</DeleteResult>")


def _local_name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


# -- objects ---------------------------------------------------------------------------------------------

_KEPT_HEADERS = {
    "cache-control", "content-disposition", "content-encoding", "content-language", "content-type", "expires",
    *CHECKSUMS,
}  # fmt: skip


def _put_object(store: ObjectStore, call: Call) -> web.Response:
    headers, etag = _kept(call.headers), hashlib.md5(call.body).hexdigest()
    absent, match = call.headers.get("if-none-match"), call.headers.get("if-match")
    if absent not in (None, "*"):
        raise S3Error("NotImplemented", "If-None-Match: writes take '*' alone.")
    with store.writing():
        _require_bucket(store, call)
        existing = store.head(call.bucket, call.key) if absent or match else None
        if match and existing is None:
            raise S3Error("NoSuchKey")
        if existing and (absent or not _names(match, existing)):
            raise S3Error("PreconditionFailed")
        store.put(call.bucket, call.key, call.body, etag, headers)
    return web.Response(headers={"ETag": f'"{etag}"', **{n: headers[n] for n in CHECKSUMS & headers.keys()}})


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that come back with the object."""
    kept = {n: v for n, v in headers.items() if n in _KEPT_HEADERS or n.startswith("x-amz-meta-")}
    encodings = [e.strip() for e in kept.pop("content-encoding", "").split(",")]
    if encoding := ",".join(e for e in encodings if e not in ("", "aws-chunked")):
        kept["content-encoding"] = encoding
    try:
        sizes = [len(f"{n.removeprefix('x-amz-meta-')}{v}".encode()) for n, v in kept.items()]
    except UnicodeEncodeError:
        raise S3Error("InvalidArgument", "headers: UTF-8 is required") from None
    if sum(size for name, size in zip(kept, sizes, strict=True) if name.startswith("x-amz-meta-")) > MAX_METADATA_BYTES:
        raise S3Error("MetadataTooLarge")
    return kept


def _read_object(store: ObjectStore, call: Call) -> web.Response:
    """GetObject and HeadObject."""
    stored, body = _find(store, call)
    validators = {"ETag": f'"{stored.etag}"', "Last-Modified": formatdate(stored.modified / 1000, usegmt=True)}
    if _is_unchanged(call.headers, stored):
        return web.Response(status=304, headers=validators)
    span = _range(call.headers.get("range", ""), stored.size)
    headers = {"content-type": "binary/octet-stream", "Accept-Ranges": "bytes", **validators}
    with_checksums = call.headers.get("x-amz-checksum-mode") == "ENABLED" and span is None
    headers |= {n: v for n, v in json.loads(stored.headers).items() if with_checksums or n not in CHECKSUMS}
    if span is not None:
        headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{stored.size}"
    if body is None:
        headers["Content-Length"] = str(stored.size if span is None else len(span))
    elif span is not None:
        body = body[span.start : span.stop]
    return web.Response(status=200 if span is None else 206, headers=headers, body=body)


def _find(store: ObjectStore, call: Call) -> tuple[StoredObject, bytes | None]:
    stored, body = None, None
    if call.method == "HEAD":
        stored = store.head(call.bucket, call.key)
    elif found := store.get(call.bucket, call.key):
        stored, body = found
    if stored is None:
        _require_bucket(store, call)
        raise S3Error("NoSuchKey")
    return stored, body


def _delete_object(store: ObjectStore, call: Call) -> web.Response:
    if "if-match" in call.headers:
        raise S3Error("NotImplemented", "Conditional deletes are not implemented here.")
    with store.writing():
        _require_bucket(store, call)
        store.remove(call.bucket, call.key)
    return web.Response(status=204)


def _is_unchanged(headers: Mapping[str, str], stored: StoredObject) -> bool:
    """Whether the answer is 304; raises PreconditionFailed. The precedence is RFC 9110's."""
    match, none_match = headers.get("if-match"), headers.get("if-none-match")
    modified = stored.modified // 1000  # dates in headers have whole seconds
    since, until = _date(headers.get("if-modified-since")), _date(headers.get("if-unmodified-since"))
    if match is not None and not _names(match, stored):
        raise S3Error("PreconditionFailed")
    if match is None and until is not None and modified > until:
        raise S3Error("PreconditionFailed")
    if none_match is not None:
        return _names(none_match, stored)
    return since is not None and modified <= since


def _names(tags: str | None, stored: StoredObject) -> bool:
    """Whether a list of entity tags, or ``*``, names this object."""
    names = [tag.strip().removeprefix("W/").strip('"') for tag in (tags or "").split(",")]
    return names == ["*"] or stored.etag in names


def _date(value: str | None) -> float | None:
    """Seconds since the epoch; None for what is no date (RFC 9110: ignore it)."""
    try:
        return parsedate_to_datetime(value).timestamp() if value else None
    except (ValueError, OverflowError):
        return None


def _range(value: str, size: int) -> range | None:
    """The bytes that a Range header asks for; None for all of them, also (as S3) if it makes no sense."""
    asked = re.fullmatch(r"bytes=([0-9]*)-([0-9]*)", value.strip())
    if asked is None or not any(asked.groups()):
        return None
    first, last = asked.groups()
    if first and last and int(first) > int(last):
        return None
    span = (
        range(size)[int(first) : int(last) + 1 if last else size]
        if first
        else range(size)[size - min(int(last), size) :]
    )
    if not span:
        raise S3Error("InvalidRange")
    return span


# -- which operation a call asks for ------------------------------------------------------------------------


class _Operation(NamedTuple):
    """``required`` and ``optional``: the query parameters that tell it from S3's other operations."""

    perform: Callable[[ObjectStore, Call], web.Response]
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


_LISTING = frozenset({"prefix", "delimiter", "start-after", "max-keys", "continuation-token", "encoding-type"})
_OPERATIONS = {
    ("GET", "service"): _Operation(_list_buckets),
    ("PUT", "bucket"): _Operation(_create_bucket),
    ("HEAD", "bucket"): _Operation(_head_bucket),
    ("DELETE", "bucket"): _Operation(_delete_bucket),
    ("GET", "bucket"): _Operation(_list_objects, required=frozenset({"list-type"}), optional=_LISTING),
    ("POST", "bucket"): _Operation(_delete_objects, required=frozenset({"delete"})),
    ("PUT", "object"): _Operation(_put_object),
    ("GET", "object"): _Operation(_read_object),
    ("HEAD", "object"): _Operation(_read_object),
    ("DELETE", "object"): _Operation(_delete_object),
}


def operation(call: Call) -> Callable[[ObjectStore, Call], web.Response]:
    """What to run for this call; raises ``S3Error`` (501) for all that is not offered."""
    level = "object" if call.key else "bucket" if call.bucket else "service"
    found = _OPERATIONS.get((call.method, level))
    given = call.query.keys() - {"x-id"}  # the SDK's name of the operation, for logs
    if found is None or not found.required <= given <= found.required | found.optional:
        asked = f"{call.method} on a {level}" + "".join(f", {name}" for name in sorted(given))
        raise S3Error("NotImplemented", f"This local S3 does not implement {asked}.")
    return found.perform

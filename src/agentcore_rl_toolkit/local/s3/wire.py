"""S3's wire: a request as a :class:`Call`, errors and answers as XML."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape as _escape

from aiohttp import web

MAX_OBJECT_BYTES = 256 * 2**20
"""Larger objects are refused with EntityTooLarge; S3 itself takes 5 GiB in one PUT."""
MAX_KEY_BYTES, MAX_METADATA_BYTES = 1024, 2048

_ERRORS = {
    "AccessDenied": (403, "Access Denied: requests must be signed (any credentials will do here)"),
    "BadDigest": (400, "The checksum you specified did not match what we received."),
    "BucketAlreadyOwnedByYou": (409, "The bucket exists already, and you own it."),
    "BucketNotEmpty": (409, "The bucket you tried to delete is not empty."),
    "EntityTooLarge": (400, f"Objects here have at most {MAX_OBJECT_BYTES} bytes."),
    "IncompleteBody": (400, "The body is not what its headers announced."),
    "InternalError": (500, "We encountered an internal error."),
    "InvalidArgument": (400, "Invalid Argument"),
    "InvalidBucketName": (400, "The specified bucket is not valid."),
    "InvalidRange": (416, "The requested range is not satisfiable"),
    "InvalidURI": (400, "Couldn't parse the specified URI: keys are UTF-8."),
    "KeyTooLongError": (400, f"Your key is too long: at most {MAX_KEY_BYTES} bytes of UTF-8."),
    "MalformedXML": (400, "The XML you provided was not well-formed or did not validate."),
    "MetadataTooLarge": (400, f"User metadata has at most {MAX_METADATA_BYTES} bytes."),
    "NoSuchBucket": (404, "The specified bucket does not exist"),
    "NoSuchKey": (404, "The specified key does not exist."),
    "NotImplemented": (501, "This local S3 does not implement what you asked for."),
    "PreconditionFailed": (412, "At least one of the pre-conditions you specified did not hold"),
    "XAmzContentSHA256Mismatch": (400, "x-amz-content-sha256 does not match the body."),
}


class S3Error(Exception):
    def __init__(self, code: str, message: str = "") -> None:
        self.code, (self.status, default) = code, _ERRORS[code]
        super().__init__(message or default)


@dataclass(frozen=True, slots=True)
class Call:
    """One request, decoded. ``bucket`` and ``key`` are empty where the path has none."""

    method: str
    bucket: str
    key: bytes
    query: dict[str, str]
    headers: Mapping[str, str]
    body: bytes


_DIGESTS: dict[str, Callable[[bytes], bytes]] = {
    "content-md5": lambda body: hashlib.md5(body).digest(),
    "x-amz-checksum-crc32": lambda body: zlib.crc32(body).to_bytes(4, "big"),
    "x-amz-checksum-sha1": lambda body: hashlib.sha1(body).digest(),
    "x-amz-checksum-sha256": lambda body: hashlib.sha256(body).digest(),
}
CHECKSUMS = {f"x-amz-checksum-{name}" for name in ("crc32", "crc32c", "crc64nvme", "sha1", "sha256")}
_REFUSED_HEADERS = {"x-amz-copy-source", "x-amz-write-offset-bytes"}


def decode(request: web.Request, body: bytes) -> Call:
    path, _, query = request.raw_path.partition("?")
    bucket, _, key = path[1:].partition("/")
    headers = {name.lower(): value for name, value in request.headers.items()}
    if "authorization" not in headers:
        raise S3Error("AccessDenied")
    if refused := _REFUSED_HEADERS & headers.keys():
        raise S3Error("NotImplemented", f"This local S3 does not implement {', '.join(refused)}.")
    try:
        parameters = dict(parse_qsl(query, keep_blank_values=True, errors="strict"))
        bucket, key = unquote(bucket, errors="strict"), unquote(key, errors="strict")
    except UnicodeDecodeError:
        raise S3Error("InvalidURI") from None
    if len(key.encode()) > MAX_KEY_BYTES:
        raise S3Error("KeyTooLongError")
    return Call(request.method, bucket, key.encode(), parameters, headers, _content(body, headers))


def _content(body: bytes, headers: dict[str, str]) -> bytes:
    """What the client meant to send: without the aws-chunked envelope, and checked against every digest it named.

    Trailing headers are moved into ``headers``.
    """
    announced = headers.get("x-amz-content-sha256", "")
    if announced.startswith("STREAMING-"):
        body, trailer = _unchunk(body)
        headers.update(trailer)
        if headers.get("x-amz-decoded-content-length", str(len(body))) != str(len(body)):
            raise S3Error("IncompleteBody")
    elif len(announced) == 64 and announced != hashlib.sha256(body).hexdigest():
        raise S3Error("XAmzContentSHA256Mismatch")
    for name in _DIGESTS.keys() & headers.keys():
        if base64.b64encode(_DIGESTS[name](body)).decode() != headers[name]:
            raise S3Error("BadDigest")
    return body


def _unchunk(body: bytes) -> tuple[bytes, dict[str, str]]:
    """Take apart ``size[;signature] CRLF data CRLF`` …, ``0 CRLF``, ``name:value CRLF`` …"""
    chunks: list[bytes] = []
    position = 0
    try:
        while True:
            line = body[position : body.index(b"\r\n", position)]
            size = int(line.partition(b";")[0], 16)
            position += len(line) + 2
            if size == 0:
                break
            chunk = body[position : position + size]
            position += size + 2
            if len(chunk) != size or body[position - 2 : position] != b"\r\n":
                raise S3Error("IncompleteBody")
            chunks.append(chunk)
        trailer = [line.partition(":") for line in body[position:].decode("ascii").split("\r\n") if line]
    except ValueError:
        raise S3Error("IncompleteBody") from None
    return b"".join(chunks), {name.strip().lower(): value.strip() for name, _, value in trailer}


def error_answer(request: web.Request, error: S3Error) -> web.Response:
    resource = escape(request.raw_path.partition("?")[0])
    fields = f"<Code>{error.code}</Code><Message>{escape(str(error))}</Message><Resource>{resource}</Resource>"
    return xml(f"<Error>{fields}</Error>", error.status)


def xml(text: str, status: int = 200) -> web.Response:
    declared = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'
    return web.Response(status=status, body=declared.encode(errors="replace"), content_type="application/xml")


def iso(milliseconds: int) -> str:
    moment = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def escape(value: str) -> str:
    """Text for XML; a bare carriage return would be read back as a line feed."""
    return _escape(value, {"\r": "&#13;"})

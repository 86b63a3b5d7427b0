"""The local S3, through boto3. What both can do, moto's server must answer the same."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import hashlib
import http.client
import io
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import boto3
import pytest
from aiohttp import web
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.httpchecksum import AwsChunkedWrapper, Crc32Checksum
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer

from agentcore_rl_toolkit.errors import SetupError
from agentcore_rl_toolkit.local.s3 import MAX_OBJECT_BYTES, LocalS3

_names = (f"bucket-{number}" for number in itertools.count())


@contextlib.contextmanager
def serve(root: Path, **arguments: Any) -> Iterator[str]:
    """A LocalS3 in a thread; its URL."""
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def run() -> None:
        stop = asyncio.Event()
        runner = web.AppRunner(LocalS3(root, **arguments).app(), access_log=None, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started.set_result(("http://{}:{}".format(*runner.addresses[0]), asyncio.get_running_loop(), stop))
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=[run()])
    thread.start()
    url, loop, stop = started.result(timeout=30)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@contextlib.contextmanager
def client(url: str) -> Iterator[Any]:
    config = Config(retries={"total_max_attempts": 1}, max_pool_connections=32, read_timeout=30)
    s3 = boto3.client(
        "s3", endpoint_url=url, region_name="us-west-2", config=config,
        aws_access_key_id="local", aws_secret_access_key="local",
    )  # fmt: skip
    with contextlib.closing(s3):
        yield s3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s3")


@pytest.fixture(scope="module")
def local(root: Path) -> Iterator[Any]:
    with serve(root) as url, client(url) as s3:
        yield s3


@pytest.fixture(scope="module")
def moto() -> Iterator[Any]:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with client(f"http://{host}:{port}") as s3:
        yield s3
    server.stop()


@pytest.fixture(params=["local", "moto"])
def s3(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def make_bucket(s3: Any) -> str:
    name = next(_names)
    s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    return name


@pytest.fixture
def bucket(s3: Any) -> str:
    return make_bucket(s3)


@pytest.fixture
def local_bucket(local: Any) -> str:
    return make_bucket(local)


@contextlib.contextmanager
def fails(status: int, code: str) -> Iterator[None]:
    with pytest.raises(ClientError) as caught:
        yield
    response = caught.value.response
    assert (response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]) == (status, code)


def put_all(s3: Any, bucket: str, keys: list[str]) -> None:
    for key in keys:
        s3.put_object(Bucket=bucket, Key=key, Body=key.encode())


def listing(s3: Any, bucket: str, **arguments: Any) -> tuple[list[str], list[str]]:
    """All pages: keys and common prefixes."""
    pages = list(s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, **arguments))
    keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
    prefixes = [item["Prefix"] for page in pages for item in page.get("CommonPrefixes", [])]
    assert sum(page["KeyCount"] for page in pages) == len(keys) + len(prefixes)
    return keys, prefixes


def raw(s3: Any, method: str, target: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    """A request that no SDK would send; a header of "" is left out."""
    connection = http.client.HTTPConnection(urlsplit(s3.meta.endpoint_url).netloc, timeout=30)
    credential = "AWS4-HMAC-SHA256 Credential=local/20260101/us-west-2/s3/aws4_request"
    sent = {"Authorization": f"{credential}, SignedHeaders=host, Signature=0", **headers}
    with contextlib.closing(connection):
        chunked = "Transfer-Encoding" in headers
        connection.request(method, target, body, {n: v for n, v in sent.items() if v}, encode_chunked=chunked)
        answer = connection.getresponse()
        return answer.status, answer.read()


# -- the same on both ------------------------------------------------------------------------------------


def test_put_get_head_delete(s3: Any, bucket: str) -> None:
    body = os.urandom(300_000)
    etag = f'"{hashlib.md5(body).hexdigest()}"'
    before = datetime.now(UTC) - timedelta(seconds=1)
    meta = {"run": "r1", "with-dash": "a b"}
    put = s3.put_object(Bucket=bucket, Key="k", Body=body, ContentType="application/json", Metadata=meta)
    got, head = s3.get_object(Bucket=bucket, Key="k"), s3.head_object(Bucket=bucket, Key="k")
    assert put["ETag"] == got["ETag"] == head["ETag"] == etag
    assert got["Body"].read() == body
    assert head["ContentLength"] == got["ContentLength"] == len(body)
    assert head["ContentType"] == got["ContentType"] == "application/json"
    assert head["Metadata"] == got["Metadata"] == meta
    assert before <= head["LastModified"] == got["LastModified"] <= datetime.now(UTC)
    assert s3.delete_object(Bucket=bucket, Key="k")["ResponseMetadata"]["HTTPStatusCode"] == 204
    assert s3.delete_object(Bucket=bucket, Key="k")["ResponseMetadata"]["HTTPStatusCode"] == 204
    with fails(404, "NoSuchKey"):
        s3.get_object(Bucket=bucket, Key="k")
    with fails(404, "404"):
        s3.head_object(Bucket=bucket, Key="k")


def test_overwriting_replaces_body_and_metadata(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"long body", Metadata={"a": "1"}, CacheControl="no-store")
    s3.put_object(Bucket=bucket, Key="k", Body=b"")
    got = s3.get_object(Bucket=bucket, Key="k")
    assert (got["Body"].read(), got["Metadata"], got["ContentType"]) == (b"", {}, "binary/octet-stream")
    assert "CacheControl" not in got


@pytest.mark.parametrize("algorithm", ["CRC32", "SHA1", "SHA256"])
def test_checksums_are_checked_and_given_back(s3: Any, bucket: str, algorithm: str) -> None:
    digest = {
        "CRC32": lambda body: zlib.crc32(body).to_bytes(4, "big"),
        "SHA1": lambda body: hashlib.sha1(body).digest(),
        "SHA256": lambda body: hashlib.sha256(body).digest(),
    }[algorithm](b"body")
    put = s3.put_object(Bucket=bucket, Key="k", Body=b"body", ChecksumAlgorithm=algorithm)
    head = s3.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    value = base64.b64encode(digest).decode()
    assert put[f"Checksum{algorithm}"] == head[f"Checksum{algorithm}"] == value
    assert s3.get_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")["Body"].read() == b"body"


def test_a_body_in_chunks_with_a_trailing_checksum(s3: Any, bucket: str) -> None:
    """What the SDK sends over https; botocore's own encoder makes it here."""
    body = os.urandom(2_500_000)
    chunks = AwsChunkedWrapper(io.BytesIO(body), Crc32Checksum, "x-amz-checksum-crc32")
    headers = {
        "Transfer-Encoding": "chunked", "Content-Encoding": "x-own,aws-chunked",
        "X-Amz-Trailer": "x-amz-checksum-crc32", "X-Amz-Sdk-Checksum-Algorithm": "CRC32",
        "X-Amz-Content-SHA256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER", "X-Amz-Decoded-Content-Length": str(len(body)),
    }  # fmt: skip
    status, _ = raw(s3, "PUT", f"/{bucket}/k", chunks, **headers)
    got = s3.get_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert (status, got["Body"].read(), got["ContentEncoding"]) == (200, body, "x-own")
    assert got["ChecksumCRC32"] == base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


def test_ranges(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"0123456789")
    for asked, content, part in [
        ("bytes=0-0", b"0", "bytes 0-0/10"),
        ("bytes=2-4", b"234", "bytes 2-4/10"),
        ("bytes=7-", b"789", "bytes 7-9/10"),
        ("bytes=7-1000", b"789", "bytes 7-9/10"),
        ("bytes=-3", b"789", "bytes 7-9/10"),
        ("bytes=-1000", b"0123456789", "bytes 0-9/10"),
    ]:
        got = s3.get_object(Bucket=bucket, Key="k", Range=asked)
        assert got["ResponseMetadata"]["HTTPStatusCode"] == 206
        assert (got["Body"].read(), got["ContentRange"]) == (content, part)
        assert got["ContentLength"] == len(content)
    with fails(416, "InvalidRange"):
        s3.get_object(Bucket=bucket, Key="k", Range="bytes=10-")


def test_conditional_reads(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="k", Body=b"x")["ETag"]
    now, other = datetime.now(UTC), '"' + "0" * 32 + '"'
    for read in (s3.get_object, s3.head_object):
        for condition in ({"IfNoneMatch": etag}, {"IfModifiedSince": now + timedelta(hours=1)}):
            with fails(304, "304"):
                read(Bucket=bucket, Key="k", **condition)
        for condition in ({"IfMatch": other}, {"IfUnmodifiedSince": now - timedelta(hours=1)}):
            with fails(412, "PreconditionFailed" if read == s3.get_object else "412"):
                read(Bucket=bucket, Key="k", **condition)
        for condition in (
            {"IfMatch": etag}, {"IfNoneMatch": other},
            {"IfModifiedSince": now - timedelta(hours=1)}, {"IfUnmodifiedSince": now + timedelta(hours=1)},
        ):  # fmt: skip
            assert read(Bucket=bucket, Key="k", **condition)["ContentLength"] == 1


def test_conditional_writes(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="k", Body=b"first", IfNoneMatch="*")["ETag"]
    with fails(412, "PreconditionFailed"):
        s3.put_object(Bucket=bucket, Key="k", Body=b"second", IfNoneMatch="*")
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"first"
    with fails(412, "PreconditionFailed"):
        s3.put_object(Bucket=bucket, Key="k", Body=b"second", IfMatch='"' + "0" * 32 + '"')
    s3.put_object(Bucket=bucket, Key="k", Body=b"second", IfMatch=etag)
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"second"
    with fails(404, "NoSuchKey"):
        s3.put_object(Bucket=bucket, Key="missing", Body=b"", IfMatch=etag)


def test_buckets(s3: Any) -> None:
    name = make_bucket(s3)
    s3.head_bucket(Bucket=name)
    assert name in [item["Name"] for item in s3.list_buckets()["Buckets"]]
    with fails(409, "BucketAlreadyOwnedByYou"):
        s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    s3.put_object(Bucket=name, Key="k", Body=b"")
    with fails(409, "BucketNotEmpty"):
        s3.delete_bucket(Bucket=name)
    s3.delete_object(Bucket=name, Key="k")
    s3.delete_bucket(Bucket=name)
    assert name not in [item["Name"] for item in s3.list_buckets()["Buckets"]]
    with fails(404, "404"):
        s3.head_bucket(Bucket=name)
    with fails(404, "NoSuchBucket"):
        s3.delete_bucket(Bucket=name)


def test_a_missing_bucket(s3: Any) -> None:
    absent = next(_names)
    with fails(404, "NoSuchBucket"):
        s3.put_object(Bucket=absent, Key="k", Body=b"")
    with fails(404, "NoSuchBucket"):
        s3.get_object(Bucket=absent, Key="k")
    with fails(404, "404"):
        s3.head_object(Bucket=absent, Key="k")
    with fails(404, "NoSuchBucket"):
        s3.list_objects_v2(Bucket=absent)
    with fails(404, "NoSuchBucket"):
        s3.delete_object(Bucket=absent, Key="k")


def test_a_listing_has_all_fields(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="a b+c%20&<é>", Body=b"123")["ETag"]
    page = s3.list_objects_v2(Bucket=bucket)
    (item,) = page["Contents"]
    assert (item["Key"], item["ETag"], item["Size"]) == ("a b+c%20&<é>", etag, 3)
    assert item["StorageClass"] == "STANDARD"
    assert abs(item["LastModified"] - datetime.now(UTC)) < timedelta(seconds=5)
    assert (page["Name"], page["Prefix"], page["KeyCount"], page["MaxKeys"]) == (bucket, "", 1, 1000)
    assert page["IsTruncated"] is False
    assert "NextContinuationToken" not in page


def test_listing_by_prefix_delimiter_and_start(s3: Any, bucket: str) -> None:
    put_all(s3, bucket, ["a", "a/1", "a/2", "a/b/3", "ab", "b/1", "c"])
    everything = ["a", "a/1", "a/2", "a/b/3", "ab", "b/1", "c"]
    assert listing(s3, bucket) == (everything, [])
    assert listing(s3, bucket, Prefix="a/") == (["a/1", "a/2", "a/b/3"], [])
    assert listing(s3, bucket, Delimiter="/") == (["a", "ab", "c"], ["a/", "b/"])
    assert listing(s3, bucket, Prefix="a/", Delimiter="/") == (["a/1", "a/2"], ["a/b/"])
    assert listing(s3, bucket, Delimiter="/b/") == (["a", "a/1", "a/2", "ab", "b/1", "c"], ["a/b/"])
    assert listing(s3, bucket, StartAfter="a/2") == (["a/b/3", "ab", "b/1", "c"], [])
    assert listing(s3, bucket, StartAfter="a/20") == (["a/b/3", "ab", "b/1", "c"], [])
    assert listing(s3, bucket, StartAfter="a", Delimiter="/") == (["ab", "c"], ["a/", "b/"])
    assert listing(s3, bucket, StartAfter="a/1", Delimiter="/") == (["ab", "c"], ["b/"])
    assert listing(s3, bucket, Prefix="none") == ([], [])


def test_listing_page_by_page(s3: Any, bucket: str) -> None:
    keys = [f"{number:02d}" for number in range(7)]
    put_all(s3, bucket, keys)
    page = s3.list_objects_v2(Bucket=bucket, MaxKeys=3, StartAfter="00")
    assert [item["Key"] for item in page["Contents"]] == keys[1:4]
    assert (page["IsTruncated"], page["KeyCount"], page["MaxKeys"]) == (True, 3, 3)
    token = page["NextContinuationToken"]
    page = s3.list_objects_v2(Bucket=bucket, MaxKeys=3, ContinuationToken=token, StartAfter="00")
    assert [item["Key"] for item in page["Contents"]] == keys[4:7]
    assert page["IsTruncated"] is False  # exactly full, and nothing behind it
    for size in range(1, 8):
        assert listing(s3, bucket, PaginationConfig={"PageSize": size}) == (keys, [])
    assert s3.list_objects_v2(Bucket=bucket, MaxKeys=0)["IsTruncated"] is False


def test_delete_many(s3: Any, bucket: str) -> None:
    put_all(s3, bucket, ["a", "b & <c>", "é", "keep"])
    doomed = [{"Key": key} for key in ["a", "b & <c>", "é", "never-there"]]
    answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": doomed})
    assert sorted(item["Key"] for item in answer["Deleted"]) == sorted(item["Key"] for item in doomed)
    assert listing(s3, bucket) == (["keep"], [])
    s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "keep"}], "Quiet": True})
    assert listing(s3, bucket) == ([], [])


# -- keys ------------------------------------------------------------------------------------------------

ODD_KEYS = [
    "..", "../..", "../../etc/passwd", "a/../b", "a/./b", ".", "./a", "/", "//", "/etc/passwd", "a", "a/", "a/b",
    "a//b", "a/b/c", " ", " a ", "+", "%2F", "%2e%2e/", "?x=1", "a?b#c&d=e", "\x01", "\n", "\r\n", "\x7f", "é",
    "e\u0301", "\uffff", "\U0001f600", "CON", "k" * 1024, "/" * 1024, "é" * 512, "d/" * 512,
]  # fmt: skip


def test_keys_are_values_not_paths(local: Any, local_bucket: str, root: Path) -> None:
    put_all(local, local_bucket, ODD_KEYS)
    for key in ODD_KEYS:
        assert local.get_object(Bucket=local_bucket, Key=key)["Body"].read() == key.encode(), key
    assert listing(local, local_bucket) == (sorted(ODD_KEYS, key=str.encode), [])
    assert {path.name for path in root.iterdir()} <= {"s3.sqlite3", "s3.sqlite3-journal"}
    local.delete_objects(Bucket=local_bucket, Delete={"Objects": [{"Key": "a"}, {"Key": "\r\n"}]})
    assert set(ODD_KEYS) - set(listing(local, local_bucket)[0]) == {"a", "\r\n"}


def test_a_key_may_have_1024_bytes(local: Any, local_bucket: str) -> None:
    for key in ("k" * 1025, "é" * 513):
        with fails(400, "KeyTooLongError"):
            local.put_object(Bucket=local_bucket, Key=key, Body=b"")


pieces = st.lists(st.sampled_from(["a", "b", "/", "-", "é", "\uffff", "\U0001f600"]), min_size=1, max_size=4)
texts = st.one_of(st.just(""), pieces.map("".join))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keys=st.sets(pieces.map("".join), max_size=14),
    prefix=texts, delimiter=st.sampled_from(["", "/", "-", "a/", "é"]), after=texts, size=st.integers(1, 5),
)  # fmt: skip
def test_listings_agree_with_a_model(
    local: Any, keys: set[str], prefix: str, delimiter: str, after: str, size: int
) -> None:
    bucket = make_bucket(local)
    put_all(local, bucket, sorted(keys))

    rolled: list[tuple[bytes, bool]] = []  # (entry, is a common prefix)
    for key in sorted(key.encode() for key in keys if key.startswith(prefix)):
        head, cut, _ = key[len(prefix.encode()) :].partition(delimiter.encode() or b"\0")
        entry = (prefix.encode() + head + cut, bool(cut))
        if entry[0] > after.encode() and entry not in rolled:
            rolled.append(entry)

    arguments = {"Bucket": bucket, "Prefix": prefix, "Delimiter": delimiter, "StartAfter": after, "MaxKeys": size}
    got: list[tuple[bytes, bool]] = []
    token: dict[str, str] = {}
    while True:
        page = local.list_objects_v2(**arguments, **token)
        entries = [(item["Key"].encode(), False) for item in page.get("Contents", [])]
        entries += [(item["Prefix"].encode(), True) for item in page.get("CommonPrefixes", [])]
        got += sorted(entries)
        assert len(entries) == page["KeyCount"] == min(size, len(rolled) - len(got) + len(entries))
        assert page.get("ContinuationToken") == token.get("ContinuationToken")
        assert page["IsTruncated"] == (len(got) < len(rolled))
        if not page["IsTruncated"]:
            break
        token = {"ContinuationToken": page["NextContinuationToken"]}
    assert got == rolled


# -- what raw requests show ------------------------------------------------------------------------------


CHUNKED = {
    "Content-Encoding": "aws-chunked", "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
    "x-amz-decoded-content-length": "5",
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"5\r\nhello\r\n0\r\nx-amz-checksum-crc32:NhCmhg==\r\n\r\n", 200),  # 0x3610a686
        (b"2;chunk-signature=ab\r\nhe\r\n3;chunk-signature=cd\r\nllo\r\n0;chunk-signature=ef\r\n\r\n", 200),
        (b"5\r\nhello\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n", 400),
        (b"5\r\nhello\r\n", 400),
        (b"5\r\nhel", 400),
        (b"-5\r\nhello\r\n0\r\n\r\n", 400),
        (b"4\r\nhell\r\n0\r\n\r\n", 400),
        (b"hello", 400),
    ],
)
def test_aws_chunked(local: Any, local_bucket: str, body: bytes, status: int) -> None:
    answered, _ = raw(local, "PUT", f"/{local_bucket}/k", body, **CHUNKED)
    assert answered == status
    if status != 200:
        assert listing(local, local_bucket) == ([], [])
        return
    got = local.get_object(Bucket=local_bucket, Key="k")
    assert got["Body"].read() == b"hello"
    assert "ContentEncoding" not in got


@pytest.mark.parametrize(
    ("header", "value", "code"),
    [
        ("Content-MD5", base64.b64encode(hashlib.md5(b"other").digest()).decode(), "BadDigest"),
        ("x-amz-checksum-sha256", "AAAA", "BadDigest"),
        ("x-amz-content-sha256", "0" * 64, "XAmzContentSHA256Mismatch"),
        ("If-None-Match", '"etag"', "NotImplemented"),
        ("x-amz-copy-source", "/a/b", "NotImplemented"),
        ("x-amz-meta-long", "v" * 2048, "MetadataTooLarge"),
        ("Authorization", "", "AccessDenied"),
    ],
)
def test_a_refused_put_leaves_nothing(local: Any, local_bucket: str, header: str, value: str, code: str) -> None:
    _, answer = raw(local, "PUT", f"/{local_bucket}/k", b"body", **{header: value})
    assert f"<Code>{code}</Code>".encode() in answer
    assert listing(local, local_bucket) == ([], [])


def test_a_gzipped_object_stays_gzipped(local: Any, local_bucket: str) -> None:
    body = gzip.compress(b"text" * 100)
    local.put_object(Bucket=local_bucket, Key="k", Body=body, ContentEncoding="gzip")
    assert raw(local, "GET", f"/{local_bucket}/k") == (200, body)
    assert local.head_object(Bucket=local_bucket, Key="k")["ContentEncoding"] == "gzip"


@pytest.mark.parametrize("name", ["Upper", "under_score", "-dash", "dash-", "two..dots", "127.0.0.1", "b" * 63 + "é"])
def test_bad_bucket_names(local: Any, name: str) -> None:
    _, body = raw(local, "PUT", f"/{quote(name)}")
    assert b"<Code>InvalidBucketName</Code>" in body


@pytest.mark.parametrize(
    ("method", "target", "status", "code"),
    [
        ("POST", "/{bucket}/k?uploads", 501, b"NotImplemented"),
        ("PUT", "/{bucket}/k?tagging", 501, b"NotImplemented"),
        ("GET", "/{bucket}/k?versionId=1", 501, b"NotImplemented"),
        ("GET", "/{bucket}?location", 501, b"NotImplemented"),
        ("GET", "/{bucket}", 501, b"NotImplemented"),
        ("PATCH", "/{bucket}/k", 501, b"NotImplemented"),
        ("GET", "/{bucket}/%ff", 400, b"InvalidURI"),
        ("GET", "/{bucket}?list-type=2&prefix=%ff", 400, b"InvalidURI"),
        ("GET", "/{bucket}?list-type=2&max-keys=-1", 400, b"InvalidArgument"),
        ("GET", "/{bucket}?list-type=2&encoding-type=x", 400, b"InvalidArgument"),
        ("GET", "/{bucket}?list-type=2&continuation-token=%C3%A9", 400, b"InvalidArgument"),
        ("GET", "//k", 404, b"NoSuchBucket"),
        ("POST", "/{bucket}?delete", 400, b"MalformedXML"),
    ],
)
def test_what_is_not_offered_is_refused(
    local: Any, local_bucket: str, method: str, target: str, status: int, code: bytes
) -> None:
    answered, body = raw(local, method, target.format(bucket=local_bucket), b"" if method == "POST" else None)
    assert answered == status
    assert b"<Code>" + code + b"</Code>" in body


def test_multipart_uploads_say_that_they_are_missing(local: Any, local_bucket: str) -> None:
    with fails(501, "NotImplemented"):
        local.create_multipart_upload(Bucket=local_bucket, Key="k")


def test_a_body_over_the_limit(local: Any, local_bucket: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(local.meta.endpoint_url).netloc, timeout=30)
    with contextlib.closing(connection):
        connection.putrequest("PUT", f"/{local_bucket}/k")
        connection.putheader("Authorization", "x")
        connection.putheader("Content-Length", str(MAX_OBJECT_BYTES + 1))
        connection.endheaders(b"start")
        answer = connection.getresponse()
        assert (answer.status, b"EntityTooLarge" in answer.read()) == (400, True)


def test_a_bad_bucket_at_construction(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="'No_Good'"):
        LocalS3(tmp_path, buckets=["No_Good"])


@pytest.mark.parametrize("broken", ["a file", "another file format"])
async def test_a_directory_that_cannot_be_used(tmp_path: Path, broken: str) -> None:
    root = tmp_path / "s3"
    if broken == "a file":
        root.touch()
    else:
        root.mkdir()
        (root / "s3.sqlite3").write_bytes(b"not a database" * 100)
    runner = web.AppRunner(LocalS3(root).app())
    with pytest.raises(SetupError, match="choose another directory"):
        await runner.setup()
    await runner.cleanup()


# -- concurrency and crashes -----------------------------------------------------------------------------


def test_one_of_many_conditional_writes_wins(tmp_path: Path) -> None:
    """Also between two servers on the same directory."""
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(serve(tmp_path, buckets=["shared"])) for _ in range(2)]
        clients = [stack.enter_context(client(url)) for url in urls]

        def put(number: int) -> int | None:
            try:
                body = str(number).encode()
                clients[number % 2].put_object(Bucket="shared", Key=key, Body=body, IfNoneMatch="*")
            except ClientError as error:
                if error.response["Error"]["Code"] != "PreconditionFailed":
                    raise
                return None
            return number

        with ThreadPoolExecutor(16) as pool:
            for attempt in range(4):
                key = f"key-{attempt}"
                winners = [number for number in pool.map(put, range(16)) if number is not None]
                assert len(winners) == 1
                got = {s3.get_object(Bucket="shared", Key=key)["Body"].read() for s3 in clients}
                assert got == {str(winners[0]).encode()}


def test_readers_see_old_or_new_never_a_mixture(local: Any, local_bucket: str) -> None:
    bodies = [bytes([number]) * (50_000 + number) for number in range(8)]
    local.put_object(Bucket=local_bucket, Key="k", Body=bodies[0])

    def write(number: int) -> None:
        for body in bodies:
            local.put_object(Bucket=local_bucket, Key="k", Body=body, Metadata={"n": str(body[0])})

    def read(number: int) -> None:
        for _ in range(20):
            got = local.get_object(Bucket=local_bucket, Key="k")
            body = got["Body"].read()
            assert body in bodies
            assert got["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'
            assert got["Metadata"].get("n", "0") == str(body[0])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda task: task[0](task[1]), [(write, 0), (read, 1), (write, 2), (read, 3)]))


SERVER = """
import asyncio, sys
from pathlib import Path
from aiohttp import web
from agentcore_rl_toolkit.local.s3 import LocalS3

async def main():
    runner = web.AppRunner(LocalS3(Path(sys.argv[1]), buckets=["crash"]).app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("sent", [0.5, 1.0], ids=["while it is sent", "while it is written"])
def test_kill_in_the_middle_of_a_put(tmp_path: Path, sent: float) -> None:
    body = os.urandom(40_000_000)
    server = subprocess.Popen([sys.executable, "-c", SERVER, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        head = f"PUT /crash/k HTTP/1.1\r\nHost: x\r\nAuthorization: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head.encode() + body[: int(sent * len(body))])
            store = tmp_path / "s3.sqlite3"
            size = store.stat().st_size
            while sent == 1.0 and store.stat().st_size == size:
                pass  # until the store has begun to write
    finally:
        server.send_signal(signal.SIGKILL)
        server.communicate()
    with serve(tmp_path) as url, client(url) as s3:
        if listing(s3, "crash")[0]:  # written completely before the signal
            assert sent == 1.0
            assert s3.get_object(Bucket="crash", Key="k")["Body"].read() == body
        else:
            with fails(404, "404"):
                s3.head_object(Bucket="crash", Key="k")
        s3.put_object(Bucket="crash", Key="k", Body=b"works")
        assert s3.get_object(Bucket="crash", Key="k")["Body"].read() == b"works"


def test_objects_outlive_the_server(tmp_path: Path) -> None:
    with serve(tmp_path, buckets=["kept"]) as url, client(url) as s3:
        s3.put_object(Bucket="kept", Key="k", Body=b"body", Metadata={"a": "b"})
    with serve(tmp_path, buckets=["kept"]) as url, client(url) as s3:
        got = s3.get_object(Bucket="kept", Key="k")
        assert (got["Body"].read(), got["Metadata"]) == (b"body", {"a": "b"})

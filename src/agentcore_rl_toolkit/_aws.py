"""Signed requests to AWS, without boto3's layers around them; and objects in S3.

A rollout costs a few calls on either side, and boto3 spends two to four times the processor time on each that
signing and sending need. So botocore's own signer and HTTP session (its proxies, certificates and errors) are used
directly, and boto3 says only where the services are and with which credentials. Everything here blocks: call it from
threads.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import os
import re
import socket
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlencode

import botocore.loaders
import botocore.session
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import ClientError, NoCredentialsError
from botocore.httpsession import URLLib3Session
from botocore.utils import get_environ_proxies
from urllib3 import HTTPResponse

__all__ = [
    "USER_AGENT",
    "Answer",
    "BrokenOff",
    "Page",
    "ServiceError",
    "SignedHttp",
    "Storage",
    "new_session",
    "warm_up",
]

USER_AGENT = "agentcore-rl-toolkit"
_CONNECT_TIMEOUT = 10.0  # seconds
_S3_READ_TIMEOUT = 20.0


class ServiceError(Exception):
    """An answer of AWS that is an error. ``code``: its type, as AWS names it; ``status``: of HTTP."""

    def __init__(self, code: str, status: int, message: str) -> None:
        super().__init__(f"{code} ({status}): {message}" if message else f"{code} ({status})")
        self.code, self.status, self.message = code, status, message


class BrokenOff(Exception):
    """An answer ended before its announced length."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


def new_session() -> Any:
    """A botocore session: a new one reads the credentials anew."""
    session = botocore.session.get_session()
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    return session


@functools.cache
def _loader(data_path: str | None) -> Any:
    """botocore's descriptions of the services. To read them is most of what making a client takes: 50 of 65 ms."""
    return botocore.loaders.create_loader(data_path)


def warm_up() -> None:
    """Do what forked processes need not do each for itself."""
    new_session().create_client("s3", region_name="us-east-1").close()


class SignedHttp:
    """Signed requests with the credentials of one botocore session, over connections that are kept open."""

    def __init__(self, session: Any, endpoint: str, connections: int, read_timeout: float) -> None:
        self._credentials = session.get_credentials()
        self._http = URLLib3Session(
            verify=session.get_config_variable("ca_bundle") or True,
            proxies=get_environ_proxies(endpoint),
            timeout=(_CONNECT_TIMEOUT, read_timeout),
            max_pool_connections=connections,
            # Head and body are sent apart: Nagle's algorithm would hold the body back.
            socket_options=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],
        )

    def send(
        self,
        signer: type[SigV4Auth],
        service: str,
        region: str,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Answer:
        if self._credentials is None:
            raise NoCredentialsError
        request = AWSRequest(method, url, headers={"User-Agent": USER_AGENT, **(headers or {})}, data=body)
        signer(self._credentials.get_frozen_credentials(), service, region).add_auth(request)
        answer = self._http.send(request.prepare())
        announced, content = answer.headers.get("Content-Length"), answer.content
        if announced is not None and announced != str(len(content)):
            raise BrokenOff(f"{len(content)} of {announced} bytes came")
        return Answer(answer.status_code, answer.headers, content)

    def close(self) -> None:
        self._http.close()


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing: its keys in order, and whether more follow."""

    keys: list[str]
    truncated: bool


_KEY = re.compile(rb"<Key>([^<]*)</Key>")


class Storage:
    """Objects in S3. Raises ``ServiceError``, ``BrokenOff`` and botocore's exceptions.

    ``region``: of buckets that name no other; the default is the environment's. ``connections``: kept open, at most.
    """

    def __init__(self, region: str | None = None, connections: int = 10) -> None:
        self._session = new_session()
        self._buckets: dict[str, tuple[str, str]] = {}
        self._lock = threading.Lock()
        # AWS_REGION is what containers of AWS have; boto3 alone does not read it.
        environment = self._session.get_config_variable("region") or os.environ.get("AWS_REGION")
        self._region, self._connections = region or environment or "us-east-1", connections
        self._http: SignedHttp | None = None

    def get(self, bucket: str, key: str) -> bytes:
        """GetObject: the object's bytes."""
        return self._send("GET", bucket, _path(key))

    def exists(self, bucket: str, key: str) -> bool:
        """Whether there is such an object. Not by HeadObject, whose errors say neither what is missing nor why."""
        try:
            self._send("GET", bucket, _path(key), {"Range": "bytes=0-0"})
        except ServiceError as error:
            if error.code == "NoSuchKey":
                return False
            if error.code != "InvalidRange":  # of an empty object
                raise
        return True

    def put(self, bucket: str, key: str, body: bytes, content_type: str) -> None:
        """PutObject, unless there is one already: then ``ServiceError`` with status 412."""
        checksum = base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
        headers = {
            "Content-Type": content_type,
            "If-None-Match": "*",
            "x-amz-sdk-checksum-algorithm": "CRC32",
            "x-amz-checksum-crc32": checksum,
        }
        self._send("PUT", bucket, _path(key), headers, body)

    def list(self, bucket: str, prefix: str, start_after: str) -> Page:
        """One page of ListObjectsV2: at most 1,000 keys."""
        query = {"encoding-type": "url", "list-type": "2", "prefix": prefix, "start-after": start_after}
        body = self._send("GET", bucket, f"?{urlencode(query, quote_via=quote)}")
        # A parser of XML takes fifty times as long, and nothing but keys is wanted.
        keys = [unquote(key.decode("ascii").replace("+", " ")) for key in _KEY.findall(body)]
        return Page(keys, b"<IsTruncated>true</IsTruncated>" in body)

    def _send(
        self, method: str, bucket: str, rest: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> bytes:
        http, url, region = self._place(bucket)
        answer = http.send(S3SigV4Auth, "s3", region, method, url + rest, headers, body)
        home = answer.headers.get("x-amz-bucket-region")
        if answer.status in (301, 307, 400) and home and home != region:
            with self._lock:
                self._buckets.pop(bucket, None)
            http, url, region = self._place(bucket, home)
            answer = http.send(S3SigV4Auth, "s3", region, method, url + rest, headers, body)
        if 200 <= answer.status < 300:
            return answer.body
        raise _xml_error(answer)

    def _place(self, bucket: str, region: str | None = None) -> tuple[SignedHttp, str, str]:
        """Connections, the bucket's URL with a slash at its end, and its region."""
        with self._lock:
            if bucket not in self._buckets:
                config = Config(user_agent_extra=USER_AGENT, retries={"total_max_attempts": 1})
                client = self._session.create_client("s3", region_name=region or self._region, config=config)
                self._buckets[bucket] = _bucket_url(client, bucket), client.meta.region_name
                client.close()
            url, region = self._buckets[bucket]
            if self._http is None:
                self._http = SignedHttp(self._session, url, self._connections, _S3_READ_TIMEOUT)
            return self._http, url, region

    def close(self) -> None:
        if self._http is not None:
            self._http.close()


def _path(key: str) -> str:
    return quote(key, safe="/~")


def _bucket_url(client: Any, bucket: str) -> str:
    """Where boto3 would send a request for this bucket: it knows regions, address styles, endpoints of one's own."""
    sent: list[str] = []

    def keep(request: Any, **_: Any) -> AWSResponse:
        sent.append(request.url)
        return AWSResponse(request.url, 404, {}, HTTPResponse(io.BytesIO(), preload_content=False))

    client.meta.events.register("before-send.s3.GetObject", keep)
    with contextlib.suppress(ClientError):
        client.get_object(Bucket=bucket, Key="k")
    return sent[0].removesuffix("k")


def _xml_error(answer: Answer) -> ServiceError:
    def text(tag: bytes) -> str:
        match = re.search(rb"<%b>([^<]*)</%b>" % (tag, tag), answer.body)
        return match[1].decode("utf-8", "replace") if match else ""

    return ServiceError(text(b"Code") or f"HTTP{answer.status}", answer.status, text(b"Message"))

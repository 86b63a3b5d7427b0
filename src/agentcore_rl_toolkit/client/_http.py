"""Signed requests to AWS, without boto3's layers around them.

A rollout costs three calls or so, and boto3 spends two to four times the processor time on each that signing and
sending need. So botocore's own signer and HTTP session (its proxies, certificates and errors) are used directly, and
boto3 says only where the services are and with which credentials. Everything here blocks: call it from threads.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlencode

import botocore.session
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import ClientError, NoCredentialsError
from botocore.httpsession import URLLib3Session
from botocore.utils import get_environ_proxies
from urllib3 import HTTPResponse

from .._arn import RuntimeArn

__all__ = ["BrokenOff", "Page", "Runtime", "ServiceError", "Storage"]

SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
_AGENT = "agentcore-rl-toolkit"
_CONNECT_TIMEOUT = 10.0  # seconds
# An invoke is answered when the session has started, which can take minutes with a heavy image.
_INVOKE_READ_TIMEOUT = 180.0
_S3_READ_TIMEOUT = 20.0


class ServiceError(Exception):
    """An answer of AWS that is an error. ``code``: its type, as AWS names it; ``status``: of HTTP."""

    def __init__(self, code: str, status: int, message: str) -> None:
        super().__init__(f"{code} ({status}): {message}" if message else f"{code} ({status})")
        self.code, self.status, self.message = code, status, message


class BrokenOff(Exception):
    """An answer ended before its announced length."""


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class _Http:
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
    ) -> _Answer:
        if self._credentials is None:
            raise NoCredentialsError
        request = AWSRequest(method, url, headers={"User-Agent": _AGENT, **(headers or {})}, data=body)
        signer(self._credentials.get_frozen_credentials(), service, region).add_auth(request)
        answer = self._http.send(request.prepare())
        announced, content = answer.headers.get("Content-Length"), answer.content
        if announced is not None and int(announced) != len(content):
            raise BrokenOff(f"{len(content)} of {announced} bytes came")
        return _Answer(answer.status_code, answer.headers, content)

    def close(self) -> None:
        self._http.close()


class Runtime:
    """The sessions of one agent runtime. Raises ``ServiceError``, ``BrokenOff`` and botocore's exceptions."""

    def __init__(self, arn: RuntimeArn, connections: int) -> None:
        session = botocore.session.get_session()
        client = session.create_client(
            "bedrock-agentcore", region_name=arn.region, config=Config(user_agent_extra=_AGENT)
        )
        self.endpoint: str = client.meta.endpoint_url
        client.close()
        self._region = arn.region
        self._url = f"{self.endpoint}/runtimes/{quote(arn.text, safe='')}"
        self._http = _Http(session, self.endpoint, connections, _INVOKE_READ_TIMEOUT)

    def invoke(self, session_id: str, payload: bytes) -> bytes:
        """InvokeAgentRuntime: the body of the answer."""
        headers = {"Accept": "application/json"}
        return self._post("invocations", session_id, payload, headers)

    def stop(self, session_id: str) -> None:
        """StopRuntimeSession."""
        self._post("stopruntimesession", session_id, b"{}")

    cancels = False
    """Whether the agent can be asked to end before its session is stopped; only A2A has a word for that."""

    def cancel(self, session_id: str) -> None:
        """Ask the agent to end."""
        raise NotImplementedError

    def _get(self, what: str, session_id: str) -> bytes:
        return self._send("GET", what, {SESSION_HEADER: session_id}, b"")

    def _post(self, what: str, session_id: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        headers = {SESSION_HEADER: session_id, "Content-Type": "application/json", **(headers or {})}
        return self._send("POST", what, headers, body)

    def _send(self, method: str, what: str, headers: Mapping[str, str], body: bytes) -> bytes:
        url = f"{self._url}/{what}"
        answer = self._http.send(SigV4Auth, "bedrock-agentcore", self._region, method, url, headers, body)
        if 200 <= answer.status < 300:
            return answer.body
        raise _json_error(answer)

    def close(self) -> None:
        self._http.close()


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing: its keys in order, and whether more follow."""

    keys: list[str]
    truncated: bool


_KEY = re.compile(rb"<Key>([^<]*)</Key>")


class Storage:
    """Objects in S3. Raises ``ServiceError``, ``BrokenOff`` and botocore's exceptions."""

    def __init__(self, region: str, connections: int) -> None:
        self._session = botocore.session.get_session()
        self._buckets: dict[str, tuple[str, str]] = {}
        self._lock = threading.Lock()
        self._region, self._connections = region, connections
        self._http: _Http | None = None

    def get(self, bucket: str, key: str) -> bytes:
        """GetObject: the object's bytes."""
        return self._get(bucket, quote(key, safe="/~"))

    def list(self, bucket: str, prefix: str, start_after: str) -> Page:
        """One page of ListObjectsV2: at most 1,000 keys."""
        query = {"encoding-type": "url", "list-type": "2", "prefix": prefix, "start-after": start_after}
        body = self._get(bucket, f"?{urlencode(query, quote_via=quote)}")
        # A parser of XML takes fifty times as long, and nothing but keys is wanted.
        keys = [unquote(key.decode("ascii").replace("+", " ")) for key in _KEY.findall(body)]
        return Page(keys, b"<IsTruncated>true</IsTruncated>" in body)

    def _get(self, bucket: str, rest: str) -> bytes:
        url, region = self._place(bucket)
        assert self._http is not None
        answer = self._http.send(S3SigV4Auth, "s3", region, "GET", url + rest)
        home = answer.headers.get("x-amz-bucket-region")
        if answer.status in (301, 307, 400) and home and home != region:
            with self._lock:
                self._buckets.pop(bucket, None)
            url, region = self._place(bucket, home)
            answer = self._http.send(S3SigV4Auth, "s3", region, "GET", url + rest)
        if 200 <= answer.status < 300:
            return answer.body
        raise _xml_error(answer)

    def _place(self, bucket: str, region: str | None = None) -> tuple[str, str]:
        """The bucket's URL, with a slash at its end, and its region."""
        with self._lock:
            if bucket not in self._buckets:
                config = Config(user_agent_extra=_AGENT, retries={"total_max_attempts": 1})
                client = self._session.create_client("s3", region_name=region or self._region, config=config)
                url = _bucket_url(client, bucket)
                client.close()
                if self._http is None:
                    self._http = _Http(self._session, url, self._connections, _S3_READ_TIMEOUT)
                self._buckets[bucket] = url, client.meta.region_name
            return self._buckets[bucket]

    def close(self) -> None:
        if self._http is not None:
            self._http.close()


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


def _json_error(answer: _Answer) -> ServiceError:
    try:
        parsed: Any = json.loads(answer.body)
    except ValueError:
        parsed = None
    fields = parsed if isinstance(parsed, dict) else {}
    code = answer.headers.get("x-amzn-errortype") or fields.get("__type") or fields.get("code") or ""
    code = str(code).partition(":")[0].rpartition("#")[2]
    message = fields.get("message") or fields.get("Message") or answer.body[:500].decode("utf-8", "replace")
    return ServiceError(code or f"HTTP{answer.status}", answer.status, str(message))


def _xml_error(answer: _Answer) -> ServiceError:
    def text(tag: bytes) -> str:
        match = re.search(rb"<%b>([^<]*)</%b>" % (tag, tag), answer.body)
        return match[1].decode("utf-8", "replace") if match else ""

    return ServiceError(text(b"Code") or f"HTTP{answer.status}", answer.status, text(b"Message"))

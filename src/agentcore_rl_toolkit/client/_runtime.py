"""AgentCore Runtime's own calls: invoke a session, stop it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from botocore.auth import SigV4Auth
from botocore.config import Config

from .._arn import RuntimeArn
from .._aws import USER_AGENT, Answer, ServiceError, SignedHttp, new_session

__all__ = ["Runtime"]

SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
# An invoke is answered when the session has started, which can take minutes with a heavy image.
_INVOKE_READ_TIMEOUT = 180.0  # seconds


class Runtime:
    """The sessions of one agent runtime. Raises ``ServiceError``, ``BrokenOff`` and botocore's exceptions."""

    def __init__(self, arn: RuntimeArn, connections: int) -> None:
        session = new_session()
        client = session.create_client(
            "bedrock-agentcore", region_name=arn.region, config=Config(user_agent_extra=USER_AGENT)
        )
        self.endpoint: str = client.meta.endpoint_url
        client.close()
        self._region = arn.region
        self._url = f"{self.endpoint}/runtimes/{quote(arn.text, safe='')}"
        self._http = SignedHttp(session, self.endpoint, connections, _INVOKE_READ_TIMEOUT)

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


def _json_error(answer: Answer) -> ServiceError:
    try:
        parsed: Any = json.loads(answer.body)
    except ValueError:
        parsed = None
    fields = parsed if isinstance(parsed, dict) else {}
    code = answer.headers.get("x-amzn-errortype") or fields.get("__type") or fields.get("code") or ""
    code = str(code).partition(":")[0].rpartition("#")[2]
    message = fields.get("message") or fields.get("Message")
    if not message:
        text = answer.body[:501].decode("utf-8", "replace")
        message = text[:500] + "…" if len(text) > 500 else text  # marked: half a secret is found by it
    return ServiceError(code or f"HTTP{answer.status}", answer.status, str(message))

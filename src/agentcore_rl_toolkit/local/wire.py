"""The data plane of AgentCore Runtime over HTTP: invoke, card, stop, command. See :mod:`.control` for the rest."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
from aiohttp import web

from agentcore_rl_toolkit._redact import find_secrets
from agentcore_rl_toolkit.protocol import MAX_PAYLOAD_BYTES

from . import commands, eventstream
from .limits import ServiceError, invalid
from .sessions import Agent, Session, Sessions

logger = logging.getLogger("agentcore_rl_toolkit.local")

SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
_CUSTOM = "x-amzn-bedrock-agentcore-runtime-custom-"
_TO_AGENT = {
    "content-type", "accept", "mcp-session-id", "mcp-protocol-version", "mcp-method", "mcp-name",
    "x-amzn-bedrock-agentcore-runtime-user-id", "x-amzn-trace-id", "traceparent", "tracestate", "baggage",
}  # fmt: skip
_TO_CLIENT = {
    "content-type", "content-length", "content-encoding", "cache-control",
    "mcp-session-id", "mcp-protocol-version", "x-amzn-trace-id", "traceparent", "tracestate", "baggage",
}  # fmt: skip
_MAX_COMMAND = 65_536
_CARD = "/.well-known/agent-card.json"


@web.middleware
async def errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every failure in the shape that botocore knows: type in a header, message in JSON."""
    try:
        _keep_web_pages_out(request)
        return await handler(request)
    except ServiceError as error:
        return _error(error)
    except web.HTTPException as error:
        return _error(invalid(f"{request.method} {request.path}: {error.reason}"))
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:
        logger.exception("%s %s", request.method, request.path)
        return _error(ServiceError("InternalServerException", f"{type(error).__name__}: {error}"))


def _keep_web_pages_out(request: web.Request) -> None:
    """A page in a browser on this machine must not run commands: it can't sign, nor be called 127.0.0.1."""
    if "Authorization" not in request.headers:
        raise ServiceError("AccessDeniedException", "Requests must be signed (any credentials will do here)")
    if request.url.host not in ("127.0.0.1", "localhost"):
        raise ServiceError("AccessDeniedException", f"Host {request.host}: only 127.0.0.1 is served")


def _error(error: ServiceError) -> web.Response:
    body = {"message": str(error)}
    if error.type == "ValidationException":
        body["reason"] = "FieldValidationFailed"
    return web.json_response(body, status=error.status, headers={"x-amzn-ErrorType": error.type})


class DataPlane:
    """Handlers over the registered agents (by ARN) and their sessions."""

    def __init__(self, agents: Mapping[str, Agent], sessions: Sessions) -> None:
        self._agents, self._sessions = agents, sessions

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/runtimes/{arn}/invocations", self.invoke),
            web.get(f"/runtimes/{{arn}}/invocations{_CARD}", self.agent_card),
            web.post("/runtimes/{arn}/stopruntimesession", self.stop),
            web.post("/runtimes/{arn}/commands", self.command),
        ]

    def _agent(self, request: web.Request) -> Agent:
        name = request.match_info["arn"]
        agent = self._agents.get(name) or next((a for a in self._agents.values() if a.id == name), None)
        if agent is None:
            known = ", ".join(self._agents) or "none"
            raise ServiceError("ResourceNotFoundException", f"No agent runtime {name}; registered here: {known}")
        qualifier = request.query.get("qualifier", "DEFAULT")
        if qualifier != "DEFAULT":
            raise ServiceError("ResourceNotFoundException", f"No endpoint {qualifier}; there is only DEFAULT")
        return agent

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        agent, session_id = self._agent(request), _session_id(request) or str(uuid.uuid4())
        agent.rates["invoke"].take("InvokeAgentRuntime")
        payload = await _read(request, MAX_PAYLOAD_BYTES, "payload")
        session = await self._sessions.get(agent, session_id)
        with session.activity():
            return await self._forward(request, session, agent.path, payload)

    async def agent_card(self, request: web.Request) -> web.StreamResponse:
        agent, session_id = self._agent(request), _session_id(request) or str(uuid.uuid4())
        session = await self._sessions.get(agent, session_id)
        with session.activity():
            return await self._forward(request, session, _CARD, b"")

    async def _forward(self, request: web.Request, session: Session, path: str, payload: bytes) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() in _TO_AGENT or k.lower().startswith(_CUSTOM)}
        headers[SESSION_HEADER] = session.id
        headers["X-Amzn-Bedrock-AgentCore-Runtime-Request-Id"] = str(uuid.uuid4())
        answer: web.StreamResponse | None = None
        try:
            async with contextlib.AsyncExitStack() as stack:
                body = io.BytesIO(payload)  # which aiohttp sends in parts
                call = self._sessions.http.request(request.method, session.url + path, data=body, headers=headers)
                async with asyncio.timeout(session.agent.lifecycle.request_timeout):
                    upstream = await stack.enter_async_context(call)
                    if not 200 <= upstream.status < 300:
                        text = (await upstream.content.read(2000)).decode(errors="replace")
                        wrong = f"; does it serve {session.agent.protocol}?" if upstream.status == 404 else ""
                        raise await _failure(session, f"answered {upstream.status} ({text}){wrong}", payload)
                answer = web.StreamResponse(status=200, headers=_answer_headers(upstream, session))
                await answer.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
                return answer
        except TimeoutError:
            seconds = session.agent.lifecycle.request_timeout
            raise await _failure(session, f"did not begin to answer within {seconds:g} s", payload) from None
        except aiohttp.ClientError as error:
            if answer is not None:  # too late for a status: break the body off, so that no client takes it for whole
                logger.warning("session %s: an answer broke off: %s", session.id, error)
                if request.transport is not None:
                    request.transport.abort()
                return answer
            code = await session.exit_code(within=1.0)
            what = f"broke the connection off ({error})" if code is None else f"ended (exit code {code})"
            raise await _failure(session, f"{what} while it worked on the request", payload) from None

    async def stop(self, request: web.Request) -> web.StreamResponse:
        agent, session_id = self._agent(request), _session_id(request)
        if session_id is None:
            raise invalid(f"{SESSION_HEADER} is required")
        agent.rates["stop"].take("StopRuntimeSession")
        await self._sessions.stop(agent, session_id)
        return web.json_response({}, headers={SESSION_HEADER: session_id})

    async def command(self, request: web.Request) -> web.StreamResponse:
        agent, session_id = self._agent(request), _session_id(request) or str(uuid.uuid4())
        agent.rates["command"].take("InvokeAgentRuntimeCommand")
        command, timeout = _command(await _read(request, 8 * _MAX_COMMAND, "body"))
        session = await self._sessions.get(agent, session_id)
        headers = {"Content-Type": eventstream.CONTENT_TYPE, SESSION_HEADER: session_id}
        with session.activity():
            answer = web.StreamResponse(headers=headers)
            await answer.prepare(request)
            async with contextlib.aclosing(commands.run(session, command, timeout)) as events:
                async for event in events:
                    await answer.write(eventstream.event("chunk", event))
            await answer.write_eof()
            return answer


async def _failure(session: Session, what: str, payload: bytes) -> ServiceError:
    """The session's failure; what it quotes of the agent's words shows no secret of the payload."""

    def secrets() -> list[str]:
        with contextlib.suppress(ValueError, RecursionError):
            return list(find_secrets(json.loads(payload)))
        return []

    return session.failure(what, await asyncio.to_thread(secrets))


def _session_id(request: web.Request) -> str | None:
    session_id = request.headers.get(SESSION_HEADER)
    if session_id is not None and not 33 <= len(session_id) <= 256:
        raise invalid(f"runtimeSessionId: {len(session_id)} characters, 33 to 256 are required")
    return session_id


async def _read(request: web.Request, most: int, what: str) -> bytes:
    parts, size = [], 0
    async for part in request.content.iter_any():
        size += len(part)
        if size <= most:
            parts.append(part)
        elif size > 2 * most:  # read on up to here, for a client that is still sending would not see the answer
            break
    if size > most:
        raise invalid(f"{what}: more than {most} bytes")
    return b"".join(parts)


def _command(body: bytes) -> tuple[str, float]:
    try:
        parsed = json.loads(body)
        command, timeout = parsed["command"], parsed.get("timeout", 300)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise invalid('body: {"command": "…", "timeout": seconds} is required') from None
    if not isinstance(command, str) or not 1 <= len(command) <= _MAX_COMMAND:
        raise invalid(f"body.command: a string of 1 to {_MAX_COMMAND} characters is required")
    if "\0" in command:
        raise invalid("body.command: may not contain a NUL character")
    if type(timeout) is not int or not 1 <= timeout <= 3600:
        raise invalid("body.timeout: a whole number of seconds from 1 to 3600 is required")
    return command, float(timeout)


def _answer_headers(upstream: aiohttp.ClientResponse, session: Session) -> dict[str, str]:
    headers = {k: v for k, v in upstream.headers.items() if k.lower() in _TO_CLIENT}
    return {"Content-Type": "application/octet-stream", **headers, SESSION_HEADER: session.id}

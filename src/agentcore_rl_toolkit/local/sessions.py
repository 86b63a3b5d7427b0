"""Sessions: one process group each, from first contact to its end."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp

from agentcore_rl_toolkit._redact import Redactor

from .limits import Lifecycle, Quotas, RateLimit, ServiceError
from .processes import Process, Supervisor

logger = logging.getLogger("agentcore_rl_toolkit.local")

_PING_TIMEOUT = 10.0  # seconds


class State(enum.StrEnum):
    """``starting → ready → stopping → stopped``; a session that fails to start skips ``ready``."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(eq=False)
class Agent:
    """A registered agent: what AgentCore calls an agent runtime."""

    name: str
    id: str
    arn: str
    command: list[str]
    """Resolved for any working directory; ``{port}`` stands for the session's port."""
    environment: Mapping[str, str]
    """What was registered for it, not the complete environment."""
    lifecycle: Lifecycle
    quotas: Quotas
    supervisor: Supervisor
    sessions_dir: Path
    created_at: float = field(default_factory=time.time)
    definition: Mapping[str, Any] = field(default_factory=dict)
    """The request of CreateAgentRuntime, empty for agents registered in Python."""
    sessions: dict[str, Session] = field(default_factory=dict)

    @property
    def protocol(self) -> str:
        return str((self.definition.get("protocolConfiguration") or {}).get("serverProtocol") or "HTTP")

    @property
    def path(self) -> str:
        """Where the container takes payloads: its protocol says."""
        return "/" if self.protocol == "A2A" else "/invocations"

    def __post_init__(self) -> None:
        self.rates = {name: RateLimit(self.quotas.tps, 1.0) for name in ("invoke", "command", "stop")}
        self.new_sessions = RateLimit(self.quotas.new_sessions_per_minute, 60.0)


class Ports:
    """Free loopback ports, outside the range from which the kernel takes ports for outgoing connections."""

    def __init__(self) -> None:
        ports = list(range(18_000, 32_000))
        start = random.randrange(len(ports))
        self._ports = cycle(ports[start:] + ports[:start])

    def next(self) -> int:
        for _, port in zip(range(14_000), self._ports, strict=False):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with contextlib.suppress(OSError):
                    probe.bind(("127.0.0.1", port))
                    return port
        raise ServiceError("InternalServerException", "no free port on 127.0.0.1")


class Session:
    """One session. Its whole life is one task, :meth:`live`; everything else only looks or asks it to end."""

    def __init__(self, agent: Agent, session_id: str, port: int, http: aiohttp.ClientSession) -> None:
        self.agent, self.id, self.port, self._http = agent, session_id, port, http
        self.tag = directory_name(session_id)
        self.directory = agent.sessions_dir / self.tag
        self.log, self.work = self.directory / "agent.log", self.directory / "work"
        self.state = State.STARTING
        self.url = f"http://127.0.0.1:{port}"
        self.env = {"PORT": str(port), "AGENTCORE_RL_PORT": str(port), "A2A_PORT": str(port)}
        self.pid: int | None = None
        self.end_reason = ""
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended = asyncio.Event()
        self._stop: asyncio.Future[str] = loop.create_future()
        self._process: Process | None = None
        self._in_flight = 0
        self._born = self._active_at = time.monotonic()
        self._last_update: object = None

    @contextlib.contextmanager
    def activity(self) -> Iterator[None]:
        """While a request or command runs the session is not idle."""
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            self._active_at = time.monotonic()

    def stop(self, reason: str) -> None:
        """Ask it to end; the end of :meth:`live` is the end of the session."""
        if not self._stop.done():
            self._stop.set_result(reason)

    def failure(self, what: str, secrets: Iterable[str] = ()) -> ServiceError:
        """A RuntimeClientError naming the log and quoting its last lines, ``secrets`` masked."""
        redactor = Redactor(secrets)
        what, tail = redactor.text(what), redactor.text(_tail(self.log))
        quoted = f" Its last lines:\n{tail}" if tail else " It is empty."
        return ServiceError("RuntimeClientError", f"The agent {what}. See the log {self.log}.{quoted}")

    async def exit_code(self, within: float) -> int | None:
        """The agent's exit code, None if it has not ended ``within`` seconds."""
        if self._process is None:
            return None
        await asyncio.wait({self._process.exited}, timeout=within)
        return self._process.exited.result() if self._process.exited.done() else None

    async def live(self, starting: asyncio.Semaphore) -> None:
        try:
            async with starting:
                await self._start()
            self.state = State.READY
            self._active_at = time.monotonic()
            self.ready.set_result(None)
            logger.info("session %s started: pid %s, port %d", self.id, self.pid, self.port)
            self.end_reason = await self._watch()
        except ServiceError as error:
            self.end_reason = str(error).partition(". See")[0]
            self.ready.set_exception(error)
        except BaseException as error:
            if not self.ready.done():
                self.ready.set_exception(ServiceError("InternalServerException", f"{error!r}"))
            raise
        finally:
            self.ready.exception()  # nobody may be waiting for it any more
            self.state = State.STOPPING
            await self._terminate()
            self.state = State.STOPPED
            logger.info("session %s ended: %s", self.id, self.end_reason or "cancelled")

    async def _start(self) -> None:
        if self._stop.done():
            raise self.failure(f"was stopped while it started ({self._stop.result()})")
        shutil.rmtree(self.work, ignore_errors=True)  # a session that starts again has fresh compute
        self.work.mkdir(parents=True)
        argv = [part.replace("{port}", str(self.port)) for part in self.agent.command]
        with self.log.open("ab", buffering=0) as log:
            self._process = await self.agent.supervisor.start(
                argv,
                session=self.tag,
                main=True,
                cwd=self.work,
                env=self.env,
                stdout=log.fileno(),
                stderr=log.fileno(),
            )
        self.pid = self._process.started.result() if self._process.started.done() else None
        deadline = time.monotonic() + self.agent.lifecycle.start_timeout
        delay = 0.02
        while await self._ping() is None:
            if time.monotonic() > deadline:
                raise self.failure(f"did not answer /ping within {self.agent.lifecycle.start_timeout:g} s")
            await _any_of(self._process.exited, self._stop, timeout=delay)
            if self._process.exited.done():
                raise self.failure(f"{_exit(self._process.exited.result())} before it answered /ping")
            if self._stop.done():
                raise self.failure(f"was stopped while it started ({self._stop.result()})")
            delay = min(delay * 1.4, 0.25)

    async def _watch(self) -> str:
        """Wait for the end of the session; returns why it ends."""
        assert self._process is not None
        lifecycle = self.agent.lifecycle
        while True:
            now = time.monotonic()
            age, idle = now - self._born, 0.0 if self._in_flight else now - self._active_at
            if age >= lifecycle.max_lifetime:
                return f"maximum lifetime of {lifecycle.max_lifetime:g} s"
            if idle >= lifecycle.idle_timeout and not await self._busy():
                return f"idle for {lifecycle.idle_timeout:g} s"
            pause = min(lifecycle.ping_interval, lifecycle.max_lifetime - age)
            if idle < lifecycle.idle_timeout:
                pause = min(pause, lifecycle.idle_timeout - idle)
            await _any_of(self._process.exited, self._stop, timeout=pause)
            if self._process.exited.done():
                return f"the agent {_exit(self._process.exited.result())}"
            if self._stop.done():
                return self._stop.result()
            await self._busy()

    async def _busy(self) -> bool:
        """Whether the agent says, now, that it works; then it is not idle.

        A ping whose ``time_of_last_update`` moved counts as work too, as on AWS: an agent that stamps every
        ping with the current time is never reclaimed.
        """
        ping = await self._ping() or {}
        before, self._last_update = self._last_update, ping.get("time_of_last_update", self._last_update)
        moved = before is not None and before != self._last_update
        if ping.get("status") == "HealthyBusy" or moved:
            self._active_at = time.monotonic()
        return time.monotonic() - self._active_at < self.agent.lifecycle.idle_timeout or self._in_flight > 0

    async def _ping(self) -> dict[str, Any] | None:
        """The body of /ping ({} if it is no JSON object), None without an answer of 200 before it ends."""
        assert self._process is not None
        ping = asyncio.create_task(self._read_ping())
        await _any_of(ping, self._process.exited, self._stop, timeout=_PING_TIMEOUT)
        if not ping.done():
            ping.cancel()
            return None
        return ping.result()

    async def _read_ping(self) -> dict[str, Any] | None:
        try:
            async with self._http.get(f"{self.url}/ping") as response:
                body = await response.read()
                if response.status != 200:
                    return None
        except (aiohttp.ClientError, OSError):
            return None
        with contextlib.suppress(ValueError):
            parsed = json.loads(body)
            if isinstance(parsed, dict):
                return parsed
        return {}

    async def _terminate(self) -> None:
        if self._process is None or self._process.exited.done():
            return
        self._process.signal(signal.SIGTERM)
        if await self.exit_code(within=self.agent.lifecycle.stop_grace) is None:
            self.agent.supervisor.end(self.tag)
            await self._process.exited


async def _any_of(*futures: asyncio.Future[Any], timeout: float) -> None:
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def directory_name(session_id: str) -> str:
    """The session id if that is a plain file name, else its hash."""
    if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", session_id):
        return session_id
    return sha256(session_id.encode()).hexdigest()


def _exit(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _tail(log: Path, lines: int = 8, size: int = 1000) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(start)
        mark = "…" if start else ""  # half a secret is found by it
        return "\n".join((mark + file.read().decode(errors="replace")).splitlines()[-lines:])
    return ""


class Sessions:
    """The sessions of all agents: finds or starts them, within the quotas."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http
        self._ports = Ports()
        # More at once only makes each of them slower, up to the start timeout.
        self._starting = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        self._lives: set[asyncio.Task[None]] = set()

    async def get(self, agent: Agent, session_id: str) -> Session:
        """The session, ready; started if there is none. Raises ServiceError."""
        session = agent.sessions.get(session_id)
        if session is None:
            session = self._new(agent, session_id)
            await asyncio.shield(session.ready)
        if session.state is not State.READY:
            raise ServiceError("RetryableConflictException", f"Session {session_id} is {session.state}")
        return session

    def _new(self, agent: Agent, session_id: str) -> Session:
        most = agent.quotas.active_sessions
        if most is not None and len(agent.sessions) >= most:
            raise ServiceError("ServiceQuotaExceededException", f"maxVms limit exceeded: {most} active sessions")
        agent.new_sessions.take("new sessions per minute")
        session = Session(agent, session_id, self._ports.next(), self.http)
        agent.sessions[session_id] = session
        life = asyncio.create_task(session.live(self._starting))
        self._lives.add(life)
        life.add_done_callback(lambda task: self._ended(session, task))
        return session

    def _ended(self, session: Session, life: asyncio.Task[None]) -> None:
        self._lives.discard(life)
        session.agent.sessions.pop(session.id, None)
        session.ended.set()
        if not life.cancelled() and (error := life.exception()) is not None:
            logger.error("session %s ended by an error of the runtime", session.id, exc_info=error)

    async def stop(self, agent: Agent, session_id: str) -> None:
        """Stop a session and wait for its end. Raises ServiceError if there is none."""
        session = agent.sessions.get(session_id)
        if session is None:
            raise ServiceError("ResourceNotFoundException", f"No active session {session_id}")
        if session.state is State.STOPPING:
            raise ServiceError("RetryableConflictException", f"Session {session_id} is {session.state}")
        session.stop("stopped by request")
        await session.ended.wait()

    async def stop_all(self, agents: list[Agent]) -> None:
        for agent in agents:
            for session in agent.sessions.values():
                session.stop("the runtime is shutting down")
        if self._lives:
            await asyncio.wait(self._lives)

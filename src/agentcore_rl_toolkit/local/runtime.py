"""``LocalAgentCore``: AgentCore Runtime and S3 on this machine, for unmodified clients and agents."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

import aiohttp
from aiohttp import web

from agentcore_rl_toolkit.errors import SetupError

from . import wire
from .control import ControlPlane
from .limits import Lifecycle, Quotas
from .processes import Supervisor, python_script, resolve_command
from .s3 import LocalS3
from .sessions import Agent, Sessions, State

REGION, ACCOUNT = "us-east-1", "000000000000"
_HOST = "127.0.0.1"
_T = TypeVar("_T")

StartMethod = Literal["fork", "process"]
Protocol = Literal["HTTP", "A2A"]


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What :meth:`LocalAgentCore.sessions` tells of a session. ``port``: where its agent listens."""

    session_id: str
    agent_runtime_arn: str
    state: State
    pid: int | None
    port: int
    log: Path
    work: Path


class LocalAgentCore:
    """AgentCore Runtime and S3 on 127.0.0.1, while the ``with`` block lasts.

    ::

        with LocalAgentCore(agent="python rl_app.py") as local:
            os.environ |= local.environment()
            RolloutClient(local.agent_runtime_arn, s3_bucket=local.bucket, exp_id="try")

    Each session is a process group of its own, started at its first request. The agent learns its port from
    ``AGENTCORE_RL_PORT``, ``PORT``, or ``{port}`` in its command, and is ready when it answers ``/ping``.

    ``agent``: start command, a string as for a shell or a list; more agents by :meth:`register`. ``cwd``: the
    directory to which its file names are relative (default: the current one); every session works in a
    directory of its own, ``data_dir/sessions/<id>/work``, beside its ``agent.log``. ``data_dir``: a temporary
    directory by default, removed at the end. ``port``, ``s3_port``: 0 takes free ones. ``bucket``: exists from
    the start. ``env``: more environment variables for agents; they win over ``environment()``. ``start``:
    ``"fork"`` starts sessions from a process that has imported what the script imports (a tenth of a second
    instead of seconds), only for ``python file.py``; ``"process"`` starts each anew; None forks where it can.
    ``protocol``: ``"A2A"`` for an agent that serves A2A (payloads are JSON-RPC, and there is an agent card).
    ``quotas``: by default those of the service, ``lifecycle`` likewise.

    Raises ``SetupError`` if the command can't be started or a port is taken.
    """

    def __init__(
        self,
        agent: str | Sequence[str] | None = None,
        *,
        cwd: str | os.PathLike[str] | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        port: int = 0,
        s3_port: int = 0,
        bucket: str = "local",
        env: Mapping[str, str] | None = None,
        start: StartMethod | None = None,
        protocol: Protocol = "HTTP",
        quotas: Quotas | None = None,
        lifecycle: Lifecycle | None = None,
    ) -> None:
        if start not in (None, "fork", "process"):
            raise SetupError(f"start={start!r}: 'fork', 'process' or None is required")
        if protocol not in ("HTTP", "A2A"):
            raise SetupError(f"protocol={protocol!r}: 'HTTP' or 'A2A' is required")
        self._definition = {"protocolConfiguration": {"serverProtocol": protocol}}
        self._command, self._cwd = agent, Path(cwd or ".").resolve()
        self._keep_data = data_dir is not None
        self._data_dir = Path(data_dir).resolve() if data_dir is not None else None
        self._ports = {"agentcore": port, "s3": s3_port}
        self.bucket = bucket
        self._env, self._start = dict(env or {}), start
        self._quotas, self._lifecycle = quotas or Quotas(), lifecycle or Lifecycle()
        self._agents: dict[str, Agent] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._sessions: Sessions | None = None

    # -- life ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise SetupError("this LocalAgentCore is running, or has run: make a new one")
        if self._data_dir is None:
            self._data_dir = Path(tempfile.mkdtemp(prefix="agentcore-rl-"))
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=[started], name="local-agentcore", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop every session, gracefully, then the servers. Nothing it started is left when this returns."""
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join()
        if not self._keep_data and self._data_dir is not None:
            shutil.rmtree(self._data_dir, ignore_errors=True)

    def _run(self, started: Future[None]) -> None:
        try:
            asyncio.run(self._serve(started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(self, started: Future[None]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a kept connection may be dead when it is needed
        timeout = aiohttp.ClientTimeout(total=None)
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(
                aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
            )
            self._sessions = Sessions(http)
            control = ControlPlane(self._agents, self._register, self._lifecycle)
            routes = [*wire.DataPlane(self._agents, self._sessions).routes(), *control.routes()]
            app = web.Application(middlewares=[wire.errors], client_max_size=2**20)
            app.add_routes(routes)
            self._ports["agentcore"] = await self._listen(stack, app, self._ports["agentcore"])
            assert self._data_dir is not None
            s3 = LocalS3(self._data_dir / "s3", buckets=[self.bucket]).app()
            self._ports["s3"] = await self._listen(stack, s3, self._ports["s3"])
            stack.push_async_callback(self._end_sessions)
            if self._command is not None:
                await self._register(None, self._command, definition=self._definition)
            started.set_result(None)
            await self._stop.wait()

    async def _listen(self, stack: contextlib.AsyncExitStack, app: web.Application, port: int) -> int:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, _HOST, port).start()
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SetupError(f"can't listen on {_HOST}:{port} ({reason}): choose another port, or 0") from None
        return int(runner.addresses[0][1])

    async def _end_sessions(self) -> None:
        assert self._sessions is not None
        try:
            await self._sessions.stop_all(list(self._agents.values()))
        finally:
            await asyncio.gather(*(agent.supervisor.close() for agent in self._agents.values()))

    # -- agents --------------------------------------------------------------------------------------------

    def register(
        self, name: str, agent: str | Sequence[str], *, cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:  # fmt: skip
        """Register one more agent and return its ARN. ``name``: letters, digits and ``_``, at most 48."""
        directory = Path(cwd).resolve() if cwd is not None else None
        return self._call(self._register(name, agent, directory, env, definition=self._definition)).arn

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        if self._loop is None or not self._loop.is_running():
            coroutine.close()
            raise SetupError("LocalAgentCore is not running: use it in a `with` block")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _register(
        self,
        name: str | None,
        command: str | Sequence[str],
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        lifecycle: Lifecycle | None = None,
        definition: Mapping[str, Any] | None = None,
    ) -> Agent:
        cwd = cwd or self._cwd
        if not cwd.is_dir():
            raise SetupError(f"cwd {os.fspath(cwd)!r} is no directory")
        try:
            parts = shlex.split(command) if isinstance(command, str) else [os.fspath(part) for part in command]
        except ValueError as error:
            raise SetupError(f"the agent's start command {command!r}: {error}") from None
        if not parts:
            raise SetupError("the agent's start command is empty; e.g. 'python rl_app.py'")
        argv = resolve_command(parts, cwd)
        variables = {**self._env, **(environment or {})}
        script = python_script(argv)
        complete = self._agent_environment(None if script else cwd, variables)
        executable = shutil.which(argv[0], path=complete["PATH"])
        if executable is None:
            raise SetupError(f"{argv[0]!r} is not a command here: check the agent's start command {command!r}")
        if len(argv) > 1 and argv[0] == sys.executable and argv[1].endswith(".py") and script is None:
            raise SetupError(f"there is no file {argv[1]!r} in {cwd}: check the agent's start command, or set cwd")
        if self._start == "fork" and script is None:
            raise SetupError(f"start='fork' needs a command like 'python file.py', not {command!r}")
        name = name if name is not None else _name(script or argv[0])
        if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_]{0,47}", name):
            raise SetupError(f"agent name {name!r}: a letter, then letters, digits and '_', at most 48")
        if any(agent.name == name for agent in self._agents.values()):
            raise SetupError(f"there is an agent {name!r} already: choose another name")
        # The same in every run, so that a script may hold the ARN.
        identity = f"{name}-{sha256(name.encode()).hexdigest()[:10]}"
        arn = f"arn:aws:bedrock-agentcore:{REGION}:{ACCOUNT}:runtime/{identity}"
        complete["AGENTCORE_RUNTIME_URL"] = f"{self.endpoint_url}/runtimes/{quote(arn, safe='')}/invocations/"
        assert self._data_dir is not None
        sessions_dir = self._data_dir / "sessions"
        supervisor = Supervisor(
            python=executable if script else sys.executable,
            script=None if self._start == "process" else script,
            environment=complete,
        )
        agent = Agent(
            name=name,
            id=identity,
            arn=arn,
            command=[executable, *argv[1:]],
            environment=variables,
            lifecycle=lifecycle or self._lifecycle,
            quotas=self._quotas,
            supervisor=supervisor,
            sessions_dir=sessions_dir if not self._agents else sessions_dir / identity,
            definition=definition or {},
        )
        self._agents[arn] = agent
        try:
            await supervisor.open()
        except BaseException:
            del self._agents[arn]
            await supervisor.close()
            raise
        return agent

    def _agent_environment(self, path: Path | None, variables: Mapping[str, str]) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if k not in ("AWS_PROFILE", "AWS_SESSION_TOKEN")}
        environment = {**inherited, **self.environment(), "PYTHONUNBUFFERED": "1", **variables}
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        if path is not None:  # as if the command ran beside its files; `python file.py` finds its own directory anyway
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), environment.get("PYTHONPATH")]))
        return environment

    # -- what clients need ---------------------------------------------------------------------------------

    @property
    def endpoint_url(self) -> str:
        """AgentCore: both the data plane and what there is of the control plane."""
        return f"http://{_HOST}:{self._ports['agentcore']}"

    @property
    def s3_endpoint_url(self) -> str:
        return f"http://{_HOST}:{self._ports['s3']}"

    @property
    def agent_runtime_arn(self) -> str:
        """The ARN of the agent that was given to the constructor, or registered first."""
        if not self._agents:
            raise SetupError("no agent is registered: LocalAgentCore(agent=…) or register(name, agent)")
        return next(iter(self._agents))

    @property
    def data_dir(self) -> Path:
        if self._data_dir is None:
            raise SetupError("LocalAgentCore is not running: use it in a `with` block")
        return self._data_dir

    def environment(self) -> dict[str, str]:
        """The environment variables that lead clients, and lead agents, here; the credentials are dummies."""
        return {
            "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": self.endpoint_url,
            "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE_CONTROL": self.endpoint_url,
            "AWS_ENDPOINT_URL_S3": self.s3_endpoint_url,
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
        }

    def sessions(self) -> list[SessionInfo]:
        """The sessions that exist now, oldest first for each agent."""

        async def collect() -> list[SessionInfo]:
            return [
                SessionInfo(s.id, agent.arn, s.state, s.pid, s.port, s.log, s.work)
                for agent in self._agents.values()
                for s in agent.sessions.values()
            ]

        return self._call(collect())


def _name(path: str) -> str:
    name = re.sub(r"[^a-zA-Z0-9_]", "_", Path(path).stem)[:47]
    return name if name[:1].isalpha() else f"a{name}"

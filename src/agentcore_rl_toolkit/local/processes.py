"""Processes under a supervisor: start them, signal them, wait for them. See :mod:`.supervisor`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.errors import SetupError

from . import supervisor as program

logger = logging.getLogger("agentcore_rl_toolkit.local")


@dataclass(eq=False)
class Process:
    """A running process. ``exited`` resolves to its exit code, negative for a signal."""

    job: int
    supervisor: Supervisor
    started: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    exited: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def signal(self, number: int) -> None:
        """Signal its process group; nothing happens if it is gone."""
        self.supervisor.send({"op": "signal", "job": self.job, "signal": number})


class Supervisor:
    """One supervisor program; all methods belong to one event loop.

    ``script``: a Python file whose imports are loaded before the first session, which is then forked;
    None starts plain processes. ``environment``: the complete environment of everything it starts.
    """

    def __init__(self, *, python: str, script: str | None, environment: Mapping[str, str]) -> None:
        self._python, self.script, self._environment = python, script, dict(environment)
        self._socket: socket.socket | None = None
        self._program: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._jobs: dict[int, Process] = {}
        self._numbers = count(1)
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """Start the program and wait until it has imported what it should."""
        ours, theirs = socket.socketpair()
        events, events_write = os.pipe()
        with theirs, open(events_write, "wb"):  # noqa: ASYNC230 - only to close our copy
            self._program = subprocess.Popen(  # noqa: ASYNC220 - returns as soon as the program is executed
                [
                    self._python,
                    program.__file__,
                    *map(str, (theirs.fileno(), events_write, os.getpid())),
                    self.script or "",
                ],
                pass_fds=[theirs.fileno(), events_write],
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        self._socket = ours
        reader = await read_pipe(events)
        try:
            hello = json.loads(await reader.readline())
        except ValueError:
            raise SetupError(
                f"importing ahead what {self.script} imports ended the process: start='process' avoids that"
                if self.script
                else f"{self._python} can't run the process supervisor (Python >= 3.9 is required)"
            ) from None
        for problem in hello["failed"]:
            logger.warning("could not import ahead of the sessions: %s", problem)
        if self.script and hello["threads"] > 1:
            logger.warning(
                "the imports of %s start %d threads, which a fork would lose: starting plain processes",
                Path(self.script).name,
                hello["threads"] - 1,
            )
            self.script = None
        self._reader = asyncio.create_task(self._read(reader))

    async def start(
        self,
        argv: Sequence[str],
        *,
        session: str,
        main: bool,
        cwd: Path,
        env: Mapping[str, str],
        stdout: int,
        stderr: int,
    ) -> Process:
        """Start a process. ``main``: it is the session's agent, whose end is the end of the session.

        A ``main`` is forked where that is possible; ``argv`` is then ``[python, script, *arguments]``.
        """
        async with self._opening:
            if self._reader is None or self._reader.done():  # somebody killed it, the out-of-memory killer perhaps
                await self.close()
                await self.open()
        process = Process(next(self._numbers), self)
        self._jobs[process.job] = process
        request: dict[str, Any] = {"op": "start", "job": process.job, "session": session, "main": main}
        request |= {"cwd": str(cwd), "env": {**env, program.SESSION_VARIABLE: session}}
        if main and self.script:
            request |= {"script": self.script, "arguments": list(argv[2:])}
        else:
            request |= {"argv": list(argv)}
        self.send(request, [stdout, stderr])
        await asyncio.wait({process.started, process.exited}, return_when=asyncio.FIRST_COMPLETED)
        return process

    def end(self, session: str) -> None:
        """Kill whatever a session still has."""
        self.send({"op": "end", "session": session})

    def send(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        body = json.dumps(request).encode()
        assert self._socket is not None
        with contextlib.suppress(OSError):  # the program is gone: `_read` has told every process
            socket.send_fds(self._socket, [struct.pack("!I", len(body))], list(descriptors))
            self._socket.sendall(body)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            event = json.loads(line)
            process = self._jobs[event["job"]]
            if "pid" in event:
                process.started.set_result(event["pid"])
            else:
                del self._jobs[process.job]
                process.exited.set_result(event["exit"])
        for process in self._jobs.values():  # killed from outside: what it started goes with it
            if process.started.done():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.started.result(), signal.SIGKILL)
            process.exited.set_result(-signal.SIGKILL)
        self._jobs.clear()

    async def close(self) -> None:
        """Kill everything it started and wait for its end."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        if self._program is not None:
            await asyncio.to_thread(self._program.wait)
        if self._reader is not None:
            await self._reader


async def read_pipe(descriptor: int) -> asyncio.StreamReader:
    """A stream over the reading end of a pipe, which it closes when it has seen the end."""
    reader = asyncio.StreamReader()
    pipe = open(descriptor, "rb", buffering=0)  # noqa: ASYNC230, SIM115 - no I/O; the transport closes it
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


def python_script(argv: Sequence[str]) -> str | None:
    """The script of a resolved ``python file.py …`` command, None for any other command."""
    name = Path(argv[0]).name
    if len(argv) > 1 and name.startswith("python") and argv[1].endswith(".py") and Path(argv[1]).is_absolute():
        return argv[1] if Path(argv[1]).is_file() else None
    return None


def resolve_command(argv: Sequence[str], cwd: Path) -> list[str]:
    """The command for another working directory: names of files below ``cwd`` become absolute.

    A bare ``python`` or ``python3`` is this interpreter, whether or not its environment is active.
    """
    # Not Path.is_file(), which raises for a part that is too long for a name (`python -c ...`).
    resolved = [str(cwd / part) if os.path.isfile(cwd / part) else part for part in argv]
    if argv[0] in ("python", "python3"):
        resolved[0] = sys.executable
    return resolved

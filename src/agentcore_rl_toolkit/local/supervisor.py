"""The process that starts an agent's sessions and never lets one outlive it.

Run as a program by :mod:`.processes`, one for each agent, with the agent's interpreter: standard library only,
one thread. It starts processes on request, each in a session and process group of its own, reports their exits,
and kills everything when its socket closes, whatever became of the other end. For ``python file.py`` agents it
first imports what the file imports; forks then find it there, and a session pays for the imports no more.

Requests (4-byte length, JSON, file descriptors for stdout and stderr beside the length):
``start`` (job, session, main, cwd, env, and argv or script), ``signal`` (job, signal), ``end`` (session).
Events (JSON lines): ``{"ready", "threads", "failed"}`` once, then ``{"job", "pid"}`` and ``{"job", "exit"}``.
"""

from __future__ import annotations

import os
import sys

if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]  # our own folder: it must not shadow modules of the agent

import ast
import contextlib
import ctypes
import gc
import json
import runpy
import select
import signal
import socket
import struct
import threading
import time
import traceback
from typing import Any

SESSION_VARIABLE = "AGENTCORE_RL_SESSION"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

# `app.run()` and the stock clients import these late; a fork should find them there already.
_IMPORTED_LATE = {
    "bedrock_agentcore": [
        "uvicorn",
        "uvicorn.lifespan.on",
        "uvicorn.loops.auto",
        "uvicorn.loops.asyncio",
        "uvicorn.protocols.http.auto",
        "uvicorn.protocols.websockets.auto",
        "anyio._backends._asyncio",
        "encodings.idna",
    ],
    "boto3": ["boto3.s3.inject"],
    "openai": ["openai.resources.chat.completions.completions", "jiter", "httpcore", "httpcore2", "truststore"],
}


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class _Job:
    """A child: ``main`` is the agent itself, whose end is the end of its session; others are commands."""

    def __init__(self, request: dict[str, Any], pid: int) -> None:
        self.number: int = request["job"]
        self.session: str = request["session"]
        self.main: bool = request["main"]
        self.pid = pid


class Supervisor:
    def __init__(self, control: socket.socket, events: int, parent: int) -> None:
        self.control, self.events = control, events
        self.parent = parent
        self.jobs: dict[int, _Job] = {}
        self.wake, self._wake_write = os.pipe()
        for descriptor in (self.wake, self._wake_write):
            os.set_blocking(descriptor, False)

    def serve(self) -> dict[str, Any] | None:
        """Work until the other end is gone (None). In a forked child: the request it has to run."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._quit())
        while os.getppid() == self.parent:  # a forked copy of the parent may keep the socket open
            readable = select.select([self.control.fileno(), self.wake], [], [], 1.0)[0]
            if self.wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake, 4096)
            self._reap()
            if self.control.fileno() in readable:
                request, descriptors = self._receive()
                if request is None:
                    break
                if self._handle(request, descriptors):
                    return request
        self._quit()
        return None

    def send(self, **event: Any) -> None:
        with contextlib.suppress(OSError):  # the other end is gone: the next receive says so
            os.write(self.events, json.dumps(event).encode() + b"\n")

    def _receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        try:
            header, descriptors, _, _ = socket.recv_fds(self.control, 4, 2)
            body = self._exactly(struct.unpack("!I", header)[0]) if len(header) == 4 else b""
        except OSError:
            return None, []
        return (json.loads(body) if body else None), descriptors

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self.control.recv(size - len(parts))
            if not part:
                return b""
            parts += part
        return bytes(parts)

    def _handle(self, request: dict[str, Any], descriptors: list[int]) -> bool:
        """Carry out a request. True in a forked child that has to run the agent's script."""
        if request["op"] == "start":
            return self._start(request, descriptors)
        if request["op"] == "signal":
            for job in list(self.jobs.values()):
                if job.number == request["job"]:
                    _kill_group(job.pid, request["signal"])
        elif request["op"] == "end":
            self._end(request["session"])
        return False

    def _start(self, request: dict[str, Any], descriptors: list[int]) -> bool:
        pid = os.fork()
        if pid == 0:
            self._enter_child(request, descriptors)
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        self.jobs[pid] = _Job(request, pid)
        self.send(job=request["job"], pid=pid)
        return False

    def _enter_child(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """After the fork: become a process of its own. Returns only if a script is to be run in it."""
        try:
            os.setsid()
            supervisor = os.getppid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(descriptors[0], 1)
            os.dup2(descriptors[1], 2)
            os.environ.update(request["env"])
            os.chdir(request["cwd"])
            if request.get("argv"):
                os.execvp(request["argv"][0], request["argv"])  # every descriptor but 0, 1, 2 closes here
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as the interpreter has it
            for descriptor in (*descriptors, self.events, self.wake, self._wake_write):
                os.close(descriptor)
            self.control.close()
        except BaseException:  # noqa: BLE001 - whatever it is, the forked copy must not go on as a supervisor
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(127)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            job = self.jobs.pop(pid, None)
            if job is None:  # an orphan that came to us
                continue
            if job.main:
                _kill_group(pid, signal.SIGKILL)
                self._end(job.session)
            self.send(job=job.number, exit=os.waitstatus_to_exitcode(status))

    def _end(self, session: str) -> None:
        """Kill what a session still has: its process groups, and orphans that left them."""
        for job in list(self.jobs.values()):
            if job.session == session:
                _kill_group(job.pid, signal.SIGKILL)
        for _ in range(100):  # killing an orphan may orphan its children in turn
            strays = [pid for pid in _children() if pid not in self.jobs and _session_of(pid) == session]
            if not strays:
                return
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
            with contextlib.suppress(ChildProcessError):
                for pid in strays:
                    os.waitpid(pid, os.WNOHANG)

    def _quit(self) -> None:
        """Kill every descendant that can be found, then leave."""
        for job in self.jobs.values():
            _kill_group(job.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                for pid in _children():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                time.sleep(0.005)
        os._exit(0)


def _kill_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _children() -> list[int]:
    """Pids of our children, on Linux also those that were orphaned; elsewhere unknown."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _session_of(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return None
    prefix = SESSION_VARIABLE.encode() + b"="
    return next((v[len(prefix) :].decode() for v in variables if v.startswith(prefix)), None)


def preload(script: str, parent: int) -> list[str]:
    """Import what the file imports at its top level, without running it. Returns what failed."""
    signal.signal(signal.SIGALRM, lambda *_: os.getppid() == parent or os._exit(1))
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)  # an import that hangs must not outlive the parent
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # else numpy starts threads, which a fork would lose
    failed: list[str] = []
    try:
        with open(script, "rb") as file:
            body = ast.parse(file.read(), script).body
    except (OSError, SyntaxError):
        body = []  # the session itself will say so, in its log
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                _import(alias.name, [], failed)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module != "__future__":
            _import(node.module, [alias.name for alias in node.names], failed)
    for package, late in _IMPORTED_LATE.items():
        for name in late if package in sys.modules else []:
            _import(name, [], [])
    if "agentcore_rl_toolkit" in sys.modules:
        with contextlib.suppress(Exception):
            from agentcore_rl_toolkit._aws import warm_up

            warm_up()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    gc.collect()
    gc.freeze()  # a collection in a child must not copy every page
    return failed


def _import(module: str, names: list[str], failed: list[str]) -> None:
    try:
        __import__(module, {}, {}, names)
    except BaseException as error:  # noqa: BLE001 - the agent's own import will raise it again, where it belongs
        failed.append(f"{module}: {type(error).__name__}: {error}")


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _run_script(request: dict[str, Any]) -> None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python reseeds its own generator after a fork, numpy does not
    sys.argv = [request["script"], *request["arguments"]]
    runpy.run_path(request["script"], run_name="__main__")


def main() -> dict[str, Any] | None:
    control = socket.socket(fileno=int(sys.argv[1]))
    events, parent, script = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    for descriptor in (control.fileno(), events):
        os.set_inheritable(descriptor, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    failed: list[str] = []
    if script:
        sys.path.insert(0, os.path.dirname(script))
        failed = preload(script, parent)
    supervisor = Supervisor(control, events, parent)
    supervisor.send(ready=True, threads=_threads(), failed=failed)
    return supervisor.serve()


if __name__ == "__main__":
    _request = main()
    if _request is not None:  # a forked child: what follows is the agent's life, up to the interpreter's end
        _run_script(_request)

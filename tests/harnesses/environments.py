"""One environment per harness, made on first use and kept: a virtual environment, or a folder of npm's.

They live in ``.harnesses`` of the checkout (``HARNESS_ENVS`` names another place), under names that change with what is
in them. Nothing of them is installed into the project's own environment.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
MANIFEST: dict[str, dict[str, list[str]]] = tomllib.loads((HERE / "harnesses.toml").read_text())
_LONGEST = 400.0
"""Seconds for one installation."""
_installing: set[subprocess.Popen[bytes]] = set()


def ready(harness: str) -> Path:
    """The ``bin`` folder of a harness's environment, which is made if it is not there."""
    [(tool, packages)] = MANIFEST[harness].items()
    digest = sha256("\n".join([tool, sys.version, *packages]).encode()).hexdigest()[:10]
    folder = Path(os.environ.get("HARNESS_ENVS", HERE.parents[1] / ".harnesses")).resolve() / f"{harness}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    complete = folder / "complete"
    with _alone(folder.with_suffix(".lock")):
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            {"pip": _pip, "npm": _npm}[tool](folder, packages)
            complete.touch()
    return folder / ("bin" if tool == "pip" else "node_modules/.bin")


def _pip(folder: Path, packages: Sequence[str]) -> None:
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--no-compile", *packages])


def _npm(folder: Path, packages: Sequence[str]) -> None:
    if not shutil.which("npm"):
        raise RuntimeError(f"{', '.join(packages)}: npm is needed (`apt-get install nodejs npm`, Node.js 20 or later)")
    _run(["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel=error", *packages])


def _run(command: Sequence[str]) -> None:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    _installing.add(process)
    try:
        with ended(process):
            output, _ = process.communicate(timeout=_LONGEST)
    finally:
        _installing.discard(process)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output.decode()[-4000:]}")


def abort() -> None:
    """End the installations that are running in other threads."""
    for process in list(_installing):
        _kill(process.pid)


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """On leaving, nothing that the process started is left, whatever happened. It must lead a group of its own."""
    try:
        yield
    finally:
        _kill(process.pid)
        process.wait()


def _kill(leader: int) -> None:
    for pid in _family(leader):  # harnesses put the commands they run into groups of their own
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _family(pid: int) -> list[int]:
    """A process and all its descendants, where the system tells them."""
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(found for child in itertools.chain(*lists) for found in _family(int(child)))]


@contextmanager
def _alone(path: Path) -> Iterator[IO[bytes]]:
    """Two runs at once make an environment once."""
    with path.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock

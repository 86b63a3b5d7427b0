"""One environment per harness, made on first use and kept: a virtual environment, or a folder of npm's.

They live in ``.harnesses`` of the checkout (``HARNESS_ENVS`` names another place), under names that change with what is
in them. Nothing of them is installed into the project's own environment.
"""

from __future__ import annotations

import fcntl
import os
import shutil
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
_INSTALLING = 400.0
"""Seconds for one installation."""


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
    with ended(process):
        output, _ = process.communicate(timeout=_INSTALLING)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output.decode()[-4000:]}")


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """On leaving, nothing of the process's group is left, whatever happened. It must lead a group of its own."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


@contextmanager
def _alone(path: Path) -> Iterator[IO[bytes]]:
    """Two runs at once make an environment once."""
    with path.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock

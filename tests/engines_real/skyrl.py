"""A real SkyRL server on the CPU (its JAX engine), with a tiny random Qwen3."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
SHIM = """
# Below Python 3.12 pydantic takes only typing_extensions' TypedDict; SkyRL 0.3.0 uses typing's.
import sys, typing
if sys.version_info < (3, 12):
    import typing_extensions
    typing.TypedDict = typing_extensions.TypedDict
"""


class SkyrlServer:
    """Always at the same address. ``folder``: for the model, the server's state and its log."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, folder / "model"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        (folder / "shim").mkdir()
        (folder / "shim" / "sitecustomize.py").write_text(SHIM)
        subprocess.run([sys.executable, str(HERE / "make_tiny_qwen3.py"), str(self.model)], check=True)
        limits = {
            "max_lora_adapters": 4,
            "max_lora_rank": 8,
            "train_micro_batch_size": 8,
            "sample_max_num_sequences": 8,
        }
        self._command = [
            *("uv", "run", "--no-project", "--active", "-m", "skyrl.tinker.api", "--host", "127.0.0.1"),
            *("--port", str(port), "--base-model", str(self.model), "--backend", "jax"),
            *("--backend-config", json.dumps(limits), "--database-url", f"sqlite:///{folder / 'tinker.db'}"),
            *("--checkpoints-base", str(folder / "checkpoints")),
        ]
        environment = Path(sys.prefix)
        self._environment = {
            **os.environ,
            "VIRTUAL_ENV": str(environment),
            "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(folder / "shim"),
            "HF_HUB_OFFLINE": "1",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(environment / "jax-cache"),  # compiling takes longer than the tests
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = (self.folder / "log").open("ab")
        self.process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        deadline = time.monotonic() + 120
        while not self._healthy():
            assert self.process.poll() is None, (self.folder / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-3000:]
            time.sleep(0.5)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        """The server, its engine and uv: one process group."""
        os.killpg(self.process.pid, number)
        self.process.wait(30)

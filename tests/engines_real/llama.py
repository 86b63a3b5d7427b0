"""A real llama.cpp server in a process of its own, and a second way to ask it for logprobs."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERVE = """
import sys
from pathlib import Path
from agentcore_rl_toolkit.local.smollm2 import llama_server, model_file
with llama_server(model_file(), slots=4, port=int(sys.argv[1])):
    print("up", flush=True)
    sys.stdin.read()
"""
LETTER = 81  # "a" in SmolLM2's vocabulary
VOCABULARY = 49_152


class LlamaServer:
    """Always at the same address. Ends with us: it reads our end of its standard input."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-c", SERVE, str(self.port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "up\n"

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(20)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def running(self) -> int:
        """How many requests it works on."""
        return sum(slot["is_processing"] for slot in self.get("/slots"))

    def settle(self) -> None:
        """Wait until it works on nothing: it ends the block of an answer that nobody waits for."""
        deadline = time.monotonic() + 15
        while self.running():
            assert time.monotonic() < deadline, f"{self.running()} requests are still running"
            time.sleep(0.05)

    def connections(self) -> int:
        """How many connections to it are open, read from the kernel."""
        table = Path("/proc/net/tcp").read_text().splitlines()[1:]
        states = [(line.split()[2], line.split()[3]) for line in table]
        return sum(remote.endswith(f":{self.port:04X}") and state == "01" for remote, state in states)

    def score(self, before: Sequence[int], token: int, temperature: float = 1.0, likely: int = 1000) -> float:
        """The logprob of ``token`` after ``before``, from all next tokens: a letter is forced, and what else could
        have come is listed. Nothing of the sampling is involved, nor what the server has cached."""
        body = {
            "prompt": list(before),
            "n_predict": 1,
            "n_probs": VOCABULARY if temperature != 1 else likely,
            "cache_prompt": False,
            "logit_bias": [[LETTER, 1e6]],
            "samplers": [],
            "temperature": 0,
        }
        [entry] = self.post("/completion", body)["completion_probabilities"]
        logprobs = {other["id"]: other["logprob"] for other in entry["top_logprobs"]}
        if temperature == 1:
            return logprobs[token] if token in logprobs else self.score(before, token, likely=VOCABULARY)
        total = math.log(math.fsum(math.exp(value / temperature) for value in logprobs.values()))
        return logprobs[token] / temperature - total

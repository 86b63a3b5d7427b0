"""What the agent's side costs under a burst: 200 invocations at once into one process.

``python benchmarks/app.py`` runs this project's ``AgentCoreRLApp`` beside a bare AgentCore app that writes no results;
``--package original`` adds the published toolkit from an environment made on first use (``.envs/`` beside this file).
See README.md for what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _envs import environment

HERE = Path(__file__).resolve().parent
ORIGINAL = "agentcore-rl-toolkit[server]==0.2.0"
BUCKET = "results"


# -- the agent's process; also runs with the original's interpreter ------------------------------------------


def agent(kind: str, handler: str, port: int, seconds: float) -> None:
    if kind == "bare":
        from bedrock_agentcore.runtime import BedrockAgentCoreApp

        app: Any = BedrockAgentCoreApp()
        tasks = set()

        @app.entrypoint
        async def answer(payload: Any) -> Any:
            tasks.add(asyncio.create_task(asyncio.sleep(seconds)))
            return {"status": "processing"}
    else:
        from agentcore_rl_toolkit import AgentCoreRLApp

        app = AgentCoreRLApp()

        def work(payload: Any) -> Any:
            time.sleep(seconds)
            return {"rewards": 1.0, "transcript": "x" * 2000}

        async def work_async(payload: Any) -> Any:
            await asyncio.sleep(seconds)
            return {"rewards": 1.0, "transcript": "x" * 2000}

        app.rollout_entrypoint(work if handler == "sync" else work_async)
    app.run(port=port)


# -- S3's process: puts take a while, and it notes when each was done -----------------------------------------


def s3(port: int, log: Path, put: float) -> None:
    from aiohttp import web

    from agentcore_rl_toolkit.local.s3 import LocalS3

    times = log.open("a", buffering=1)

    @web.middleware
    async def slow(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.method == "PUT":
            await asyncio.sleep(put)
        response: web.StreamResponse = await handler(request)
        if request.method == "PUT":
            times.write(f"{time.monotonic()}\n")
        return response

    with tempfile.TemporaryDirectory() as folder:
        app = LocalS3(Path(folder), buckets=[BUCKET]).app()
        app.middlewares.append(slow)
        web.run_app(app, host="127.0.0.1", port=port, print=lambda *_: None, access_log=None)


# -- the measurement ------------------------------------------------------------------------------------------


@contextmanager
def started(argv: list[str], port: int, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that listens on ``port`` before the body runs."""
    environment = {**os.environ, **env}
    if argv[0] != sys.executable:
        environment.pop("PYTHONPATH", None)  # it may lead to this project, whose name the original shares
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(argv, env=environment, stdout=output, stderr=output)
        try:
            for _ in range(1200):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                if process.poll() is not None:
                    output.seek(0)
                    raise SystemExit(f"a contender ended: {output.read().decode()[-2000:]}")
                time.sleep(0.05)
            yield process
        finally:
            process.kill()
            process.wait()


async def drive(port: int, log: Path, count: int, writes: bool) -> dict[str, list[float]]:
    import aiohttp

    url, late = f"http://127.0.0.1:{port}", []
    pings: list[tuple[float, float]] = []
    results = lambda: [float(line) for line in log.read_text().splitlines()]  # noqa: E731
    # Connections exist before the burst: AgentCore's proxy keeps its own.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def invoke(number: int) -> float:
            config = {"exp_id": "e", "input_id": f"i{number:05d}", "s3_bucket": BUCKET}
            headers = {"X-Amzn-Bedrock-AgentCore-Runtime-Session-Id": f"session-{number:040d}"}
            began = time.monotonic()
            async with http.post(f"{url}/invocations", json={"_rollout": config}, headers=headers) as response:
                body = await response.json()
                assert body["status"] == "processing", body
            return time.monotonic() - began

        async def ping() -> None:
            while True:
                began = time.monotonic()
                async with http.get(f"{url}/ping") as response:
                    await response.read()
                pings.append((began, time.monotonic() - began))
                await asyncio.sleep(0.005)

        await invoke(99_999)  # imports and first connections are not the burst's
        while writes and not results():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        pinging = asyncio.create_task(ping())
        await asyncio.sleep(0.1)
        pings.clear()
        began = time.monotonic()
        await asyncio.gather(*(invoke(number) for number in range(count)))
        accepted = time.monotonic() - began
        early, after = [seconds for _, seconds in pings], time.monotonic()
        number = count
        while time.monotonic() - began < 60:
            late.append(await invoke(number))
            number += 1
            await asyncio.sleep(0.01)
            done = len(results()) - 1 if writes else count
            if done >= count and time.monotonic() - began > 1.0:
                break
        pinging.cancel()
    finished = sorted(results())[1 : count + 1]
    return {
        "last result": [finished[-1] - began] if len(finished) == count else [],
        "burst accepted": [accepted],
        "late": late,
        "ping": [seconds for asked, seconds in pings if asked >= after],
        "ping, burst": [max([*early, 0.0])],
    }


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def measure(kind: str, handler: str, python: str, args: argparse.Namespace) -> dict[str, list[float]]:
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(str(probe.getsockname()[1]))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "puts"
        log.touch()
        environment = {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{ports[0]}",
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        store = [sys.executable, __file__, "--role", "s3", ports[0], str(log), str(args.put)]
        app = [python, __file__, "--role", "agent", kind, handler, ports[1], str(args.handler)]
        with (
            started(store, int(ports[0])),
            started(app, int(ports[1]), **environment) as process,
        ):
            figures = asyncio.run(drive(int(ports[1]), log, args.count, kind != "bare"))
            cpu = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            figures["cpu"] = [(int(cpu[11]) + int(cpu[12])) / os.sysconf("SC_CLK_TCK")]
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            figures["rss MB"] = [pages * resource.getpagesize() / 2**20]
    return figures


def summary(rounds: list[dict[str, list[float]]]) -> dict[str, float | None]:
    """Medians of the rounds; quantiles of late answers and pings over all rounds, since one has too few for a p99."""
    whole = {name: [value for figures in rounds for value in figures[name]] for name in rounds[0]}
    once = {name: whole.pop(name) for name in ("late", "ping")}
    row: dict[str, float | None] = {name: statistics.median(v) if v else None for name, v in whole.items()}
    for name, values in once.items():
        row |= {f"{name} p50": statistics.median(values), f"{name} p99": _quantile(values, 0.99)}
        row |= {f"{name} max": max(values), f"{name}, count": len(values)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--package", choices=["original"], action="append", default=[])
    parser.add_argument("--original-python", help="an interpreter that has the original installed")
    parser.add_argument("--count", type=int, default=200, help="invocations in the burst")
    parser.add_argument("--handler", type=float, default=0.2, help="seconds a handler takes")
    parser.add_argument("--put", type=float, default=0.05, help="seconds a put takes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        role, *rest = args.role
        if role == "s3":
            s3(int(rest[0]), Path(rest[1]), float(rest[2]))
        else:
            agent(rest[0], rest[1], int(rest[2]), float(rest[3]))
        return
    rows = [("bare app", "bare", "async", sys.executable)]
    rows += [(f"this project, {handler}", "ours", handler, sys.executable) for handler in ("sync", "async")]
    if args.package:
        python = args.original_python or str(environment(HERE / ".envs" / "original-app", [ORIGINAL]))
        rows += [(f"original, {handler}", "original", handler, python) for handler in ("sync", "async")]
    runs: dict[str, list[dict[str, list[float]]]] = {}
    for _ in range(args.rounds):
        for name, kind, handler, python in rows:
            runs.setdefault(name, []).append(measure(kind, handler, python, args))
    table = {name: summary(rounds) for name, rounds in runs.items()}
    if args.json:
        print(json.dumps(table, indent=1))
        return
    columns = [
        "last result",
        "burst accepted",
        "late p99",
        "late max",
        "ping p50",
        "ping p99",
        "ping max",
        "ping, burst",
    ]
    print(f"{'milliseconds':24}" + "".join(f"{c:>16}" for c in columns) + f"{'CPU s':>8}{'RSS MB':>8}")
    for name, row in table.items():
        cells = "".join("               -" if (v := row[c]) is None else f"{v * 1000:16.1f}" for c in columns)
        print(f"{name:24}{cells}{row['cpu']:8.2f}{row['rss MB']:8.0f}")


if __name__ == "__main__":
    main()

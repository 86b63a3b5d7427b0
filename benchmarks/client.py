"""What it costs a client to run many sessions: against the local runtime's wire, with a stub in place of the agents.

``python benchmarks/client.py`` runs 2,000 sessions, 500 at a time, with results after 2 to 10 s; see README.md.
``--package original`` adds the published toolkit from an environment made on first use (``.envs/`` beside this file).
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _envs import environment
from _stub_runtime import ARN, BUCKET

HERE = Path(__file__).resolve().parent
ORIGINAL = "agentcore-rl-toolkit[core]==0.2.0"
TABLE = {
    "invoke:read": (11, ""),  # milliseconds
    "mode": (5, ""),
    "package": (9, ""),
    "floor": (6, ".1f"),  # seconds, as are the next
    "wall": (6, ".1f"),
    "cpu_ms": (7, ".2f"),  # of the client's process, for each rollout
    "median": (7, ".2f"),  # seconds from the object to the item
    "p95": (6, ".2f"),
    "max": (6, ".2f"),
    "rss_mb": (7, ".0f"),
    "polls": (6, ""),  # HEAD, LIST, and GET of what was not there
    "gets": (6, ""),
    "invokes": (8, ""),
    "failed": (7, ""),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--concurrent", type=int, default=500)
    parser.add_argument("--package", choices=["this", "original"], default="this", help="original: both")
    parser.add_argument("--modes", default="sync,async")
    parser.add_argument("--variants", default="0:0,50:0,0:20", help="milliseconds of an invoke : of a read of S3")
    parser.add_argument("--notify", action="store_true", help="with the push hint as well")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    args = parser.parse_args()
    pythons = {"this": sys.executable}
    if args.package == "original":
        pythons["original"] = str(environment(HERE / ".envs" / "original-client", [ORIGINAL]))
    rng = random.Random(args.seed)
    payloads = [{"seconds": rng.uniform(2.0, 10.0), "text": "x" * 500} for _ in range(args.sessions)]
    rows = []
    print(" ".join(f"{name:>{width}}" for name, (width, _) in TABLE.items()))
    for variant in args.variants.split(","):
        invoke_ms, read_ms = map(float, variant.split(":"))
        floor = _floor([p["seconds"] + invoke_ms / 1000 for p in payloads], args.concurrent)
        for mode in args.modes.split(","):
            for package, python in pythons.items():
                for notify in [False, True] if args.notify and package == "this" else [False]:
                    row = _measure(python, mode, invoke_ms, read_ms, payloads, args.concurrent, notify=notify)
                    name = f"{package}+push" if notify else package
                    row |= {"package": name, "mode": mode, "invoke:read": variant, "floor": floor}
                    rows.append(row)
                    print(" ".join(f"{row[name]:>{width}{form}}" for name, (width, form) in TABLE.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def _floor(durations: list[float], places: int) -> float:
    """Wall time of a client that costs nothing: each place takes the next payload at once."""
    free = [0.0] * places
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


def _measure(
    python: str, mode: str, invoke_ms: float, read_ms: float, payloads: list[Any], concurrent: int, *, notify: bool
) -> dict[str, Any]:
    with _stub(invoke_ms, read_ms) as environment:
        job = {"mode": mode, "arn": ARN, "bucket": BUCKET, "payloads": payloads, "concurrent": concurrent}
        if notify:
            job["notify"] = "http://127.0.0.1:0"
        run = subprocess.run(
            [python, HERE / "_client_run.py"],
            input=json.dumps(job),
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        stats_url = f"{environment['AWS_ENDPOINT_URL_BEDROCK_AGENTCORE']}/stats"
        request = urllib.request.Request(stats_url, headers={"Authorization": "stub"})
        with urllib.request.urlopen(request) as answer:
            stats = json.load(answer)
    polls = stats.get("head", 0) + stats.get("list", 0) + stats.get("get_miss", 0)
    return {**json.loads(run.stdout), "polls": polls, "gets": stats["get"], "invokes": stats["invoke"], "stats": stats}


@contextmanager
def _stub(invoke_ms: float, read_ms: float) -> Iterator[dict[str, str]]:
    command = [sys.executable, HERE / "_stub_runtime.py", str(invoke_ms / 1000), str(read_ms / 1000)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())
        finally:
            server.kill()


if __name__ == "__main__":
    main()

"""What a turn costs the gateway process, beside an ideal, a bare handler and published gateways. See README.md.

python benchmarks/gateway.py                 # ours, the append-only ideal, a bare handler
python benchmarks/gateway.py --peers         # and the published ones, from environments made for them
python benchmarks/gateway.py --memory        # what held sessions weigh
python benchmarks/gateway.py --lag           # the event loop's lag with 256 agents and long first prompts
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _envs import environment

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared" / "tokenizers" / "qwen3"
TINY = HERE.parent / "src" / "agentcore_rl_toolkit" / "local" / "data" / "tiny"
PEERS = {
    # With transformers after 5.12 the original loses its tool calls.
    "original": ["agentcore-rl-toolkit[gateway]==0.2.0", "transformers==5.12.1"],
    "rllm": ["rllm-model-gateway==0.1.0"],
}
LARGE_PROMPT = 60_000


@dataclass(frozen=True)
class Row:
    """One contender: its name in the table, what ``_server.py`` calls it, and how it is started."""

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable

    @property
    def is_peer(self) -> bool:
        return self.python != sys.executable


class Server:
    """A contender's process and the line to it."""

    def __init__(self, row: Row, workload: Path, tokenizer: Path, **options: Any) -> None:
        argv = [row.python, str(HERE / "_server.py"), row.kind, str(workload), str(tokenizer)]
        argv.append(json.dumps({**row.options, **options}))
        environment = dict(os.environ)
        if row.is_peer:
            environment.pop("PYTHONPATH", None)  # it may lead to this project, whose name the original shares
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE, env=environment
        )
        self.port: int = self._read()["port"]

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._read()["result"]

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of a contender ended (exit status {self._process.wait()}); see above")
        return json.loads(line)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def drive(server: Server, sessions: list[Any], workload: Path, *, stream: bool = False, **job: Any) -> dict[str, Any]:
    """Run the load in its own process until all sessions have had their turns."""
    whole = {"host": "127.0.0.1", "port": server.port, "sessions": sessions, "workload": str(workload)}
    whole |= {"stream": stream, "pause": None, "large": [], **job}
    done = subprocess.run(
        [sys.executable, "-I", str(HERE / "_load.py")], input=json.dumps(whole), stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit("the load failed; see above")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(row: Row, server: Server, workload: Path, turns: int, args: argparse.Namespace) -> dict[str, Any]:
    """One conversation length: CPU, latency, and what finishing costs."""
    waves = max(1, math.ceil(args.min_turns / (args.agents * turns)))
    sessions = server.ask("open", count=args.agents * waves)
    before = server.ask("usage")
    if args.profile and row.kind == "gateway":
        server.ask("profile")
    load = drive(
        server, sessions, workload, stream=row.options.get("stream", False), concurrency=args.agents, turns=turns
    )
    if args.profile and row.kind == "gateway":
        server.ask("unprofile", file=f"{args.profile}.{row.name.replace(', ', '-')}.{turns}.prof")
    after = server.ask("usage")
    finished = server.ask("finish")
    return {
        "turns": turns,
        "cpu_per_1000": (after["cpu"] - before["cpu_after"]) / load["turns"] * 1000,
        "turns_per_second": load["turns"] / load["wall"],
        "latency_p50_ms": load["p50"] * 1e3,
        "latency_p99_ms": load["p99"] * 1e3,
        "tokens_per_session": load["tokens"] / len(sessions),
        "finish_median_ms": statistics.median(finished["walls"]) * 1e3,
        "finish_max_ms": max(finished["walls"]) * 1e3,
        "stall_median_ms": statistics.median(finished["stalls"]) * 1e3,
        "stall_max_ms": max(finished["stalls"]) * 1e3,
        "rows_per_session": sum(finished["rows"]) / len(sessions),
    }


def run_row(row: Row, workload: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All conversation lengths in one fresh process, shortest first."""
    with _started(row, workload, args) as server:
        return [measure(row, server, workload, turns, args) for turns in args.turns]


@contextlib.contextmanager
def _started(row: Row, workload: Path, args: argparse.Namespace) -> Iterator[Server]:
    with contextlib.ExitStack() as stack:
        options = {}
        if row.kind == "rllm":
            upstream = stack.enter_context(Server(Row("upstream", "upstream"), workload, args.tokenizer))
            options["upstream"] = f"http://127.0.0.1:{upstream.port}"
        server = stack.enter_context(Server(row, workload, args.tokenizer, **options))
        drive(server, server.ask("open", count=8), workload, concurrency=8, turns=3)  # imports, caches, probes
        server.ask("finish")
        yield server


def measure_memory(row: Row, workload: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What sessions of the longest conversations weigh: the growth of resident memory by the second half of them.

    The first half pays for what is there once (caches, the allocator's pools). Memory that comes back may stay with
    the process; whether it does come back shows when as many sessions again, after all were finished, need no more.
    """
    half, turns = max(1, args.agents // 2), args.turns[-1]
    with _started(row, workload, args) as server:

        def hold() -> tuple[float, int]:
            load = drive(server, server.ask("open", count=half), workload, concurrency=half, turns=turns)
            return server.ask("usage")["rss"], load["tokens"]

        first, _ = hold()
        second, tokens = hold()
        server.ask("finish")
        hold()
        again, _ = hold()
        server.ask("finish")
    return {
        "bytes_per_token": (second - first) / tokens,
        "mb_per_session": (second - first) / half / 1e6,
        "mb_kept_per_session": (again - second) / (2 * half) / 1e6,
    }


def measure_lag(row: Row, workload: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The loop's lag while agents think for about a second between turns and a long first prompt comes every second."""
    turns = args.lag_seconds
    with _started(row, workload, args) as server:
        sessions = server.ask("open", count=args.lag_agents)
        large = server.ask("open", count=args.lag_seconds)
        before = server.ask("usage")  # it collects garbage: not while the loop is watched
        server.ask("watch")
        load = drive(server, sessions, workload, concurrency=len(sessions), turns=turns, pause=[0.5, 1.5], large=large)
        lags = sorted(server.ask("unwatch"))
        after = server.ask("usage")
    return {
        "lag_p50_ms": lags[len(lags) // 2] * 1e3,
        "lag_p99_ms": lags[int(len(lags) * 0.99)] * 1e3,
        "lag_max_ms": lags[-1] * 1e3,
        "turns_per_second": load["turns"] / load["wall"],
        "latency_p99_ms": load["p99"] * 1e3,
        "cpu_share": (after["cpu"] - before["cpu_after"]) / load["wall"],
    }


# -- contenders --------------------------------------------------------------------------------------------


def contenders(args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """The rows of this run, and why a row is missing."""
    rows = [Row("bare handler", "bare"), Row("append-only ideal", "ideal"), Row("gateway", "gateway")]
    notes = []
    missing = [name for name in ("orjson", "fastokens") if find_spec(name) is None]
    if "fast" not in (metadata("agentcore-rl-toolkit").get_all("Provides-Extra") or ()):
        notes.append("gateway, fast: skipped, the package has no extra [fast] yet")
    elif missing:
        notes.append(f"gateway, fast: skipped, {' and '.join(missing)} not installed (the extra [fast])")
    else:
        rows.append(Row("gateway, fast", "gateway", {"fast": True}))
    rows.append(Row("gateway, streamed", "gateway", {"stream": True}))
    if args.peers:
        pythons = {name: str(environment(args.envs / name, wanted)) for name, wanted in PEERS.items()}
        rows.append(Row("rllm", "rllm", python=pythons["rllm"]))
        rows += [Row(f"original, {h}", "original", {"history": h}, pythons["original"]) for h in ("tree", "linear")]
    if args.only:
        rows = [row for row in rows if row.name in args.only]
    return rows, notes


# -- report --------------------------------------------------------------------------------------------------


def summarize(rounds: dict[str, list[list[dict[str, Any]]]]) -> dict[str, list[dict[str, Any]]]:
    """Of all rounds, per contender and conversation length: the least and the median CPU; of the rest the median."""
    summary = {}
    for name, runs in rounds.items():
        summary[name] = []
        for samples in zip(*runs, strict=True):
            merged = {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}
            merged["cpu_per_1000_min"] = min(sample["cpu_per_1000"] for sample in samples)
            summary[name].append(merged)
    return summary


def print_table(summary: dict[str, list[dict[str, Any]]], turns: list[int]) -> None:
    print(
        "\nCPU-seconds of the server process per 1,000 turns, by turns of a conversation: least (median) of all rounds"
    )
    _print_rows(
        [f"{n} turns" for n in turns],
        {
            name: [f"{cell['cpu_per_1000_min']:.2f} ({cell['cpu_per_1000']:.2f})" for cell in cells]
            for name, cells in summary.items()
        },
    )
    for base in ("append-only ideal", "bare handler"):
        if base not in summary:
            continue
        print(f"\nratio to the {base} (least by least)")
        _print_rows(
            [f"{n} turns" for n in turns],
            {
                name: [
                    f"{cell['cpu_per_1000_min'] / other['cpu_per_1000_min']:.2f}"
                    for cell, other in zip(cells, summary[base], strict=True)
                ]
                for name, cells in summary.items()
                if name != base
            },
        )
    print(f"\nat {turns[-1]} turns (medians)")
    columns = {
        "turns/s": ("turns_per_second", ".0f"),
        "p99 ms": ("latency_p99_ms", ".0f"),
        "tokens": ("tokens_per_session", ".0f"),
        "finish ms": ("finish_median_ms", ".1f"),
        "finish max": ("finish_max_ms", ".1f"),
        "stall ms": ("stall_median_ms", ".1f"),
        "stall max": ("stall_max_ms", ".1f"),
        "rows": ("rows_per_session", ".2f"),
    }
    _print_rows(
        list(columns),
        {name: [format(cells[-1][key], form) for key, form in columns.values()] for name, cells in summary.items()},
    )


def print_memory(memory: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    print(f"\nresident memory of held sessions of {args.turns[-1]} turns")
    keys = ["bytes_per_token", "mb_per_session", "mb_kept_per_session"]
    columns = ["bytes/token", "MB/session", "MB/session not reused after finishing"]
    _print_rows(columns, {name: [f"{cell[key]:.2f}" for key in keys] for name, cell in memory.items()})


def print_lag(lags: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    print(
        f"\nevent-loop lag, {args.lag_agents} agents that think for 0.5–1.5 s, and a first prompt of "
        f"{LARGE_PROMPT:,} tokens every second"
    )
    keys = ["lag_p50_ms", "lag_p99_ms", "lag_max_ms", "latency_p99_ms", "turns_per_second", "cpu_share"]
    columns = ["lag p50 ms", "lag p99 ms", "lag max ms", "turn p99 ms", "turns/s", "CPU share"]
    _print_rows(columns, {name: [f"{cell[key]:.2f}" for key in keys] for name, cell in lags.items()})


def _print_rows(columns: list[str], rows: dict[str, list[str]]) -> None:
    width = max(len(name) for name in rows)
    widths = [max(len(column), *(len(cells[i]) for cells in rows.values())) for i, column in enumerate(columns)]
    print(" " * width, *(column.rjust(w) for column, w in zip(columns, widths, strict=True)), sep="  ")
    for name, cells in rows.items():
        print(name.ljust(width), *(cell.rjust(w) for cell, w in zip(cells, widths, strict=True)), sep="  ")


def main() -> None:
    args = _arguments()
    sys.path.insert(0, str(HERE))
    from _workload import make_workload

    rows, notes = contenders(args)
    results: dict[str, Any] = {"tokenizer": args.tokenizer.name, "agents": args.agents, "turns": args.turns}
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder) / "workload.json"
        texts = make_workload(args.tokenizer, large=LARGE_PROMPT if args.lag else 0)
        workload.write_text(json.dumps(texts), "utf-8")
        if args.lag:
            chosen = [row for row in rows if row.kind in ("bare", "gateway")]
            results["lag"] = {row.name: measure_lag(row, workload, args) for row in chosen}
        elif args.memory:
            chosen = [row for row in rows if row.kind != "bare"]
            results["memory"] = {row.name: measure_memory(row, workload, args) for row in chosen}
        else:
            rounds: dict[str, list[list[dict[str, Any]]]] = defaultdict(list)
            for number in range(args.rounds):
                for row in rows:  # interleaved: what else the machine does hits all of them alike
                    if not row.is_peer or number < args.peer_rounds:
                        print(f"round {number + 1}: {row.name}", file=sys.stderr)
                        rounds[row.name].append(run_row(row, workload, args))
            results["rounds"], results["summary"] = rounds, summarize(rounds)
    results["notes"] = notes
    if args.json:
        print(json.dumps(results, indent=1))
        return
    if args.lag:
        print_lag(results["lag"], args)
    elif args.memory:
        print_memory(results["memory"], args)
    else:
        print_table(results["summary"], args.turns)
    print(*notes, sep="\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of a turn in the gateway process.")
    parser.add_argument("--tokenizer", type=Path, default=SHARED if SHARED.is_dir() else TINY, metavar="FOLDER")
    parser.add_argument("--turns", type=_numbers, default=[1, 10, 40, 100], metavar="1,10,40,100")
    parser.add_argument("--agents", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--min-turns", type=int, default=1000, help="repeat short conversations up to this many turns")
    parser.add_argument("--peers", action="store_true", help="measure the published gateways too")
    parser.add_argument("--peer-rounds", type=int, default=1)
    parser.add_argument("--envs", type=Path, default=HERE / ".envs", help="where the peers' environments are kept")
    parser.add_argument("--only", action="append", metavar="ROW", help="only the row of this name; may be repeated")
    parser.add_argument("--memory", action="store_true", help="measure the memory of held sessions instead")
    parser.add_argument("--lag", action="store_true", help="measure the event loop's lag instead")
    parser.add_argument("--lag-agents", type=int, default=256)
    parser.add_argument("--lag-seconds", type=int, default=20)
    parser.add_argument("--profile", metavar="PREFIX", help="write cProfile files of the gateway's event loop")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    args.turns.sort()
    args.tokenizer, args.envs = args.tokenizer.resolve(), args.envs.resolve()
    return args


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()

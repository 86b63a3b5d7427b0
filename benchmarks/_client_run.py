"""One batch by one client, under the interpreter whose package is measured; prints its figures as one line of JSON.

Standard input: an object with ``mode`` (sync, async), ``arn``, ``bucket``, ``payloads``, ``concurrent``. What is called
is the same in the published package and in this one, so one script measures both.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import resource
import sys
import time
from typing import Any

from agentcore_rl_toolkit import RolloutClient


def main() -> None:
    job = json.load(sys.stdin)
    options = {"tps_limit": 1000, "max_pool_connections": 64}
    if "new_sessions_per_minute" in inspect.signature(RolloutClient).parameters:
        options["new_sessions_per_minute"] = None
    if job.get("notify"):
        options["notify_address"] = job["notify"]
    client = RolloutClient(job["arn"], job["bucket"], f"bench-{time.time_ns()}", **options)
    delays: list[float] = []
    failed = 0

    def take(item: Any) -> None:
        nonlocal failed
        if item.success:
            delays.append(time.time() - item.result["finished_at"])
        else:
            failed += 1
            print(item.error, file=sys.stderr)

    cpu, wall = time.process_time(), time.monotonic()
    if job["mode"] == "sync":
        for item in client.run_batch(job["payloads"], job["concurrent"], timeout=120.0):
            take(item)
    else:

        async def collect() -> None:
            async for item in client.run_batch_async(job["payloads"], job["concurrent"], timeout=120.0):
                take(item)

        asyncio.run(collect())
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    delays.sort()
    print(
        json.dumps(
            {
                "wall": wall,
                "cpu_ms": 1000 * cpu / len(job["payloads"]),
                "median": delays[len(delays) // 2],
                "p95": delays[int(len(delays) * 0.95)],
                "max": delays[-1],
                "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "failed": failed,
            }
        )
    )


if __name__ == "__main__":
    main()

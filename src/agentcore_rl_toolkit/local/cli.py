"""``agentcore-rl local``: serve AgentCore Runtime and S3 in the foreground."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
import threading
from types import FrameType

from agentcore_rl_toolkit.errors import SetupError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "local",
        help="AgentCore Runtime and S3 on this machine",
        description="Serve AgentCore Runtime and S3 on 127.0.0.1, until Ctrl-C (twice: at once).",
    )
    parser.add_argument("--agent", required=True, metavar="COMMAND", help="start command, e.g. 'python rl_app.py'")
    parser.add_argument("--cwd", metavar="DIR", help="where the command's files are (default: here)")
    parser.add_argument("--data-dir", metavar="DIR", help="sessions and S3 objects (default: temporary)")
    parser.add_argument("--port", type=int, default=0, help="AgentCore's port (default: a free one)")
    parser.add_argument("--s3-port", type=int, default=0, help="S3's port (default: a free one)")
    parser.add_argument("--bucket", default="local", help="a bucket that exists from the start (default: local)")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="for the agent; may be repeated"
    )
    parser.add_argument(
        "--start", choices=["fork", "process"], help="how sessions start (default: fork for 'python file.py')"
    )
    parser.add_argument(
        "--protocol", choices=["HTTP", "A2A"], default="HTTP", help="what the agent serves (default: HTTP)"
    )
    parser.add_argument("--idle-timeout", type=float, default=900.0, metavar="SECONDS", help="default: 900")
    parser.add_argument("--max-lifetime", type=float, default=28_800.0, metavar="SECONDS", help="default: 28800")
    parser.add_argument("--stop-grace", type=float, default=15.0, metavar="SECONDS", help="default: 15")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from . import Lifecycle, LocalAgentCore

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("agentcore_rl_toolkit.local").setLevel(logging.INFO)
    stop = _stop_on_signals()
    lifecycle = Lifecycle(
        idle_timeout=arguments.idle_timeout,
        max_lifetime=arguments.max_lifetime,
        stop_grace=arguments.stop_grace,
    )
    local = LocalAgentCore(
        arguments.agent,
        cwd=arguments.cwd,
        data_dir=arguments.data_dir,
        port=arguments.port,
        s3_port=arguments.s3_port,
        bucket=arguments.bucket,
        env=_variables(arguments.env),
        start=arguments.start,
        protocol=arguments.protocol,
        lifecycle=lifecycle,
    )
    with local:
        environment = local.environment()
        exports = ("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", "AWS_ENDPOINT_URL_S3")
        print("AgentCore Runtime and S3 are up. For clients in another shell:\n")
        for name in exports:
            print(f"  export {name}={shlex.quote(environment[name])}")
        rest = " ".join(
            f"{k}={v}" for k, v in environment.items() if k.startswith(("AWS_ACCESS", "AWS_SECRET", "AWS_DEFAULT"))
        )
        print(f"  export {rest}   # if you have no credentials")
        print(f"\nagent runtime ARN  {local.agent_runtime_arn}\nbucket             {local.bucket}")
        print(f"logs               {local.data_dir / 'sessions'}\n", flush=True)
        stop.wait()
        print("stopping; Ctrl-C again to quit at once", file=sys.stderr)
    return 0


def _stop_on_signals() -> threading.Event:
    """Set by the first SIGINT or SIGTERM; the second one quits; the supervisors kill what is left."""
    stop = threading.Event()

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return stop


def _variables(pairs: list[str]) -> dict[str, str]:
    variables = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise SetupError(f"--env {pair}: NAME=VALUE is required")
        variables[name] = value
    return variables

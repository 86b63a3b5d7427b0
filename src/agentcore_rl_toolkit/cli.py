"""The command ``agentcore-rl``. Each subcommand is a module with ``add_parser(subparsers)``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from . import __version__
from .errors import ToolkitError

# Modules that are cheap to import: what a subcommand needs, it imports when it runs.
_SUBCOMMANDS = ("local.cli", "local.demo", "evaluation.cli")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit code. A ``ToolkitError`` is one line on stderr, not a traceback."""
    _open_standard_streams()
    _read_dotenv()
    parser = argparse.ArgumentParser(
        prog="agentcore-rl",
        description="Reinforcement learning for agents on Amazon Bedrock AgentCore Runtime.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for module in _SUBCOMMANDS:
        import_module(f".{module}", __package__).add_parser(subparsers)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ToolkitError as error:
        print(f"agentcore-rl: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does: nothing more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"agentcore-rl: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered would fail again
        return 1
    except KeyboardInterrupt:
        return 130


def _read_dotenv() -> None:
    """Take from ``.env`` (``AGENTCORE_AGENT_ARN``, ``AGENTCORE_S3_BUCKET``, …) what the environment does not say."""
    if not os.path.isfile(".env"):
        return
    try:
        dotenv = import_module("dotenv")
    except ModuleNotFoundError:
        print("agentcore-rl: .env is not read: pip install 'agentcore-rl-toolkit[dotenv]'", file=sys.stderr)
        return
    dotenv.load_dotenv(".env")


def _open_standard_streams() -> None:
    """Put /dev/null where a standard stream was closed (``>&-``): a socket must not become somebody's stdout."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))

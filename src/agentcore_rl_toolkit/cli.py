"""The command ``agentcore-rl``. Each subcommand is a module with ``add_parser(subparsers)``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from . import __version__
from .errors import ToolkitError

# Modules that are cheap to import: what a subcommand needs, it imports when it runs.
_SUBCOMMANDS = ("local.cli", "local.demo")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit code. A ``ToolkitError`` is one line on stderr, not a traceback."""
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
    except KeyboardInterrupt:
        return 130

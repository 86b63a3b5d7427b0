"""Types of command-line arguments that several subcommands take."""

from __future__ import annotations

import argparse


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)

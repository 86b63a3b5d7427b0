"""What a command has started, found by a mark in the environment that it gave to all of them."""

import contextlib
import time
from pathlib import Path


def marked(mark: str) -> list[int]:
    """All that still run and were started with the mark, however indirectly."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def assert_nothing_is_left(mark: str) -> None:
    deadline = time.monotonic() + 8
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []

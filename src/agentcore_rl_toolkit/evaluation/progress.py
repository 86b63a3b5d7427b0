"""What an evaluation shows while it runs: a bar on a terminal, else a line now and then. Both on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

from .results import Sample

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_INTERVAL = 10.0  # seconds


class Show(Protocol):
    def __call__(self, samples: Sequence[Sample]) -> None:
        """``samples``: all that have finished so far."""


@contextmanager
def progress(total: int, *, plain: bool) -> Iterator[Show]:
    """How far the run of ``total`` samples is, while the block lasts."""
    bar = None if plain or not sys.stderr.isatty() else _bar()
    if bar is None:
        yield _Lines(total)
        return
    with bar:
        job = bar.add_task("", total=total)
        yield lambda samples: bar.update(job, completed=len(samples), description=_summary(samples))


def _bar() -> Progress | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:  # it comes with an extra
        return None
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True)


@dataclass(slots=True)
class _Lines:
    """The first and the last sample get a line, and one every ``LINE_INTERVAL`` seconds."""

    total: int
    next: float = 0.0

    def __call__(self, samples: Sequence[Sample]) -> None:
        if len(samples) < self.total and time.monotonic() < self.next:
            return
        self.next = time.monotonic() + LINE_INTERVAL
        print(
            f"{time.strftime('%H:%M:%S')} {len(samples)}/{self.total} {_summary(samples)}", file=sys.stderr, flush=True
        )


def _summary(samples: Sequence[Sample]) -> str:
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    failed = sum(sample.failed for sample in samples)
    return f"mean reward {fmean(rewards):.3f}, {failed} failed" if rewards else f"no reward yet, {failed} failed"

"""What an evaluation shows while it runs: a bar on a terminal, else a line now and then. Both on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..client._progress import new_bar
from .results import Sample

LINE_INTERVAL = 10.0  # seconds


@contextmanager
def progress(total: int, finished: Iterable[Sample], *, plain: bool) -> Iterator[Callable[[Sample], None]]:
    """How far the run of ``total`` samples is, while the block lasts; what it gives is to be told of each more."""
    tally = _Tally(total)
    for sample in finished:
        tally.add(sample)
    bar = None if plain or not sys.stderr.isatty() else new_bar(transient=True)
    if bar is None:
        yield _Lines(tally)
        return
    with bar:
        job = bar.add_task(str(tally), total=total, completed=tally.finished)

        def draw(sample: Sample) -> None:
            tally.add(sample)
            bar.update(job, completed=tally.finished, description=str(tally))

        yield draw


@dataclass(slots=True)
class _Tally:
    total: int
    finished: int = 0
    failed: int = 0
    rewarded: int = 0
    rewards: float = 0.0

    def add(self, sample: Sample) -> None:
        self.finished += 1
        self.failed += sample.failed
        if sample.reward is not None:
            self.rewarded += 1
            self.rewards += sample.reward

    def __str__(self) -> str:
        reward = f"mean reward {self.rewards / self.rewarded:.3f}" if self.rewarded else "no reward yet"
        return f"{reward}, {self.failed} failed"


class _Lines:
    """The first and the last sample get a line, and one every ``LINE_INTERVAL`` seconds."""

    def __init__(self, tally: _Tally) -> None:
        self._tally, self._next = tally, 0.0

    def __call__(self, sample: Sample) -> None:
        tally = self._tally
        tally.add(sample)
        if tally.finished < tally.total and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LINE_INTERVAL
        print(f"{time.strftime('%H:%M:%S')} {tally.finished}/{tally.total} {tally}", file=sys.stderr, flush=True)

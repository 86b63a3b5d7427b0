"""Progress of a batch: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from typing import TYPE_CHECKING

from ..errors import Outcome

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

__all__ = ["Progress", "new_bar"]

logger = logging.getLogger("agentcore_rl_toolkit.client")


class Progress:
    """``total``: rollouts, None if unknown. ``bar``: None shows one where standard error is a terminal and rich is
    installed. ``log_interval``: seconds between log lines."""

    def __init__(self, total: int | None, bar: bool | None, log_interval: float) -> None:
        self._total, self._log_interval = total, log_interval
        self._outcomes: Counter[Outcome] = Counter()
        self._active = 0
        wanted = bar or (bar is None and sys.stderr is not None and sys.stderr.isatty())
        self._bar = new_bar() if wanted else None
        if self._bar is not None:
            self._row = self._bar.add_task("rollouts", total=total)
            self._bar.start()
        self._task: asyncio.Task[None] | None = None

    def started(self) -> None:
        self._active += 1
        if self._task is None:
            self._task = asyncio.create_task(self._log())

    def ended(self, outcome: Outcome | None) -> None:
        self._active -= 1
        if outcome is not None:
            self._outcomes[outcome] += 1
            if self._bar is not None:
                self._bar.update(self._row, advance=1, description=f"rollouts ({self._text()})")

    def _text(self) -> str:
        return ", ".join(
            [*(f"{count} {outcome}" for outcome, count in self._outcomes.items()), f"{self._active} active"]
        )

    async def _log(self) -> None:
        while True:
            await asyncio.sleep(self._log_interval)
            done, of = self._outcomes.total(), "" if self._total is None else f" of {self._total}"
            logger.info("batch: %d%s done: %s", done, of, self._text())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def new_bar(*, transient: bool = False) -> Bar | None:
    """On standard error; None without rich, which comes with an extra. ``transient``: nothing of it stays."""
    try:
        from rich import progress
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    columns = (
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.description}"),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    return progress.Progress(*columns, console=Console(stderr=True), transient=transient)

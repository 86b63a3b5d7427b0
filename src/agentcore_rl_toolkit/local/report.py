"""What a training run shows: a table that grows while it runs, and the reward curve as an SVG file."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from ..errors import Outcome

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..rollouts import Rollout


@dataclass(slots=True)
class Step:
    """One training step. Grows with every rollout that :meth:`add` counts.

    ``rewards``: of the rollouts that have one. ``outcomes``: how many ended how. ``tokens``, ``turns``: sampled
    by the policy. ``seconds``: the step's time so far. ``logprob_gap``: the largest difference between a logprob
    that the gateway captured and the one the trainer computes for the same token; None where no update was made.
    """

    number: int
    rollouts: int
    rewards: list[float] = field(default_factory=list)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    tokens: int = 0
    turns: int = 0
    seconds: float = 0.0
    logprob_gap: float | None = None

    def add(self, rollout: Rollout) -> None:
        self.outcomes[rollout.outcome] += 1
        if rollout.reward is not None:
            self.rewards.append(rollout.reward)
        for record in rollout.records:
            self.tokens += sum(record.loss_mask)
            self.turns += sum(turn["trained"] for turn in record.metadata["turns"])

    @property
    def done(self) -> int:
        return self.outcomes.total()

    @property
    def failures(self) -> int:
        return self.done - self.outcomes[Outcome.SUCCEEDED] - self.outcomes[Outcome.TRUNCATED]

    @property
    def reward(self) -> float | None:
        """Mean reward, None where no rollout has one."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


_COLUMNS = ("step", "reward", "success", "tokens", "turns/s", "failures", "|Δ logprob|")


def _cells(step: Step) -> tuple[str, ...]:
    success = (step.done - step.failures) / step.done if step.done else None
    return (
        str(step.number),
        _number(step.reward, ".3f"),
        _number(success, ".0%"),
        str(step.tokens),
        _number(step.turns / step.seconds if step.seconds else None, ".1f"),
        str(step.failures),
        _number(step.logprob_gap, ".1g"),
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


class PlainReport:
    """One line a step, for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __enter__(self) -> Self:
        self._print("  ".join(_COLUMNS))
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, step: Step) -> None:
        """A rollout of this step has ended."""

    def finish(self, step: Step) -> None:
        """The step is complete."""
        cells = zip(_cells(step), _COLUMNS, strict=True)
        self._print("  ".join(cell.rjust(len(column)) for cell, column in cells))

    def _print(self, line: str) -> None:
        print(line, file=self._out, flush=True)


class LiveReport:
    """A table on a terminal, redrawn as rollouts end; the newest steps stay in sight."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._steps: list[Step] = []
        self._current: Step | None = None
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        self._console.print(self._table(self._steps))

    def update(self, step: Step) -> None:
        self._current = step

    def finish(self, step: Step) -> None:
        self._steps.append(step)
        self._current = None

    def _render(self) -> RenderableType:
        shown = [*self._steps, *filter(None, [self._current])]
        return self._table(shown[-max(1, self._console.height - 6) :])

    def _table(self, steps: Sequence[Step]) -> RenderableType:
        from rich.table import Table

        table = Table(*_COLUMNS, "", box=None, header_style="bold", padding=(0, 2, 0, 0))
        for column in table.columns[:-1]:
            column.justify = "right"
        for step in steps:
            running = step is self._current
            note = f"{step.done}/{step.rollouts}" if running else _bar(step.reward)
            style = "dim" if running else "red" if step.failures else ""
            table.add_row(*_cells(step), note, style=style)
        return table


def _bar(fraction: float | None, width: int = 12) -> str:
    return "" if fraction is None else "█" * round(width * min(max(fraction, 0.0), 1.0))


def make_report(*, plain: bool) -> PlainReport | LiveReport:
    """The live table where there is a terminal to draw it on, else lines."""
    return PlainReport(sys.stdout) if plain or not sys.stdout.isatty() else LiveReport()


# -- the curve -------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 20, 48, 52  # margins


def reward_svg(rewards: Sequence[float | None], title: str) -> str:
    """The curve of a mean reward per step, from step 1, as a complete SVG file. None leaves a gap."""
    known = [reward for reward in rewards if reward is not None]
    low, high = min([0.0, *known]), max([1.0, *known])
    last = max(len(rewards), 2)

    def x(step: float) -> float:
        return _LEFT + (step - 1) / (last - 1) * (_WIDTH - _LEFT - _RIGHT)

    def y(reward: float) -> float:
        return _HEIGHT - _BOTTOM - (reward - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        _element("rect", width=_WIDTH, height=_HEIGHT, fill="white"),
        _text(title, _LEFT, 28, size=16, fill="#111"),
        _text("training step", (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, anchor="middle"),
        _text("mean reward", 16, (_TOP + _HEIGHT - _BOTTOM) / 2, anchor="middle", turned=True),
    ]
    for i in range(5):
        value = low + (high - low) * i / 4
        parts.append(_line(_LEFT, y(value), _WIDTH - _RIGHT, y(value), "#ddd"))
        parts.append(_text(f"{value:.2f}", _LEFT - 8, y(value) + 4, anchor="end"))
    ticks = range(1, last + 1, max(1, round(last / 8)))
    parts += [_text(str(step), x(step), _HEIGHT - _BOTTOM + 18, anchor="middle") for step in ticks]
    parts.append(_line(_LEFT, _HEIGHT - _BOTTOM, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM, "#555"))
    parts.append(_line(_LEFT, _TOP, _LEFT, _HEIGHT - _BOTTOM, "#555"))

    points = [(x(step), y(r)) for step, r in enumerate(rewards, start=1) if r is not None]
    for piece in _pieces(rewards):
        line = " ".join(f"{x(step):.1f},{y(reward):.1f}" for step, reward in piece)
        parts.append(_element("polyline", points=line, fill="none", stroke="#c2410c", stroke_width=2.5))
    parts += [_element("circle", cx=f"{px:.1f}", cy=f"{py:.1f}", r=3, fill="#c2410c") for px, py in points]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif">\n{body}\n</svg>\n'
    )


def _pieces(rewards: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Runs of neighbouring steps that have a reward, as ``(step, reward)``."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for step, reward in enumerate(rewards, start=1):
        if reward is None:
            pieces.append([])
        else:
            pieces[-1].append((step, reward))
    return [piece for piece in pieces if piece]


def _element(name: str, content: str = "", **attributes: object) -> str:
    values = "".join(f' {key.replace("_", "-")}="{escape(str(v))}"' for key, v in attributes.items())
    return f"<{name}{values}>{escape(content)}</{name}>" if content else f"<{name}{values}/>"


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return _element("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", stroke=color)


def _text(
    text: str,
    x: float,
    y: float,
    *,
    anchor: str = "start",
    size: int = 12,
    fill: str = "#555",
    turned: bool = False,
) -> str:
    attributes: Mapping[str, Any] = {"x": f"{x:.1f}", "y": f"{y:.1f}", "font_size": size, "fill": fill}
    turn = {"transform": f"rotate(-90 {x:.1f} {y:.1f})"} if turned else {}
    return _element("text", text, text_anchor=anchor, **attributes, **turn)

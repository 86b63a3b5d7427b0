"""From samples to a report: its numbers, and their form as text, Markdown and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from .results import Sample
from .statistics import Estimate, mean, pass_at_k, pass_hat_k, percentile, proportion

__all__ = ["Report", "Rule", "Table", "make_report", "markdown", "number", "text"]

PERCENTILES = (50, 90, 95, 99, 100)


@dataclass(frozen=True, slots=True)
class Rule:
    """How a sample is counted.

    ``threshold``: a reward of at least this is a success. ``failed_as_zero``: a failed rollout has reward 0;
    otherwise it counts in no mean, because a lost session says nothing about the agent's skill.
    """

    threshold: float = 1.0
    failed_as_zero: bool = False

    def reward(self, sample: Sample) -> float | None:
        return 0.0 if sample.failed and self.failed_as_zero else sample.reward

    def tasks(self, samples: Iterable[Sample]) -> dict[str, list[float]]:
        """The rewards that count, of each task that has any."""
        tasks: dict[str, list[float]] = {}
        for sample in samples:
            if (reward := self.reward(sample)) is not None:
                tasks.setdefault(sample.task, []).append(reward)
        return tasks

    def successes(self, rewards: Iterable[float]) -> int:
        return sum(reward >= self.threshold for reward in rewards)


@dataclass(slots=True)
class Report:
    """The numbers of one run.

    ``tasks``, ``planned``, ``finished``, ``scored``: how many tasks, samples to run, samples that ended, samples
    with a reward that counts. ``outcomes``: how many ended how. ``pass_at_k``, ``pass_hat_k``: by k; tasks with
    fewer than k scored samples are left out of that row. ``latency``: seconds, by percentile, of the rollouts that
    did not fail. ``unscored_tasks``: tasks without a single scored sample; they are in none of the estimates.
    """

    tasks: int
    planned: int
    finished: int
    scored: int
    rule: Rule
    mean_reward: Estimate
    success_rate: Estimate
    outcomes: dict[str, int]
    pass_at_k: dict[int, Estimate] = field(default_factory=dict)
    pass_hat_k: dict[int, Estimate] = field(default_factory=dict)
    latency: dict[str, float] = field(default_factory=dict)
    unscored_tasks: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """What a reader must know before believing the numbers."""
        failed = self.finished - sum(self.outcomes.get(name, 0) for name in ("succeeded", "truncated"))
        notes = []
        if self.finished < self.planned:
            notes.append(f"{self.planned - self.finished} of {self.planned} samples have not finished.")
        if failed and self.rule.failed_as_zero:
            notes.append(f"{failed} failed rollouts count with reward 0 (--failed-as-zero).")
        elif failed:
            notes.append(f"{failed} failed rollouts count in no mean; --failed-as-zero would give them reward 0.")
        if lost := self.outcomes.get("runtime_failed", 0) + self.outcomes.get("cancelled", 0):
            notes.append(f"{lost} of them lost their session; the same command runs them again.")
        silent = self.finished - self.scored - (0 if self.rule.failed_as_zero else failed)
        if silent:
            notes.append(f"{silent} rollouts succeeded without a reward: the agent's result has no `rewards`.")
        if self.unscored_tasks:
            notes.append(f"{len(self.unscored_tasks)} of {self.tasks} tasks have no scored sample and count nowhere.")
        if self.mean_reward.tasks == 1:
            notes.append("With one task there is no interval.")
        return notes


def make_report(samples: Sequence[Sample], tasks: Sequence[str], per_task: int, rule: Rule) -> Report:
    """The report of ``samples`` of ``tasks`` (ids), of which each was to have ``per_task``."""
    rewards = rule.tasks(samples)
    counts = [(len(values), rule.successes(values)) for values in rewards.values()]
    seconds = [sample.elapsed for sample in samples if not sample.failed]
    ks = range(1, max((n for n, _ in counts), default=0) + 1)
    return Report(
        tasks=len(tasks),
        planned=len(tasks) * per_task,
        finished=len(samples),
        scored=sum(n for n, _ in counts),
        rule=rule,
        mean_reward=mean([fmean(values) for values in rewards.values()]),
        success_rate=proportion([c / n for n, c in counts], sum(n for n, _ in counts)),
        outcomes=dict(Counter(sample.outcome.value for sample in samples).most_common()),
        pass_at_k={k: _passes(pass_at_k, counts, k) for k in ks},
        pass_hat_k={k: _passes(pass_hat_k, counts, k) for k in ks},
        latency={f"p{p}" if p < 100 else "max": percentile(seconds, p) for p in PERCENTILES} if seconds else {},
        unscored_tasks=[task for task in tasks if task not in rewards],
    )


def _passes(chance: Callable[[int, int, int], float], counts: Sequence[tuple[int, int]], k: int) -> Estimate:
    enough = [(n, c) for n, c in counts if n >= k]
    return proportion([chance(n, c, k) for n, c in enough], sum(n for n, _ in enough))


# -- form ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """``rows`` under ``header``; the first column is text, the others are numbers."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(report: Report) -> list[Table]:
    ks = [k for k in report.pass_at_k if k & (k - 1) == 0 or k == len(report.pass_at_k)]  # 1, 2, 4, 8, … and the last
    estimates = [
        ("mean reward", report.mean_reward),
        (f"success rate (reward >= {report.rule.threshold:g})", report.success_rate),
        *((f"pass@{k}", report.pass_at_k[k]) for k in ks),
        *((f"pass^{k}", report.pass_hat_k[k]) for k in ks if k > 1),  # pass^1 is pass@1
    ]
    found = [
        Table(("", "value", "95 % interval", "tasks"), [estimate_row(name, estimate) for name, estimate in estimates]),
        Table(("outcome", "rollouts"), [(name, str(count)) for name, count in report.outcomes.items()]),
        Table(("latency", "seconds"), [(name, f"{value:.2f}") for name, value in report.latency.items()]),
    ]
    return [table for table in found if table.rows]


def estimate_row(name: str, estimate: Estimate, sign: str = "") -> tuple[str, ...]:
    low, high = number(estimate.low, sign), number(estimate.high, sign)
    return name, number(estimate.value, sign), "-" if estimate.low is None else f"{low} to {high}", str(estimate.tasks)


def number(value: float | None, sign: str = "") -> str:
    """Three decimals; ``sign="+"`` shows the sign always."""
    return "-" if value is None else format(value, f"{sign}.3f")


def title(report: Report) -> str:
    return f"{report.tasks} tasks, {report.finished} of {report.planned} samples finished, {report.scored} scored"


def text(heading: str, found: Iterable[Table], notes: Iterable[str]) -> str:
    """For a terminal."""
    return "\n\n".join(filter(None, [heading, *map(_text_table, found), "\n".join(notes)]))


def _text_table(table: Table) -> str:
    rows = [table.header, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.header))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def markdown(heading: str, found: Iterable[Table], notes: Iterable[str]) -> str:
    return "\n\n".join(filter(None, [f"# {heading}", *map(_markdown_table, found), *notes]))


def _markdown_table(table: Table) -> str:
    rule = ["---", *["---:"] * (len(table.header) - 1)]
    rows = ([cell.replace("|", "\\|") for cell in row] for row in table.rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in [table.header, rule, *rows])


def plain(report: Report) -> dict[str, Any]:
    """For ``report.json``."""
    values = asdict(report)
    for name in ("pass_at_k", "pass_hat_k"):
        values[name] = {str(k): estimate for k, estimate in values[name].items()}
    return {**values, "notes": report.notes}

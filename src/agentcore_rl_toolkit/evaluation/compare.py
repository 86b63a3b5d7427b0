"""Two runs over the same tasks: what changed, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ..errors import SetupError
from .report import Rule, Table, estimate_row, number
from .results import Sample
from .statistics import Estimate, mean

SOLVED = 0.5
"""A task is solved if at least this share of its samples succeed."""
MOST_FLIPS = 50  # that a table shows


@dataclass(frozen=True, slots=True)
class Change:
    """One task in both runs: mean reward and share of successes, before and after."""

    task: str
    reward_a: float
    reward_b: float
    success_a: float
    success_b: float

    @property
    def flipped(self) -> bool:
        return (self.success_a >= SOLVED) != (self.success_b >= SOLVED)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a run has: tasks of which a sample has finished, samples that have, samples with a reward that counts."""

    tasks: int
    finished: int
    scored: int

    def __str__(self) -> str:
        return f"{self.tasks} tasks, {self.finished} samples finished, {self.scored} scored"


@dataclass(frozen=True, slots=True)
class Comparison:
    """``b`` minus ``a`` over the tasks that have a scored sample in both.

    ``reward``, ``success``: mean difference per task with the paired-t interval (Miller 2024, arXiv:2411.00640).
    ``a``, ``b``: what each run has. Not compared: ``only_a``, ``only_b``, tasks that the other run has no scored sample
    of; ``neither``, tasks of which no sample was scored; ``different``, tasks of the same id whose payloads differ.
    """

    a: Counts
    b: Counts

    reward: Estimate
    success: Estimate
    changes: list[Change]
    only_a: list[str]
    only_b: list[str]
    neither: list[str]
    different: list[str]

    @property
    def flipped(self) -> list[Change]:
        """The tasks that are solved in one run only: first those that were lost, the largest change first."""
        found = [change for change in self.changes if change.flipped]
        return sorted(found, key=lambda c: (c.success_b > c.success_a, -abs(c.success_b - c.success_a), c.task))


def compare(a: Sequence[Sample], b: Sequence[Sample], rule: Rule) -> Comparison:
    """Raises ``SetupError`` if the runs have no scored task in common."""
    tasks_a, tasks_b = rule.tasks(a), rule.tasks(b)
    digests_a, digests_b = _digests(a), _digests(b)
    common = [task for task in tasks_a if task in tasks_b]
    different = [task for task in common if digests_a[task] != digests_b[task]]
    same = [task for task in common if digests_a[task] == digests_b[task]]
    if not same:
        why = "their payloads differ" if different else "their tasks have different ids, or no sample was scored"
        raise SetupError(f"the two runs have no scored task in common: {why}")
    changes = [_change(task, tasks_a[task], tasks_b[task], rule) for task in same]
    return Comparison(
        a=_counts(a, tasks_a),
        b=_counts(b, tasks_b),
        reward=mean([change.reward_b - change.reward_a for change in changes]),
        success=mean([change.success_b - change.success_a for change in changes]),
        changes=changes,
        only_a=[task for task in tasks_a if task not in tasks_b],
        only_b=[task for task in tasks_b if task not in tasks_a],
        neither=[task for task in digests_a | digests_b if task not in tasks_a and task not in tasks_b],
        different=different,
    )


def _digests(samples: Sequence[Sample]) -> dict[str, str]:
    return {sample.task: sample.digest for sample in samples}


def _counts(samples: Sequence[Sample], scored: Mapping[str, Sequence[float]]) -> Counts:
    return Counts(len(_digests(samples)), len(samples), sum(map(len, scored.values())))


def _change(task: str, a: Sequence[float], b: Sequence[float], rule: Rule) -> Change:
    return Change(task, fmean(a), fmean(b), rule.successes(a) / len(a), rule.successes(b) / len(b))


def heading(found: Comparison, a: str, b: str) -> str:
    return f"a: {a}: {found.a}\nb: {b}: {found.b}"


def tables(found: Comparison, rule: Rule) -> list[Table]:
    differences = Table(
        ("b - a", "difference", "95 % interval", "tasks"),
        [
            estimate_row("mean reward", found.reward, "+"),
            estimate_row(f"success rate (reward >= {rule.threshold:g})", found.success, "+"),
        ],
    )
    flips = Table(
        ("flipped task", "success a", "success b", "reward a", "reward b"),
        [
            (c.task, number(c.success_a), number(c.success_b), number(c.reward_a), number(c.reward_b))
            for c in found.flipped[:MOST_FLIPS]
        ],
    )
    return [differences, flips] if flips.rows else [differences]


def notes(found: Comparison) -> list[str]:
    gained = sum(change.success_b > change.success_a for change in found.flipped)
    lost = len(found.flipped) - gained
    lines = [f"Flipped (solved: at least half of the samples succeed): {gained} gained, {lost} lost."]
    if len(found.flipped) > MOST_FLIPS:
        lines[0] += f" The first {MOST_FLIPS} are shown, --json has all."
    if found.only_a or found.only_b or found.neither:
        lines.append(
            f"Not compared: {len(found.only_a)} tasks scored only in a, {len(found.only_b)} only in b,"
            f" {len(found.neither)} in neither."
        )
    if found.different:
        lines.append(f"Not compared: {len(found.different)} tasks whose payloads differ.")
    if found.reward.low is None:
        lines.append("With one task there is no interval.")
    return lines

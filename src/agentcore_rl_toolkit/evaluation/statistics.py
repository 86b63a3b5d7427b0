"""The numbers of a report, in plain Python.

Everything reported is the mean over tasks of one number per task, so that samples of one task are never taken
for independent observations and a task weighs the same however many of its samples failed. For equal sample
counts this is the estimate and the cluster-robust standard error of Miller, "Adding Error Bars to Evals: A
Statistical Approach to Language Model Evaluations", 2024 (arXiv:2411.00640), with the small-sample
factor G/(G-1) and Student's t with G-1 degrees of freedom for G tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, variance

__all__ = ["Estimate", "mean", "pass_at_k", "pass_hat_k", "percentile", "proportion", "student_t"]

_NORMAL_FROM = 10_000  # degrees of freedom; from there on t and normal quantile differ by less than 0.0003


@dataclass(frozen=True, slots=True)
class Estimate:
    """``value`` with its 95 % interval from ``low`` to ``high``, over ``tasks`` tasks.

    ``value`` is None where there is no task; the interval is where there are fewer than two.
    """

    value: float | None
    low: float | None
    high: float | None
    tasks: int


def mean(values: Sequence[float], *, confidence: float = 0.95) -> Estimate:
    """The mean of one value per task, with Student's t interval.

    Of paired differences it is the paired-t interval. All values equal: an interval of width 0, which says
    nothing about tasks not seen.
    """
    if len(values) < 2:
        return Estimate(values[0] if values else None, None, None, len(values))
    center = fmean(values)
    half = student_t(0.5 + confidence / 2, len(values) - 1) * math.sqrt(variance(values) / len(values))
    return Estimate(center, center - half, center + half, len(values))


def proportion(values: Sequence[float], samples: int, *, confidence: float = 0.95) -> Estimate:
    """The mean of one value in [0, 1] per task, with an interval that stays in [0, 1] and never has width 0.

    Wilson's interval with the effective number of observations ``p(1-p)/SE²`` in place of the number of
    ``samples``, which it can't exceed; for p = 0 or 1 it is the number of tasks, as if the samples of a task were
    all one. Korn and Graubard, "Confidence intervals for proportions with small expected number of positive
    counts estimated from survey data", Survey Methodology 24, 1998; Dean and Pagano, "Evaluating confidence
    interval methods for binomial proportions in clustered surveys", J. Survey Statistics and Methodology 3, 2015.
    """
    if len(values) < 2:
        return Estimate(values[0] if values else None, None, None, len(values))
    p = fmean(values)
    spread = p * (1 - p)
    n = _effective(spread, variance(values) / len(values), samples, len(values))
    t2 = student_t(0.5 + confidence / 2, len(values) - 1) ** 2
    center = (p + t2 / (2 * n)) / (1 + t2 / n)
    half = math.sqrt(t2 * (spread / n + t2 / (4 * n * n))) / (1 + t2 / n)
    return Estimate(p, min(p, max(0.0, center - half)), max(p, min(1.0, center + half)), len(values))


def _effective(spread: float, error: float, samples: int, tasks: int) -> float:
    """How many independent observations would have the squared standard error ``error``."""
    if spread <= 0:
        return tasks
    return min(samples, spread / error) if error > 0 else samples


@cache
def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of ``k`` samples succeeds, from ``c`` successes in ``n``; unbiased.

    ``1 - C(n-c, k) / C(n, k)``: Chen et al., "Evaluating Large Language Models Trained on Code", 2021
    (arXiv:2107.03374), equation 1. Raises ``ValueError`` unless 0 <= c <= n and 1 <= k <= n.
    """
    _check(n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


@cache
def pass_hat_k(n: int, c: int, k: int) -> float:
    """The chance that all of ``k`` samples succeed (pass^k), from ``c`` successes in ``n``; unbiased.

    ``C(c, k) / C(n, k)``: Yao et al., "tau-bench: A Benchmark for Tool-Agent-User Interaction in Real-World
    Domains", 2024 (arXiv:2406.12045). Raises ``ValueError`` unless 0 <= c <= n and 1 <= k <= n.
    """
    _check(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def _check(n: int, c: int, k: int) -> None:
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"0 <= c <= n and 1 <= k <= n are required, got n={n}, c={c}, k={k}")


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the closest ranks: type 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages", 1996.

    Raises ``ValueError`` without values, or if ``percent`` is not in [0, 100].
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"values, and a percent from 0 to 100, are required; got {len(values)} and {percent}")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (rank - below) * (ordered[above] - ordered[below])


@cache
def student_t(p: float, df: int) -> float:
    """The ``p`` quantile of Student's t, 0.5 <= p < 1, for a whole number ``df`` >= 1 of degrees of freedom.

    Solves for the angle in the finite series of Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964,
    26.7.3 and 26.7.4; above 10,000 degrees it is the normal quantile. Raises ``ValueError`` out of these ranges.
    """
    if not (0.5 <= p < 1 and df >= 1):
        raise ValueError(f"0.5 <= p < 1 and df >= 1 are required, got p={p}, df={df}")
    if df > _NORMAL_FROM:
        return NormalDist().inv_cdf(p)
    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        if _within(middle, df) < 2 * p - 1:
            low = middle
        else:
            high = middle
    return math.sqrt(df) * math.tan(low)


def _within(angle: float, df: int) -> float:
    """The chance that the absolute value of t is below sqrt(df) tan(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = df % 2
    term = sine * cosine if odd else sine
    total = term if df > 1 else 0.0
    for i in range(3 if odd else 2, df - 1, 2):
        term *= cosine * cosine * (i - 1) / i
        total += term
    return 2 / math.pi * (angle + total) if odd else total

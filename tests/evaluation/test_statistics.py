"""The statistics against scipy, statsmodels and numpy (``scripts/evaluation_reference.py``), and their coverage."""

import json
import random
from pathlib import Path
from statistics import fmean

import pytest

from agentcore_rl_toolkit.evaluation.statistics import (
    Estimate,
    mean,
    pass_at_k,
    pass_hat_k,
    percentile,
    proportion,
    student_t,
)

REFERENCE = json.loads((Path(__file__).parent / "reference.json").read_text())


@pytest.mark.parametrize(("p", "df", "expected"), REFERENCE["student_t"])
def test_quantiles_of_student_t(p, df, expected):
    assert student_t(p, df) == pytest.approx(expected, rel=1e-9 if df < 10_000 else 3e-4)


@pytest.mark.parametrize("case", REFERENCE["mean"])
def test_mean_with_an_interval_clustered_by_task(case):
    found = mean([fmean(group) for group in case["groups"]])
    assert (found.value, found.low, found.high) == pytest.approx((case["value"], case["low"], case["high"]), rel=1e-9)
    assert found.tasks == len(case["groups"])


@pytest.mark.parametrize("case", REFERENCE["proportion"])
def test_proportion_with_an_interval_clustered_by_task(case):
    groups = case["groups"]
    found = proportion([fmean(group) for group in groups], sum(map(len, groups)))
    expected = case["value"], case["low"], case["high"]
    assert (found.value, found.low, found.high) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found.high - found.low > 0.01


def test_paired_difference():
    case = REFERENCE["paired"]
    found = mean([b - a for a, b in zip(case["a"], case["b"], strict=True)])
    assert (found.low, found.high) == pytest.approx((case["low"], case["high"]), rel=1e-9)


@pytest.mark.parametrize(("n", "c", "k", "any_of_k", "all_of_k"), REFERENCE["passes"])
def test_pass_at_k_and_pass_hat_k(n, c, k, any_of_k, all_of_k):
    assert pass_at_k(n, c, k) == pytest.approx(any_of_k, abs=1e-12)
    assert pass_hat_k(n, c, k) == pytest.approx(all_of_k, abs=1e-12)


@pytest.mark.parametrize(("percent", "expected"), REFERENCE["percentile"]["at"])
def test_percentiles(percent, expected):
    assert percentile(REFERENCE["percentile"]["values"], percent) == pytest.approx(expected, rel=1e-12)


def test_no_task_and_one_task_have_no_interval():
    assert mean([]) == proportion([], 0) == Estimate(None, None, None, 0)
    assert mean([0.5]) == proportion([0.5], 8) == Estimate(0.5, None, None, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: pass_at_k(4, 2, 5),
        lambda: pass_at_k(4, 2, 0),
        lambda: pass_hat_k(4, 5, 1),
        lambda: percentile([], 50),
        lambda: percentile([1.0], 101),
        lambda: student_t(0.975, 0),
        lambda: student_t(1.0, 3),
    ],
)
def test_values_out_of_range_are_refused(call):
    with pytest.raises(ValueError, match="required"):
        call()


@pytest.mark.parametrize(("tasks", "samples"), [(10, 1), (10, 8), (40, 4)])
@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (6.0, 0.6), (2.0, 2.0)])
def test_intervals_of_a_proportion_hold_the_truth_as_often_as_they_say(tasks, samples, alpha, beta):
    """Tasks differ in difficulty (beta distributed): samples of one task are alike, which a naive interval misses."""
    rng, truth, hits, runs = random.Random(1), alpha / (alpha + beta), 0, 600
    for _ in range(runs):
        chances = [rng.betavariate(alpha, beta) for _ in range(tasks)]
        values = [sum(rng.random() < chance for _ in range(samples)) / samples for chance in chances]
        found = proportion(values, tasks * samples)
        hits += found.low <= truth <= found.high
    assert hits / runs > 0.93

"""Compute with scipy, statsmodels and numpy what the evaluation's statistics are compared with.

::

    pip install scipy statsmodels
    python scripts/evaluation_reference.py > tests/evaluation/reference.json
"""

import json
import random

import numpy as np
import scipy
import statsmodels
import statsmodels.api as sm
from scipy import stats
from statsmodels.stats.proportion import proportion_confint


def clustered(groups: list[list[float]]) -> dict:
    """Mean with cluster-robust interval: a regression on a constant, each task weighing the same."""
    y = np.concatenate([np.asarray(group, dtype=float) for group in groups])
    ids = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    weights = np.repeat([1 / len(group) for group in groups], [len(group) for group in groups])
    fit = sm.WLS(y, np.ones_like(y), weights=weights).fit(
        cov_type="cluster", cov_kwds={"groups": ids, "use_correction": True}, use_t=True
    )
    low, high = fit.conf_int(alpha=0.05)[0]
    return {"groups": groups, "value": fit.params[0], "low": low, "high": high, "se": fit.bse[0]}


def share(groups: list[list[float]]) -> dict:
    """Wilson's interval with the effective number of observations that the cluster-robust error implies."""
    fit, tasks, samples = clustered(groups), len(groups), sum(map(len, groups))
    p = min(max(fit["value"], 0.0), 1.0)
    spread = p * (1 - p)
    n = min(samples, spread / fit["se"] ** 2) if spread > 1e-12 else tasks
    alpha = 2 * stats.norm.sf(stats.t.ppf(0.975, tasks - 1))  # its normal quantile is then Student's
    low, high = proportion_confint(p * n, n, alpha=alpha, method="wilson")
    return {"groups": groups, "value": p, "low": low, "high": high}


def main() -> None:
    rng = random.Random(7)
    balanced = [[round(rng.gauss(i % 3, 1), 3) for _ in range(4)] for i in range(12)]
    unequal = [[round(rng.gauss(i % 5, 2), 3) for _ in range(rng.randint(1, 6))] for i in range(9)]
    mixed = [[float(rng.random() < (i + 1) / 22) for _ in range(rng.randint(2, 8))] for i in range(20)]
    before = [round(rng.gauss(0.4, 0.3), 3) for _ in range(15)]
    after = [round(b + rng.gauss(0.1, 0.2), 3) for b in before]
    paired = stats.ttest_rel(after, before)
    interval = paired.confidence_interval(0.95)
    values = [round(rng.expovariate(0.2), 3) for _ in range(37)]
    counts = [(n, c, k) for n in (1, 2, 8, 100) for c in {0, 1, n // 2, n} for k in {1, 2, 5, n} if k <= n]
    degrees = (1, 2, 3, 4, 7, 10, 99, 100, 2500, 20_000)
    reference = {
        "versions": {"scipy": scipy.__version__, "statsmodels": statsmodels.__version__, "numpy": np.__version__},
        "student_t": [[p, df, stats.t.ppf(p, df)] for p in (0.9, 0.975, 0.995) for df in degrees],
        "mean": [clustered(balanced), clustered(unequal), clustered([[0.5], [0.75]])],
        "proportion": [
            share(mixed),
            share([[1.0] * 3] * 10),
            share([[0.0]] * 5),
            share([[0.0, 1.0]] * 6),
            share([[0.0, 1.0]] * 5 + [[0.0, 1.0, 1.0]]),
            share([[1.0] * 4] * 29 + [[0.0, 1.0, 1.0, 1.0]]),
        ],
        "paired": {"a": before, "b": after, "low": interval.low, "high": interval.high},
        # The chances of at least one, and of k, good ones when k are drawn from n of which c are good.
        "passes": [
            [n, c, k, stats.hypergeom.sf(0, n, c, k), stats.hypergeom.pmf(k, n, c, k)] for n, c, k in sorted(counts)
        ],
        "percentile": {"values": values, "at": [[q, np.percentile(values, q)] for q in (0, 1, 50, 90, 95, 99, 100)]},
    }
    lines = (f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in reference.items())
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main()

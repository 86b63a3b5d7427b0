"""Group-relative advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence

_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """``(reward - mean) / (std + 1e-6)`` over the samples of one payload; population standard deviation.

    None where there is nothing to learn: for a rollout without a reward (it counts neither in the mean nor in the
    std), and for all of a group whose rewards are fewer than two or all equal.
    """
    valid = [reward for reward in rewards if reward is not None]
    if len(set(valid)) < 2:
        return [None] * len(rewards)
    mean = math.fsum(valid) / len(valid)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in valid) / len(valid))
    return [None if reward is None else (reward - mean) / (std + _EPSILON) for reward in rewards]

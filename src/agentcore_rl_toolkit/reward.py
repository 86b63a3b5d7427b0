"""Rewards: a number (or one per turn) for what an agent did."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

__all__ = ["RewardFunction"]


class RewardFunction(ABC):
    """Computes the reward of one rollout; the agent calls it and puts the value under ``rewards``.

    Subclasses name the keyword arguments they need::

        class ExactMatch(RewardFunction):
            def __call__(self, *, response_text: str, ground_truth: str, **_: object) -> float:
                return float(response_text.strip() == ground_truth)
    """

    @abstractmethod
    def __call__(self, **kwargs: Any) -> float | list[float]:
        """The reward of the rollout: one float for the outcome, or a list with one float per turn."""

from __future__ import annotations

from typing import Any

import pytest

from agentcore_rl_toolkit import RewardFunction


class ExactMatch(RewardFunction):
    def __call__(self, *, response_text: str, ground_truth: str, **_: Any) -> float:
        return float(response_text.strip() == ground_truth)


class PerTurn(RewardFunction):
    def __call__(self, **kwargs: Any) -> list[float]:
        return [float(turn == kwargs["want"]) for turn in kwargs["turns"]]


def test_a_reward_function_is_called_with_keywords() -> None:
    assert ExactMatch()(response_text=" 42\n", ground_truth="42", user_input="6*7?") == 1.0
    assert ExactMatch()(response_text="41", ground_truth="42") == 0.0
    assert PerTurn()(turns=["a", "b"], want="b") == [0.0, 1.0]


def test_call_must_be_defined() -> None:
    class Nothing(RewardFunction):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing()  # type: ignore[abstract]

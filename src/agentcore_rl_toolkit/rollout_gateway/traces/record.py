"""``TraceRecord``: one training row, the boundary between the gateway and every trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np


class Status(StrEnum):
    """How the conversation behind a row ended."""

    PENDING = "pending"
    """Not ended: for trainers that keep rows of their own; the gateway's rows never have it."""
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """Its last answer was cut by a limit."""
    ABORTED = "aborted"
    """The last request that went on from it was cut by the session's end, or its client hung up."""
    FAILED = "failed"
    """The last request that went on from it met an engine error."""


@dataclass(slots=True)
class TraceRecord:
    """One training row: a leaf of a session's token tree, from its first token to its last.

    ``token_ids``: int list, the whole row: first prompt, then the response region.
    ``loss_mask``: 0/1 ints for the response region only; 1 = sampled here and to be trained.
    ``logprobs``: floats for the response region; the engine's logprob where the mask is 1, else 0.0.
    ``rollout_id``: groups the rows of one rollout (the session id).
    ``reward``: float, or None where there is none. A failed rollout has none; it is never 0.0 by default.
    ``response_length``: ``len(loss_mask)``. ``response``: the response region as text.
    ``metadata``: what the caller gave, and what docs/gateway.md lists: ``fork`` (why the row left its parent),
    ``history``, ``template_divergent_turns``, ``ill_formed_turns``, ``abandoned``, ``abandoned_turns``,
    ``exact_logprobs``, ``ties``, ``turns`` (per turn: span in the response region, finish reason, sampling parameters
    …).
    ``policy_versions``: one int or None per response token; None where the engine reports none.
    ``turn_rewards``: one float per delivered turn of this row, or None.
    ``routed_experts``: the experts that the row's tokens went through, in order, an integer array as the engine gave it
    with the last turn (usually without the very last token); None where it gives none.
    """

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    rollout_id: str | int | None = None
    reward: float | None = None
    response_length: int = -1
    response: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    status: Status = Status.COMPLETED
    policy_versions: list[int | None] | None = None
    turn_rewards: list[float] | None = None
    routed_experts: Any = None

    def __post_init__(self) -> None:
        if self.response_length < 0:
            self.response_length = len(self.loss_mask)
        self.validate()

    @property
    def prompt_length(self) -> int:
        """Tokens of the first prompt, before the response region."""
        return len(self.token_ids) - len(self.loss_mask)

    def validate(self) -> None:
        """Raise ``ValueError`` naming the first inconsistency."""
        n = len(self.loss_mask)
        if n > len(self.token_ids):
            raise ValueError(f"loss_mask has {n} entries, token_ids only {len(self.token_ids)}")
        if len(self.logprobs) != n:
            raise ValueError(f"logprobs has {len(self.logprobs)} entries, loss_mask {n}")
        if self.response_length != n:
            raise ValueError(f"response_length is {self.response_length}, loss_mask has {n} entries")
        if self.policy_versions is not None and len(self.policy_versions) != n:
            raise ValueError(f"policy_versions has {len(self.policy_versions)} entries, loss_mask {n}")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward is {self.reward}: it must be finite or None")
        if self.turn_rewards is not None and not all(map(math.isfinite, self.turn_rewards)):
            raise ValueError(f"turn_rewards is {self.turn_rewards}: all of them must be finite")
        mask, logprobs = np.asarray(self.loss_mask), np.asarray(self.logprobs, np.float64)
        if not (known := (mask == 0) | (mask == 1)).all():
            raise ValueError(f"loss_mask[{np.argmin(known)}] is neither 0 nor 1")
        bad = ~np.isfinite(logprobs) | ((mask == 0) & (logprobs != 0.0)) if n else np.zeros(0, bool)
        if bad.any():
            i = int(np.argmax(bad))
            raise ValueError(f"logprobs[{i}] is {self.logprobs[i]} where the mask is {self.loss_mask[i]}")

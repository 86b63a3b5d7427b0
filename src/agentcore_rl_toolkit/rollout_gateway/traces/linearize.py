"""From a token tree to training rows: one row per leaf, every sampled token trained in exactly one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .record import Status, TraceRecord
from .tree import TokenTree, Turn, TurnState

Abandoned = Literal["mask", "train"]


@dataclass(slots=True)
class _Row:
    """The columns of one row's response region."""

    mask: npt.NDArray[np.int8]
    logprobs: npt.NDArray[np.float64]
    versions: list[int | None] | None
    turns: list[dict[str, Any]] = field(default_factory=list)


def linearize(
    tree: TokenTree,
    *,
    rollout_id: str,
    reward: float | None,
    metadata: dict[str, Any],
    decode: Callable[[Sequence[int]], str],
    abandoned: Abandoned = "mask",
    turn_rewards: Sequence[float] | None = None,
) -> list[TraceRecord]:
    """The rows of a session, in the order in which their leaves were delivered. O(tokens of the rows).

    A prefix that several rows share is trained in the first of them. A turn that nobody extended although another
    answer to the same prompt was extended is abandoned: mask 0, unless ``abandoned="train"``.
    """
    turns = tree.delivered()
    parents = {id(t.parent) for t in turns if t.parent is not None}
    unused = _abandoned(turns, parents)
    left = set() if abandoned == "train" else unused
    trained: set[int] = set()
    records = []
    for leaf in turns:
        if id(leaf) in parents:
            continue
        row = _row(leaf.path(), trained, left)
        records.append(
            _record(
                row,
                leaf,
                rollout_id=rollout_id,
                reward=reward,
                metadata={
                    **metadata,
                    "abandoned_turns": len(unused),
                    "abandoned": id(leaf) in unused,
                    "ties": tree.ties,
                },
                decode=decode,
                turn_rewards=turn_rewards,
            )
        )
    return records


def _abandoned(turns: Sequence[Turn], parents: set[int]) -> set[int]:
    """Turns that nobody built on although somebody built on another answer to the very same prompt."""
    same_prompt: dict[tuple[int, bytes], list[Turn]] = {}
    for turn in turns:
        same_prompt.setdefault((id(turn.parent), turn.prompt_key), []).append(turn)
    return {
        id(turn)
        for group in same_prompt.values()
        if any(id(turn) in parents for turn in group)
        for turn in group
        if id(turn) not in parents
    }


def _row(path: Sequence[Turn], trained: set[int], left: set[int]) -> _Row:
    length = sum(turn.prompt_tokens + turn.sampled_tokens for turn in path) - path[0].prompt_tokens
    versions: list[int | None] | None = [None] * length if any(turn.policy_versions for turn in path) else None
    row = _Row(np.zeros(length, np.int8), np.zeros(length), versions)
    end = -path[0].prompt_tokens  # the first prompt lies before the response region
    for turn in path:
        assert turn.state is TurnState.DELIVERED
        start = end + turn.prompt_tokens
        end = start + turn.sampled_tokens
        fresh = id(turn) not in trained and id(turn) not in left and not turn.masked
        trained.add(id(turn))
        if fresh:
            row.mask[start:end] = 1
            row.logprobs[start:end] = turn.logprobs
        if row.versions is not None and turn.policy_versions:
            row.versions[start:end] = turn.policy_versions
        row.turns.append(_said_of(turn, [start, end], trained=fresh))
    return row


def _said_of(turn: Turn, span: list[int], *, trained: bool) -> dict[str, Any]:
    """What a record's metadata says of a turn; what is as usual is left out."""
    said = {
        "span": span,
        "trained": trained,
        "finish_reason": turn.finish_reason,
        "sampling": turn.params,
        "exact_logprobs": turn.exact,
        "fork": turn.fork,
        "template_divergence": turn.divergence,
        "stop_sequence": turn.stop_sequence,
        "choice": turn.choice,
    }
    return {name: value for name, value in said.items() if value is not None}


def _record(
    row: _Row,
    leaf: Turn,
    *,
    rollout_id: str,
    reward: float | None,
    metadata: dict[str, Any],
    decode: Callable[[Sequence[int]], str],
    turn_rewards: Sequence[float] | None,
) -> TraceRecord:
    token_ids, path = leaf.tokens(), leaf.path()
    return TraceRecord(
        token_ids=token_ids,
        loss_mask=row.mask.tolist(),
        logprobs=row.logprobs.tolist(),
        rollout_id=rollout_id,
        reward=reward,
        response=decode(token_ids[path[0].prompt_tokens :]),
        metadata={
            **metadata,
            "fork": next((t.fork for t in reversed(path) if t.fork), None),
            "exact_logprobs": all(t.exact for t in path),
            "ill_formed_turns": sum(t.message.ill_formed for t in path),
            "template_divergent_turns": sum(t.divergence is not None for t in path),
            "turns": row.turns,
        },
        status=leaf.cut or (Status.TRUNCATED if leaf.finish_reason == "length" else Status.COMPLETED),
        turn_rewards=None if turn_rewards is None else [float(turn_rewards[t.order]) for t in path],
        policy_versions=row.versions,
        routed_experts=leaf.routed_experts,
    )

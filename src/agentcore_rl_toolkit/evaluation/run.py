"""Run what is missing of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from .._redact import Redactor
from ..errors import ContractError, Outcome, SetupError
from ..protocol import result_reward
from .results import EvaluationDirectory, Sample, Task

if TYPE_CHECKING:
    from ..client import BatchItem, RolloutClient


def finished(tasks: Sequence[Task], samples: int, directory: EvaluationDirectory) -> list[Sample]:
    """The samples that were asked for and have ended; the directory may hold more, of a longer run.

    Raises ``SetupError`` if the tasks are no longer the same.
    """
    found = [s for s in directory.samples.values() if s.among(len(tasks), samples)]
    for sample in found:
        if tasks[sample.index].digest != sample.digest:
            raise SetupError(
                f"{directory.path} has a result of another task {sample.index + 1} ({sample.task}): the data has"
                " changed; choose another --out, or put it back"
            )
    return found


def evaluate(
    client: RolloutClient,
    tasks: Sequence[Task],
    samples: int,
    directory: EvaluationDirectory,
    *,
    timeout: float | None,
    max_concurrent: int,
    show: Callable[[Sample], None],
    secrets: Sequence[str] = (),
) -> None:
    """Run every task ``samples`` times, except what has ended, and put each into ``directory`` as it ends.

    ``timeout``: seconds for each rollout. ``show``: is told of each sample. ``secrets``: masked wherever an agent
    repeats them. Whatever ends it early (Ctrl-C, ``SetupError``) stops the sessions that run; what has finished is
    in the directory.
    """
    redactor = Redactor(secrets)
    payloads = [task.payload for task in tasks]
    batch = client.run_batch(
        payloads, max_concurrent, timeout=timeout, samples=samples, run_dir=directory.path, progress=False
    )
    ended = {key for key, sample in directory.samples.items() if not sample.lost}
    with closing(iter(batch.without(ended))) as items:
        for item in items:
            item.result, item.error = redactor.values(item.result), redactor.values(item.error)
            sample = judge(item, tasks[item.index])
            directory.add(sample, item.result)
            show(sample)


def judge(item: BatchItem, task: Task) -> Sample:
    """The sample that a batch's item is; a reward that is no finite number is a failure of the agent."""
    outcome, reward, error = item.outcome, None, item.error
    if item.success and item.result is not None:
        try:
            reward = result_reward(item.result)
        except ContractError as problem:
            outcome, error = Outcome.AGENT_FAILED, str(problem)
    return Sample(
        task=task.id,
        digest=task.digest,
        index=item.index,
        sample=item.sample,
        outcome=outcome,
        reward=reward,
        elapsed=round(item.elapsed, 3),
        input_id=item.input_id,
        session_id=item.session_id,
        error=error,
    )

"""Run what is missing of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from .._redact import Redactor
from ..errors import ContractError, Outcome, SetupError
from ..protocol import result_reward
from .results import RunDirectory, Sample, Task

if TYPE_CHECKING:
    from ..client import BatchItem, RolloutClient


def missing(tasks: Sequence[Task], samples: int, directory: RunDirectory) -> list[tuple[int, int]]:
    """Task index and sample of what has not finished. Raises ``SetupError`` if the tasks are no longer the same."""
    for sample in directory.samples:
        if sample.index < len(tasks) and tasks[sample.index].digest != sample.digest:
            raise SetupError(
                f"{directory.path} has a result of another task {sample.index + 1} ({sample.task}): the data has"
                " changed; choose another --out, or put it back"
            )
    done = {(sample.index, sample.sample) for sample in counted(tasks, samples, directory)}
    return [(i, s) for i in range(len(tasks)) for s in range(samples) if (i, s) not in done]


def counted(tasks: Sequence[Task], samples: int, directory: RunDirectory) -> list[Sample]:
    """The finished samples that were asked for: the directory may hold more, of a longer run."""
    return [s for s in directory.samples if s.index < len(tasks) and s.sample < samples]


def evaluate(
    client: RolloutClient,
    tasks: Sequence[Task],
    todo: Sequence[tuple[int, int]],
    directory: RunDirectory,
    *,
    timeout: float | None,
    max_concurrent: int,
    show: Callable[[Sample], None],
    secrets: Sequence[str] = (),
) -> None:
    """Run ``todo``, and put every sample into ``directory`` as it ends.

    ``timeout``: seconds for each rollout. ``show``: is told of each sample. ``secrets``: masked wherever an agent
    repeats them. Whatever ends it early (Ctrl-C, ``SetupError``) stops the sessions that run; what has finished is
    in the directory.
    """
    redactor = Redactor(secrets)
    batch = client.run_batch([tasks[index].payload for index, _ in todo], max_concurrent, timeout=timeout)
    with closing(iter(batch)) as items:
        for item in items:
            item.result, item.error = redactor.values(item.result), redactor.values(item.error)
            index, number = todo[item.index]
            sample = judge(item, tasks[index], index, number)
            directory.add(sample, item.result)
            show(sample)


def judge(item: BatchItem, task: Task, index: int, number: int) -> Sample:
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
        index=index,
        sample=number,
        outcome=outcome,
        reward=reward,
        elapsed=round(item.elapsed, 3),
        input_id=item.input_id,
        session_id=item.session_id,
        error=error,
    )

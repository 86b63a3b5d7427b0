"""What a run that goes on asks of AWS: only what it does not have."""

from __future__ import annotations

from pathlib import Path

from agentcore_rl_toolkit import Outcome
from agentcore_rl_toolkit.evaluation.results import EvaluationDirectory, Task, read_samples
from agentcore_rl_toolkit.evaluation.run import evaluate
from client.conftest import BUCKET, World, world

__all__ = ["world"]  # a fixture

TASKS = [Task(f"t{i}", {"text": str(i)}, f"d{i}") for i in range(4)]


def run(world: World, out: Path, samples: int = 1) -> EvaluationDirectory:
    directory = EvaluationDirectory(out, {})
    evaluate(world.client(), TASKS, samples, directory, timeout=10.0, max_concurrent=4, show=lambda _: None)
    directory.close()
    return EvaluationDirectory(out, {})


def test_only_what_the_results_do_not_have_is_fetched_again(world: World, tmp_path: Path) -> None:
    before = run(world, tmp_path).samples
    results = tmp_path / "results.jsonl"
    whole = results.read_bytes()
    [*_, last] = read_samples(results)
    results.write_bytes(whole[:-20])  # killed in the middle of a line

    world.s3.log.clear()
    assert run(world, tmp_path).samples.keys() == before.keys()
    assert [path for _, kind, path in world.s3.log if kind == "get"] == [
        f"/{BUCKET}/exp/{last.input_id}/{last.session_id}.json"
    ]
    assert results.read_bytes()[: len(whole) - 20] == whole[:-20]

    world.s3.log.clear()
    run(world, tmp_path, samples=2)
    assert not any(last.input_id in path for _, _, path in world.s3.log)
    assert world.stub.runs == 8
    assert all(s.outcome is Outcome.SUCCEEDED for s in read_samples(results))

"""Task files, results files, reports and comparisons: what is read, counted, left out, and refused."""

import json
import math

import pytest

from agentcore_rl_toolkit import BatchItem, Outcome
from agentcore_rl_toolkit.errors import SetupError
from agentcore_rl_toolkit.evaluation.compare import compare, heading, notes
from agentcore_rl_toolkit.evaluation.report import Rule, make_report, markdown, plain, tables, text
from agentcore_rl_toolkit.evaluation.results import (
    EvaluationDirectory,
    Sample,
    Task,
    read_samples,
    read_tasks,
    reported_samples,
)
from agentcore_rl_toolkit.evaluation.run import finished, judge

SETTINGS = {"agent": "python rl_app.py", "model_id": None}


def sample(task: str = "t", number: int = 0, reward: float | None = 1.0, **changes) -> Sample:
    outcome = changes.pop("outcome", Outcome.SUCCEEDED)
    digest, elapsed = changes.pop("digest", task), changes.pop("elapsed", 1.0)
    return Sample(task, digest, 0, number, outcome, reward, elapsed, "input", "session", **changes)


def samples(**rewards: list[float | None]) -> list[Sample]:
    """Samples by task; None is a failed rollout."""
    return [
        sample(task, i, reward, outcome=Outcome.TIMED_OUT if reward is None else Outcome.SUCCEEDED)
        for task, values in rewards.items()
        for i, reward in enumerate(values)
    ]


# -- tasks ---------------------------------------------------------------------------------------------


def test_tasks_are_named_by_their_id_or_their_payload(tmp_path):
    data = tmp_path / "tasks.jsonl"
    data.write_text('{"task_id": "a", "id": "x"}\n\n{"id": 7}\r\n{"p": 1, "q": 2}\n{"prompt": "\u2028"}', "utf-8")
    found = read_tasks(data)
    assert [task.id for task in found[:2]] == ["a", "7"]
    assert found[2].id == found[2].digest
    assert found[3].payload == {"prompt": "\u2028"}
    assert read_tasks(data, limit=2) == found[:2]
    data.write_text('{"q": 2, "p": 1}')
    assert read_tasks(data)[0].id == found[2].id  # the order of keys is no difference


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": 1}\n{"id": 2,}\n', "line 2: not JSON"),
        ('{"id": 1}\n\n["id"]\n', "line 3: a JSON object is required, not list"),
        ('{"id": 1, "x": NaN}\n', "line 1: not JSON: NaN is not JSON"),
        ('{"id": 1, "x": 1e999}\n', "line 1: not JSON: 1e999 is not finite"),
        ('{"id": [1]}\n', r"line 1: a task's id is a string or a whole number, not \[1\]"),
        ('{"id": 1}\n{"id": 2}\n{"id": "1"}\n', "line 3: line 1 has the id '1'"),
        ('{"x": 1}\n{"x": 1}\n', "line 2: line 1 has the same payload; --samples"),
        ('{"x": "\udc80"}\n', "line 1: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, message):
    data = tmp_path / "tasks.jsonl"
    data.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(SetupError, match=message):
        read_tasks(data)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SetupError, match=r"can't read .*nothing\.jsonl \(No such file"):
        read_tasks(tmp_path / "nothing.jsonl")


# -- the run's directory ---------------------------------------------------------------------------------


def test_samples_are_there_again_after_a_crash_in_the_middle_of_a_line(tmp_path):
    directory = EvaluationDirectory(tmp_path / "run", SETTINGS)
    first, second = sample(number=0), sample(number=1, reward=None, outcome=Outcome.TIMED_OUT, error="too late")
    directory.add(first, {"rewards": 1.0})
    directory.add(second, None)
    directory.close()
    results = tmp_path / "run" / "results.jsonl"
    whole = results.read_bytes()
    with results.open("ab") as file:
        file.write(whole.splitlines()[0][:-9])  # a third line, cut off
    assert read_samples(results) == [first, second]

    directory = EvaluationDirectory(tmp_path / "run", SETTINGS)
    assert list(directory.samples.values()) == [first, second]
    directory.add(sample(number=2), None)
    directory.close()
    assert results.read_bytes().startswith(whole)
    assert [s.sample for s in read_samples(results)] == [0, 1, 2]


def test_a_last_line_without_its_newline_counts(tmp_path):
    directory = EvaluationDirectory(tmp_path, SETTINGS)
    directory.add(sample(), None)
    directory.close()
    results = tmp_path / "results.jsonl"
    results.write_bytes(results.read_bytes().rstrip())
    directory = EvaluationDirectory(tmp_path, SETTINGS)
    directory.add(sample(number=1), None)
    directory.close()
    assert len(read_samples(results)) == 2


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("reward", math.nan, "line 2: not JSON: NaN"),
        ("reward", "1", "line 2: no result of an evaluation: reward: '1' is not int or float"),
        ("reward", True, "line 2: .*reward: True"),
        ("outcome", "fine", "line 2: .*'fine' is not a valid Outcome"),
        ("index", 0.5, "line 2: .*index: 0.5 is not int"),
        ("elapsed", 10**400, "line 2: "),
        ("task", None, "line 2: .*task: None is not str"),
        ("task", ..., "line 2: .*'task' is missing"),
    ],
)
def test_a_bad_result_line_is_named(tmp_path, field, value, message):
    directory = EvaluationDirectory(tmp_path, SETTINGS)
    directory.add(sample(), None)
    directory.close()
    results = tmp_path / "results.jsonl"
    row = json.loads(results.read_bytes())
    if value is ...:
        del row[field]
    else:
        row[field] = value
    results.write_text(results.read_text() + json.dumps(row) + "\n")
    with pytest.raises(SetupError, match=message):
        read_samples(results)


def test_another_run_is_not_mixed_in(tmp_path):
    EvaluationDirectory(tmp_path, {**SETTINGS, "agent": "python mistyped.py"}).close()
    directory = EvaluationDirectory(tmp_path, {**SETTINGS, "files": {"rl_app.py": "1"}})  # nothing had come of it
    directory.add(sample(reward=None, outcome=Outcome.RUNTIME_FAILED), None)
    directory.close()
    directory = EvaluationDirectory(tmp_path, SETTINGS)  # nothing but a lost session has
    directory.add(sample(), None)
    directory.close()
    with pytest.raises(SetupError, match=r"holds a run with agent 'python rl_app.py', not 'python b.py'"):
        EvaluationDirectory(tmp_path, {**SETTINGS, "agent": "python b.py"})
    with pytest.raises(SetupError, match=r"other contents of a\.py: choose another --out"):
        EvaluationDirectory(tmp_path, {**SETTINGS, "files": {"a.py": "1"}})
    (tmp_path / "run.json").write_text("[")
    with pytest.raises(SetupError, match="damaged"):
        EvaluationDirectory(tmp_path, SETTINGS)
    (tmp_path / "run.json").unlink()
    with pytest.raises(SetupError, match=r"no run\.json"):
        EvaluationDirectory(tmp_path, SETTINGS)


def test_a_directory_that_cannot_be_one(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="choose another --out"):
        EvaluationDirectory(tmp_path / "file", SETTINGS)


def test_what_has_finished(tmp_path):
    tasks = [Task("t", {}, "t"), Task("u", {}, "u")]
    directory = EvaluationDirectory(tmp_path, SETTINGS)
    directory.add(sample(number=1), None)
    directory.add(sample(number=2, reward=None, outcome=Outcome.RUNTIME_FAILED), None)
    directory.close()
    assert [s.sample for s in finished(tasks, 3, directory)] == [1, 2]
    assert [s.sample for s in finished(tasks, 2, directory)] == [1]
    assert [s.lost for s in directory.samples.values()] == [False, True]
    with pytest.raises(SetupError, match="the data has changed"):
        finished([Task("t", {}, "another")], 2, directory)


def test_a_sample_that_was_lost_and_run_again_counts_once(tmp_path):
    directory = EvaluationDirectory(tmp_path, SETTINGS)
    directory.add(sample(reward=None, outcome=Outcome.RUNTIME_FAILED), None)
    directory.add(sample(), None)
    directory.close()
    assert read_samples(tmp_path / "results.jsonl") == [sample()]
    assert list(EvaluationDirectory(tmp_path, SETTINGS).samples.values()) == [sample()]


def test_a_result_that_is_no_json_is_not_kept_but_its_reward_is(tmp_path):
    directory = EvaluationDirectory(tmp_path, SETTINGS)
    directory.add(sample(), {"rewards": 1.0, "loss": math.nan})
    directory.close()
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert (row["reward"], row["result"]) == (1.0, None)
    assert "loss: NaN is not JSON" in row["error"]


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1.0", [0.5, math.nan]])
def test_a_reward_that_is_no_finite_number_is_the_agents_failure(reward):
    found = judge(BatchItem(True, {"rewards": reward}, index=3, sample=1), Task("t", {}, "t"))
    assert (found.outcome, found.reward, found.index, found.sample) == (Outcome.AGENT_FAILED, None, 3, 1)
    assert "a finite number is required" in found.error


def test_a_failed_rollouts_reward_does_not_count():
    item = BatchItem(False, {"rewards": 1.0, "status_code": 500}, "boom", outcome=Outcome.AGENT_FAILED)
    assert judge(item, Task("t", {}, "t")).reward is None


# -- reports ---------------------------------------------------------------------------------------------


def test_a_report_counts_tasks_equally_and_failures_not_at_all():
    found = make_report(samples(a=[1.0, 1.0, 1.0, 0.0], b=[0.0, None, None, None]), ["a", "b"], 4, Rule())
    assert (found.planned, found.finished, found.scored) == (8, 8, 5)
    assert found.mean_reward.value == found.success_rate.value == (0.75 + 0.0) / 2
    assert found.outcomes == {"succeeded": 5, "timed_out": 3}
    assert found.pass_at_k[1].value == 0.375
    assert (found.pass_at_k[2].value, found.pass_at_k[2].tasks) == (1.0, 1)  # b has but one sample
    assert found.pass_hat_k[2].value == 0.5  # of a's six pairs, three are all good
    assert found.pass_hat_k[4].value == 0.0
    assert "3 failed rollouts count in no mean; --failed-as-zero would give them reward 0." in found.notes


def test_failures_count_as_zero_when_asked():
    found = make_report(samples(a=[1.0, None], b=[None, None]), ["a", "b"], 2, Rule(failed_as_zero=True))
    assert (found.scored, found.mean_reward.value, found.success_rate.value) == (4, 0.25, 0.25)
    assert found.pass_at_k[2].value == 0.5
    assert found.notes == ["3 failed rollouts count with reward 0 (--failed-as-zero)."]


def test_success_is_a_reward_of_at_least_the_threshold():
    some = samples(a=[0.49, 0.5, 0.51, 2.0])
    assert make_report(some, ["a"], 4, Rule(threshold=0.5)).success_rate.value == 0.75
    assert make_report(some, ["a"], 4, Rule()).success_rate.value == 0.25


def test_notes_tell_what_is_missing():
    some = [*samples(a=[1.0]), sample("b", 0, None)]
    notes = make_report(some, ["a", "b", "c"], 2, Rule()).notes
    assert notes == [
        "4 of 6 samples have not finished.",
        "1 rollouts succeeded without a reward: the agent's result has no `rewards`.",
        "2 of 3 tasks have no scored sample and count nowhere.",
        "With one task there is no interval.",
    ]


def test_latency_is_that_of_rollouts_that_did_not_fail():
    some = [sample(number=i, elapsed=float(i)) for i in range(11)]
    some.append(sample(number=11, reward=None, outcome=Outcome.TIMED_OUT, elapsed=900.0))
    found = make_report(some, ["t"], 12, Rule())
    assert found.latency == {"p50": 5.0, "p90": 9.0, "p95": 9.5, "p99": 9.9, "max": 10.0}


@pytest.mark.parametrize("some", [{}, {"a": [None]}, {"a": [1.0]}, {"a": [1.0, 0.5], "b": [0.0]}])
def test_every_report_can_be_written(some):
    found = make_report(samples(**some), list(some), 2, Rule())
    json.dumps(plain(found), allow_nan=False)
    for form in text, markdown:
        written = form("heading", tables(found), found.notes)
        assert "mean reward" in written
        assert "None" not in written


def test_text_and_markdown():
    found = make_report(samples(a=[1.0, 1.0], b=[0.0, 1.0]), ["a", "b"], 2, Rule())
    lines = text("heading", tables(found), found.notes).splitlines()
    assert lines[0] == "heading"
    assert [line.split()[0] for line in lines[3:8]] == ["mean", "success", "pass@1", "pass@2", "pass^2"]
    assert len({len(line) for line in lines[2:8]}) == 1
    assert "| mean reward | 0.750 | -2.427 to 3.927 | 2 |" in markdown("heading", tables(found), [])


# -- comparisons -----------------------------------------------------------------------------------------


def test_a_comparison_pairs_tasks_and_names_those_that_flipped():
    a = samples(up=[0.0, 0.0], down=[1.0, 1.0], same=[1.0, 0.0], gone=[1.0])
    b = samples(up=[1.0, 1.0], down=[0.0, 0.0, 1.0], same=[1.0, 0.0], new=[1.0], failed=[None])
    found = compare(a, b, Rule())
    assert found.reward.tasks == found.success.tasks == 3
    assert found.reward.value == pytest.approx((1 - 2 / 3 + 0) / 3)
    assert [change.task for change in found.flipped] == ["down", "up"]
    assert (found.only_a, found.only_b) == (["gone"], ["new"])
    assert found.neither == ["failed"]
    assert "Not compared: 1 tasks scored only in a, 1 only in b, 1 in neither." in notes(found)
    assert heading(found, "x", "y") == (
        "a: x: 4 tasks, 7 samples finished, 7 scored\nb: y: 5 tasks, 9 samples finished, 8 scored"
    )


def test_a_task_whose_payload_changed_is_not_compared():
    a = [sample("t", digest="1"), sample("u")]
    b = [sample("t", digest="2"), sample("u")]
    found = compare(a, b, Rule())
    assert (found.different, found.reward.tasks, found.reward.low) == (["t"], 1, None)
    with pytest.raises(SetupError, match="no scored task in common: their payloads differ"):
        compare(a[:1], b[:1], Rule())


@pytest.mark.parametrize("b", [samples(other=[1.0]), samples(a=[None]), []])
def test_runs_with_nothing_in_common(b):
    with pytest.raises(SetupError, match="no scored task in common"):
        compare(samples(a=[1.0]), b, Rule())


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"tasks": 0, "planned": 0}', '{"tasks": 1, "planned": "x"}'])
def test_a_damaged_report_is_told(tmp_path, content):
    directory = EvaluationDirectory(tmp_path, SETTINGS)
    directory.add(sample(), None)
    directory.close()
    assert reported_samples(tmp_path) == [sample()]  # killed before there was a report
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(SetupError, match=r"report\.json is damaged: the command of its run"):
        reported_samples(tmp_path)


def test_the_same_run_has_no_difference():
    run = samples(a=[1.0, 0.0], b=[0.5], c=[0.0, None])
    found = compare(run, run, Rule())
    assert (found.reward.value, found.success.value, found.flipped) == (0.0, 0.0, [])

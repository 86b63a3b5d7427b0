"""``agentcore-rl eval`` and ``compare`` as a user meets them: processes, agents, files, signals."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.cli import main
from agentcore_rl_toolkit.local import LocalAgentCore
from processes import assert_nothing_is_left

# Appends a line to ran.log whenever it runs, and echoes what it was told.
AGENT = """
import asyncio
import os

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


@app.rollout_entrypoint
async def agent(payload):
    with open(os.environ["RAN"], "a") as log:
        log.write(payload["id"] + "\\n")
    await asyncio.sleep(payload.get("sleep", 0))
    if payload.get("fail"):
        raise ValueError("boom")
    return {"rewards": payload.get(os.environ.get("FIELD", "value")), "config": payload["_rollout"]}


if __name__ == "__main__":
    app.run()
"""


@dataclass
class Eval:
    """A folder with an agent and tasks, and commands run in it. All that they start inherits the mark."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def tasks(self, *payloads: dict[str, Any]) -> None:
        (self.folder / "tasks.jsonl").write_text("".join(json.dumps(payload) + "\n" for payload in payloads))

    def start(self, *arguments: str, stderr: int = subprocess.PIPE, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "agentcore_rl_toolkit", *arguments],
            env={
                **os.environ,
                "EVAL_TEST_MARK": self.mark,
                "RAN": str(self.folder / "ran.log"),
                "TERM": "xterm",
                **env,
            },
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        self.processes.append(process)
        return process

    def start_local(self, *arguments: str, out: str = "run", **options: Any) -> subprocess.Popen[str]:
        local = "eval", "--local", "python agent.py", "--data", "tasks.jsonl", "--out", out
        return self.start(*local, *arguments, **options)

    def run_local(self, *arguments: str, status: int = 0, **options: Any) -> tuple[str, str]:
        process = self.start_local(*arguments, **options)
        output, errors = process.communicate(timeout=50)
        assert process.returncode == status, errors
        return output, errors

    def results(self, out: str = "run") -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.folder / out / "results.jsonl").read_text().splitlines()]
        return []

    def report(self, out: str = "run") -> dict[str, Any]:
        return json.loads((self.folder / out / "report.json").read_text())

    def ran(self) -> Counter[str]:
        return Counter((self.folder / "ran.log").read_text().split())

    def wait_for(self, process: subprocess.Popen[str], results: int, running: int) -> None:
        """Until this many have ended, and this many agents have been started."""
        while len(self.results()) < results or sum(self.ran().values()) < running:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)


@pytest.fixture
def evaluation(tmp_path: Path) -> Iterator[Eval]:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "ran.log").touch()
    evaluation = Eval(tmp_path)
    yield evaluation
    for process in evaluation.processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_evaluate_twice_and_compare(evaluation):
    evaluation.tasks(
        {"id": "good", "value": 1.0, "other": 0.0},
        {"id": "bad", "value": 0.0, "other": 0.0},
        {"id": "broken", "fail": True},
    )
    output, errors = evaluation.run_local("--samples", "2")
    report = evaluation.report()
    assert (report["finished"], report["scored"]) == (6, 4)
    assert report["outcomes"] == {"succeeded": 4, "agent_failed": 2}
    assert report["mean_reward"]["value"] == report["pass_at_k"]["2"]["value"] == 0.5
    assert report["latency"]["max"] >= report["latency"]["p50"] > 0
    assert report["unscored_tasks"] == ["broken"]
    assert output.startswith("3 tasks, 6 of 6 samples finished, 4 scored\n")
    assert "2 failed rollouts count in no mean" in output
    assert "| success rate (reward >= 1) | 0.500 |" in (evaluation.folder / "run" / "report.md").read_text()
    progress, first = errors.splitlines()[-2:]
    assert progress.endswith("6/6 mean reward 0.500, 2 failed")
    assert first == "the first error: agent_failed: ValueError: boom (whole, and the others: results.jsonl)"
    assert {(r["task"], r["sample"]) for r in evaluation.results()} == {
        (task, number) for task in ("good", "bad", "broken") for number in (0, 1)
    }
    assert "ValueError: boom" in next(r["error"] for r in evaluation.results() if r["task"] == "broken")
    assert_nothing_is_left(evaluation.mark)

    evaluation.run_local("--samples", "1", out="other", FIELD="other")
    output, errors = evaluation.start("compare", "run", "other").communicate(timeout=20)
    assert errors == ""
    assert [line.split() for line in output.splitlines() if line.startswith(("mean", "good"))] == [
        ["mean", "reward", "-0.500", "-6.853", "to", "+5.853", "2"],
        ["good", "1.000", "0.000", "1.000", "0.000"],
    ]
    output, _ = evaluation.start("compare", "run", "other", "--failed-as-zero", "--json").communicate(timeout=20)
    assert json.loads(output)["reward"]["tasks"] == 3


def test_more_samples_are_added_and_a_finished_run_is_only_reported(evaluation):
    evaluation.tasks({"id": "a", "value": 1.0}, {"id": "b", "value": 0.5})
    evaluation.run_local("--limit", "1")
    evaluation.run_local("--samples", "2")
    assert evaluation.ran() == {"a": 2, "b": 2}
    _, errors = evaluation.run_local("--samples", "2", "--threshold", "0.5")
    assert evaluation.ran() == {"a": 2, "b": 2}
    assert errors == ""
    assert evaluation.report()["success_rate"]["value"] == 1.0
    assert evaluation.report()["mean_reward"]["value"] == 0.75
    evaluation.tasks({"id": "a", "value": 0.0})
    assert "the data has changed" in evaluation.run_local("--samples", "3", status=2)[1]
    assert "holds a run with model_id None, not 'big'" in evaluation.run_local("--model-id", "big", status=2)[1]


def test_a_comparison_counts_what_the_reports_count(evaluation):
    evaluation.tasks({"id": "a", "value": 1.0}, {"id": "b", "value": 0.0}, {"id": "c", "fail": True})
    evaluation.run_local("--samples", "3")
    evaluation.run_local("--samples", "2", "--limit", "2")
    assert (evaluation.report()["scored"], len(evaluation.results())) == (4, 9)
    evaluation.run_local(out="other")
    output, errors = evaluation.start("compare", "run", "other").communicate(timeout=20)
    assert errors == ""
    assert output.splitlines()[:2] == [
        "a: run: 2 tasks, 4 samples finished, 4 scored",
        "b: other: 3 tasks, 3 samples finished, 2 scored",
    ]
    assert "Not compared: 0 tasks scored only in a, 0 only in b, 1 in neither." in output
    output, _ = evaluation.start("compare", "run", "other", "--json").communicate(timeout=20)
    assert json.loads(output)["a"] == {"tasks": 2, "finished": 4, "scored": 4}


def test_an_agent_whose_file_was_edited_is_another_agent(evaluation):
    agent = evaluation.folder / "agent.py"
    evaluation.tasks({"id": "a", "value": 1.0})
    evaluation.run_local()
    agent.write_text(AGENT.replace("return", "return  "))
    _, errors = evaluation.run_local("--samples", "2", status=2)
    assert errors == (
        "agentcore-rl: run holds a run with other contents of agent.py: choose another --out, or go on with the same\n"
    )
    (evaluation.folder / "other").mkdir()  # what --local names is below --cwd
    agent.rename(evaluation.folder / "other" / "agent.py")
    assert "agent.py" in evaluation.run_local("--cwd", "other", "--samples", "2", status=2)[1]
    (evaluation.folder / "other" / "agent.py").write_text(AGENT)
    evaluation.run_local("--cwd", "other", "--samples", "2")
    assert evaluation.ran() == {"a": 2}


def test_a_file_that_is_edited_while_the_agent_runs_is_told(evaluation):
    agent = evaluation.folder / "agent.py"
    evaluation.tasks({"id": "a", "value": 1.0}, {"id": "b", "value": 1.0, "sleep": 1.5})
    process = evaluation.start_local()
    evaluation.wait_for(process, results=1, running=2)
    agent.write_text(AGENT + "\n")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert errors.endswith("the agent's file has changed while it ran: some samples may be of the new one\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_sessions_and_keeps_what_is_there(evaluation, number):
    evaluation.tasks(*({"id": f"t{i}", "value": 1.0, "sleep": 0 if i < 2 else 60} for i in range(6)))
    process = evaluation.start_local("--max-concurrent", "4")
    evaluation.wait_for(process, results=2, running=4)
    process.send_signal(number)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "interrupted: the same command goes on from here"
    assert "4 of 6 samples have not finished." in output
    assert evaluation.report()["finished"] == len(evaluation.results()) == 2
    assert_nothing_is_left(evaluation.mark)


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(evaluation):
    evaluation.tasks(*({"id": f"t{i}", "value": 1.0, "sleep": 0 if i < 3 else 1.5} for i in range(6)))
    process = evaluation.start_local("--max-concurrent", "3")
    evaluation.wait_for(process, results=3, running=5)
    process.kill()
    process.communicate()
    assert_nothing_is_left(evaluation.mark)
    finished = {r["task"] for r in evaluation.results()}
    with (evaluation.folder / "run" / "results.jsonl").open("a") as file:
        file.write('{"task": "t5", "sam')
    evaluation.run_local()
    assert sorted(r["task"] for r in evaluation.results()) == [f"t{i}" for i in range(6)]
    assert {task: evaluation.ran()[task] for task in finished} == dict.fromkeys(finished, 1)
    assert evaluation.report()["finished"] == 6


@pytest.mark.slow
def test_a_sample_that_lost_its_session_is_run_again(evaluation):
    agent = evaluation.folder / "agent.py"
    agent.write_text("raise SystemExit('broken image')")
    evaluation.tasks({"id": "a", "value": 1.0})
    output, errors = evaluation.run_local(status=1)
    assert "1 of them lost their session; the same command runs them again." in output
    assert "broken image" in errors
    agent.write_text(AGENT)
    evaluation.run_local()
    assert [r["outcome"] for r in evaluation.results()] == ["runtime_failed", "succeeded"]
    assert evaluation.report()["outcomes"] == {"succeeded": 1}


def test_the_agent_learns_about_its_model_and_the_key_is_not_kept(evaluation):
    evaluation.tasks({"id": "a", "value": 1.0})
    evaluation.run_local(
        *("--base-url", "http://127.0.0.1:9/sessions/sk-in-url/v1", "--model-id", "m", "--api-key-env", "MODEL_KEY"),
        *("--sampling-params", '{"temperature": 0.5}'),
        MODEL_KEY="sk-12345678",
    )
    config = evaluation.results()[0]["result"]["config"]
    assert config["sampling_params"] == {"temperature": 0.5}
    assert (config["model_id"], config["api_key"]) == ("m", "***")
    assert config["base_url"] == "http://127.0.0.1:9/sessions/***/v1"
    kept = [path.read_text() for path in (evaluation.folder / "run").iterdir() if path.is_file()]
    assert len(kept) == 5  # results, report as JSON and as text, settings, ledger
    assert not any("sk-" in content for content in kept)


def test_no_reward_at_all_is_an_error(evaluation):
    evaluation.tasks({"id": "a", "fail": True})
    _, errors = evaluation.run_local(status=1)
    assert "no sample has a reward; the first error: agent_failed: " in errors
    assert "boom" in errors


def test_on_a_terminal_it_draws_a_bar_and_gives_the_cursor_back(evaluation):
    evaluation.tasks({"id": "a", "value": 1.0}, {"id": "b", "value": 0.0})
    ours, theirs = pty.openpty()
    process = evaluation.start_local(stderr=theirs)
    os.close(theirs)
    drawn = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 4096):
            drawn += part
    os.close(ours)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.decode())
    assert "━" in shown
    assert "2/2 mean reward 0.500, 0 failed" in shown
    assert drawn.rindex(b"\x1b[?25h") > drawn.rindex(b"\x1b[?25l")
    assert "\x1b" not in output


@pytest.fixture
def deployed(evaluation: Eval) -> Iterator[dict[str, str]]:
    """The environment in which ``evaluation``'s agent is a deployed one."""
    ran = {"RAN": str(evaluation.folder / "ran.log")}
    with LocalAgentCore("python agent.py", cwd=evaluation.folder, env=ran) as local:
        place = {"AGENTCORE_AGENT_ARN": local.agent_runtime_arn, "AGENTCORE_S3_BUCKET": local.bucket}
        yield {**local.environment(), **place}


@pytest.mark.slow
def test_a_deployed_agent_outlives_a_killed_run_and_runs_nothing_twice(evaluation, deployed):
    evaluation.tasks(*({"id": f"t{i}", "value": 1.0, "sleep": 0 if i < 2 else 4} for i in range(6)))
    command = "eval", "--data", "tasks.jsonl", "--out", "run", "--max-concurrent", "4"
    process = evaluation.start(*command, **deployed)
    evaluation.wait_for(process, results=2, running=4)
    process.kill()
    process.communicate()
    process = evaluation.start(*command, **deployed)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 0, errors
    assert evaluation.ran() == {f"t{i}": 1 for i in range(6)}
    assert sorted(r["task"] for r in evaluation.results()) == [f"t{i}" for i in range(6)]


def test_one_process_at_a_time(evaluation, deployed):
    evaluation.tasks({"id": "a", "value": 1.0}, {"id": "b", "value": 1.0, "sleep": 60})
    command = "eval", "--data", "tasks.jsonl", "--out", "run"
    first = evaluation.start(*command, **deployed)
    evaluation.wait_for(first, results=1, running=2)
    second = evaluation.start(*command, **deployed)
    _, errors = second.communicate(timeout=20)
    assert second.returncode == 2
    assert "in use by another process" in errors
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=20)
    assert first.returncode == 130
    assert evaluation.ran() == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "tasks.jsonl"], "which agent? --agent-arn ARN for a deployed one, --local COMMAND"),
        (["--data", "tasks.jsonl", "--agent-arn", "arn:x"], "--bucket is required"),
        (["--data", "tasks.jsonl", "--agent-arn", "arn:x", "--bucket", "b"], "arn:x"),
        (["--data", "tasks.jsonl", "--local", "python nothing.py"], "there is no file 'nothing.py'"),
        (["--data", "tasks.jsonl", "--local", "python 'x"], "the agent's start command \"python 'x\": No closing"),
        (["--data", "tasks.jsonl", "--local", "x", "--api-key-env", "NO_SUCH"], "--api-key-env NO_SUCH: there is no"),
        (["--data", "broken.jsonl", "--local", "x"], "broken.jsonl, line 2: not JSON"),
        (["--data", "nothing.jsonl", "--local", "x"], "can't read nothing.jsonl"),
        (["--data", "empty.jsonl", "--local", "x"], "empty.jsonl has no task: one JSON object a line is required"),
    ],
)
def test_a_bad_setup_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("AGENTCORE_AGENT_ARN", "AGENTCORE_S3_BUCKET"):
        monkeypatch.delenv(name, raising=False)
    Path("tasks.jsonl").write_text('{"id": 1}\n')
    Path("empty.jsonl").write_text("\n")
    Path("broken.jsonl").write_text('{"id": 1}\n{"id": \n')
    assert main(["eval", *arguments, "--out", "run"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--samples", "0"],
        ["--threshold", "nan"],
        ["--timeout", "0"],
        ["--sampling-params", "[1]"],
        ["--agent-arn", "arn"],  # beside --local
    ],
)
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        main(["eval", "--local", "x", "--data", "x", "--out", "x", *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_a_local_agent_is_held_back_by_no_quota(tmp_path, monkeypatch):
    (tmp_path / "tasks.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "app.py").write_text("")
    clients = []

    def keep(client, *_, **__):
        clients.append(client)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agentcore_rl_toolkit.evaluation.run.evaluate", keep)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # it is told where the local services are
    main(["eval", "--local", "python app.py", "--data", "tasks.jsonl", "--out", "run"])
    assert (clients[0]._rates.calls, clients[0]._rates.sessions) == (math.inf, math.inf)


def test_help_teaches(capsys):
    for command, words in ("eval", ["--samples 8", "results.jsonl", '{"rewards": 1.0}']), ("compare", ["b - a"]):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = capsys.readouterr().out
        assert all(word in shown for word in words)


def test_compare_says_which_run_is_missing(tmp_path, capsys):
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert f"can't read {tmp_path}/a/results.jsonl" in capsys.readouterr().err

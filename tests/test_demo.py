"""``agentcore-rl demo`` as a user meets it: a command, its run directory, and Ctrl-C."""

import contextlib
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import pytest

from agentcore_rl_toolkit.cli import main
from agentcore_rl_toolkit.errors import MissingExtraError, SetupError
from agentcore_rl_toolkit.local import demo as demo_module
from agentcore_rl_toolkit.local.report import reward_svg
from processes import assert_nothing_is_left, marked

SVG = "{http://www.w3.org/2000/svg}"


@dataclass
class Demo:
    """A demo in a process of its own. Everything that it starts inherits the mark."""

    out: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str, stdout: int = subprocess.PIPE) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agentcore_rl_toolkit", "demo", "--out", str(self.out), *arguments],
            env={**os.environ, "DEMO_TEST_MARK": self.mark, "TERM": "xterm"},
            cwd=self.out.parent,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self, timeout: float = 50) -> str:
        output, _ = self.process.communicate(timeout=timeout)
        return output or ""

    def wait_for_rollouts(self, count: int) -> None:
        while len(self.rollouts()) < count:
            assert self.process.poll() is None, self.wait()
            time.sleep(0.02)

    def rollouts(self) -> list[dict]:
        """The complete lines."""
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.out / "rollouts.jsonl").read_text().splitlines(keepends=True)]
        return []


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path / "a run")
    yield demo
    if demo.process is not None and demo.process.poll() is None:
        demo.process.kill()
        demo.process.communicate()


def test_it_runs_and_leaves_what_it_says(demo):
    demo.start("--steps", "2", "--samples", "2", "--plain")
    output = demo.wait()

    assert demo.process.returncode == 0, output
    lines = output.splitlines()
    assert [line.split()[0] for line in lines[-4:-2]] == ["1", "2"]
    rollouts = demo.rollouts()
    assert sorted(r["input_id"] for r in rollouts) == [
        f"step-{step:04d}-{task:08d}-{sample:03d}" for step in (1, 2) for task in range(6) for sample in (0, 1)
    ]
    assert {r["outcome"] for r in rollouts} == {"succeeded"}
    assert {r["reward"] for r in rollouts} <= {0.0, 1.0}
    for rollout in rollouts:
        [row] = rollout["records"]  # a linear conversation is one row
        assert row["reward"] == rollout["reward"]
        assert sum(row["loss_mask"]) > 0
        turns = row["metadata"]["turns"]
        assert len(turns) == rollout["result"]["metrics"]["turns"]
    first, last = (fmean(r["reward"] for r in rollouts if r["run"] == f"step-000{i}") for i in (1, 2))
    assert lines[-2].startswith(f"reward {first:.2f} -> {last:.2f} in 2 steps, ")
    assert lines[-1] == f"{demo.out}: rollouts.jsonl, reward.svg"
    curve = ET.parse(demo.out / "reward.svg").getroot()
    assert len(curve.findall(f"{SVG}circle")) == 2
    assert_nothing_is_left(demo.mark)


@pytest.mark.slow
def test_on_a_terminal_it_draws_a_table_and_gives_the_cursor_back(demo):
    ours, theirs = pty.openpty()
    demo.start("--steps", "1", "--samples", "4", stdout=theirs)
    os.close(theirs)
    output = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 4096):
            output += part
    os.close(ours)
    demo.wait()
    assert demo.process.returncode == 0, output
    text = output.decode()
    assert "failures" in text
    assert re.search(r"\d/24", text)  # drawn while it ran
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert_nothing_is_left(demo.mark)


def test_ctrl_c_ends_it_in_order(demo):
    demo.start("--steps", "50", "--samples", "2", "--plain")
    demo.wait_for_rollouts(3)
    demo.process.send_signal(signal.SIGINT)
    output = demo.wait(timeout=15)
    assert demo.process.returncode == 130, output
    assert "Traceback" not in output
    assert "interrupted" in output
    assert f"{demo.out}: rollouts.jsonl" in output
    assert all(r["outcome"] == "succeeded" for r in demo.rollouts())
    assert_nothing_is_left(demo.mark)


def test_kill_leaves_no_process_and_a_readable_directory(demo):
    demo.start("--steps", "50", "--samples", "1", "--plain")
    demo.wait_for_rollouts(7)  # of six a step
    while len(marked(demo.mark)) < 3:  # between two steps there is no agent: the demo and its supervisor only
        assert demo.process.poll() is None, demo.wait()
    demo.process.kill()
    demo.wait()
    assert_nothing_is_left(demo.mark)
    assert len(demo.rollouts()) > 6
    ET.parse(demo.out / "reward.svg")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.timeout(180)
def test_signals_at_random_moments_leave_no_process(tmp_path, number):
    moments = random.Random(int(number))
    for attempt in range(5):
        demo = Demo(tmp_path / str(attempt))
        demo.start("--steps", "50", "--samples", "2", "--plain")
        time.sleep(moments.uniform(0.3, 8.0))
        demo.process.send_signal(number)
        output = demo.wait(timeout=20)
        # Before the handlers are there, Python is still importing: it ends as any program does.
        assert demo.process.returncode in (128 + number, -number), output
        demo.rollouts()  # every line is complete
        assert_nothing_is_left(demo.mark)


@pytest.mark.slow
def test_a_second_ctrl_c_quits_at_once(demo):
    demo.start("--steps", "50", "--samples", "2", "--plain")
    demo.wait_for_rollouts(4)
    demo.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    demo.process.send_signal(signal.SIGINT)
    started = time.monotonic()
    demo.wait(timeout=10)
    assert demo.process.returncode == 130
    assert time.monotonic() - started < 5
    assert_nothing_is_left(demo.mark)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_reward_climbs_and_two_runs_agree(tmp_path):
    curves = []
    for name in ("one", "two"):
        demo = Demo(tmp_path / name)
        demo.start("--plain")
        output = demo.wait(timeout=600)
        assert demo.process.returncode == 0, output
        print(output.splitlines()[-2])  # how long it took is told, not asserted
        rollouts = demo.rollouts()
        assert {r["outcome"] for r in rollouts} == {"succeeded"}
        steps = sorted({r["run"] for r in rollouts})
        curves.append([fmean(r["reward"] for r in rollouts if r["run"] == step) for step in steps])
        assert_nothing_is_left(demo.mark)
    assert len(curves[0]) == 24
    assert curves[0][0] <= 0.45
    assert fmean(curves[0][-4:]) >= 0.9
    assert f"reward {curves[0][0]:.2f} -> {fmean(curves[0][-4:]):.2f} (mean of the last 4) in 24 steps" in output
    assert curves[0] == curves[1]


# -- what can be wrong before it starts ----------------------------------------------------------------------


def test_a_directory_that_holds_a_run_is_refused(tmp_path, capsys):
    (tmp_path / "rollouts.jsonl").write_text("")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"agentcore-rl: {tmp_path} holds a run already: choose another --out\n"


def test_a_directory_that_cannot_be_made_is_told_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file" / "run")]) == 2
    error = capsys.readouterr().err
    assert "choose another --out" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "²"])
def test_steps_must_be_a_number(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["demo", f"--steps={text}"])
    assert "is not a number of at least 1" in capsys.readouterr().err


def test_a_missing_example_and_a_missing_extra_say_what_to_do(tmp_path, monkeypatch):
    arguments = demo_module.argparse.Namespace(out=tmp_path, engine="tiny", steps=1, samples=1, seed=0, plain=True)
    monkeypatch.setattr(demo_module, "EXAMPLE", Path("examples/gone"))
    with pytest.raises(SetupError, match=r"examples/gone/rl_app\.py is missing: reinstall"):
        demo_module.run(arguments)
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentcore-rl-toolkit\[local\]'"):
        demo_module.run(arguments)


def test_a_step_without_a_success_ends_it_with_the_reason(demo, tmp_path, monkeypatch, capsys):
    agent = tmp_path / "agent"
    agent.mkdir()
    (agent / "rl_app.py").write_text(
        "from agentcore_rl_toolkit import AgentCoreRLApp\n"
        "app = AgentCoreRLApp()\n"
        "@app.rollout_entrypoint\n"
        "def solve(payload): raise OSError('the calculator is broken')\n"
        "app.run()\n"
    )
    monkeypatch.setattr(demo_module, "_agent_directory", lambda: agent)
    assert main(["demo", "--plain", "--samples", "1", "--out", str(demo.out)]) == 2
    error = capsys.readouterr().err
    assert "no rollout of step 1 succeeded" in error
    assert "the calculator is broken" in error
    assert str(demo.out / "local" / "sessions") in error
    assert {r["outcome"] for r in demo.rollouts()} == {"agent_failed"}


# -- the curve -----------------------------------------------------------------------------------------------


def test_the_curve_is_an_svg_with_a_point_for_every_reward_and_gaps_between():
    root = ET.fromstring(reward_svg([0.0, 0.5, None, 1.0], "a < b"))
    texts = [element.text for element in root.findall(f"{SVG}text")]
    assert {"a < b", "training step", "mean reward", "0.00", "1.00", "1", "4"} <= set(texts)
    points = [(float(c.get("cx")), float(c.get("cy"))) for c in root.findall(f"{SVG}circle")]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    (_, bottom), (_, middle), (_, top) = points
    assert top < middle < bottom  # y grows downwards
    assert middle == pytest.approx((top + bottom) / 2)
    assert len(root.findall(f"{SVG}polyline")) == 2


@pytest.mark.parametrize("rewards", [[], [None], [0.5], [-3.0, 7.5], [0.0] * 1000])
def test_any_rewards_make_a_curve_inside_its_frame(rewards):
    root = ET.fromstring(reward_svg(rewards, "title"))
    for circle in root.findall(f"{SVG}circle"):
        assert 0 <= float(circle.get("cx")) <= 640
        assert 0 <= float(circle.get("cy")) <= 360


@pytest.mark.parametrize(("redirect", "code"), [(">/dev/full", 1), (">&-", 0), ("| head -1", 141)])
def test_odd_outputs_are_no_traceback(tmp_path, redirect, code):
    command = f'"{sys.executable}" -m agentcore_rl_toolkit demo --plain --steps 2 --samples 1 --out run'
    ended = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {redirect}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr

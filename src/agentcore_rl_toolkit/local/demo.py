"""``agentcore-rl demo``: train a small math agent on this machine, through every part that a real training uses.

Agent processes are started one per session by a local AgentCore Runtime and call the model through the rollout
gateway; results go to a local S3; ``run_rollouts`` joins rewards and traces; a policy-gradient step follows (GRPO:
the samples of a task are compared with each other). Two runs with one seed agree in every reward. With ``--engine
llama.cpp`` a real small model takes the policy's place: it is evaluated, not trained.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import TYPE_CHECKING, Any

from .._arguments import at_least_one
from ..errors import SetupError, require

if TYPE_CHECKING:
    from ..client import RolloutClient
    from ..rollout_gateway import ThreadedGatewayServer
    from ..rollouts import Rollout
    from .policy import TinyPolicy
    from .report import LiveReport, PlainReport, Step

TASKS_PER_STEP = 6
SUMMARY_STEPS = 4  # one step's mean reward moves by a few hundredths from chance alone
MAX_CONCURRENT = 12
LEARNING_RATE = 1.0
ROLLOUT_TIMEOUT = 120.0  # seconds; one takes about one, on a busy machine a few
REAL_MODEL_TIMEOUT = 900.0  # a slow machine samples a few tokens a second
EXAMPLE = Path("examples/local_math_agent")
_SIZES = {"tiny": (24, 6), "llama.cpp": (2, 2)}
"""Engine -> default number of steps, and of rollouts per task."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train a small agent on this machine, start to finish",
        description="Train a small math agent on this machine: no AWS account, no GPU.",
    )
    parser.add_argument(
        "--engine",
        choices=list(_SIZES),
        default="tiny",
        help="tiny: a policy that learns (default); llama.cpp: SmolLM2-135M-Instruct, evaluated, not trained",
    )
    parser.add_argument("--steps", type=at_least_one, help="training steps (default: 24; with llama.cpp: 2)")
    parser.add_argument("--samples", type=at_least_one, help="rollouts per task (default: 6; with llama.cpp: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of tasks and sampling (default: 0)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run directory (default: runs/<time>)")
    parser.add_argument("--plain", action="store_true", help="lines instead of a live table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; its exit code, ``128 + signal`` if a signal ended it. Raises ``SetupError``."""
    for module in ("aiohttp", "tokenizers", "jinja2", "numpy", "rich", "openai"):
        require(module, "local")
    from .report import make_report
    from .smollm2 import model_file, retokenized

    real = arguments.engine != "tiny"
    if real:
        model_file()  # says what is missing before anything runs
    steps, samples = _SIZES[arguments.engine]
    agent = _agent_directory()
    directory = RunDirectory(arguments.out)
    started = time.monotonic()
    signals = _Signals()
    with signals, directory:
        print(f"run directory: {directory.path}", flush=True)
        try:
            with _parts(agent, directory, real=real) as parts, make_report(plain=arguments.plain) as report:
                trainer = Trainer(*parts, directory=directory, report=report)
                plan = trainer.train(arguments.steps or steps, arguments.samples or samples, seed=arguments.seed)
                asyncio.run(signals.guard(plan))
        except (KeyboardInterrupt, asyncio.CancelledError):
            if not signals.received:
                raise
            print("interrupted", file=sys.stderr)
    print(directory.summary(time.monotonic() - started, trained=not real))
    if real:
        different, answers = retokenized(directory.path / "rollouts.jsonl", directory.path / "model")
        print(f"{different} of {answers} answers would be other tokens if their text was tokenized again; none was")
    return 128 + signals.received if signals.received else 0


def _agent_directory() -> Path:
    """Where the example agent is: in the installed package, or in a checkout."""
    package = Path(__file__).resolve().parents[1]
    places = [package / EXAMPLE, package.parents[1] / EXAMPLE]
    for place in places:
        if (place / "rl_app.py").is_file():
            return place
    raise SetupError(f"the demo's agent {EXAMPLE / 'rl_app.py'} is missing: reinstall, or restore it in the checkout")


@contextmanager
def _parts(
    agent: Path, directory: RunDirectory, *, real: bool
) -> Iterator[tuple[RolloutClient, ThreadedGatewayServer, TinyPolicy | None]]:
    """Everything that runs while the demo does; all of it has ended when the block is left."""
    from ..client import RolloutClient
    from ..rollout_gateway import HfTemplateRenderer, RolloutGateway, ThreadedGatewayServer
    from . import Lifecycle, LocalAgentCore, Quotas
    from .policy import FOLDER, TinyPolicy
    from .smollm2 import SAMPLING, smollm2

    with ExitStack() as stack:
        local = stack.enter_context(
            LocalAgentCore(
                "python rl_app.py",
                cwd=agent,
                data_dir=directory.path / "local",
                start="fork",
                quotas=Quotas(tps=None, new_sessions_per_minute=None, active_sessions=None),
                lifecycle=Lifecycle(stop_grace=2.0),
            )
        )
        policy = None if real else TinyPolicy()
        if policy is None:
            engine, renderer = stack.enter_context(smollm2(directory.path / "model"))
            gateway = RolloutGateway(backend=engine, renderer=renderer, sampling_defaults=SAMPLING)
        else:
            gateway = RolloutGateway(backend=policy, renderer=HfTemplateRenderer(FOLDER))
        server = ThreadedGatewayServer(gateway)
        server.start()
        stack.callback(server.shutdown)
        stack.enter_context(_environment(local.environment()))
        client = stack.enter_context(
            RolloutClient(
                local.agent_runtime_arn,
                s3_bucket=local.bucket,
                exp_id="demo",
                tps_limit=1000,
                new_sessions_per_minute=None,
                max_pool_connections=2 * MAX_CONCURRENT,
                model_id="tiny",
            )
        )
        yield client, server, policy


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@dataclass(slots=True)
class Trainer:
    """The training loop: rollouts, advantages, update, again. Without a policy, rollouts and again."""

    client: RolloutClient
    gateway: ThreadedGatewayServer
    policy: TinyPolicy | None
    directory: RunDirectory
    report: PlainReport | LiveReport

    async def train(self, steps: int, samples: int, *, seed: int) -> None:
        from .math_tasks import math_tasks

        tasks = math_tasks(seed, steps * TASKS_PER_STEP)
        for index in range(steps):
            payloads = tasks[index * TASKS_PER_STEP : (index + 1) * TASKS_PER_STEP]
            await self._step(index + 1, payloads, samples=samples, seed=seed * 1_000_003 + index)

    async def _step(self, number: int, payloads: Sequence[dict[str, Any]], *, samples: int, seed: int) -> None:
        from ..rollouts import run_rollouts
        from .report import Step

        started = time.monotonic()
        step = Step(number, len(payloads) * samples)
        rollouts: list[Rollout] = []
        stream = run_rollouts(
            self.client,
            self.gateway,
            payloads,
            samples=samples,
            timeout=ROLLOUT_TIMEOUT if self.policy else REAL_MODEL_TIMEOUT,
            max_concurrent=MAX_CONCURRENT,
            run=f"step-{number:04d}",
            seed=seed,
        )
        async with aclosing(stream):
            async for rollout in stream:
                rollouts.append(rollout)
                self.directory.add(rollout)
                step.add(rollout)
                step.seconds = time.monotonic() - started
                self.report.update(step)
        if not step.rewards:
            first = rollouts[0]
            raise SetupError(
                f"no rollout of step {number} succeeded. The first to end was {first.outcome} with: {first.error}\n"
                f"The agents' logs are in {self.directory.path / 'local' / 'sessions'}"
            )
        if self.policy:
            step.logprob_gap = await asyncio.to_thread(self._learn, self.policy, rollouts, samples)
        step.seconds = time.monotonic() - started
        self.directory.finish(step)
        self.report.finish(step)

    @staticmethod
    def _learn(policy: TinyPolicy, rollouts: list[Rollout], samples: int) -> float | None:
        """One policy update. Returns the largest logprob gap, None without a single row."""
        from .grpo import group_advantages

        # As they complete they come in any order; sums of floats depend on it.
        rollouts.sort(key=lambda rollout: (rollout.payload_index, rollout.sample_index))
        records, advantages = [], []
        for start in range(0, len(rollouts), samples):
            group = rollouts[start : start + samples]
            for rollout, advantage in zip(group, group_advantages([r.reward for r in group]), strict=True):
                records += rollout.records
                # A group of equals teaches nothing, but counts in the mean: else the last few mistakes of a good
                # policy would be as loud as the many of a bad one.
                advantages += [advantage or 0.0] * len(rollout.records)
        if not records:
            return None
        return policy.update(records, advantages, learning_rate=LEARNING_RATE)["max_logprob_gap"]


class RunDirectory:
    """What a run leaves behind, readable whenever it ends: ``rollouts.jsonl``, one rollout a line, ``reward.svg``, and
    in ``local/`` the agents' logs and S3 objects.

    ``path``: must not hold a run already; None makes one below ``runs/``, named by the time. Raises ``SetupError``.
    """

    def __init__(self, path: Path | None) -> None:
        self.steps: list[Step] = []
        self.path = path if path is not None else _new_run()
        if (self.path / "rollouts.jsonl").exists():
            raise SetupError(f"{self.path} holds a run already: choose another --out")

    def __enter__(self) -> RunDirectory:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lines = (self.path / "rollouts.jsonl").open("xb", buffering=0)  # a line is one write: whole or not
        except OSError as error:
            raise SetupError(f"can't write to {self.path} ({error.strerror}): choose another --out") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def add(self, rollout: Rollout) -> None:
        self._lines.write(rollout.to_json().encode() + b"\n")

    def finish(self, step: Step) -> None:
        from .report import reward_svg

        self.steps.append(step)
        curve = reward_svg([step.reward for step in self.steps], "agentcore-rl demo: mean reward per step")
        unfinished = self.path / ".reward.svg"
        unfinished.write_text(curve, encoding="utf-8")
        unfinished.replace(self.path / "reward.svg")

    def summary(self, seconds: float, *, trained: bool) -> str:
        """The last words of a run."""
        rewards = [step.reward for step in self.steps if step.reward is not None]
        last = rewards[-min(SUMMARY_STEPS, len(rewards) // 2) :] if len(rewards) > 1 else rewards
        curve = f"{rewards[0]:.2f} -> {fmean(last):.2f}" if rewards else "none"
        curve += f" (mean of the last {len(last)})" if len(last) > 1 else ""
        if rewards and not trained:
            curve = f"{fmean(rewards):.2f} (nothing was trained)"
        failures = sum(step.failures for step in self.steps)
        failed = f", {failures} failed rollouts" if failures else ""
        files = "rollouts.jsonl" + (", reward.svg" if self.steps else "")
        return f"reward {curve} in {len(self.steps)} steps, {seconds:.0f} s{failed}\n{self.path}: {files}"


def _new_run() -> Path:
    name = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    return name if not name.exists() else name.with_name(f"{name.name}-{os.getpid()}")


class _Signals:
    """The first SIGINT or SIGTERM ends the demo in order, the second at once.

    What ``LocalAgentCore`` has started ends in both cases: its processes don't outlive it.
    """

    def __init__(self) -> None:
        self.received = 0
        self._main: asyncio.Task[None] | None = None
        self._ending = False

    async def guard(self, work: Any) -> None:
        """Await ``work``, which the first signal cancels."""
        self._main = asyncio.current_task()
        try:
            await work
        finally:
            self._ending = True

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received:
            with contextlib.suppress(OSError):
                os.write(1, b"\x1b[?25h" if sys.stdout.isatty() else b"")  # the live table hides the cursor
            os._exit(128 + number)
        self.received = number
        if self._main is None:
            raise KeyboardInterrupt
        if not self._ending:
            self._main.get_loop().call_soon_threadsafe(self._main.cancel)

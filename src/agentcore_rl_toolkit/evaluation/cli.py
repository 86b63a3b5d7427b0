"""``agentcore-rl eval`` and ``agentcore-rl compare``."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._arguments import at_least_one
from ..errors import SetupError

if TYPE_CHECKING:
    from ..client import RolloutClient
    from .report import Report
    from .results import EvaluationDirectory, Sample, Task

_EVAL = """\
Run an agent on every task of a file, several times each, and report how good it is.

  agentcore-rl eval --agent-arn ARN --bucket my-bucket --data tasks.jsonl --samples 8 --out runs/base
  agentcore-rl eval --local "python rl_app.py" --data tasks.jsonl --samples 8 --out runs/mine
  agentcore-rl compare runs/base runs/mine

--data holds one request payload a line, as the agent's handler takes it; "task_id" or "id" in it names the task.
The agent's result says what a sample is worth: {"rewards": 1.0}.

--out gets results.jsonl (a line as each sample ends), report.json and report.md. The same command again goes on
where the last one was stopped, Ctrl-C or crash; samples that have finished don't run again, and more --samples or a
longer --data add to them. A rollout that failed has no reward, and counts in no mean unless --failed-as-zero is given.
"""
_COMPARE = """\
Compare two runs of `agentcore-rl eval` task by task: the mean difference b - a with its 95 % interval, and the tasks
that are solved (at least half of their samples succeed) in one run only. An interval that holds 0: no difference shown.
What is counted of a run are the samples that its last report covers.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        "eval", help="run an agent on a file of tasks and report", description=_EVAL, formatter_class=form
    )
    _add_agent(parser.add_argument_group("agent"))
    _add_model(parser.add_argument_group("model", "What the agent is told in _rollout; without it, its own choice."))
    run = parser.add_argument_group("run")
    run.add_argument("--data", type=Path, required=True, metavar="FILE", help="tasks, one JSON object a line")
    run.add_argument("--limit", type=at_least_one, metavar="N", help="only the first N tasks")
    run.add_argument("--samples", type=at_least_one, default=1, metavar="N", help="rollouts of each task (default: 1)")
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the run")
    run.add_argument("--timeout", type=_above_zero, default=900.0, metavar="SECONDS", help="a rollout (default: 900)")
    run.add_argument("--max-concurrent", type=at_least_one, metavar="N", help="sessions (default: 64; with --local: 8)")
    run.add_argument(
        "--tps-limit", type=_above_zero, default=25.0, metavar="N", help="calls to AgentCore a second (default: 25)"
    )
    run.add_argument(
        "--new-sessions-per-minute", type=_above_zero, default=400.0, metavar="N",
        help="AWS's quota: 400 for a container (default), 1500 for a code deployment",
    )  # fmt: skip
    run.add_argument("--plain", action="store_true", help="lines instead of a progress bar")
    _add_rule(parser)
    parser.set_defaults(run=_run_eval)

    parser = subparsers.add_parser(
        "compare", help="compare two evaluations task by task", description=_COMPARE, formatter_class=form
    )
    parser.add_argument("a", type=Path, metavar="RUN_A", help="--out of the first run")
    parser.add_argument("b", type=Path, metavar="RUN_B", help="--out of the second")
    parser.add_argument("--json", action="store_true", help="all numbers, every task, as JSON")
    _add_rule(parser)
    parser.set_defaults(run=_run_compare)


def _add_agent(group: argparse._ArgumentGroup) -> None:
    one = group.add_mutually_exclusive_group()
    one.add_argument("--agent-arn", metavar="ARN", help="a deployed agent (default: $AGENTCORE_AGENT_ARN)")
    one.add_argument("--local", metavar="COMMAND", help="an agent on this machine, e.g. 'python rl_app.py'")
    group.add_argument("--bucket", help="where a deployed agent writes results (default: $AGENTCORE_S3_BUCKET)")
    group.add_argument("--cwd", type=Path, metavar="DIR", help="with --local: where the command's files are")


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", metavar="URL", help="its chat API")
    group.add_argument("--model-id", metavar="NAME", help="its name")
    group.add_argument("--api-key-env", metavar="NAME", help="the environment variable that holds its key")
    group.add_argument("--sampling-params", type=_object, metavar="JSON", help="""e.g. '{"temperature": 0.6}'""")


def _add_rule(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("counting")
    group.add_argument(
        "--threshold", type=_finite, default=1.0, metavar="R", help="a reward of at least R is a success (default: 1)"
    )
    group.add_argument("--failed-as-zero", action="store_true", help="give failed rollouts reward 0")


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def _above_zero(text: str) -> float:
    if (value := _finite(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object is required")
    return value


# -- eval ------------------------------------------------------------------------------------------------


def _run_eval(arguments: argparse.Namespace) -> int:
    from .report import Rule, make_report
    from .results import EvaluationDirectory, read_tasks
    from .run import finished

    rule = Rule(arguments.threshold, arguments.failed_as_zero)
    tasks = read_tasks(arguments.data, limit=arguments.limit)
    settings = _settings(arguments)
    directory = EvaluationDirectory(arguments.out, settings)
    interrupted = False
    with _terminable(), closing(directory):
        try:
            before = [sample for sample in finished(tasks, arguments.samples, directory) if not sample.lost]
            if len(before) < len(tasks) * arguments.samples:
                _evaluate(arguments, tasks, before, directory)
        except KeyboardInterrupt:
            interrupted = True
    samples = finished(tasks, arguments.samples, directory)
    report = make_report(samples, [task.id for task in tasks], arguments.samples, rule)
    _write(report, directory)
    if _settings(arguments) != settings:
        print("the agent's file has changed while it ran: some samples may be of the new one", file=sys.stderr)
    if interrupted:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    if report.scored:
        if error := _first_error(samples):
            print(f"the first error: {error.splitlines()[0]} (whole, and the others: results.jsonl)", file=sys.stderr)
        return 0
    print(f"no sample has a reward; the first error: {_first_error(samples) or 'none'}", file=sys.stderr)
    return 1


def _first_error(samples: Sequence[Sample]) -> str:
    return next((f"{sample.outcome}: {sample.error}" for sample in samples if sample.error), "")


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What has to stay the same for samples to belong to one run."""
    from .._redact import Redactor
    from .results import FILES

    files = {FILES: _contents(arguments.local, arguments.cwd or Path())} if arguments.local else {}
    return {
        "agent": arguments.local or _deployed(arguments)[0],
        **files,
        "base_url": Redactor().text(arguments.base_url) if arguments.base_url else None,
        "model_id": arguments.model_id,
        "sampling_params": arguments.sampling_params,
    }


def _contents(command: str, cwd: Path) -> dict[str, str]:
    """Digests of the files that the command names: an edited agent is another one."""
    from .results import digests

    with suppress(ValueError):  # told when the agent is started
        return digests({part: cwd / part for part in shlex.split(command) if os.path.isfile(cwd / part)})
    return {}


def _deployed(arguments: argparse.Namespace) -> tuple[str, str]:
    """ARN and bucket of a deployed agent."""
    arn = arguments.agent_arn or os.environ.get("AGENTCORE_AGENT_ARN")
    bucket = arguments.bucket or os.environ.get("AGENTCORE_S3_BUCKET")
    if not arn:
        raise SetupError("which agent? --agent-arn ARN for a deployed one, --local COMMAND for one on this machine")
    if not bucket:
        raise SetupError("--bucket is required: the S3 bucket to which the agent writes its results")
    return arn, bucket


def _evaluate(
    arguments: argparse.Namespace, tasks: Sequence[Task], before: Sequence[Sample], directory: EvaluationDirectory
) -> None:
    from .._redact import find_secrets
    from .progress import progress
    from .run import evaluate

    concurrent = arguments.max_concurrent or (8 if arguments.local else 64)
    key = _api_key(arguments.api_key_env)
    with ExitStack() as stack:
        client = _client(arguments, stack, concurrent, key, directory.exp_id)
        total = len(tasks) * arguments.samples
        evaluate(
            client,
            tasks,
            arguments.samples,
            directory,
            timeout=arguments.timeout,
            max_concurrent=concurrent,
            show=stack.enter_context(progress(total, before, plain=arguments.plain)),
            secrets=list(find_secrets({"base_url": arguments.base_url, "api_key": key})),
        )


def _api_key(name: str | None) -> str | None:
    if name is not None and not os.environ.get(name):
        raise SetupError(f"--api-key-env {name}: there is no such environment variable; export it first")
    return os.environ[name] if name else None


def _client(
    arguments: argparse.Namespace, stack: ExitStack, concurrent: int, key: str | None, exp_id: str
) -> RolloutClient:
    from ..client import RolloutClient

    tps: float | None = arguments.tps_limit
    sessions: float | None = arguments.new_sessions_per_minute
    if not arguments.local:
        arn, bucket = _deployed(arguments)
    else:
        from ..local import Lifecycle, LocalAgentCore, Quotas

        local = stack.enter_context(
            LocalAgentCore(
                arguments.local,
                cwd=arguments.cwd,
                data_dir=arguments.out / "local",
                quotas=Quotas(tps=None, new_sessions_per_minute=None, active_sessions=None),
                lifecycle=Lifecycle(stop_grace=2.0),
            )
        )
        os.environ.update(local.environment())  # this process ends with the command
        arn, bucket = local.agent_runtime_arn, local.bucket
        tps = sessions = None
    return stack.enter_context(
        RolloutClient(
            arn,
            bucket,
            exp_id=exp_id,
            tps_limit=tps,
            new_sessions_per_minute=sessions,
            max_pool_connections=min(concurrent, 64),
            base_url=arguments.base_url,
            model_id=arguments.model_id,
            api_key=key,
            sampling_params=arguments.sampling_params,
        )
    )


def _write(report: Report, directory: EvaluationDirectory) -> None:
    from .report import markdown, plain, tables, text, title
    from .results import REPORT, RESULTS

    found = tables(report)
    directory.write(REPORT, json.dumps(plain(report), indent=1, allow_nan=False))
    directory.write("report.md", markdown(f"Evaluation: {title(report)}", found, report.notes))
    print(text(title(report), found, report.notes))
    names = [name for name in (RESULTS, REPORT, "report.md") if (directory.path / name).exists()]
    print(f"\n{directory.path}: {', '.join(names)}")


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM is Ctrl-C: sessions are stopped and the report is written."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- compare ---------------------------------------------------------------------------------------------


def _run_compare(arguments: argparse.Namespace) -> int:
    from .compare import compare, heading, notes, tables
    from .report import Rule, text
    from .results import reported_samples

    rule = Rule(arguments.threshold, arguments.failed_as_zero)
    found = compare(reported_samples(arguments.a), reported_samples(arguments.b), rule)
    if arguments.json:
        print(json.dumps(asdict(found), indent=1, allow_nan=False))
    else:
        print(text(heading(found, str(arguments.a), str(arguments.b)), tables(found, rule), notes(found)))
    return 0

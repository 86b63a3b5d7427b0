"""What an evaluation reads and keeps: tasks, samples, and the directory of a run."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ContractError, Outcome, SetupError
from ..protocol import dumps

__all__ = ["EvaluationDirectory", "Sample", "Task", "digests", "read_samples", "read_tasks", "reported_samples"]

RESULTS, REPORT = "results.jsonl", "report.json"
FILES = "files"
"""The setting that holds :func:`digests`."""


@dataclass(frozen=True, slots=True)
class Task:
    """One line of the data file. ``digest``: of the payload, by which two runs know that they mean the same."""

    id: str
    payload: Mapping[str, Any]
    digest: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished rollout, as a line of ``results.jsonl`` holds it, beside the agent's ``result`` object.

    ``task``, ``digest``: see :class:`Task`. ``index``: the task's position in the data, from 0. ``sample``: which
    of the task's samples, from 0. ``reward``: finite; None if the agent gave none or the rollout failed.
    ``elapsed``: seconds from the invoke until the result was seen. ``error``: what went wrong, None if nothing did.
    """

    task: str
    digest: str
    index: int
    sample: int
    outcome: Outcome
    reward: float | None
    elapsed: float
    input_id: str
    session_id: str
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.outcome not in (Outcome.SUCCEEDED, Outcome.TRUNCATED)

    def among(self, tasks: int, samples: int) -> bool:
        """Whether it is one of the first ``samples`` of one of the first ``tasks``."""
        return self.index < tasks and self.sample < samples

    @property
    def lost(self) -> bool:
        """Whether the failure says nothing about the agent: such a sample is run again when its run goes on."""
        return self.outcome in (Outcome.RUNTIME_FAILED, Outcome.CANCELLED)


def read_tasks(path: Path, *, limit: int | None = None) -> list[Task]:
    """The first ``limit`` tasks of a JSONL file, each line one payload; empty lines are skipped.

    A task is known by its payload's ``task_id`` or ``id``, else by the digest of the payload. Raises ``SetupError``
    with the line's number for what is no JSON object, or an id that an earlier line has, and for a file without a task.
    """
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    for number, payload in _objects(path, _read(path).splitlines()):
        if limit is not None and len(tasks) >= limit:
            break
        digest = sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()[:16]
        name = next((payload[key] for key in ("task_id", "id") if payload.get(key) is not None), None)
        if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
            raise SetupError(f"{path}, line {number}: a task's id is a string or a whole number, not {name!r}")
        id = str(name) if name is not None else digest
        if id in lines:
            what = f"the id {id!r}" if name is not None else "the same payload"
            raise SetupError(f"{path}, line {number}: line {lines[id]} has {what}; --samples runs a task repeatedly")
        lines[id] = number
        tasks.append(Task(id, payload, digest))
    if not tasks:
        raise SetupError(f"{path} has no task: one JSON object a line is required")
    return tasks


def read_samples(path: Path) -> list[Sample]:
    """The samples of a ``results.jsonl``; of two lines for one sample the later counts.

    A last line that a crash cut off does not count. Raises ``SetupError`` with the line's number for any other line
    that holds no sample.
    """
    samples = {}
    for number, row in _objects(path, _complete(_read(path)).splitlines()):
        try:
            sample = _sample(row)
        except (KeyError, ArithmeticError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise SetupError(f"{path}, line {number}: no result of an evaluation: {what}") from None
        samples[sample.index, sample.sample] = sample
    return list(samples.values())


def reported_samples(directory: Path) -> list[Sample]:
    """The samples that the last report of a run covers, so that its numbers are the same everywhere.

    All of them, if the run was killed before its first report. Raises ``SetupError`` if a file can't be read.
    """
    samples, path = read_samples(directory / RESULTS), directory / REPORT
    if not path.exists():
        return samples
    try:
        report = json.loads(_read(path))
        tasks, planned = int(report["tasks"]), int(report["planned"])
        return [sample for sample in samples if sample.among(tasks, planned // tasks)]
    except (ValueError, TypeError, KeyError, ArithmeticError):
        raise SetupError(f"{path} is damaged: the command of its run writes it anew") from None


def _sample(row: Mapping[str, Any]) -> Sample:
    reward, error = row["reward"], row.get("error")
    return Sample(
        task=_typed(row, "task", str),
        digest=_typed(row, "digest", str),
        index=_typed(row, "index", int),
        sample=_typed(row, "sample", int),
        outcome=Outcome(row["outcome"]),
        reward=None if reward is None else float(_typed(row, "reward", int, float)),
        elapsed=float(_typed(row, "elapsed", int, float)),
        input_id=str(row.get("input_id", "")),
        session_id=str(row.get("session_id", "")),
        error=None if error is None else str(error),
    )


def _typed(row: Mapping[str, Any], name: str, *types: type) -> Any:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, types):
        raise ValueError(f"{name}: {value!r} is not {' or '.join(kind.__name__ for kind in types)}")
    return value


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SetupError(f"can't read {path} ({error.strerror})") from None


def _complete(data: bytes) -> bytes:
    """``data`` without a last line that was cut off."""
    whole, tail = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
    try:
        json.loads(tail)
    except ValueError:
        return whole
    return data + b"\n"  # an editor may leave it out


def _objects(path: Path, lines: list[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON object of each line that is not empty, with the line's number from 1."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise SetupError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise SetupError(f"{path}, line {number}: a JSON object is required, not {type(value).__name__}")
        yield number, value


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not finite")
    return value


def digests(files: Mapping[str, Path]) -> dict[str, str]:
    """A digest of the contents of each file, by the same names. Raises ``SetupError`` for one that can't be read."""
    return {name: sha256(_read(path)).hexdigest()[:16] for name, path in files.items()}


def _difference(name: str, before: Any, now: Any) -> str:
    if name != FILES:
        return f"{name} {before!r}, not {now!r}"
    before = before if isinstance(before, dict) else {}
    return f"other contents of {', '.join(file for file in now | before if now.get(file) != before.get(file))}"


class EvaluationDirectory:
    """The directory of one evaluation: ``run.json`` (what is run), ``results.jsonl`` (one line a finished sample).

    ``settings``: what must be the same when a run goes on, unless all it has are lost samples; the first run writes
    them. ``exp_id``: the run's place in the bucket. ``samples``: what has ended, by position in the data and sample.
    Raises ``SetupError`` if the directory can't be used, or holds a run with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.samples: dict[tuple[int, int], Sample] = {}
        self._lines: BinaryIO | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            if (path / RESULTS).exists():
                self.samples = {(s.index, s.sample): s for s in read_samples(path / RESULTS)}
            self.exp_id = self._check(settings)
        except OSError as error:
            raise SetupError(f"can't write to {path} ({error.strerror}): choose another --out") from None

    def _check(self, settings: Mapping[str, Any]) -> str:
        path = self.path / "run.json"
        if not path.exists():
            if self.samples:
                raise SetupError(f"{self.path} has results, but no run.json: choose another --out")
            name = re.sub(r"[^A-Za-z0-9_-]+", "-", self.path.resolve().name)[:100]
            return self._begin(f"eval-{name}-{uuid.uuid4().hex[:8]}", settings)
        try:
            before = dict(json.loads(path.read_bytes()))
            exp_id = str(before["exp_id"])
        except (ValueError, TypeError, KeyError):
            raise SetupError(f"{path} is damaged: choose another --out") from None
        if all(sample.lost for sample in self.samples.values()):  # nothing has come of it: a mistyped command, perhaps
            return self._begin(exp_id, settings)
        for name, value in settings.items():
            if value != before.get(name):
                raise SetupError(
                    f"{self.path} holds a run with {_difference(name, before.get(name), value)}: choose another --out,"
                    " or go on with the same"
                )
        return exp_id

    def _begin(self, exp_id: str, settings: Mapping[str, Any]) -> str:
        self.write("run.json", dumps({"exp_id": exp_id, **settings}))
        return exp_id

    def add(self, sample: Sample, result: Mapping[str, Any] | None) -> None:
        """Append one line. A result that is no strict JSON is left out, and the line says why."""
        row = {**asdict(sample), "result": result}
        try:
            line = dumps(row)
        except ContractError as error:
            line = dumps({**row, "result": None, "error": f"its result is not kept: {error}"})
        if self._lines is None:
            self._lines = self._open()
        self._lines.write(line.encode() + b"\n")
        self.samples[sample.index, sample.sample] = sample

    def _open(self) -> BinaryIO:
        """Not before there is a sample to add: then the batch's ledger keeps other processes out."""
        path = self.path / RESULTS
        if path.exists():
            before = _read(path)
            if _complete(before) != before:
                path.write_bytes(_complete(before))
        return path.open("ab", buffering=0)  # a line is one write: whole or not

    def write(self, name: str, text: str) -> None:
        """A whole file, or none: a crash never leaves half of it."""
        unfinished = self.path / f".{name}"
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(self.path / name)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

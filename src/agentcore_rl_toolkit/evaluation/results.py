"""What an evaluation reads and keeps: tasks, samples, and the directory of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..errors import ContractError, Outcome, SetupError
from ..protocol import dumps

__all__ = ["RunDirectory", "Sample", "Task", "read_samples", "read_tasks"]

RESULTS = "results.jsonl"


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


def read_tasks(path: Path, *, limit: int | None = None) -> list[Task]:
    """The first ``limit`` tasks of a JSONL file, each line one payload; empty lines are skipped.

    A task is known by its payload's ``task_id`` or ``id``, else by the digest of the payload. Raises ``SetupError``
    with the line's number for what is no JSON object, or an id that an earlier line has.
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
    return tasks


def read_samples(path: Path) -> list[Sample]:
    """The samples of a ``results.jsonl``. A last line that a crash cut off does not count.

    Raises ``SetupError`` with the line's number for any other line that holds no sample.
    """
    return _samples(path, _complete(_read(path)))


def _samples(path: Path, data: bytes) -> list[Sample]:
    samples = {}
    for number, row in _objects(path, data.splitlines()):
        try:
            sample = _sample(row)
        except (KeyError, ArithmeticError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise SetupError(f"{path}, line {number}: no result of an evaluation: {what}") from None
        samples[sample.index, sample.sample] = sample
    return list(samples.values())


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
        return data + b"\n" if isinstance(json.loads(tail), dict) else whole  # an editor may leave out the newline
    except ValueError:
        return whole


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


class RunDirectory:
    """The directory of one run: ``run.json`` (what is evaluated), ``results.jsonl`` (one line a finished sample).

    ``settings``: what must be the same when a run goes on; the first run writes them. ``samples``: those that
    have finished. Raises ``SetupError`` if the directory can't be used, or holds a run with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        results = path / RESULTS
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._check(settings)
            self._lines = results.open("ab", buffering=0)  # a line is one write: whole or not
            before = _read(results)
            self.samples = _samples(results, _complete(before))
            if _complete(before) != before:
                results.write_bytes(_complete(before))
        except OSError as error:
            raise SetupError(f"can't write to {path} ({error.strerror}): choose another --out") from None

    def _check(self, settings: Mapping[str, Any]) -> None:
        path = self.path / "run.json"
        results = self.path / RESULTS
        if not results.exists() or not results.stat().st_size:  # nothing has come of it: a mistyped command, perhaps
            self.write("run.json", dumps(settings))
            return
        if not path.exists():
            raise SetupError(f"{self.path} has results, but no run.json: choose another --out")
        try:
            before = dict(json.loads(path.read_bytes()))
        except (ValueError, TypeError):
            raise SetupError(f"{path} is damaged: choose another --out") from None
        for name, value in settings.items():
            if value != before.get(name):
                raise SetupError(
                    f"{self.path} holds a run with {name} {before.get(name)!r}, not {value!r}: choose another --out,"
                    " or go on with the same"
                )

    def add(self, sample: Sample, result: Mapping[str, Any] | None) -> None:
        """Append one line. A result that is no strict JSON is left out, and the line says why."""
        row = {**asdict(sample), "result": result}
        try:
            line = dumps(row)
        except ContractError as error:
            line = dumps({**row, "result": None, "error": f"its result is not kept: {error}"})
        self._lines.write(line.encode() + b"\n")
        self.samples.append(sample)

    def write(self, name: str, text: str) -> None:
        """A whole file, or none: a crash never leaves half of it."""
        unfinished = self.path / f".{name}"
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(self.path / name)

    def close(self) -> None:
        self._lines.close()

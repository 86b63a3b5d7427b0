"""What a batch has done so far, in a file: a script that died goes on where it was.

One line of JSON for each step, appended before (a start) or after (an end) it is made. A line is handed to the
operating system at once and never synced: it survives the death of the process, and what a power cut takes can be had
again, because input and session ids follow from the run's name. S3 holds the results.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..errors import ContractError, Outcome, SetupError
from ..protocol import dumps

__all__ = ["Ledger", "Past"]

_FILE = "ledger.jsonl"
_FINAL = frozenset(Outcome) - {Outcome.RUNTIME_FAILED, Outcome.CANCELLED}
"""The others were lost: they are run again, as another attempt."""


@dataclass(slots=True)
class Past:
    """What the ledger knows of one rollout. ``outcome``: None while it runs, or ran when the script died."""

    payload: str
    attempt: int
    outcome: Outcome | None = None
    error: str | None = None
    elapsed: float = 0.0
    known: bool = False
    """Whether this comes from the ledger's file: an earlier run of the script has begun it."""

    @property
    def final(self) -> bool:
        return self.outcome in _FINAL


class Ledger:
    """The ledger of one batch in ``run_dir`` (made if it is missing), held by one process at a time.

    ``run``: the name that its input ids begin with. ``identity``: what must be the same for a batch to go on.
    Raises ``SetupError`` if the folder can't be used, or belongs to another batch.
    """

    def __init__(self, run_dir: str | os.PathLike[str], identity: Mapping[str, Any]) -> None:
        self._past: dict[str, Past] = {}
        path = Path(run_dir) / _FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise SetupError(f"run_dir {run_dir} can't be used ({error.strerror}): choose another") from None
        try:
            self._hold(path)
            self.run = self._read(path, dict(identity))
        except BaseException:
            self.close()
            raise

    def _hold(self, path: Path) -> None:
        try:
            import fcntl
        except ImportError:  # not on this system: whoever starts a batch twice at once is on their own
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SetupError(f"{path} is in use by another process: wait for it, or choose another run_dir") from None

    def _read(self, path: Path, identity: dict[str, Any]) -> str:
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):  # the last line was cut when the machine stopped
            os.ftruncate(self._file, len(whole))
        lines = whole.splitlines()
        if not lines:
            run = f"run-{uuid.uuid4().hex[:12]}"
            self._append({"run": run, **identity})
            return run
        try:
            header, *entries = (json.loads(line) for line in lines)
            run = header.pop("run")
            for entry in entries:
                outcome = Outcome(entry.pop("outcome")) if entry["outcome"] else entry.pop("outcome")
                input_id = entry.pop("input_id")  # before the rest is spread: a target is evaluated after its value
                self._past[input_id] = Past(**entry, outcome=outcome, known=True)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SetupError(f"{path} is no ledger of this version: choose another run_dir") from None
        if header != identity:
            differs = ", ".join(name for name in identity if header.get(name) != identity[name])
            raise SetupError(f"{path} belongs to a batch with another {differs}: choose another run_dir")
        return str(run)

    def past(self, input_id: str, payload: Mapping[str, Any]) -> Past:
        """What is known of this rollout; of one that was lost or stopped, that it is to be another attempt.

        Raises ``SetupError`` if its payload was another.
        """
        try:
            digest = sha256(dumps(payload, "payload").encode()).hexdigest()[:16]
        except ContractError:  # it will be rejected, each time
            digest = ""
        past = self._past.pop(input_id, None)
        if past is None:
            return Past(digest, 0)
        if past.payload != digest:
            raise SetupError(
                f"run_dir has another payload for {input_id}: the payloads have changed since; choose another run_dir,"
                " or put them back"
            )
        if past.outcome is not None and not past.final:  # its session can't be used again
            return Past(digest, past.attempt + 1)
        return past

    def write(self, input_id: str, past: Past) -> None:
        fields = asdict(past)
        del fields["known"]
        self._append({"input_id": input_id, **fields})

    def _append(self, entry: dict[str, Any]) -> None:
        if self._file < 0:
            return  # a second Ctrl-C did not wait for this one's end
        line = json.dumps(entry).encode() + b"\n"
        try:
            written = os.write(self._file, line)
            if written < len(line):  # no half line may stay in the middle of the file
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise SetupError(
                f"the ledger can't be written ({error.strerror}): make room for it, and start the batch again"
            ) from None

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)  # which lets go of the lock
            self._file = -1

"""What the agent and the trainer agree on: the rollout config, the result object, its key, the outcomes.

Everything that crosses the border between the two is defined here and nowhere else. Pure standard
library: both sides import it, and neither pays for the other's dependencies.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import itertools
import json
import math
import reprlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ContractError, Outcome

__all__ = [
    "ADDRESS_FIELDS",
    "MAX_PAYLOAD_BYTES",
    "PROBE_FIELD",
    "ROLLOUT_FIELD",
    "ContractError",
    "Outcome",
    "RolloutConfig",
    "dumps",
    "error_result",
    "is_success",
    "make_input_id",
    "make_session_id",
    "result_key",
    "result_outcome",
    "result_reward",
    "success_result",
    "to_jsonable",
]

ROLLOUT_FIELD = "_rollout"
"""The payload field that carries the :class:`RolloutConfig`."""

PROBE_FIELD = "is_running"
"""In ``_rollout``: true asks whether the rollout runs (status ``processing``) or not (``unknown``), and starts none."""

MAX_KEY_PART = 256
_MAX_KEY_BYTES = 1024
_MAX_INT_BITS = 14_000  # Python's own JSON reader takes 4,300 digits
MAX_PAYLOAD_BYTES = 100_000_000
"""InvokeAgentRuntime takes no larger payload (botocore model of the service)."""


def _key_part(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ContractError(f"_rollout.{name}: a non-empty string is required, got {value!r}")
    if len(value) > MAX_KEY_PART:
        raise ContractError(f"_rollout.{name}: {len(value)} characters, at most {MAX_KEY_PART} are allowed")
    if "/" in value or ".." in value or value == "." or any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise ContractError(f"_rollout.{name}: {value!r} may not contain '/', '..' or control characters")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ContractError(f"_rollout.{name}: not valid Unicode (lone surrogate)") from None
    return value


def result_key(exp_id: str, input_id: str, session_id: str) -> str:
    """The S3 key of a result, ``{exp_id}/{input_id}/{session_id}.json``: both sides can compute it."""
    parts = _key_part("exp_id", exp_id), _key_part("input_id", input_id), _key_part("session_id", session_id)
    key = "/".join(parts) + ".json"
    if len(key.encode()) > _MAX_KEY_BYTES:
        raise ContractError(
            f"_rollout.exp_id, input_id: the result's key has {len(key.encode())} bytes, S3 takes {_MAX_KEY_BYTES}"
        )
    return key


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """The ``_rollout`` part of a request payload, injected by the client.

    ``exp_id``, ``input_id``, ``s3_bucket``: where the result goes. ``base_url``, ``model_id``, ``api_key``,
    ``sampling_params``: how the agent reaches its model. ``extra``: every other keyword, passed through.
    """

    exp_id: str
    input_id: str
    s3_bucket: str
    base_url: str | None = None
    model_id: str | None = None
    api_key: str | None = field(default=None, repr=False)
    sampling_params: Mapping[str, Any] | None = None
    notify_url: str | None = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_payload(cls, payload: object) -> RolloutConfig | None:
        """Read and validate ``payload["_rollout"]``.

        None for a direct call: a payload without ``_rollout``, or with one that names no place for a result
        (none of ``exp_id``, ``input_id``, ``s3_bucket``). Raises ``ContractError`` naming the offending field.
        """
        if not isinstance(payload, Mapping):
            raise ContractError(f"payload: a JSON object is required, got {type(payload).__name__}")
        raw = payload.get(ROLLOUT_FIELD)
        if raw is None:
            return None
        if not isinstance(raw, Mapping):
            raise ContractError(f"_rollout: a JSON object is required, got {type(raw).__name__}")
        if not any(name in raw for name in ("exp_id", "input_id", "s3_bucket")):
            return None
        for name in ("base_url", "model_id", "api_key", "notify_url"):
            if raw.get(name) is not None and not isinstance(raw[name], str):
                raise ContractError(f"_rollout.{name}: a string is required, got {type(raw[name]).__name__}")
        params = raw.get("sampling_params")
        if params is not None and not isinstance(params, Mapping):
            raise ContractError(f"_rollout.sampling_params: a JSON object is required, got {type(params).__name__}")
        known = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        return cls(
            exp_id=_key_part("exp_id", raw.get("exp_id")),
            input_id=_key_part("input_id", raw.get("input_id")),
            s3_bucket=_key_part("s3_bucket", raw.get("s3_bucket")),
            base_url=raw.get("base_url"),
            model_id=raw.get("model_id"),
            api_key=raw.get("api_key"),
            sampling_params=params,
            notify_url=raw.get("notify_url"),
            extra={k: v for k, v in raw.items() if k not in known},
        )

    def result_key(self, session_id: str) -> str:
        return result_key(self.exp_id, self.input_id, session_id)


# -- strict JSON ---------------------------------------------------------------------------------------


def to_jsonable(value: Any, path: str = "result") -> Any:
    """``value`` as plain JSON types.

    Converted: numpy scalars and arrays, datetimes and dates (ISO 8601), enums, dataclasses, pydantic models,
    tuples and sets (lists). Raises ``ContractError`` with the path of what can't be: ``metrics.loss: NaN is not JSON``.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, enum.Enum):
        return to_jsonable(value.value, path)
    if isinstance(value, str):
        try:
            if not value.isascii():
                value.encode("utf-8")
        except UnicodeEncodeError:
            raise ContractError(f"{path}: not valid Unicode (lone surrogate)") from None
        return str(value)
    if isinstance(value, int):
        if value.bit_length() > _MAX_INT_BITS:
            raise ContractError(f"{path}: an integer of {value.bit_length()} bits can't be read back")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ContractError(f"{path}: {'NaN' if math.isnan(value) else value} is not JSON")
        return float(value)
    if isinstance(value, Mapping):
        plain = {_json_key(key, path): to_jsonable(item, _child(path, str(key))) for key, item in value.items()}
        if len(plain) < len(value):
            raise ContractError(f"{path}: two of its keys are the same JSON string")
        return plain
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f.name: to_jsonable(getattr(value, f.name), _child(path, f.name)) for f in fields}
    if callable(getattr(value, "model_dump", None)):  # pydantic, without importing it
        return to_jsonable(value.model_dump(mode="python"), path)
    if type(value).__module__.partition(".")[0] == "numpy" and callable(getattr(value, "tolist", None)):
        if value.dtype.kind in "mM":  # numpy makes plain integers of most of them
            raise ContractError(f"{path}: numpy {value.dtype} is not JSON, a datetime or a string is")
        return to_jsonable(value.tolist(), path)
    raise ContractError(f"{path}: {type(value).__name__} is not JSON")


def _json_key(key: object, path: str) -> str:
    if not isinstance(key, str):
        raise ContractError(f"{path}: key {key!r} is {type(key).__name__}, JSON keys are strings")
    return str(to_jsonable(key, f"{path}: key {key!r}"))


def _child(path: str, name: str) -> str:
    return name if path == "result" else f"{path}.{name}"


def dumps(value: Any, path: str = "result") -> str:
    """Strict JSON text of a value that :func:`to_jsonable` accepts; raises ``ContractError`` like it."""
    try:
        return _encode(to_jsonable(value, path))
    except RecursionError:
        raise ContractError(f"{path}: nested too deeply, or it contains itself") from None


_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
_LARGE = 1_000_000  # characters of strings, and 10 for every item: a few ms of encoding
_SIZED = frozenset({str, list, dict})


def _encode(plain: Any) -> str:
    if not _is_large(plain):
        return _ENCODER.encode(plain)
    # encode() is one call, during which no other thread runs, such as the one that answers pings.
    chunks = _ENCODER.iterencode(plain)
    return "".join(iter(lambda: "".join(itertools.islice(chunks, 10_000)), ""))


def _is_large(plain: Any) -> bool:
    size, todo = 0, [plain]
    for value in todo:
        kind = type(value)
        if kind in _SIZED:
            size += len(value) if kind is str else 10 * len(value)
            if size > _LARGE:
                return True
            if kind is not str:
                todo += [item for item in (value.values() if kind is dict else value) if type(item) in _SIZED]
    return False


# -- the result object -----------------------------------------------------------------------------------


def success_result(returned: Any, config: RolloutConfig, key: str) -> dict[str, Any]:
    """The result object of a handler that returned ``returned``; raises ``ContractError`` if that is no result."""
    if not isinstance(returned, Mapping):
        raise ContractError(f"result: the handler must return a dict, it returned {type(returned).__name__}")
    try:
        plain = to_jsonable(returned)
    except RecursionError:
        raise ContractError("result: nested too deeply, or it contains itself") from None
    address = _address(config, key)
    for name, value in address.items():
        # Equal is fine: agents like to return what they find in `_rollout`.
        if plain.get(name, value) != value:
            raise ContractError(f"{name}: this name belongs to the result's address; return the value under another")
    return {"status_code": 200, "stop_reason": "end_turn", **plain, **address}


def error_result(
    stop_reason: str,
    config: RolloutConfig,
    key: str,
    *,
    traceback: str = "",
    outcome: Outcome = Outcome.AGENT_FAILED,
) -> dict[str, Any]:
    """The result object of a rollout that failed; ``outcome`` says how, for whoever reads it later."""
    body = {"status_code": 500, "outcome": outcome.value, "stop_reason": stop_reason or "error"}
    return {**body, "traceback": traceback, **_address(config, key)}


ADDRESS_FIELDS = ("input_id", "s3_bucket", "result_key")
"""Where a result belongs; in every result object."""


def _address(config: RolloutConfig, key: str) -> dict[str, Any]:
    return dict(zip(ADDRESS_FIELDS, (config.input_id, config.s3_bucket, key), strict=True))


def is_success(result: Mapping[str, Any]) -> bool:
    """Whether a result object stands for a success: ``status_code`` is 200 or absent."""
    return result.get("status_code") in (None, 200)


def result_outcome(result: Mapping[str, Any]) -> Outcome:
    """What a result object says about how the rollout ended: ``succeeded``, or the error's own outcome."""
    if is_success(result):
        return Outcome.SUCCEEDED
    try:
        outcome = Outcome(result.get("outcome", ""))
    except ValueError:  # an agent's own error object, or one of an older toolkit
        return Outcome.AGENT_FAILED
    return Outcome.AGENT_FAILED if outcome in (Outcome.SUCCEEDED, Outcome.TRUNCATED) else outcome


def result_reward(result: Mapping[str, Any]) -> float | None:
    """``rewards`` (or ``reward``): a number, or a list whose last entry counts; None if there is none.

    Raises ``ContractError`` for what is no finite number.
    """
    name = "rewards" if result.get("rewards") is not None else "reward"
    value = result.get(name)
    if isinstance(value, list):
        value = value[-1] if value else None
    if value is None:
        return None
    try:
        reward = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise ContractError(f"{name}: a finite number is required, got {reprlib.repr(value)}")
    return reward


# -- identity --------------------------------------------------------------------------------------------


def make_input_id(run: str, index: int, sample: int) -> str:
    """``{run}-{index:08d}-{sample:03d}``: sorts in the order in which the rollouts are started."""
    return f"{run}-{index:08d}-{sample:03d}"


def make_session_id(run: str, input_id: str, attempt: int | str = 0) -> str:
    """A session id (36 characters) that a restarted script computes again, if it knows the attempt."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"agentcore-rl:{run}/{input_id}/{attempt}"))

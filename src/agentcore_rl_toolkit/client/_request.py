"""What a session is told, and what it answers."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .._redact import Redactor, find_secrets
from ..errors import ContractError, RolloutRejected, SetupError
from ..protocol import MAX_PAYLOAD_BYTES, ROLLOUT_FIELD, RolloutConfig, dumps

__all__ = ["Accepted", "check_fields", "check_payloads", "check_session_id", "encode", "masked", "read_answer"]

_SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


_NO_FIELDS = (
    *("max_retry_attempts", "tps_limit", "max_pool_connections", "new_sessions_per_minute", "notify_address"),
    *("probe_interval", "transport", "max_concurrent", "max_concurrent_sessions", "run_dir", "ordered"),
    *("initial_interval", "max_interval", "backoff_factor", "log_interval"),
)
"""Arguments of ``RolloutClient``, ``run_batch`` and ``run_rollouts`` that can't be meant for an agent."""


def check_fields(names: Iterable[str]) -> None:
    """Raises ``TypeError`` for a keyword that was hardly meant as a field of ``_rollout``, where all others go."""
    for name in names:
        near = _meant(name)
        if near == name:
            raise TypeError(f"{name}= is no argument here; it would only be sent to the agent")
        if near is not None:
            raise TypeError(f"{name}=: did you mean {near}=? It would only be sent to the agent")


def check_payloads(payloads: object) -> None:
    """Raises ``TypeError`` for one payload where many are meant: iterating over it would give its keys."""
    if isinstance(payloads, Mapping):
        raise TypeError("payloads: an iterable of dicts is required, got one dict; put it into a list")


@functools.lru_cache(maxsize=1000)
def _meant(name: str) -> str | None:
    return next(iter(difflib.get_close_matches(name, _NO_FIELDS, n=1, cutoff=0.85)), None)


def encode(payload: Mapping[str, Any], config: Mapping[str, Any]) -> bytes:
    """The request's body: the payload with ``_rollout``. Raises ``ContractError`` for what the agent would refuse."""
    if not isinstance(payload, Mapping):
        raise ContractError(f"payload: a dict is required, got {type(payload).__name__}")
    full = {**payload, ROLLOUT_FIELD: {name: value for name, value in config.items() if value is not None}}
    body = dumps(full, "payload").encode("utf-8")
    RolloutConfig.from_payload(full)
    if len(body) > MAX_PAYLOAD_BYTES:
        raise ContractError(
            f"payload: {len(body):,} bytes, AgentCore takes at most {MAX_PAYLOAD_BYTES:,}."
            " Put large inputs into S3 and pass their address"
        )
    return body


def check_session_id(session_id: str) -> None:
    if not 33 <= len(session_id) <= 256:
        raise ContractError(
            f"session_id: {len(session_id)} characters, AgentCore takes 33 to 256; str(uuid.uuid4()) has 36"
        )
    if not _SESSION_ID.fullmatch(session_id):
        raise ContractError(f"session_id: {session_id!r} may contain letters, digits, '-' and '_' only")


def masked(text: str, body: bytes) -> str:
    """``text`` without the secrets of a request's body: agents and proxies like to repeat what they were sent."""
    try:
        secrets = list(find_secrets(json.loads(body)))
    except (ValueError, RecursionError):
        secrets = []
    return Redactor(secrets).text(text)


class Accepted(NamedTuple):
    """Where the result will be, and whether the agent can say later if it still runs the rollout."""

    bucket: str
    key: str
    probes: bool = False


def read_answer(answer: bytes, session_id: str, body: bytes, expected: Accepted) -> Accepted:
    """What the session has accepted. ``body``: that of the request; ``expected``: where its result will be if it names
    no other place.

    Raises ``RolloutRejected``; ``SetupError`` for what is no answer to a rollout.
    """
    try:
        data = json.loads(answer)
        status = data.get("status")
    except (ValueError, AttributeError, RecursionError):
        data, status = {}, None
    if status == "processing":
        bucket, key = data.get("s3_bucket") or expected.bucket, data.get("result_key") or expected.key
        if isinstance(bucket, str) and isinstance(key, str):
            return Accepted(bucket, key, data.get("probes") is True)
    if status == "rejected":
        text = f"the agent rejected the payload: {data.get('error')}"
        raise RolloutRejected(masked(text, body), session_id=session_id)
    said = masked(answer[:10_000].decode("utf-8", "replace"), body)[:200]
    raise SetupError(
        f"the agent answered {said!r} instead of {{'status': 'processing'}}:"
        " is its handler decorated with @app.rollout_entrypoint, and does it serve this client's transport"
        ' ("http": app.run(), "a2a": app.run_a2a())?'
    )

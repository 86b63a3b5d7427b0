"""What the service limits, and how it says no: quotas, lifecycle, typed errors."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, fields

from ..errors import SetupError

_STATUS = {
    "ValidationException": 400,
    "ServiceQuotaExceededException": 402,
    "AccessDeniedException": 403,
    "ResourceNotFoundException": 404,
    "ConflictException": 409,
    "RetryableConflictException": 409,
    "RuntimeClientError": 424,
    "ThrottlingException": 429,
    "InternalServerException": 500,
}


class ServiceError(Exception):
    """An error answer of the service: ``type`` is the name of the exception that boto3 raises for it."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.type, self.status = error_type, _STATUS[error_type]


def invalid(message: str) -> ServiceError:
    return ServiceError("ValidationException", message)


@dataclass(frozen=True, slots=True)
class Quotas:
    """The service's default quotas, each per agent. None lifts one."""

    tps: float | None = 200.0
    """Requests per second, separately for invoke, command and stop. Over it: ThrottlingException (429)."""
    new_sessions_per_minute: float | None = 400.0
    """Over it: ThrottlingException (429)."""
    active_sessions: int | None = 2500
    """Over it: ServiceQuotaExceededException (402)."""


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """When a session ends by itself. All in seconds."""

    idle_timeout: float = 900.0
    """Without a request, a command or a busy ping for this long, a session is stopped."""
    max_lifetime: float = 28_800.0
    """A session is stopped at this age, busy or not."""
    stop_grace: float = 15.0
    """From SIGTERM to SIGKILL."""
    start_timeout: float = 120.0
    """Within this time from its start an agent must answer /ping."""
    ping_interval: float = 5.0
    """How often /ping of a running session is read."""
    request_timeout: float = 900.0
    """An agent must begin its answer within this time."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if not (value := getattr(self, limit.name)) >= 0:
                raise SetupError(f"{limit.name}: {value} is no number of seconds")


class RateLimit:
    """A token bucket: ``rate`` per ``period`` seconds, all of it at once if nothing was taken before."""

    def __init__(self, rate: float | None, period: float) -> None:
        self._capacity = math.inf if rate is None else max(1.0, rate)
        self._per_second = math.inf if rate is None else rate / period
        self._tokens, self._at = self._capacity, time.monotonic()

    def take(self, what: str) -> None:
        """Take one, or raise ThrottlingException naming ``what``."""
        if self._capacity == math.inf:
            return
        now = time.monotonic()
        self._tokens = min(self._capacity, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        if self._tokens < 1:
            raise ServiceError("ThrottlingException", f"Rate exceeded: {what}")
        self._tokens -= 1

"""Where results go: S3, each key written once, and tried until it is there."""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import Any

__all__ = ["ResultStore"]

logger = logging.getLogger(__name__)

_FIRST_DELAY, _MAX_DELAY = 0.2, 20.0  # seconds between tries
_LOOK_SECONDS = 10.0
"""A look at an earlier result that S3 will not answer may not hold up the agent for longer."""
_WRITE_SECONDS = 3600.0
"""How long a write is tried: an outage of S3 or of a credentials provider ends sooner."""
_REFUSED_SECONDS = 60.0
"""How long a permission that is missing may still be on its way: IAM takes seconds to spread a new policy."""
_LOOKS, _PUTS = 4, 16
"""Calls in flight at once. More threads inside botocore would only take the interpreter from /ping."""

_HOPELESS = frozenset({"NoSuchBucket", "InvalidBucketName", "EntityTooLarge", "KeyTooLongError", "NotImplemented"})
_WRONG_SETTING = frozenset({"ParamValidationError", "ProfileNotFound", "InvalidRegionError", "ConfigParseError"})
_REFUSED = frozenset({"AccessDenied", "403", "AllAccessDisabled", "AccountProblem"})
_CREDENTIALS = frozenset(
    {
        "400",  # of a HEAD, which says no more than that
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidToken",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "RequestTimeTooSkewed",
    }
)


class ResultStore:
    """Writes result objects to S3. Blocking: call it from threads, as many as you like."""

    def __init__(self) -> None:
        self._client: Any = None
        self._buckets: set[str] = set()
        """Buckets that exist."""
        self._lock = threading.Lock()
        self._looks, self._puts = threading.BoundedSemaphore(_LOOKS), threading.BoundedSemaphore(_PUTS)

    def may_run(self, bucket: str, key: str) -> bool:
        """Whether a rollout with this result key should run: False if its result exists or can't ever be written."""
        deadline, tries = time.monotonic() + _LOOK_SECONDS, 0
        while True:
            client = None
            try:
                client = self._s3()
                with self._looks:
                    self._look(client, bucket, key)
            except Exception as error:  # noqa: BLE001 - e.g. no permission to read: writing may still work
                code = _code(error)
                if _patience(error, code) == 0.0:
                    logger.error("rollout %s: not run, its result could not be written: %s", key, _advice(error, code))
                    return False
                if code in ("NoSuchKey", "404") or code in _REFUSED:
                    self._buckets.add(bucket)
                    return True
                self._renew(client, error, code)
                tries += 1
                if time.monotonic() > deadline:
                    logger.warning("rollout %s: could not look for an earlier result: %s", key, error)
                    return True  # should there be one, it is not overwritten
                time.sleep(_delay(tries))
                continue
            logger.info("rollout %s: its result exists already; not run again", key)
            return False

    def _look(self, client: Any, bucket: str, key: str) -> None:
        """Raises botocore's error if there is no such object."""
        if bucket in self._buckets:
            client.head_object(Bucket=bucket, Key=key)  # half the work of a GET
        else:  # only an answer with a body tells a missing bucket from a missing key
            client.get_object(Bucket=bucket, Key=key, Range="bytes=0-0")["Body"].close()

    def write(self, bucket: str, key: str, body: bytes) -> bool:
        """Write ``body`` unless the key exists, and try until it is there; True if a result is there now.

        False after an hour, or sooner where no try can help (no such bucket, permission refused for a minute); the
        reason is logged.
        """
        began, tries = time.monotonic(), 0
        while True:
            client = None
            try:
                client = self._s3()
                with self._puts:
                    client.put_object(
                        Bucket=bucket, Key=key, Body=body, ContentType="application/json", IfNoneMatch="*"
                    )
            except Exception as error:  # noqa: BLE001 - reported with what to do
                code = _code(error)
                # Also the answer to a retry of a write whose own answer was lost.
                if code in ("PreconditionFailed", "412"):
                    logger.info("rollout %s: a result was written already; it stays", key)
                    return True
                self._renew(client, error, code)
                tries += 1
                if time.monotonic() - began > _patience(error, code):
                    logger.error("rollout %s: result lost, s3://%s/%s: %s", key, bucket, key, _advice(error, code))
                    return False
                level = logging.WARNING if tries == 3 else logging.INFO
                logger.log(level, "rollout %s: write %d failed, trying on: %s", key, tries, _advice(error, code))
                time.sleep(_delay(tries))
                continue
            logger.info("rollout %s: result written (%d bytes)", key, len(body))
            return True

    def _s3(self) -> Any:
        with self._lock:
            if self._client is None:
                import boto3
                from botocore.config import Config

                config = Config(
                    retries={"mode": "standard", "total_max_attempts": 1},  # the loops above know more
                    connect_timeout=5,
                    read_timeout=20,
                    max_pool_connections=_LOOKS + _PUTS,
                )
                # A session of its own: a new one reads the credentials anew, see _renew.
                self._client = boto3.Session().client("s3", config=config)
            return self._client

    def _renew(self, client: Any, error: Exception, code: str) -> None:
        """Forget a client whose credentials were refused or could not be had: the next one looks for new ones."""
        if code in _CREDENTIALS or "Credential" in type(error).__name__:
            with self._lock:
                if self._client is client:  # another thread may have made a new one since
                    self._client = None


def _code(error: Exception) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _patience(error: Exception, code: str) -> float:
    """Seconds for which a write that fails like this is tried again."""
    # A wrong setting of this process (endpoint, profile, region) stays wrong.
    if code in _HOPELESS or type(error).__name__ in _WRONG_SETTING or isinstance(error, ValueError):
        return 0.0
    return _REFUSED_SECONDS if code in _REFUSED else _WRITE_SECONDS


def _delay(tries: int) -> float:
    return min(_MAX_DELAY, _FIRST_DELAY * 2.0 ** min(tries - 1, 10)) * random.uniform(0.5, 1.0)


def _advice(error: Exception, code: str) -> str:
    if code == "NoSuchBucket":
        bucket = getattr(error, "response", {}).get("Error", {}).get("BucketName", "")
        return f"bucket {bucket!r} does not exist. Create it, or correct s3_bucket where the rollout was started"
    if code in _REFUSED:
        return f"{error}. Allow s3:PutObject on this bucket to the agent's execution role"
    return f"{type(error).__name__}: {error}"

"""Where results go: S3, each key written once, and tried until it is there."""

from __future__ import annotations

import logging
import threading
import time

from ._aws import ServiceError, Storage
from ._faults import Fault, fault_of, pause

__all__ = ["ResultLost", "ResultStore"]

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 10.0
"""A look at an earlier result that S3 will not answer may not hold up the agent for longer."""
_WRITE_SECONDS = 3600.0
"""How long a write is tried: an outage of S3 or of a credentials provider ends sooner."""
# IAM takes seconds to spread a new policy; a file of settings may be just being written.
_PATIENCE = {Fault.SETUP: 60.0, Fault.FORBIDDEN: 60.0}
"""Seconds for which a write is tried that fails like this."""
_LOOKS, _PUTS = 4, 16
"""Calls in flight at once. More threads at work would only take the interpreter from /ping."""


class ResultLost(Exception):
    """There will never be a result; the message says why."""


class ResultStore:
    """Writes result objects to S3. Blocking: call it from threads, as many as you like."""

    def __init__(self) -> None:
        self._storage: Storage | None = None
        self._lock = threading.Lock()
        self._looks, self._puts = threading.BoundedSemaphore(_LOOKS), threading.BoundedSemaphore(_PUTS)

    def may_run(self, bucket: str, key: str) -> bool:
        """Whether a rollout with this result key should run: False if its result exists.

        Raises ``ResultLost`` if it could never be written.
        """
        deadline, tries = time.monotonic() + _LOOK_SECONDS, 0
        while True:
            storage = None
            try:
                storage = self._connected()
                with self._looks:
                    exists = storage.exists(bucket, key)
            except Exception as error:
                fault, late = fault_of(error), time.monotonic() > deadline
                if _no_bucket(error) or (fault is Fault.SETUP and late):
                    raise ResultLost(f"not run, its result could not be written: {_advice(error, bucket)}") from error
                if fault is Fault.FORBIDDEN:
                    return True
                self._renew(storage, fault)
                tries += 1
                if late:
                    logger.warning("rollout %s: could not look for an earlier result: %s", key, error)
                    return True  # should there be one, it is not overwritten
                time.sleep(pause(tries, first=0.2, longest=2.0))
                continue
            if exists:
                logger.info("rollout %s: its result exists already; not run again", key)
            return not exists

    def write(self, bucket: str, key: str, body: bytes) -> None:
        """Write ``body`` unless the key exists, and try until it is there.

        Raises ``ResultLost`` after an hour; after a minute of refused permission or wrong settings; at once without a
        bucket.
        """
        began, tries = time.monotonic(), 0
        while True:
            storage = None
            try:
                storage = self._connected()
                with self._puts:
                    storage.put(bucket, key, body, "application/json")
            except Exception as error:
                if isinstance(error, ServiceError) and error.status == 412:
                    # Also the answer to a retry of a write whose own answer was lost.
                    logger.info("rollout %s: a result was written already; it stays", key)
                    return
                fault, advice = fault_of(error), _advice(error, bucket)
                self._renew(storage, fault)
                tries += 1
                if _no_bucket(error) or time.monotonic() - began > _PATIENCE.get(fault, _WRITE_SECONDS):
                    raise ResultLost(f"result lost, s3://{bucket}/{key}: {advice}") from error
                level = logging.WARNING if tries == 3 else logging.INFO
                logger.log(level, "rollout %s: write %d failed, trying on: %s", key, tries, advice)
                time.sleep(pause(tries, first=0.2))
                continue
            logger.info("rollout %s: result written (%d bytes)", key, len(body))
            return

    def _connected(self) -> Storage:
        with self._lock:
            if self._storage is None:
                # A session of its own: a new one reads the credentials anew, see _renew.
                self._storage = Storage(connections=_LOOKS + _PUTS)
            return self._storage

    def _renew(self, storage: Storage | None, fault: Fault) -> None:
        """Forget a storage whose credentials were refused or could not be had: the next one looks for new ones."""
        if fault is Fault.CREDENTIALS:
            with self._lock:
                if self._storage is storage:  # another thread may have made a new one since
                    self._storage = None


def _no_bucket(error: Exception) -> bool:
    return isinstance(error, ServiceError) and error.code in ("NoSuchBucket", "InvalidBucketName")


def _advice(error: Exception, bucket: str) -> str:
    if isinstance(error, ServiceError) and error.code == "NoSuchBucket":
        return f"bucket {bucket!r} does not exist. Create it, or correct s3_bucket where the rollout was started"
    if fault_of(error) is Fault.FORBIDDEN:
        return f"{error}. Allow s3:PutObject on this bucket to the agent's execution role"
    return f"{type(error).__name__}: {error}"

"""Where results go: S3, each key written once."""

from __future__ import annotations

import logging
import threading
from typing import Any

__all__ = ["ResultStore"]

logger = logging.getLogger(__name__)


class ResultStore:
    """Writes result objects to S3. Blocking: call it from a thread. The client is made on first use."""

    def __init__(self) -> None:
        self._client: Any = None
        self._lock = threading.Lock()

    def _s3(self) -> Any:
        with self._lock:
            if self._client is None:
                import boto3
                from botocore.config import Config

                retries = {"mode": "standard", "total_max_attempts": 6}
                config = Config(retries=retries, connect_timeout=5, read_timeout=30, max_pool_connections=16)
                self._client = boto3.client("s3", config=config)
            return self._client

    def may_run(self, bucket: str, key: str) -> bool:
        """Whether a rollout with this result key should run: False if its result exists or can't ever be written."""
        try:
            # GET of one byte, not HEAD: only an answer with a body tells a missing bucket from a missing key.
            self._s3().get_object(Bucket=bucket, Key=key, Range="bytes=0-0")["Body"].close()
        except Exception as error:  # noqa: BLE001 - e.g. no permission to read: writing may still work
            code = _code(error)
            if code == "NoSuchBucket":
                logger.error(
                    "rollout %s: bucket %r does not exist, so no result could be written; not run."
                    " Create the bucket, or correct s3_bucket where the rollout was started",
                    key,
                    bucket,
                )
                return False
            if code not in ("NoSuchKey", "404", "AccessDenied", "403"):
                logger.warning("rollout %s: could not look for an earlier result: %s", key, error)
            return True
        logger.info("rollout %s: its result exists already; not run again", key)
        return False

    def write(self, bucket: str, key: str, body: bytes) -> bool:
        """Write ``body`` unless the key exists; True if a result is there now. Failures are logged, not raised."""
        for attempt in range(3):
            try:
                self._s3().put_object(
                    Bucket=bucket, Key=key, Body=body, ContentType="application/json", IfNoneMatch="*"
                )
            except Exception as error:  # noqa: BLE001 - reported with what to do
                code = _code(error)
                if code == "ConditionalRequestConflict" and attempt < 2:  # somebody else is writing this key
                    continue
                if code in ("PreconditionFailed", "412"):
                    logger.info("rollout %s: a result was written already; it stays", key)
                    return True
                logger.error("rollout %s: result lost, s3://%s/%s: %s", key, bucket, key, _advice(error, code))
                return False
            logger.info("rollout %s: result written (%d bytes)", key, len(body))
            return True
        return False


def _code(error: Exception) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _advice(error: Exception, code: str) -> str:
    if code == "NoSuchBucket":
        return "the bucket does not exist. Create it, or correct s3_bucket where the rollout was started"
    if code in ("AccessDenied", "403"):
        return f"{error}. Allow s3:PutObject on this bucket to the agent's execution role"
    return f"{type(error).__name__}: {error}"

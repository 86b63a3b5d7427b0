"""Watching for results in S3. One poller serves all futures of a client."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from dataclasses import dataclass
from typing import Any

import botocore.exceptions as aws

from ..errors import InvocationError, RolloutCancelled
from ._aws import Aws, error_code, setup_error

__all__ = ["Intervals", "ResultPoller"]

logger = logging.getLogger("agentcore_rl_toolkit.client")

_MISSING = frozenset({"NoSuchKey", "404"})
# Without s3:ListBucket, a missing key reads as "forbidden".
_FORBIDDEN = frozenset({"AccessDenied", "403", "Forbidden"})


@dataclass(frozen=True, slots=True)
class Intervals:
    """Seconds between looks at one result key: ``initial``, then times ``factor``, up to ``longest``."""

    initial: float = 0.5
    longest: float = 5.0
    factor: float = 1.5

    def __post_init__(self) -> None:
        if not (0 < self.initial <= self.longest and self.factor >= 1):
            raise ValueError(
                "polling needs 0 < initial_interval <= max_interval and backoff_factor >= 1,"
                f" got {self.initial}, {self.longest}, {self.factor}"
            )


class ResultPoller:
    """Turns result keys into futures. Lives on the background loop."""

    def __init__(self, client: Aws) -> None:
        self._aws = client
        self._watches: dict[asyncio.Future[dict[str, Any]], asyncio.Task[None]] = {}
        self._warned = False

    def watch(self, bucket: str, key: str, intervals: Intervals) -> asyncio.Future[dict[str, Any]]:
        """A future of the result object. Settling or cancelling it ends the watch."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._watch(future, bucket, key, intervals))
        self._watches[future] = task
        future.add_done_callback(lambda done: self._watches.pop(done).cancel())
        return future

    def close(self) -> None:
        """Nobody will get a result any more."""
        for future in list(self._watches):
            _settle(future, RolloutCancelled("the client was closed"))

    async def look(self, future: asyncio.Future[dict[str, Any]], bucket: str, key: str) -> bool:
        """Look once; True if the result was there, and the future has it."""
        try:
            result = json.loads(await self._aws.get(bucket, key))
            if not isinstance(result, dict):
                raise ValueError("it is no JSON object")
        except ValueError as error:
            _settle(future, InvocationError(f"s3://{bucket}/{key} is not a result: {error}"))
        except aws.ClientError as error:
            self._not_there(future, bucket, key, error)
        except Exception as error:  # noqa: BLE001 - a look that failed is not a rollout that failed
            broken = setup_error(error)
            if broken:
                _settle(future, broken)
            else:
                logger.info("could not look at s3://%s/%s: %s", bucket, key, error)
        else:
            if not future.done():
                future.set_result(result)
            return True
        return False

    async def _watch(self, future: asyncio.Future[dict[str, Any]], bucket: str, key: str, intervals: Intervals) -> None:
        delay = intervals.initial
        while not future.done():
            await asyncio.sleep(delay * random.uniform(0.9, 1.1))
            await self.look(future, bucket, key)
            delay = min(delay * intervals.factor, intervals.longest)

    def _not_there(self, future: asyncio.Future[dict[str, Any]], bucket: str, key: str, error: aws.ClientError) -> None:
        code = error_code(error)
        if code in _MISSING:
            return
        if code not in _FORBIDDEN:
            broken = setup_error(error)
            if broken:
                _settle(future, broken)
            else:
                logger.info("could not look at s3://%s/%s: %s", bucket, key, error)
        elif not self._warned:
            self._warned = True
            logger.warning(
                "S3 answers 403 for s3://%s/%s. Without s3:ListBucket a result that is not there yet reads like"
                " that, so waiting goes on; if no result ever comes, allow s3:GetObject on this bucket",
                bucket,
                key,
            )


def _settle(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # it is reported to whoever asks for the result, not to the loop's log

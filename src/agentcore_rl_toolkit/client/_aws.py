"""Calls to AWS: threads, rate limit, retries, and errors that say what to do."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import boto3
import botocore.exceptions as aws
from botocore.config import Config

from .._arn import RuntimeArn
from ..errors import InvocationError, SetupError

__all__ = ["Aws", "RateLimiter", "setup_error"]

logger = logging.getLogger("agentcore_rl_toolkit.client")

T = TypeVar("T")

# An invoke is answered when the session has started, which can take minutes with a heavy image.
_INVOKE_READ_TIMEOUT = 180
_ABANDON_SECONDS = 30.0
_FIRST_DELAY, _MAX_DELAY = 0.5, 20.0  # seconds

# Retrying an invoke is safe: the agent runs a session once, however often it is invoked.
_TRANSIENT = frozenset(
    {
        "ThrottlingException",
        "TooManyRequestsException",
        "ServiceQuotaExceededException",  # 402: no free slot for a session right now
        "RetryableConflictException",  # 409: the session is being started or stopped
        "ConflictException",
        "RuntimeClientError",  # 424: the container is not up yet, or crashed
        "InternalServerException",
        "ServiceUnavailableException",
    }
)
_BROKEN_SETUP = {
    "AccessDenied": "allow it to the role whose credentials are used here",
    "AccessDeniedException": "allow it to the role whose credentials are used here",
    "UnauthorizedException": "allow it to the role whose credentials are used here",
    "ResourceNotFoundException": "check agent_runtime_arn: region, account and id must be those of a deployed runtime",
    "ValidationException": "check agent_runtime_arn and the session id",
    "NoSuchBucket": "create the bucket, or correct s3_bucket",
    "InvalidBucketName": "correct s3_bucket",
    "ExpiredToken": "renew the AWS credentials",
    "ExpiredTokenException": "renew the AWS credentials",
    "InvalidAccessKeyId": "check the AWS credentials",
    "InvalidClientTokenId": "check the AWS credentials",
    "SignatureDoesNotMatch": "check the AWS credentials and the clock of this machine",
    "InvalidSignatureException": "check the AWS credentials and the clock of this machine",
    "UnrecognizedClientException": "check the AWS credentials",
}
_NO_CREDENTIALS = (
    aws.NoCredentialsError,
    aws.PartialCredentialsError,
    aws.CredentialRetrievalError,
    aws.TokenRetrievalError,
    aws.SSOError,
)
_NETWORK = (aws.HTTPClientError, aws.ConnectionError, aws.IncompleteReadError)
_GONE = "ResourceNotFoundException"  # what StopRuntimeSession says of a session that is not there


def error_code(error: BaseException) -> str:
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, aws.ClientError) else ""


def setup_error(error: BaseException) -> SetupError | None:
    """The error as a ``SetupError`` if no retry and no other payload can fare better, else None."""
    if isinstance(error, _NO_CREDENTIALS):
        return SetupError(
            f"no usable AWS credentials ({error}): set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY;"
            " for the local runtime, export what `agentcore-rl local` prints"
        )
    advice = _BROKEN_SETUP.get(error_code(error))
    if advice:
        return SetupError(f"{error}: {advice}")
    if isinstance(error, aws.ParamValidationError | aws.InvalidRegionError | aws.ProfileNotFound):
        return SetupError(str(error))
    return None


class RateLimiter:
    """At most ``per_second`` calls each second, evenly spaced; None: no limit."""

    def __init__(self, per_second: float | None) -> None:
        if per_second is not None and not per_second > 0:
            raise SetupError(f"tps_limit must be above 0, or None for no limit; it is {per_second!r}")
        self._gap = 1.0 / per_second if per_second else 0.0
        self._next = 0.0

    async def wait(self) -> None:
        now = time.monotonic()
        turn = max(now, self._next)
        self._next = turn + self._gap
        if turn > now:
            await asyncio.sleep(turn - now)


class Aws:
    """The two boto3 clients and their threads.

    ``connections``: calls in flight at once, of each kind (invoke, stop, look for a result).
    """

    def __init__(self, arn: RuntimeArn, *, attempts: int, tps: float | None, connections: int) -> None:
        if connections < 1:
            raise SetupError(f"max_pool_connections must be at least 1, it is {connections!r}")
        agent = "agentcore-rl-toolkit"
        # We retry these calls ourselves: botocore neither knows 424 nor our rate limit.
        once = Config(
            retries={"mode": "standard", "total_max_attempts": 1},
            read_timeout=_INVOKE_READ_TIMEOUT,
            max_pool_connections=2 * connections,
            user_agent_extra=agent,
        )
        s3 = Config(
            retries={"mode": "standard", "total_max_attempts": 4},
            connect_timeout=10,
            read_timeout=30,
            max_pool_connections=connections,
            user_agent_extra=agent,
        )
        session = boto3.Session()
        self.agentcore = session.client("bedrock-agentcore", region_name=arn.region, config=once)
        self.s3 = session.client("s3", region_name=arn.region, config=s3)
        self.limiter = RateLimiter(tps)
        self._arn = arn
        self._attempts = max(0, attempts)
        # Neither a look for a result nor a stop may wait behind sessions that start slowly.
        self._invokes = ThreadPoolExecutor(connections, thread_name_prefix="agentcore-rl-invoke")
        self._stops = ThreadPoolExecutor(connections, thread_name_prefix="agentcore-rl-stop")
        self._polls = ThreadPoolExecutor(connections, thread_name_prefix="agentcore-rl-s3")
        self._reached = False
        """Whether AgentCore has ever answered."""
        self._served = False
        """Whether any session was ever started."""
        self._broken = False
        """Whether the setup was found broken before that."""

    def close(self) -> None:
        """Close connections and let the threads end."""
        for executor in (self._invokes, self._stops, self._polls):
            executor.shutdown(wait=False, cancel_futures=True)
        for client in (self.agentcore, self.s3):
            client.close()

    async def invoke(self, session_id: str, body: bytes) -> bytes:
        """InvokeAgentRuntime; the body of the answer. The caller has waited for the rate limit.

        Raises ``SetupError`` or ``InvocationError``. When it raises, or is cancelled, no session is left.
        """

        def call() -> bytes:
            answer = self.agentcore.invoke_agent_runtime(
                agentRuntimeArn=self._arn.text,
                runtimeSessionId=session_id,
                payload=body,
                contentType="application/json",
                accept="application/json",
            )
            with answer["response"] as stream:
                data: bytes = stream.read()
            return data

        sent: list[Future[bytes]] = []
        try:
            answer = await self._retried("invoke", session_id, call, self._invokes, sent)
        except SetupError:
            self._broken = not self._served
            raise
        except asyncio.CancelledError:
            if not all(request.cancelled() for request in sent):
                await self._abandon(session_id, sent[-1])
            raise
        except InvocationError:
            await self.stop(session_id)  # it may have started all the same
            raise
        self._served = True
        return answer

    async def _abandon(self, session_id: str, request: Future[Any]) -> None:
        """End a session whose invoke is on its way and can't be called back: now, and again if it came later."""
        await self.stop(session_id)
        try:
            await asyncio.wait_for(asyncio.wrap_future(request), _ABANDON_SECONDS)
        except Exception:  # noqa: BLE001 - it never started, or was stopped while it did
            return
        await self.stop(session_id)

    async def stop(self, session_id: str) -> bool:
        """StopRuntimeSession, within the rate limit. Never raises: an unstopped session ends by its own limits."""
        call = functools.partial(
            self.agentcore.stop_runtime_session, agentRuntimeArn=self._arn.text, runtimeSessionId=session_id
        )
        if self._broken:
            return False  # no session was ever started, and this call would fail the same way
        try:
            await self.limiter.wait()
            await self._retried("stop", session_id, call, self._stops, [])
        except Exception as error:  # noqa: BLE001 - warned; it may not hide the rollout's own outcome
            if error.__cause__ is not None and error_code(error.__cause__) == _GONE:
                return True
            logger.warning("session %s could not be stopped, it ends by its idle timeout: %s", session_id, error)
            return False
        return True

    async def get(self, bucket: str, key: str) -> bytes:
        """The object's bytes; botocore's exceptions as they are."""

        def call() -> bytes:
            with self.s3.get_object(Bucket=bucket, Key=key)["Body"] as stream:
                data: bytes = stream.read()
            return data

        return await self.in_thread(call)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._polls, work)

    async def _retried(
        self, what: str, session_id: str, call: Callable[[], T], threads: ThreadPoolExecutor, sent: list[Future[T]]
    ) -> T:
        """The value of ``call``; each try is added to ``sent``."""
        for attempt in range(self._attempts + 1):
            if attempt:
                await asyncio.sleep(_delay(attempt))
                await self.limiter.wait()
            sent.append(threads.submit(call))
            try:
                value = await asyncio.wrap_future(sent[-1])
            except Exception as error:
                self._reached |= isinstance(error, aws.ClientError)
                if isinstance(error, _NETWORK) or error_code(error) in _TRANSIENT:
                    logger.info("%s of session %s, attempt %d: %s", what, session_id, attempt + 1, error)
                    failure = error
                    continue
                raise setup_error(error) or self._refused(what, session_id, error) from error
            self._reached = True
            return value
        if isinstance(failure, _NETWORK) and not self._reached:
            raise SetupError(
                f"AgentCore can't be reached ({failure}): check the network, the region in agent_runtime_arn,"
                " and AWS_ENDPOINT_URL_BEDROCK_AGENTCORE if a local runtime is meant"
            ) from failure
        raise self._refused(what, session_id, failure) from failure

    def _refused(self, what: str, session_id: str, error: Exception) -> InvocationError:
        hint = ""
        if error_code(error) == "RuntimeClientError":
            hint = "; the agent's container failed, its log says why (CloudWatch, or agent.log of the local runtime)"
        return InvocationError(f"{what} of session {session_id} failed: {error}{hint}", session_id=session_id)


def _delay(attempt: int) -> float:
    """Seconds before retry ``attempt`` (1, 2, …): exponential, with jitter so that many don't come back together."""
    return min(_MAX_DELAY, _FIRST_DELAY * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)

"""What an error of AWS means for the call that met it, and when to try again."""

from __future__ import annotations

import enum
import random

import botocore.exceptions as aws

from ._aws import BrokenOff, ServiceError
from .errors import SetupError

__all__ = ["NEEDS_SETUP", "Fault", "fault_of", "pause", "setup_error"]


class Fault(enum.Enum):
    THROTTLED = "over the rate that AWS allows"
    NO_CAPACITY = "no session is free"
    IN_TRANSITION = "the session is being started or stopped"
    COLD = "the container is not up yet, or crashed"
    SERVER = "AWS has a problem"
    UNREACHED = "the request was not sent"
    UNANSWERED = "sent, but no answer came: it may have been done"
    GONE = "what was asked for is not there"
    FORBIDDEN = "not allowed; in S3 also a missing key, for who may not list"
    SETUP = "wrong settings: every other call will fare the same"
    CREDENTIALS = "missing, wrong, or expired: they may be renewed"
    INVALID = "wrong settings if it is the first call; else something about this one"
    REFUSED = "anything else"


NEEDS_SETUP = frozenset({Fault.SETUP, Fault.CREDENTIALS})
"""What somebody has to put right, if it lasts."""

_BY_CODE = {
    "ThrottlingException": Fault.THROTTLED,
    "TooManyRequestsException": Fault.THROTTLED,
    "SlowDown": Fault.THROTTLED,
    "ServiceQuotaExceededException": Fault.NO_CAPACITY,
    "RetryableConflictException": Fault.IN_TRANSITION,
    "ConflictException": Fault.IN_TRANSITION,
    "RuntimeClientError": Fault.COLD,
    "ValidationException": Fault.INVALID,
    "NoSuchKey": Fault.GONE,
    "ResourceNotFoundException": Fault.GONE,
    "AccessDenied": Fault.FORBIDDEN,
    "AccessDeniedException": Fault.FORBIDDEN,
    "UnauthorizedException": Fault.FORBIDDEN,
    "RequestTimeout": Fault.SERVER,
}
_BY_STATUS = {
    401: Fault.FORBIDDEN,
    402: Fault.NO_CAPACITY,
    403: Fault.FORBIDDEN,
    404: Fault.GONE,
    408: Fault.SERVER,
    409: Fault.IN_TRANSITION,
    424: Fault.COLD,
    429: Fault.THROTTLED,
}
_RENEW = "renew the AWS credentials"
_CHECK = "check the AWS credentials, and the clock of this machine"
_ALLOW = "allow it to the role whose credentials are used here"
_ADVICE = {
    "AccessDenied": _ALLOW,
    "AccessDeniedException": _ALLOW,
    "UnauthorizedException": _ALLOW,
    "ResourceNotFoundException": "check agent_runtime_arn: region, account and id must be those of a deployed runtime",
    "ValidationException": "check agent_runtime_arn and the session id",
    "NoSuchBucket": "create the bucket, or correct s3_bucket",
    "InvalidBucketName": "correct s3_bucket",
    "NotImplemented": "use an S3 that knows conditional writes (If-None-Match)",
    "ExpiredToken": _RENEW,
    "ExpiredTokenException": _RENEW,
    "TokenRefreshRequired": _RENEW,
    "InvalidToken": _CHECK,
    "InvalidAccessKeyId": _CHECK,
    "InvalidClientTokenId": _CHECK,
    "SignatureDoesNotMatch": _CHECK,
    "InvalidSignatureException": _CHECK,
    "RequestTimeTooSkewed": _CHECK,
    "UnrecognizedClientException": _CHECK,
}
_NO_CREDENTIALS = (
    aws.NoCredentialsError,
    aws.PartialCredentialsError,
    aws.CredentialRetrievalError,
    aws.TokenRetrievalError,
    aws.SSOError,
)
_WRONG_SETTINGS = (
    aws.ParamValidationError,
    aws.InvalidRegionError,
    aws.ProfileNotFound,
    aws.ConfigParseError,
    aws.UnknownEndpointError,
    ValueError,  # botocore's, of an endpoint that is no URL
)
_NOT_SENT = (aws.EndpointConnectionError, aws.ConnectTimeoutError, aws.ProxyConnectionError)
_NO_ANSWER = (aws.HTTPClientError, aws.ConnectionError, BrokenOff)


def fault_of(error: BaseException) -> Fault:
    if isinstance(error, ServiceError):
        known = _BY_CODE.get(error.code)
        if known is None and error.code in _ADVICE:
            return Fault.CREDENTIALS if _ADVICE[error.code] in (_RENEW, _CHECK) else Fault.SETUP
        return known or _BY_STATUS.get(error.status) or (Fault.SERVER if error.status >= 500 else Fault.REFUSED)
    if isinstance(error, _NO_CREDENTIALS):
        return Fault.CREDENTIALS
    if isinstance(error, _WRONG_SETTINGS):
        return Fault.SETUP
    if isinstance(error, _NOT_SENT):
        return Fault.UNREACHED
    return Fault.UNANSWERED if isinstance(error, _NO_ANSWER) else Fault.REFUSED


def setup_error(error: BaseException) -> SetupError:
    """The error with what to do about it."""
    if isinstance(error, _NO_CREDENTIALS):
        return SetupError(
            f"no usable AWS credentials ({error}): set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY;"
            " for the local runtime, export what `agentcore-rl local` prints"
        )
    if not isinstance(error, ServiceError):
        return SetupError(str(error))
    advice = _ADVICE.get(error.code, _ALLOW if error.status in (401, 403) else "")
    return SetupError(f"{error}: {advice}" if advice else str(error))


def pause(attempt: int, first: float = 0.5, longest: float = 20.0) -> float:
    """Seconds before retry ``attempt`` (1, 2, …): exponential, with jitter so that many don't come back together."""
    return min(longest, first * 2.0 ** min(attempt - 1, 30)) * random.uniform(0.5, 1.0)

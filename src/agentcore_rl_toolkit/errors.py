"""Every exception of the toolkit, in one tree. Each message says what to do next.

::

    ToolkitError
    ├── SetupError                 the setup is wrong: no retry helps; ends a batch at once
    │   └── MissingExtraError      an optional part is not installed
    ├── ContractError (ValueError) a value breaks the contract between agent and trainer
    ├── RolloutError               one rollout failed; `outcome` says how
    │   ├── RolloutTimeout (TimeoutError)
    │   ├── RolloutCancelled
    │   ├── RolloutRejected        the payload broke the contract; the agent did not run
    │   └── InvocationError        AgentCore refused or lost the session
    ├── EngineError                the sampling engine failed or broke its contract
    ├── RenderError                a conversation can't be rendered for this model
    └── GatewayError               an answer of the gateway other than 200
        └── ContextLengthExceeded  the prompt leaves no room in the model's window
"""

from __future__ import annotations

import enum
from importlib import import_module
from types import ModuleType


class Outcome(enum.StrEnum):
    """How a rollout ended. Only ``succeeded`` and ``truncated`` can carry a reward."""

    SUCCEEDED = "succeeded"
    TRUNCATED = "truncated"
    """The agent ended well, but the model was cut by a token or turn limit on the way."""
    AGENT_FAILED = "agent_failed"
    """The agent's code raised, or returned something that is no result."""
    RUNTIME_FAILED = "runtime_failed"
    """The session could not be started, or was lost."""
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    """The payload broke the contract; the agent's code did not run."""


class ToolkitError(Exception):
    """Base of all errors of this package."""


class SetupError(ToolkitError):
    """The setup is wrong (bad ARN, no permission, missing bucket, broken contract). Retrying can't help."""


class MissingExtraError(SetupError, ImportError):
    """An optional part of the package is not installed."""


class ContractError(ToolkitError, ValueError):
    """A value breaks the contract between agent and trainer (``protocol.py``); the message names the field."""


class RolloutError(ToolkitError):
    """One rollout did not succeed.

    ``outcome``: how it ended. ``session_id``: which session, for the logs.
    """

    outcome = Outcome.RUNTIME_FAILED

    def __init__(self, message: str, *, session_id: str | None = None) -> None:
        super().__init__(message)
        self.session_id = session_id


class RolloutTimeout(RolloutError, TimeoutError):
    """No result within the time allowed. ``asyncio.TimeoutError`` is the same built-in class."""

    outcome = Outcome.TIMED_OUT


class RolloutCancelled(RolloutError):
    """The rollout was cancelled before it had a result."""

    outcome = Outcome.CANCELLED


class RolloutRejected(RolloutError):
    """The agent refused the payload, because its ``_rollout`` breaks the contract. The agent's code did not run."""

    outcome = Outcome.REJECTED


class InvocationError(RolloutError):
    """AgentCore Runtime refused, lost or crashed the session (e.g. 424 after the retries)."""


class EngineError(ToolkitError):
    """The sampling engine failed, or its answer breaks the contract (lengths differ, NaN logprob).

    ``retry_after``: seconds after which a retry may succeed, None if unknown.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RenderError(ToolkitError):
    """The chat template refused this conversation; the message carries the template's own reason."""


class GatewayError(ToolkitError):
    """An answer of the gateway other than 200, independent of the wire that will carry it.

    ``status``: HTTP status. ``kind``: machine-readable type. ``param``: path of the offending field.
    """

    def __init__(self, status: int, message: str, *, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param


class ContextLengthExceeded(GatewayError):
    """The prompt alone is too long. ``prompt_tokens``: its length; ``maximum``: the longest that would do."""

    def __init__(self, prompt_tokens: int, window: int, response_tokens: int) -> None:
        # Agents look for these words to compact their history, so they are the vendor's.
        super().__init__(
            400,
            f"This model's maximum context length is {window} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens, which leaves less than {response_tokens} for the answer. Please reduce the "
            "length of the messages.",
            kind="context_length_exceeded",
            param="messages",
        )
        self.prompt_tokens, self.maximum = prompt_tokens, window - response_tokens


def require(module: str, extra: str, or_else: str = "") -> ModuleType:
    """Import ``module`` or say in one line which extra brings it. ``or_else``: what follows in that line."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        hidden = f" ({error}: perhaps a file of yours is named like it)" if "is not a package" in str(error) else ""
        raise MissingExtraError(
            f"{error.name} is not installed: pip install 'agentcore-rl-toolkit[{extra}]'{or_else}{hidden}",
            name=error.name,
        ) from None

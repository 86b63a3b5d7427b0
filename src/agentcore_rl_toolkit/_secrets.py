"""The secrets of one request to an agent, and how they are kept out of what leaves its process."""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from bedrock_agentcore.runtime import BedrockAgentCoreContext

from ._handler import Did, describe
from ._redact import Redactor, environment_secrets, find_secrets
from .protocol import ROLLOUT_FIELD, ContractError, to_jsonable

if TYPE_CHECKING:
    from bedrock_agentcore.runtime import RequestContext

__all__ = ["Secrets", "unwrap"]

logger = logging.getLogger(__name__)


class Secrets:
    """What one request knows that nobody else may read, and how it is kept out of each thing that leaves.

    Found at once, since a handler may change the payload; compiled when something is to be masked.
    """

    def __init__(self, payload: Any, context: RequestContext) -> None:
        config = payload.get(ROLLOUT_FIELD) if isinstance(payload, Mapping) else None
        token = BedrockAgentCoreContext.get_workload_access_token()
        sure = [*find_secrets(config), *find_secrets(context.request_headers or {}), *([token] if token else [])]
        self._certain = {*sure, *environment_secrets(), *find_secrets(payload, certain=True)}
        self._guessed = set(find_secrets(payload))

    @functools.cached_property
    def everything(self) -> Redactor:
        """For errors, tracebacks and logs: also what only looks like a secret by its name."""
        return Redactor(self._certain | self._guessed)

    def message(self, text: str) -> str:
        return self.everything.text(text).encode("utf-8", "replace").decode("utf-8")

    def result(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """The agent's own values, which a guess may not garble."""
        masked: dict[str, Any] = Redactor(self._certain).values(result)
        return masked

    def payload(self, payload: Any) -> Any:
        """The payload as strict JSON; it was parsed by a laxer reader, which lets NaN through."""
        try:
            return to_jsonable(self.everything.fields(payload), "payload")
        except (ContractError, RecursionError) as error:
            return {"error": f"not stored: {error}"}


def unwrap(did: Did, payload: Any, context: RequestContext) -> Any:
    """The value of a direct call. An error, also one in the middle of a stream, goes on to the SDK, which logs it:
    without the secrets it may quote."""
    if did.error is not None:
        _raise_masked(did.error, payload, context)
        return did.unwrap()
    if inspect.isgenerator(did.value):
        return _stream(did.value, payload, context)
    if inspect.isasyncgen(did.value):
        return _async_stream(did.value, payload, context)
    return did.value


def _stream(values: Iterator[Any], payload: Any, context: RequestContext) -> Iterator[Any]:
    try:
        yield from values
    except Exception as error:
        _raise_masked(error, payload, context)
        raise


async def _async_stream(
    values: AsyncGenerator[Any, Any], payload: Any, context: RequestContext
) -> AsyncGenerator[Any, None]:
    try:
        async with aclosing(values):
            async for value in values:
                yield value
    except Exception as error:
        _raise_masked(error, payload, context)
        raise


def _raise_masked(error: BaseException, payload: Any, context: RequestContext) -> None:
    """Raise another in its place if it quotes a secret."""
    secrets, text = Secrets(payload, context), "".join(traceback.format_exception(error))
    masked = secrets.message(text)
    if masked != text:
        logger.error("direct call failed\n%s", masked)
        raise RuntimeError(secrets.message(describe(error))) from None

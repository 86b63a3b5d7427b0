"""Calling an agent's handler so that nothing it does harms the process that runs it."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from .protocol import ROLLOUT_FIELD, ContractError

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = [
    "Did",
    "LoopThread",
    "call_handler",
    "daemon",
    "describe",
    "in_thread",
    "payload_validator",
    "takes_context",
    "takes_named_context",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Did:
    """What a handler did, as a value: a SystemExit or a cancellation inside it may not end the event loop."""

    value: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        if self.error is None:
            return self.value
        if isinstance(self.error, Exception):
            raise self.error
        raise RuntimeError(f"the agent's code raised {describe(self.error)}") from self.error


async def call_handler(func: Callable[..., Any], pass_context: bool, payload: Any, context: Any) -> Did:
    args = (payload, context) if pass_context else (payload,)
    if inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__):
        return await _guarded(func(*args))
    did = await in_thread(functools.partial(contextvars.copy_context().run, func, *args))
    return await _guarded(did.value) if inspect.isawaitable(did.value) else did


async def _guarded(handler: Awaitable[Any]) -> Did:
    async def body() -> Did:
        try:
            return Did(await handler)
        except BaseException as error:  # noqa: BLE001 - see Did
            return Did(error=error)

    try:
        # A task of its own: a handler that cancels "the current task" may not cancel the writing of its result.
        return await asyncio.create_task(body())
    except asyncio.CancelledError as error:
        return Did(error=error)


def in_thread(work: Callable[[], Any]) -> asyncio.Future[Did]:
    """Run ``work`` in a daemon thread: an agent that is still busy does not keep a stopping process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Did] = loop.create_future()

    def settle(did: Did) -> None:
        if not future.done():
            future.set_result(did)

    def body() -> None:
        try:
            did = Did(work())
        except BaseException as error:  # noqa: BLE001 - see Did
            did = Did(error=error)
        try:
            loop.call_soon_threadsafe(settle, did)
        except RuntimeError:  # the loop is closed: the process is going away
            logger.debug("a thread ended after its event loop")

    daemon(body, "agentcore-rl-agent")
    return future


def daemon(work: Callable[[], None], name: str) -> None:
    """Run ``work`` in a thread that no exit of the interpreter waits for."""
    threading.Thread(target=work, name=name, daemon=True).start()


class LoopThread:
    """An event loop in a daemon thread, which starts with the first use: a process may fork before that."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The value of ``work``, run on that loop with this task's context variables."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._get()))

    def _get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                daemon(self._loop.run_forever, self._name)
            return self._loop


def takes_context(func: Callable[..., Any]) -> bool:
    """Whether ``func`` wants the context too; raises ``TypeError`` if it can't be a handler."""
    parameters = list(inspect.signature(func).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    needs_keyword = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)
    if not positional or len(required) > 2 or needs_keyword:
        raise TypeError(
            f"rollout_entrypoint: {getattr(func, '__name__', func)} must take (payload) or (payload, context)"
        )
    # A second parameter with a default of its own (``temperature=0.7``) is not meant for the context.
    return len(positional) > 1 and positional[1].default in (inspect.Parameter.empty, None)


def takes_named_context(func: Callable[..., Any]) -> bool:
    """The AgentCore SDK's own rule for ``@app.entrypoint``: the second parameter is called ``context``."""
    return list(inspect.signature(func).parameters)[1:2] == ["context"]


def payload_validator(model: type[BaseModel] | None) -> Callable[[Any], Any]:
    """A function that returns a payload with the values of ``model``, or raises ``ContractError`` naming the fields."""
    if model is None:
        return lambda payload: payload
    from pydantic import ValidationError  # comes with the AgentCore SDK

    # A model that forbids unknown fields is about the agent's own.
    declared = any(ROLLOUT_FIELD in (field.alias, field.validation_alias) for field in model.model_fields.values())

    def validate(payload: Any) -> Any:
        bare = payload
        if isinstance(payload, dict) and not declared:
            bare = {name: value for name, value in payload.items() if name != ROLLOUT_FIELD}
        try:
            values = model.model_validate(bare).model_dump(by_alias=True)
        except ValidationError as error:
            # Without the input: it may be a secret.
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            raise ContractError("; ".join(f"{_where(p['loc'])}: {p['msg']}" for p in problems[:10])) from None
        except Exception as error:
            raise ContractError(f"payload: {describe(error)}") from error  # a validator of the model's own
        return {**payload, **values} if isinstance(payload, dict) and isinstance(values, dict) else values

    return validate


def _where(path: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "payload"


def describe(error: BaseException) -> str:
    """``ValueError: what it says``, also for exceptions whose ``str()`` raises."""
    return "".join(traceback.format_exception_only(error)).strip()

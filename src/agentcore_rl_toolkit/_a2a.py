"""The agent's side over A2A: the handlers of an :class:`AgentCoreRLApp` as an A2A agent.

A message is a payload: a JSON object in a part of type ``application/json`` (text, or bytes), or a data part; any other
text becomes ``{"prompt": text}``. A rollout is a task that is ``working`` at once, with the usual answer as its status
message, and ends with the result object as its artifact; the result is written to S3 as over HTTP. A direct call
is a task whose artifact is the handler's value.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from a2a.helpers import get_data_parts, new_task, new_text_message, new_text_part
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.tasks import TaskUpdater
from a2a.types import Message, Part, TaskState
from bedrock_agentcore.runtime import BedrockAgentCoreContext
from bedrock_agentcore.runtime import RequestContext as AgentContext

from ._handler import LoopThread, describe, in_thread
from ._runner import Calls, RolloutRunner, Run
from .protocol import ROLLOUT_FIELD, ContractError, Outcome, dumps, result_outcome

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RolloutExecutor"]

JSON = "application/json"
_CANCEL_SECONDS = 10.0
_DONE = object()

_STATES = {
    Outcome.SUCCEEDED: TaskState.TASK_STATE_COMPLETED,
    Outcome.REJECTED: TaskState.TASK_STATE_REJECTED,
    Outcome.CANCELLED: TaskState.TASK_STATE_CANCELED,
}


class RolloutExecutor(AgentExecutor):
    """Runs messages on a loop of its own: whatever an agent does, the server's loop answers ``/ping``."""

    def __init__(self, runner: RolloutRunner, calls: Callable[[], Calls], name: str, description: str) -> None:
        self.agent = SimpleNamespace(name=name, description=description)  # what the agent card says
        self._runner, self._calls = runner, calls
        self._loop = LoopThread("agentcore-rl-a2a")
        self._running: dict[str, Run] = {}
        """By the task's id."""

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        task = _Task(event_queue, context)
        try:
            payload = _payload(context.message.parts if context.message else ())
            if not isinstance(payload, dict) or ROLLOUT_FIELD not in payload:
                await task.open(TaskState.TASK_STATE_WORKING)  # for a client that does not wait
            session_id = BedrockAgentCoreContext.get_session_id() or context.context_id
            headers = BedrockAgentCoreContext.get_request_headers()
            agents = AgentContext(session_id=session_id, request_headers=headers, request=None)
            answer, run, direct = await self._loop.run(self._runner.begin(self._calls(), payload, agents))
            if direct:
                await self._direct(task, answer)
            else:
                await self._rollout(task, answer, run)
        except Exception as error:  # noqa: BLE001 - the agent's failure is the task's
            await task.end(TaskState.TASK_STATE_FAILED, describe(error))

    async def _rollout(self, task: _Task, answer: dict[str, Any], run: Run | None) -> None:
        if answer["status"] == "rejected":
            await task.end(TaskState.TASK_STATE_REJECTED, dumps(answer), JSON)
            return
        await task.open(TaskState.TASK_STATE_WORKING, dumps(answer))
        result = None
        if run is not None:
            self._running[task.id] = run
            try:
                result = await asyncio.wrap_future(run.ended)
            finally:
                self._running.pop(task.id, None)
        if result is None:  # it was there before
            await task.end(TaskState.TASK_STATE_COMPLETED, dumps(answer), JSON)
        elif result_outcome(result) is not Outcome.CANCELLED:  # that end is published by `cancel`
            await task.artifact([new_text_part(dumps(result), media_type=JSON)])
            state = _STATES.get(result_outcome(result), TaskState.TASK_STATE_FAILED)
            await task.end(state, str(result.get("stop_reason", "")))

    async def _direct(self, task: _Task, value: Any) -> None:
        if inspect.isgenerator(value) or inspect.isasyncgen(value):
            first = True
            async for chunk in self._chunks(value):
                await task.artifact([_part(chunk)], append=not first)
                first = False
        else:
            await task.artifact([_part(value)])
        await task.end(TaskState.TASK_STATE_COMPLETED)

    async def _chunks(self, stream: Any) -> AsyncIterator[Any]:
        async def following() -> Any:
            return await anext(stream, _DONE)

        while True:
            if inspect.isasyncgen(stream):
                chunk = await self._loop.run(following())
            else:
                chunk = (await in_thread(lambda: next(stream, _DONE))).unwrap()
            if chunk is _DONE:
                return
            yield chunk

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        task = _Task(event_queue, context, opened=True)
        run = self._running.get(task.id)
        if run is not None:
            self._runner.cancel(run)
            await in_thread(lambda: run.ended.exception(_CANCEL_SECONDS))  # waits
        await task.end(TaskState.TASK_STATE_CANCELED)


class _Task:
    """Publishes what happens to one task."""

    def __init__(self, queue: EventQueue, context: RequestContext, *, opened: bool = False) -> None:
        self.id, self._context_id, self._queue = context.task_id or "", context.context_id or "", queue
        self._updater = TaskUpdater(queue, self.id, self._context_id)
        self._artifact, self._opened = f"{self.id}-result", opened

    async def open(self, state: TaskState, text: str | None = None, media_type: str = JSON) -> None:
        """The task's first event, which a client that does not wait for the end gets as its answer."""
        self._opened = True
        task = new_task(self.id, self._context_id, state)
        if text:
            task.status.message.CopyFrom(self._message(text, media_type))
        await self._queue.enqueue_event(task)

    async def end(self, state: TaskState, text: str | None = None, media_type: str = "text/plain") -> None:
        if self._opened:
            await self._updater.update_status(state, self._message(text, media_type) if text else None)
        else:
            await self.open(state, text, media_type)

    async def artifact(self, parts: list[Part], *, append: bool = False) -> None:
        await self._updater.add_artifact(parts, artifact_id=self._artifact, name="result", append=append)

    def _message(self, text: str, media_type: str) -> Message:
        return new_text_message(text, media_type, self._context_id, self.id)


def _payload(parts: Sequence[Part]) -> Any:
    """The payload that a message carries. Raises ``ContractError``."""
    if data := get_data_parts(parts):
        return data[0]  # all numbers in it are floating-point ones: that is how A2A carries them
    texts = []
    for part in parts:
        if _media_type(part) == JSON and (part.text or part.raw):
            try:
                return json.loads(part.text or part.raw)
            except ValueError as error:
                raise ContractError(f"a part of type {JSON} is no JSON: {error}") from None
        texts.append(part.text)
    return {"prompt": "\n".join(texts)}


def _media_type(part: Part) -> str:
    """Version 0.3 has no type for text parts: there it is said in the part's metadata."""
    said = part.metadata["mediaType"] if "mediaType" in part.metadata else ""  # noqa: SIM401 - a protobuf Struct
    return str(part.media_type or said)


def _part(value: Any) -> Part:
    if isinstance(value, str):
        return new_text_part(value)
    try:
        return new_text_part(dumps(value), media_type=JSON)
    except ContractError as error:
        raise ContractError(f"the handler's value can't be sent: {error}") from None

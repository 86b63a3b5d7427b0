"""Sessions over A2A: the same calls to AgentCore, with a message as payload and a task as answer.

AgentCore passes the bytes of an invoke on to the agent's A2A server. They are those of A2A 0.3, because that version
needs no header of its own, which AgentCore might not pass on, and servers of version 1 speak it as well.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

from .._arn import RuntimeArn
from ..errors import require
from ._runtime import Runtime

if TYPE_CHECKING:
    from a2a.types import AgentCard

__all__ = ["A2ARuntime", "parse_card"]


class A2ARuntime(Runtime):
    """As :class:`Runtime`, for agents that serve A2A. Needs the extra ``[a2a]``."""

    cancels = True

    def __init__(self, arn: RuntimeArn, connections: int) -> None:
        self._types: Any = require("a2a.compat.v0_3.types", "a2a")
        super().__init__(arn, connections)
        self._tasks: dict[str, str] = {}
        """Of each session that was invoked here and not stopped: its task's id."""

    def invoke(self, session_id: str, payload: bytes) -> bytes:
        """``message/send``: the answer in the task's status message; any other answer as it came."""
        types = self._types
        # In a data part all numbers would become floating-point ones.
        part = types.TextPart(text=payload.decode("utf-8"), metadata={"mediaType": "application/json"})
        message = types.Message(role="user", message_id=str(uuid.uuid4()), context_id=session_id, parts=[part])
        configuration = types.MessageSendConfiguration(blocking=False)
        params = types.MessageSendParams(message=message, configuration=configuration)
        answer = self._rpc(session_id, types.SendMessageRequest(id=str(uuid.uuid4()), params=params))
        task = _task(answer)
        try:
            self._tasks.setdefault(session_id, task["id"])  # what comes later asks about the first
            text: str = task["status"]["message"]["parts"][0]["text"]
        except (KeyError, IndexError, TypeError):
            return answer  # whoever reads it says that it is no answer to a rollout
        return text.encode("utf-8")

    def cancel(self, session_id: str) -> None:
        """``tasks/cancel``: the agent's code is cancelled, and its result says so. Nothing if it has no task here."""
        task_id = self._tasks.pop(session_id, None)
        if task_id is not None:
            params = self._types.TaskIdParams(id=task_id)
            self._rpc(session_id, self._types.CancelTaskRequest(id=str(uuid.uuid4()), params=params))

    def stop(self, session_id: str) -> None:
        self._tasks.pop(session_id, None)
        super().stop(session_id)

    def read_card(self, session_id: str, _: bytes = b"") -> bytes:
        """GetAgentCard. It is the session that answers, so there is one afterwards."""
        return self._get("invocations/.well-known/agent-card.json", session_id)

    def _rpc(self, session_id: str, request: Any) -> bytes:
        return super().invoke(session_id, request.model_dump_json(by_alias=True, exclude_none=True).encode("utf-8"))


def parse_card(card: bytes) -> AgentCard:
    from a2a.client.card_resolver import parse_agent_card

    return parse_agent_card(json.loads(card))


def _task(answer: bytes) -> Any:
    try:
        return json.loads(answer).get("result")
    except (ValueError, AttributeError):
        return None

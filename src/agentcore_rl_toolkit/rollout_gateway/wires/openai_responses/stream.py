"""An answer as events, while it is sampled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ....errors import GatewayError
from ...parsed import CallArgumentsDelta, CallStartDelta, ContentDelta, Delta, ReasoningDelta
from ..base import Answer, CallIds, event
from .answer import call_item, message_item, new_item_id, reasoning_item, response_end


class Stream:
    """Events in the documented order; each item ends where the next one begins."""

    def __init__(self, head: dict[str, Any], call_id: CallIds) -> None:
        self._head, self._call_id = head, call_id
        self._number = 0
        self._done: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        """The open item, and below what it says so far."""
        self._text: list[str] = []

    def start(self, prompt_tokens: int) -> bytes:
        response = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def deltas(self, deltas: Iterable[Delta], choice: int = 0) -> bytes:
        return b"".join(self._delta(delta) for delta in deltas)

    def finish(self, answer: Answer) -> bytes:
        [choice] = answer.choices
        said = {item["type"] for item in (*self._done, self._item) if item}
        events = b""
        if not said & {"message", "function_call"}:
            events += self._open(message_item(self._next_id("msg"), "", "in_progress"))
        events += self._close("incomplete" if choice.finish_reason == "length" else "completed")
        ending = response_end(answer, self._done)
        return events + self._event(f"response.{ending['status']}", response={**self._head, **ending})

    def error(self, error: GatewayError) -> bytes:
        code = "server_error" if error.status >= 500 else error.kind
        failure = {"status": "failed", "error": {"code": code, "message": str(error)}}
        response = {**self._head, **failure, "output": self._done, "usage": None}
        return self._event("response.failed", response=response)

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case ReasoningDelta(text):
                events = self._open_unless("reasoning", reasoning_item(self._next_id("rs"), ""))
                return events + self._say("response.reasoning_text.delta", text, content_index=0)
            case ContentDelta(text):
                events = self._open_unless("message", message_item(self._next_id("msg"), "", "in_progress"))
                return events + self._say("response.output_text.delta", text, content_index=0, logprobs=[])
            case CallStartDelta(index, name, parsed_id):
                call_id = self._call_id(index, parsed_id)
                return self._open(call_item(self._next_id("fc"), call_id, name, "", "in_progress"))
            case CallArgumentsDelta(_, text):
                return self._say("response.function_call_arguments.delta", text)

    def _say(self, kind: str, text: str, **more: Any) -> bytes:
        self._text.append(text)
        return self._at(kind, delta=text, **more)

    def _open_unless(self, kind: str, item: dict[str, Any]) -> bytes:
        return b"" if self._item is not None and self._item["type"] == kind else self._open(item)

    def _open(self, item: dict[str, Any]) -> bytes:
        events = self._close("completed")
        self._item, self._text = item, []
        if "content" not in item:
            return events + self._added(item)
        [part] = item["content"]
        events += self._added({**item, "content": []})
        return events + self._at("response.content_part.added", content_index=0, part=part)

    def _close(self, status: str) -> bytes:
        item, text = self._item, "".join(self._text)
        if item is None:
            return b""
        if item["type"] == "function_call":
            item |= {"arguments": text, "status": status}
            events = self._at("response.function_call_arguments.done", arguments=text, name=item["name"])
        else:
            [part] = item["content"]
            part["text"] = text
            if item["type"] == "message":
                item["status"] = status
                events = self._at("response.output_text.done", content_index=0, text=text, logprobs=[])
            else:
                events = self._at("response.reasoning_text.done", content_index=0, text=text)
            events += self._at("response.content_part.done", content_index=0, part=part)
        events += self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._item = None
        return events

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._done), item=item)

    def _at(self, kind: str, **data: Any) -> bytes:
        """An event of the open item."""
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=len(self._done), **data)

    def _event(self, kind: str, **data: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **data}, kind)

    def _next_id(self, prefix: str) -> str:
        return new_item_id(prefix, self._head["id"], len(self._done) + (self._item is not None))

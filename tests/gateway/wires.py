"""The wires as a client sees them: one conversation, kept as chat messages, said in each vendor's words."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .support import Client, assemble

Messages = list[dict[str, Any]]


def events(text: str) -> list[dict[str, Any]]:
    """The data of an event stream. Where events are named, the name must be the data's type."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        *head, data = lines
        assert data.startswith("data: "), block
        value = {"done": True} if data == "data: [DONE]" else json.loads(data.removeprefix("data: "))
        if head:
            assert head == [f"event: {value['type']}"], block
        found.append(value)
    return found


@dataclass
class Talker:
    """A client of one session on one wire. ``post`` gives ``(status, JSON or list of events)``."""

    client: Client
    path = ""

    async def post(self, body: Any, *, path: str = "", headers: dict[str, str] | None = None) -> tuple[int, Any]:
        url = f"{self.client.session.base_url}{path or self.path}"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.http.post(url, data=data, headers=headers or {}) as response:
            text = await response.text()
            if response.content_type == "text/event-stream":
                return response.status, events(text)
            assert response.content_type == "application/json", text
            return response.status, json.loads(text)

    def body(self, messages: Messages, **fields: Any) -> dict[str, Any]:
        """A request in the wire's words; ``tools`` and ``max_tokens`` as chat completions have them."""
        raise NotImplementedError

    def message(self, data: Any) -> dict[str, Any]:
        """The assistant's chat message in an answer, streamed or whole."""
        raise NotImplementedError

    def error(self, data: Any) -> str:
        """The message of an error, as an answer of its own or at the end of a stream."""
        return (data[-1] if isinstance(data, list) else data)["error"]["message"]

    async def ask(self, messages: Messages, **fields: Any) -> dict[str, Any]:
        status, data = await self.post(self.body(messages, **fields))
        assert status == 200, data
        return self.message(data)


class Chat(Talker):
    path = "/chat/completions"

    def body(self, messages: Messages, **fields: Any) -> dict[str, Any]:
        return {"messages": messages, **fields}

    def message(self, data: Any) -> dict[str, Any]:
        return assemble(data) if isinstance(data, list) else data["choices"][0]["message"]


class Anthropic(Talker):
    path = "/messages"

    def body(self, messages: Messages, **fields: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "max_tokens": 4096, **fields, "messages": []}
        for message in messages:
            match message["role"]:
                case "system":
                    body["system"] = message["content"]
                case "tool":
                    result = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
                    result["content"] = message["content"]
                    last = body["messages"][-1]
                    if last["role"] == "user" and isinstance(last["content"], list):
                        last["content"].append(result)
                    else:
                        body["messages"].append({"role": "user", "content": [result]})
                case "assistant":
                    body["messages"].append({"role": "assistant", "content": self._blocks(message)})
                case role:
                    body["messages"].append({"role": role, "content": message["content"]})
        if "tools" in fields:
            body["tools"] = [
                {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
                for f in (tool["function"] for tool in fields["tools"])
            ]
        return body

    @staticmethod
    def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": "s"})
        if message.get("content"):
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            value = call["function"]["arguments"]
            value = json.loads(value) if isinstance(value, str) else value
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": value})
        return blocks

    def message(self, data: Any) -> dict[str, Any]:
        if isinstance(data, list):
            data = self.assemble(data)
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for block in data["content"]:
            match block["type"]:
                case "thinking":
                    message["reasoning_content"] = message.get("reasoning_content", "") + block["thinking"]
                case "text":
                    message["content"] = (message["content"] or "") + block["text"]
                case "tool_use":
                    function = {"name": block["name"], "arguments": json.dumps(block["input"])}
                    call = {"id": block["id"], "type": "function", "function": function}
                    message.setdefault("tool_calls", []).append(call)
        return message

    @staticmethod
    def assemble(stream: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole message that a stream says, put together as the vendor's SDK does it."""
        assert stream[0]["type"] == "message_start", stream[0]
        assert stream[-1] == {"type": "message_stop"}, stream[-1]
        assert stream[0]["message"]["content"] == []
        message = {**stream[0]["message"], "content": []}
        open_block: int | None = None
        for event in stream[1:-1]:
            match event["type"]:
                case "content_block_start":
                    assert open_block is None
                    assert event["index"] == len(message["content"])
                    open_block = event["index"]
                    message["content"].append({**event["content_block"], "json": ""})
                case "content_block_delta":
                    assert event["index"] == open_block
                    block = message["content"][open_block]
                    delta = {k: v for k, v in event["delta"].items() if k != "type"}
                    for key, value in delta.items():
                        key = "json" if key == "partial_json" else key
                        block[key] += value
                case "content_block_stop":
                    assert event["index"] == open_block
                    block = message["content"][open_block]
                    text = block.pop("json")
                    if block["type"] == "tool_use":
                        block["input"] = json.loads(text or "{}")
                    open_block = None
                case "message_delta":
                    assert open_block is None
                    message |= event["delta"]
                    message["usage"] = message["usage"] | event["usage"]
                case kind:
                    assert kind == "ping"
        return message


class Responses(Talker):
    path = "/responses"

    def body(self, messages: Messages, **fields: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "store": False, **fields, "input": []}
        if "max_tokens" in fields:
            body["max_output_tokens"] = body.pop("max_tokens")
        if "tools" in fields:
            body["tools"] = [{"type": "function", **tool["function"]} for tool in fields["tools"]]
        for message in messages:
            body["input"] += self._items(message)
        return body

    @staticmethod
    def _items(message: dict[str, Any]) -> list[dict[str, Any]]:
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            return [{"type": "function_call_output", **output}]
        if message["role"] != "assistant":
            return [{"role": message["role"], "content": [{"type": "input_text", "text": message["content"]}]}]
        items: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
            items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": content})
        if message.get("content") is not None or "tool_calls" not in message:
            content = [{"type": "output_text", "text": message["content"] or "", "annotations": []}]
            items.append({"type": "message", "role": "assistant", "id": "msg_1", "content": content})
        for call in message.get("tool_calls", ()):
            function = dict(call["function"])
            if not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"])
            items.append({"type": "function_call", "call_id": call["id"], **function})
        return items

    def message(self, data: Any) -> dict[str, Any]:
        if isinstance(data, list):
            data = self.assemble(data)
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for item in data["output"]:
            match item["type"]:
                case "reasoning":
                    text = item["content"][0]["text"]
                    message["reasoning_content"] = message.get("reasoning_content", "") + text
                case "message":
                    message["content"] = (message["content"] or "") + item["content"][0]["text"]
                case "function_call":
                    function = {"name": item["name"], "arguments": item["arguments"]}
                    call = {"id": item["call_id"], "type": "function", "function": function}
                    message.setdefault("tool_calls", []).append(call)
        return message

    @staticmethod
    def assemble(stream: list[dict[str, Any]]) -> dict[str, Any]:
        """The response at the end of a stream, after a look at whether the events before it say the same."""
        assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
        assert [event["type"] for event in stream[:2]] == ["response.created", "response.in_progress"]
        assert stream[-1]["type"] in ("response.completed", "response.incomplete")
        output: list[dict[str, Any]] = []
        text = ""
        for event in stream[2:-1]:
            kind = event["type"].removeprefix("response.")
            assert event["output_index"] == len(output)
            if kind == "output_item.added":
                text = ""
            elif kind.endswith(".delta"):
                text += event["delta"]
            elif kind in ("output_text.done", "reasoning_text.done"):
                assert event["text"] == text
            elif kind == "function_call_arguments.done":
                assert event["arguments"] == text
            elif kind == "output_item.done":
                item = event["item"]
                said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
                assert said == text
                output.append(item)
        assert stream[-1]["response"]["output"] == output
        return stream[-1]["response"]

    def error(self, data: Any) -> str:
        return (data[-1]["response"] if isinstance(data, list) else data)["error"]["message"]


WIRES = {"chat": Chat, "anthropic": Anthropic, "responses": Responses}

"""OpenAI Responses (https://platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import GatewayError
from ..base import JSON, Answer, CallIds, WireRequest
from ..openai_chat import encode_error
from .answer import ID_PREFIX, output_items, response_end, response_head
from .request import decode
from .stream import Stream


class OpenAIResponses:
    """The wire of ``POST /v1/responses``."""

    id_prefix = ID_PREFIX
    growing_list: str | None = None

    def decode(self, body: JSON, earlier: Sequence[Any] = ()) -> WireRequest:
        """``earlier``: what was kept of the answer that :meth:`earlier_id` names."""
        return decode(body, earlier)

    def earlier_id(self, body: JSON) -> object:
        """The id of the answer that a request goes on from without repeating what was before it, else None."""
        return body.get("previous_response_id")

    def encode(self, request: WireRequest, answer: Answer) -> dict[str, Any]:
        head = response_head(request, answer.id, answer.created, answer.model)
        return {**head, **response_end(answer, output_items(answer))}

    def encode_error(self, error: GatewayError) -> dict[str, Any]:
        return encode_error(error)

    def stream(self, answer_id: str, created: int, request: WireRequest, call_ids: Sequence[CallIds]) -> Stream:
        return Stream(response_head(request, answer_id, created, request.model), call_ids[0])

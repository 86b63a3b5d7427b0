"""The one place that reads an AgentCore Runtime ARN."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import SetupError

__all__ = ["RuntimeArn", "parse_arn"]

_ARN = re.compile(
    r"(?P<text>arn:aws[a-z-]*:bedrock-agentcore:(?P<region>[a-z0-9-]+):(?P<account>\d{12})"
    r":runtime/(?P<runtime_id>[A-Za-z][A-Za-z0-9_-]*))"
)


@dataclass(frozen=True, slots=True)
class RuntimeArn:
    text: str
    region: str
    account: str
    runtime_id: str


def parse_arn(text: str) -> RuntimeArn:
    """Parts of an agent runtime's ARN. Raises ``SetupError`` if it is none."""
    match = _ARN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise SetupError(
            f"{text!r} is no agent runtime ARN. It looks like"
            " arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/my_agent-AbCdEf1234;"
            " `aws bedrock-agentcore-control list-agent-runtimes` lists yours"
        )
    return RuntimeArn(**match.groupdict())

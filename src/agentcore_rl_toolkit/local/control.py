"""The control plane, enough to register an agent and look it up: CreateAgentRuntime, GetAgentRuntime.

There are no containers here, so the artifact is not used. What is started comes from two environment variables
of the request, which mean nothing to AWS, so that one call can serve both:

``AGENTCORE_RL_COMMAND``   the start command, e.g. ``python rl_app.py`` (required)
``AGENTCORE_RL_CWD``       the directory its file names are relative to (default: that of the local runtime)
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from agentcore_rl_toolkit.errors import SetupError

from .limits import Lifecycle, ServiceError, invalid
from .sessions import Agent

Register = Callable[..., Awaitable[Agent]]


class ControlPlane:
    """``register``: coroutine ``(name, command, cwd, environment, lifecycle, definition) -> Agent``."""

    def __init__(self, agents: Mapping[str, Agent], register: Register, lifecycle: Lifecycle) -> None:
        self._agents, self._register, self._lifecycle = agents, register, lifecycle

    def routes(self) -> list[web.RouteDef]:
        return [web.put("/runtimes/", self.create), web.get("/runtimes/{id}/", self.get)]

    async def create(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
            name, variables = body["agentRuntimeName"], dict(body.get("environmentVariables") or {})
            timeouts = body.get("lifecycleConfiguration") or {}
        except (ValueError, KeyError, TypeError):
            raise invalid("agentRuntimeName is required, in a JSON object") from None
        command = variables.pop("AGENTCORE_RL_COMMAND", None)
        if not command:
            raise invalid(
                "environmentVariables.AGENTCORE_RL_COMMAND is required by the local runtime: "
                "the command that starts the agent, e.g. 'python rl_app.py'"
            )
        if any(agent.name == name for agent in self._agents.values()):
            raise ServiceError("ConflictException", f"An agent runtime {name} exists already")
        lifecycle = replace(
            self._lifecycle,
            idle_timeout=timeouts.get("idleRuntimeSessionTimeout", self._lifecycle.idle_timeout),
            max_lifetime=timeouts.get("maxLifetime", self._lifecycle.max_lifetime),
        )
        cwd = variables.pop("AGENTCORE_RL_CWD", None)
        try:
            agent = await self._register(
                name,
                command,
                Path(cwd) if cwd else None,
                variables,
                lifecycle,
                {**body, "environmentVariables": variables},
            )
        except SetupError as error:
            raise invalid(str(error)) from None
        return web.json_response(_summary(agent), status=202)

    async def get(self, request: web.Request) -> web.Response:
        wanted = request.match_info["id"]
        agent = next((agent for agent in self._agents.values() if agent.id == wanted), None)
        if agent is None:
            raise ServiceError("ResourceNotFoundException", f"No agent runtime {wanted}")
        return web.json_response(_description(agent))


def _summary(agent: Agent) -> dict[str, Any]:
    return {
        "agentRuntimeArn": agent.arn,
        "agentRuntimeId": agent.id,
        "agentRuntimeVersion": "1",
        "createdAt": dt.datetime.fromtimestamp(agent.created_at, dt.UTC).isoformat(),
        "status": "READY",
    }


def _description(agent: Agent) -> dict[str, Any]:
    kept = ("agentRuntimeArtifact", "description", "networkConfiguration", "protocolConfiguration")
    return {
        **{name: agent.definition[name] for name in kept if name in agent.definition},
        **_summary(agent),
        "agentRuntimeName": agent.name,
        "lastUpdatedAt": dt.datetime.fromtimestamp(agent.created_at, dt.UTC).isoformat(),
        "roleArn": agent.definition.get("roleArn", "arn:aws:iam::000000000000:role/local"),
        "environmentVariables": dict(agent.environment),
        "lifecycleConfiguration": {
            "idleRuntimeSessionTimeout": int(agent.lifecycle.idle_timeout),
            "maxLifetime": int(agent.lifecycle.max_lifetime),
        },
    }

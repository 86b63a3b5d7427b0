"""Agent harnesses that nobody wrote for us, pointed at a gateway by address and key alone.

Each runs a tool loop of its own in an environment of its own (``harnesses.toml``) against a real server. It must end
with the right answer; and every token that was sampled must be in the rows, with the logprob the engine gave it, in
as many rows as there were conversations. ``docs/harnesses.md`` tells the outcome.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.rollout_gateway import RolloutGateway, ThreadedGatewayServer
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records
from agentcore_rl_toolkit.rollout_gateway.wires import AnthropicMessages, OpenAIChat, OpenAIResponses

from . import model
from .environments import HERE, MANIFEST, abort, ended, ready

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]  # the first test of a harness waits for its installation

RUNNING = 90.0
"""Seconds for one harness's run."""
WIRES = {"chat": OpenAIChat, "responses": OpenAIResponses, "anthropic": AnthropicMessages}


@dataclass(frozen=True)
class Case:
    """One way to use a harness: a ``mode`` of its driver.

    ``wire``: what it must speak. ``stream``: whether it must stream. ``deltas``: whether its driver must see that the
    answers came in pieces (None: if streamed). ``key``: where the session's key is, ``"header"`` or ``"url"``.
    ``tool``: whether the tool is the driver's function, else a shell. ``rows``, ``why``: how many rows its conversation
    gives, and why not one.
    """

    harness: str
    driver: str
    mode: str
    wire: str
    stream: bool = False
    deltas: bool | None = None
    key: str = "header"
    manner: model.Manner = model.FUNCTIONS
    tool: bool = True
    rows: int = 1
    why: str = ""

    def __str__(self) -> str:
        return f"{self.harness}-{self.mode}"


def cases() -> Iterator[Case]:
    yield Case("openai", "openai_sdk", "chat", "chat")
    yield Case("openai", "openai_sdk", "chat-async", "chat", key="url")
    yield Case("openai", "openai_sdk", "chat-stream", "chat", stream=True)
    yield Case("openai", "openai_sdk", "chat-async-stream", "chat", stream=True, key="url")
    yield Case("openai", "openai_sdk", "responses", "responses")
    yield Case("openai", "openai_sdk", "responses-previous", "responses", key="url")
    yield Case("openai", "openai_sdk", "responses-async-stream", "responses", stream=True)
    yield Case("anthropic", "anthropic_sdk", "whole", "anthropic")
    yield Case("anthropic", "anthropic_sdk", "whole-async", "anthropic")
    yield Case("anthropic", "anthropic_sdk", "stream", "anthropic", stream=True, key="url")
    yield Case("anthropic", "anthropic_sdk", "stream-async", "anthropic", stream=True)
    yield Case("anthropic", "anthropic_sdk", "tool-runner", "anthropic", key="url")
    yield Case("openai-agents", "openai_agents", "responses", "responses")
    yield Case("openai-agents", "openai_agents", "responses-stream", "responses", stream=True)
    yield Case("openai-agents", "openai_agents", "chat", "chat")
    yield Case("openai-agents", "openai_agents", "chat-stream", "chat", stream=True, key="url")
    why = "an agent that is another's tool is a conversation of its own"
    yield Case("openai-agents", "openai_agents", "chat-delegated", "chat", manner=model.DELEGATED, rows=2, why=why)
    for wire in WIRES:
        yield Case("strands-agents", "strands_agents", wire, wire, stream=True)
    for harness, driver in (("langgraph", "langchain_graph"), ("pydantic-ai", "pydantic_agent")):
        for wire in WIRES:
            yield Case(harness, driver, wire, wire)
            yield Case(harness, driver, f"{wire}-stream", wire, stream=True, key="url")
    for wire in ("chat", "anthropic"):
        yield Case("litellm", "litellm_loop", wire, wire)
        yield Case("litellm", "litellm_loop", f"{wire}-stream", wire, stream=True, key="url")
    yield Case("litellm", "litellm_loop", "responses", "responses")
    for how, manner in (("tools", model.SMOL_TOOLS), ("code", model.SMOL_CODE)):
        why = "it shows the model its own calls as text, other than they were sampled: each turn begins anew"
        smol = Case("smolagents", "smol_agents", how, "chat", manner=manner, rows=3, why=why)
        yield smol
        yield replace(smol, mode=f"{how}-stream", stream=True, deltas=False)
    for wire in ("chat", "responses"):
        yield Case("mini-swe-agent", "mini_swe_agent", wire, wire, manner=model.MINI_SWE_AGENT, tool=False)
    claude_code = Case("claude-code", "claude_code", "print", "anthropic", True, manner=model.CLAUDE_CODE, tool=False)
    codex = Case("codex", "codex", "exec", "responses", True, deltas=False, manner=model.CODEX, tool=False)
    yield claude_code
    yield replace(claude_code, mode="continue")
    yield codex
    yield replace(codex, mode="resume")


@pytest.fixture(scope="session")
def environments(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Path]]]:
    """The ``bin`` folders of all harnesses that this run uses; two are installed at a time, ahead of the tests."""
    params = [getattr(item, "callspec").params for item in request.session.items if hasattr(item, "callspec")]  # noqa: B009
    wanted = dict.fromkeys(p["case"].harness for p in params if isinstance(p.get("case"), Case))
    pool = ThreadPoolExecutor(2)
    yield {harness: pool.submit(ready, harness) for harness in wanted}
    pool.shutdown(wait=False, cancel_futures=True)
    abort()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, bool]]:
    """Which wires were spoken, and whether streamed."""
    found: set[tuple[str, bool]] = set()
    for name, wire in WIRES.items():

        def decode(self: Any, body: Any, *args: Any, _name: str = name, _decode: Any = wire.decode, **more: Any) -> Any:
            request = _decode(self, body, *args, **more)
            if not more:  # else the tokens are only counted
                found.add((_name, request.stream))
            return request

        monkeypatch.setattr(wire, "decode", decode)
    return found


def drive(case: Case, bin_folder: Path, tmp_path: Path, url: str, key: str) -> dict[str, Any]:
    """Run a driver; what it printed last. Nothing of this process's environment reaches it but the search path."""
    python = bin_folder / "python"
    command = [
        str(python if python.exists() else sys.executable),
        str(HERE / "drivers" / f"{case.driver}.py"),
        case.mode,
    ]
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    env = {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "HARNESS_URL": url,
        "HARNESS_KEY": key,
        "HARNESS_MODEL": "policy",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network for prices
    }
    process = subprocess.Popen(
        command,
        cwd=work,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with ended(process):
        out, err = process.communicate(timeout=RUNNING)
    assert process.returncode == 0, f"{out.decode()[-2000:]}\n{err.decode()[-6000:]}"
    return json.loads(out.decode().strip().splitlines()[-1])


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_a_tool_loop(
    case: Case,
    environments: dict[str, Future[Path]],
    heard: set[tuple[str, bool]],
    tmp_path: Path,
) -> None:
    bin_folder = environments[case.harness].result()
    player = model.Player(case.manner)
    backend = ScriptedBackend(player, chunk=3)
    with ThreadedGatewayServer(RolloutGateway(backend=backend, renderer=model.renderer())) as server:
        session = server.create_session()
        url, key = server.gateway.base_url, session.api_key
        if case.key == "url":
            url, key = session.anthropic_base_url, "EMPTY"
        outcome = drive(case, bin_folder, tmp_path, url if case.wire == "anthropic" else f"{url}/v1", key)
        records = asyncio.run(server.finish_session(session.session_id, reward=1.0))

    assert outcome["answer"] == model.ANSWER
    assert heard == {(case.wire, case.stream)}
    if case.tool:
        assert sorted(outcome["tool_calls"]) == ["42 + 8", "42 - 2", "6 * 7"]
    else:
        assert sorted((tmp_path / "work" / model.RESULTS_FILE).read_text().split()) == ["40", "42", "50"]
    if case.stream if case.deltas is None else case.deltas:
        assert outcome["deltas"] > 3 * len(player.sampled)
    assert len(player.sampled) >= 3
    assert len(records) == case.rows
    assert check_records(records) == sum(map(len, player.sampled))


def test_the_page_names_every_case_and_version() -> None:
    """``scripts/harness_matrix.py`` writes it."""
    page = (HERE.parents[1] / "docs" / "harnesses.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for case in cases():
        [packages] = MANIFEST[case.harness].values()
        wanted = [f" {case.wire} ", f"`{case.mode}`", *(f"`{package}`" for package in packages)]
        assert any(all(text in row for text in wanted) for row in rows), wanted


def test_a_harness_that_hangs_leaves_no_process() -> None:
    script = "setsid sleep 300 & echo $!; sleep 300"
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout
    with process.stdout, ended(process):
        detached = int(process.stdout.readline())
        assert Path(f"/proc/{detached}").exists()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{detached}").exists() and " Z " not in Path(f"/proc/{detached}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)

"""A Strands agent that knows nothing of us but the decorator, from `agentcore-rl local` to token-exact rows."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import agentcore_rl_toolkit.local
from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer, RolloutGateway, ThreadedGatewayServer
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # installs Strands in an environment of its own

AGENT = '''
from strands import Agent, tool
from strands.models.openai import OpenAIModel

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression, for example 3 * (4 + 5)."""
    return str(eval(expression, {"__builtins__": {}}))


@app.rollout_entrypoint
def invoke_agent(payload, context):
    base_url, model_id = payload["_rollout"]["base_url"], payload["_rollout"]["model_id"]
    model = OpenAIModel(client_args={"api_key": "EMPTY", "base_url": base_url}, model_id=model_id)
    agent = Agent(model=model, tools=[calculator], system_prompt="Use the calculator.", callback_handler=None)
    response = agent(payload["prompt"])
    return {"rewards": float(payload["answer"] in str(response)), "session_id": context.session_id}


if __name__ == "__main__":
    app.run()
'''

TOKENIZER = Path(agentcore_rl_toolkit.local.__file__).parent / "data" / "tiny"
CALL = 'Let me see.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call><|im_end|>'
ANSWER = "It is 42.<|im_end|>"


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The interpreter of an environment with Strands and this project."""
    directory = tmp_path_factory.mktemp("strands venv")
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    project = str(Path(__file__).parents[1])
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "strands-agents[openai]", "--editable", project], check=True, timeout=500)
    yield python
    shutil.rmtree(directory)  # pytest would keep 150 MB of every run


@pytest.fixture(params=["fork", "process"])
def arn(request: pytest.FixtureRequest, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The ARN under which `agentcore-rl local` serves the agent; the environment leads there."""
    (tmp_path / "rl_app.py").write_text(AGENT)
    command = [sys.executable, "-m", "agentcore_rl_toolkit", "local", "--start", request.param]
    command += ["--agent", f"{shlex.quote(str(python))} rl_app.py", "--data-dir", str(tmp_path / "data")]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        printed = ""
        while not printed.endswith("\n\n") or "arn:" not in printed:
            line = process.stdout.readline()
            assert line, f"ended early, after {printed!r}"
            printed += line
        for name, value in re.findall(r"(AWS_\w+)=(\S+)", printed):
            monkeypatch.setenv(name, value)
        found = re.search(r"arn:\S+", printed)
        assert found, printed
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_strands_agent(arn: str) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    call, answer = (tokenizer.encode(text, add_special_tokens=False).ids for text in (CALL, ANSWER))

    def script(prompt_ids: list[int]) -> list[int]:
        has_result = "<tool_response>\n42\n</tool_response>" in tokenizer.decode(prompt_ids, skip_special_tokens=False)
        return answer if has_result else call

    backend = ScriptedBackend(script)
    gateway = RolloutGateway(backend=backend, renderer=HfTemplateRenderer(TOKENIZER))
    with ThreadedGatewayServer(gateway) as server, RolloutClient(arn, "local", "strands", model_id="policy") as client:

        def rollout(number: int) -> None:
            session = server.create_session()
            payload = {"prompt": f"What is 6 * 7? ({number})", "answer": "42"}
            future = client.invoke(payload, base_url=session.base_url)
            result = future.result(timeout=120)
            assert result["status_code"] == 200, result
            assert (result["rewards"], result["session_id"]) == (1.0, future.session_id)
            records = asyncio.run(server.finish_session(session.session_id, reward=result["rewards"]))
            (row,) = records  # one linear conversation is one row
            assert check_records(records) == len(call) + len(answer)
            response = row.token_ids[row.prompt_length :]
            assert response[: len(call)] == call
            assert response[-len(answer) :] == answer
            assert row.reward == 1.0

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(rollout, range(3)))
    assert len(backend.calls) == 6

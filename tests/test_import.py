"""The package costs nothing until a name is used, and says what to install when a part is missing."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import agentcore_rl_toolkit

HEAVY = {"boto3", "botocore", "bedrock_agentcore", "aiohttp", "numpy", "tokenizers", "jinja2", "transformers", "rich"}


def python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def loaded_by(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has after ``statement``."""
    done = python(f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))")
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_by("import agentcore_rl_toolkit") & HEAVY
    assert not loaded_by("import agentcore_rl_toolkit.protocol") & HEAVY
    assert not loaded_by("from agentcore_rl_toolkit import RewardFunction, Outcome") & HEAVY


def test_the_agent_and_the_client_load_nothing_of_the_gateway() -> None:
    for name in "AgentCoreRLApp", "RolloutClient":
        extra = loaded_by(f"from agentcore_rl_toolkit import {name}") & HEAVY
        assert extra <= {"boto3", "botocore", "bedrock_agentcore"}, name


def test_importing_the_package_is_quick() -> None:
    def seconds(code: str) -> float:
        began = time.perf_counter()
        assert python(code, "-I").returncode == 0
        return time.perf_counter() - began

    # Pairs, so that whatever else the machine does hits both alike.
    added = [seconds("import agentcore_rl_toolkit") - seconds("pass") for _ in range(9)]
    assert statistics.median(added) < 0.050, added


def test_public_names() -> None:
    expected = {
        "AgentCoreRLApp",
        "AsyncBatchResult",
        "BatchItem",
        "BatchResult",
        "Outcome",
        "RewardFunction",
        "Rollout",
        "RolloutClient",
        "RolloutFuture",
        "run_rollouts",
    }
    assert set(agentcore_rl_toolkit.__all__) == expected
    assert expected <= set(dir(agentcore_rl_toolkit))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = agentcore_rl_toolkit.nothing


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the AgentCore SDK
@pytest.mark.parametrize("name", agentcore_rl_toolkit.__all__)
def test_every_public_name_loads(name: str) -> None:
    value: Any = getattr(agentcore_rl_toolkit, name)
    assert value.__module__.startswith("agentcore_rl_toolkit")


def test_a_missing_extra_is_one_line_that_says_what_to_install() -> None:
    code = """
import sys
sys.modules["aiohttp"] = None  # as if it were not installed
from agentcore_rl_toolkit.errors import MissingExtraError, require
try:
    require("aiohttp", "gateway")
except MissingExtraError as error:
    assert isinstance(error, ImportError)
    print(error)
"""
    done = python(code)
    assert done.stdout == "aiohttp is not installed: pip install 'agentcore-rl-toolkit[gateway]'\n", done.stderr


def test_the_tools_for_tests_name_the_extra_they_need() -> None:
    code = """
import sys
sys.modules["numpy"] = None  # as if it were not installed
from agentcore_rl_toolkit.errors import MissingExtraError
try:
    import agentcore_rl_toolkit.rollout_gateway.testing
except MissingExtraError as error:
    print(error)
"""
    done = python(code)
    assert done.stdout == "numpy is not installed: pip install 'agentcore-rl-toolkit[gateway]'\n", done.stderr


LAYERS = ("wires", "render", "sampling", "traces")


@pytest.mark.parametrize("layer", LAYERS)
def test_the_gateways_layers_do_not_import_each_other(layer: str) -> None:
    gateway = Path(agentcore_rl_toolkit.__file__).parent / "rollout_gateway"
    top = {path.stem for path in gateway.glob("*.py")} & {"gateway", "sessions", "prompts", "answers", "endpoints"}
    assert len(top) == 5
    modules = list((gateway / layer).rglob("*.py"))
    assert modules
    for path in modules:
        package = ["rollout_gateway", *path.relative_to(gateway).parts[:-1]]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
                found = {*base, *(alias.name for alias in node.names)} & ({*LAYERS, *top} - {layer})
                assert base[0] != "rollout_gateway" or not found, f"{path.name} imports {'.'.join(base)}"

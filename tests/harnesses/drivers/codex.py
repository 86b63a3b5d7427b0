"""Codex CLI, as its users start it in a script."""

import json
import os
import subprocess
from pathlib import Path

from _task import AGAIN, KEY, MODEL, PROMPT, URL, run

CONFIG = f"""
model = "{MODEL}"
model_provider = "gateway"
[model_providers.gateway]
name = "gateway"
base_url = "{URL}"
env_key = "GATEWAY_KEY"
wire_api = "responses"
"""


def talk(*arguments):
    # Its sandbox needs kernel features that containers lack; the commands are the test's own.
    command = ["codex", "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, "GATEWAY_KEY": KEY},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
    )
    items = [json.loads(line).get("item", {}) for line in done.stdout.splitlines()]
    return [item["text"] for item in items if item.get("type") == "agent_message"][-1]


def resumed():
    talk(PROMPT)
    return talk("resume", "--last", AGAIN)


folder = Path.home() / ".codex"
folder.mkdir()
(folder / "config.toml").write_text(CONFIG)
run({"exec": lambda: talk(PROMPT), "resume": resumed})

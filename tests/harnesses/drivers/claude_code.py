"""Claude Code, as its users start it in a script."""

import json
import os
import subprocess

from _task import AGAIN, KEY, MODEL, PROMPT, URL, run

SETTINGS = {
    "ANTHROPIC_BASE_URL": URL,
    "ANTHROPIC_API_KEY": KEY,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
}


def talk(prompt, *options):
    command = ["claude", "-p", prompt, *options, "--model", MODEL, "--allowedTools=Bash"]
    command += ["--output-format", "stream-json", "--verbose", "--include-partial-messages"]
    done = subprocess.run(
        command, env={**os.environ, **SETTINGS}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    deltas = sum(e["type"] == "stream_event" and e["event"]["type"] == "content_block_delta" for e in events)
    return events[-1]["result"], deltas


def resumed():
    _, before = talk(PROMPT)
    answer, deltas = talk(AGAIN, "--continue")
    return answer, before + deltas


run({"print": lambda: talk(PROMPT), "continue": resumed})

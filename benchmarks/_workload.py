"""What the agents say and the engine answers: the same text and token ids for every contender."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

SAMPLED, NEW = 100, 200
"""Tokens a turn adds: sampled by the engine, and new in the next prompt (the tool's message and what frames it)."""

CALL_PREFIX = '<tool_call>\n{"name": "run", "arguments": '
CALL_SUFFIX = "}\n</tool_call>"
STOP = "<|im_end|>"
TAIL_PREFIX = "\n<|im_start|>user\n<tool_response>\n"
TAIL_SUFFIX = "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string", "description": "What to run."},
                    "path": {"type": "string", "description": "Where to run it."},
                    "limit": {"type": "integer", "description": "Lines to return at most."},
                },
                "required": ["command"],
            },
        },
    }
    for name, description in (("run", "Run a shell command."), ("edit", "Edit a file of the repository."))
]
SYSTEM = "You are a careful software engineer. Look at the repository, find the failing test and mend the code."
USER = "The nightly build is red since Tuesday. Find out which change broke it, and fix it without touching the tests."


def make_workload(
    tokenizer_folder: Path, *, variants: int = 2048, answers: int = 256, large: int = 0
) -> dict[str, Any]:
    """Tool results (``variants`` texts of NEW tokens with their frame), answers (``answers`` canonical tool calls of
    SAMPLED ids, the stop token last) and, with ``large``, a first message of that many tokens."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    if any(tokenizer.token_to_id(token) is None for token in (STOP, "<|im_start|>")):
        raise SystemExit(f"{tokenizer_folder} has no <|im_start|>/<|im_end|>: the benchmark needs a ChatML vocabulary")
    source = _standard_library()
    position = 0

    def cut(size: int, frame: str = "") -> str:
        """The next piece of the source; with the frame around it ``size`` tokens (one or two more or less)."""
        nonlocal position
        room = size - len(tokenizer.encode(frame, add_special_tokens=False).ids)
        text = source[position : position + room * 16]
        text = text[: tokenizer.encode(text, add_special_tokens=False).offsets[room][0]]
        position += len(text)
        return text

    def answer() -> dict[str, Any]:
        # Keys in alphabetical order: the original sends them back so, and any other order would fork its rows.
        arguments = {"command": "", "limit": 40, "path": "src/package/module.py"}
        frame = CALL_PREFIX + json.dumps(arguments) + CALL_SUFFIX + STOP
        # The eight make up for what joining the lines takes away.
        arguments["command"] = " ".join(cut(SAMPLED + 8, frame).replace('"', "'").replace("\\", "/").split())
        text = json.dumps(arguments)
        ids = tokenizer.encode(CALL_PREFIX + text + CALL_SUFFIX + STOP, add_special_tokens=False).ids
        return {"ids": ids, "arguments": text}

    return {
        "system": SYSTEM,
        "user": USER,
        "tools": TOOLS,
        "answers": [answer() for _ in range(answers)],
        "results": [cut(NEW, TAIL_PREFIX + TAIL_SUFFIX) for _ in range(variants)],
        "large": cut(large) if large else "",
    }


def _standard_library(size: int = 4_000_000) -> str:
    """Source code of this Python's standard library, ``size`` characters: what coding agents read all day."""
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_text("utf-8", "replace")
    return text[:size]

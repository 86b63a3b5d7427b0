"""Vocabularies as training runs leave them behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer

from .support import TINY, renderer


def test_truncation_and_padding_in_the_file_touch_no_prompt(tmp_path: Path):
    """A tokenizer saved in the middle of a fine-tuning holds the cutting and padding of that run."""
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    spec = json.loads(path.read_text("utf-8"))
    spec["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|im_end|>",
    }
    path.write_text(json.dumps(spec), "utf-8")
    messages = [{"role": "user", "content": "What is 12 times 12? Ünïcode too, and <|im_end|> spelled."}]
    assert HfTemplateRenderer(tmp_path).render(messages) == renderer(TINY).render(messages)

"""What a renderer needs of a checkpoint: vocabulary, template, special tokens, end tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...errors import SetupError


@dataclass(slots=True)
class Checkpoint:
    """``special``: template variables such as ``bos_token``. ``end_tokens``: ids from ``generation_config.json``."""

    tokenizer: Tokenizer
    template: str
    special: dict[str, str]
    end_tokens: list[int] = field(default_factory=list)


def load(source: Any, chat_template: str | None = None) -> Checkpoint:
    """Read a transformers tokenizer or a checkpoint folder. Raises ``SetupError`` saying what is missing."""
    if isinstance(source, str | Path):
        return _from_folder(Path(source), chat_template)
    backend = getattr(source, "backend_tokenizer", None)
    if backend is None:
        raise SetupError(f"{type(source).__name__} is no fast tokenizer: pass one, or the checkpoint folder's path")
    special = {k: v for k, v in source.special_tokens_map.items() if isinstance(v, str)}
    template = chat_template or _chosen(source.chat_template, "the tokenizer")
    return Checkpoint(_whole(Tokenizer.from_str(backend.to_str())), template, special)


def _from_folder(folder: Path, chat_template: str | None) -> Checkpoint:
    if not (folder / "tokenizer.json").is_file():
        raise SetupError(f"{folder} holds no tokenizer.json: pass a checkpoint's folder, or a transformers tokenizer")
    config = _json(folder / "tokenizer_config.json")
    template: Any = config.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text("utf-8")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    special = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    ends = _json(folder / "generation_config.json").get("eos_token_id")
    return Checkpoint(
        _whole(Tokenizer.from_file(str(folder / "tokenizer.json"))),
        chat_template or _chosen(template, str(folder)),
        special,
        [ends] if isinstance(ends, int) else list(ends or []),
    )


def _whole(tokenizer: Tokenizer) -> Tokenizer:
    """Without the cutting and padding that a training run may have left in the file."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text("utf-8"))) if path.is_file() else {}


def _chosen(template: Any, owner: str) -> str:
    """The one template to use, where a checkpoint names several."""
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    if not template:
        raise SetupError(f"{owner} has no chat template: pass chat_template=…")
    return str(template)

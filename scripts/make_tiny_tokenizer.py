"""Train the tiny policy's tokenizer on the demo's conversations: always the same files.

Run it after a change to the demo's prompt, tool, questions or chat template:
    python scripts/make_tiny_tokenizer.py
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentcore_rl_toolkit.local.math_tasks import transcripts

ROOT = Path(__file__).resolve().parent.parent
AGENT = ROOT / "examples/local_math_agent/rl_app.py"
FOLDER = ROOT / "src/agentcore_rl_toolkit/local/data/tiny"
VOCAB_SIZE = 544
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Words with the space before them, digits in pairs, a number's minus sign alone (so that signs and digits can be
# copied from wherever they stand), punctuation with the newlines behind it.
PIECES = r" ?[\p{L}_]+|\p{N}{1,2}|-(?=\p{N})| ?(?!-\p{N})[^\s\p{L}\p{N}_]+\n*|\s+"


def agent_constants() -> dict[str, Any]:
    """The literal constants of the agent's module, read without running it."""
    constants = {}
    for node in ast.parse(AGENT.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                constants[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return constants


def corpus() -> Iterator[str]:
    agent = agent_constants()
    tool = json.dumps(agent["CALCULATOR"]["function"], ensure_ascii=False)
    yield from [agent["SYSTEM_PROMPT"], tool] * 100
    yield from [" ".join(f"{number:02}" for number in range(100))] * 500  # every pair of digits is one token
    for parts in transcripts(seed=0, count=4000):
        yield "".join(text for text, _ in parts)


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

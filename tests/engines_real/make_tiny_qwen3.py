"""Write a tiny random Qwen3 with the demo's tokenizer: ``python make_tiny_qwen3.py FOLDER``."""

import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import agentcore_rl_toolkit.local

folder = Path(sys.argv[1])
torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=544,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)
model = Qwen3ForCausalLM(config)
torch.nn.init.normal_(model.lm_head.weight, std=0.25)  # else all tokens are about as likely
model.save_pretrained(folder)
for file in (Path(agentcore_rl_toolkit.local.__file__).parent / "data" / "tiny").iterdir():
    shutil.copy(file, folder)

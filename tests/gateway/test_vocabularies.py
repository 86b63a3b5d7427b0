"""Vocabularies as training runs leave them behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer
from agentcore_rl_toolkit.rollout_gateway.render.text import GUARD, TextEncoder

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


BEGINNINGS = {
    "prepended by the normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "prepended to the very first word": pre_tokenizers.Metaspace("▁", "first", split=False),
    "prepended to the first word of each piece": pre_tokenizers.Metaspace("▁", "always"),
    "as they are": normalizers.Replace(" ", "▁"),
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_text_beside_spelled_control_tokens_is_encoded_as_ever(beginning: str):
    """Whatever vocabularies do at the beginning of a text and beside control tokens, and whatever else they add."""
    symbols = [*[f"<0x{i:02X}>" for i in range(256)], *"▁ahi[]INST", "▁a", "▁h", "▁hi", "▁▁"]
    merges = [("▁", "a"), ("▁", "h"), ("▁h", "i"), ("▁", "▁")]
    model = models.BPE({symbol: i for i, symbol in enumerate(symbols)}, merges, byte_fallback=True)
    tokenizer, step = Tokenizer(model), BEGINNINGS[beginning]
    if isinstance(step, normalizers.Normalizer):
        tokenizer.normalizer = step
    else:
        tokenizer.pre_tokenizer = step
    tokenizer.add_special_tokens(["<s>", AddedToken("<|user|>", rstrip=True), AddedToken("<|cut|>", lstrip=True)])
    tokenizer.add_tokens([AddedToken("¶", normalized=False)])
    encoder = TextEncoder(tokenizer)
    pieces = st.sampled_from(["<s>", "<|user|>", "<|cut|>", " ", "¶", "hi", "[INST]", "a "])

    @settings(max_examples=150, deadline=None)
    @given(st.lists(pieces, max_size=8), st.integers(0, 8))
    def same_ids(words: list[str], at: int) -> None:
        expected = tokenizer.encode("".join(words), add_special_tokens=False).ids
        assert encoder.encode("".join([*words[:at], GUARD, *words[at:]])) == expected

    same_ids()

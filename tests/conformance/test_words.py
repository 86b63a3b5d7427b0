"""ASCII text encoded word by word gives the very ids of the whole tokenizer, for every vocabulary."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcore_rl_toolkit.rollout_gateway.render.text import TextEncoder
from agentcore_rl_toolkit.rollout_gateway.render.words import over_ascii, words_of

from .families import Family

CODE = (
    "def f(x):\n\treturn {'a': [1, 22, 333], \"b\": None}  # don't\r\n\r\n  $ ls -la /usr/lib\x0b\x1c\x1f\x7f\n\n"
    "I'LL WE'VE they'd HTTPServer camelCase snake_case 0x7f 3.14e-10 === --- ...\n" + "=" * 70 + "\n   \t x"
)
ascii_text = st.text(st.characters(codec="ascii"), max_size=200)
blanks_and_marks = st.text(st.sampled_from(" \n\t\r\x0b\x1c'sSdlLvVeE1290aZ.,/_="), max_size=60)


@pytest.fixture
def without_fastokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)


@pytest.mark.usefixtures("without_fastokens")
def test_any_ascii_text(family: Family):
    assert words_of(family.tokenizer) is not None
    encoder = TextEncoder(family.tokenizer)

    @settings(max_examples=150, deadline=None)
    @given(ascii_text | blanks_and_marks)
    def same_ids(text: str) -> None:
        for _ in range(2):  # the second time from memory
            assert encoder.encode(CODE + text) == family.tokenizer.encode(CODE + text, add_special_tokens=False).ids

    same_ids()


@pytest.mark.usefixtures("without_fastokens")
def test_control_tokens_between_words(family: Family):
    encoder = TextEncoder(family.tokenizer)
    for token in encoder.control:
        if token.isascii():
            text = f"a {token} b{token}{token}\n c"
            assert encoder.encode(text) == family.tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pattern", [r"[\p{L}&&[^a]]", r"[[a]b]", r"\p{Han}+", r"[\p{Latin}]"])
def test_patterns_that_are_left_alone(pattern: str):
    with pytest.raises(ValueError):
        over_ascii(pattern)

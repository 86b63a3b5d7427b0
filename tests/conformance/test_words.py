"""ASCII text encoded word by word gives the very ids of the whole tokenizer, for every vocabulary."""

from __future__ import annotations

import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

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


PIECES = r"[a-z]+|[0-9]{1,3}|\s+"


def vocabulary(pattern: str, *added: str, normalizer: str | None = None) -> Tokenizer:
    """A small byte-level one that splits by ``pattern`` and merges digits, blanks and a's in pairs. Of ``added``, those
    that begin with ``~`` are looked for in normalized text."""
    letters = {
        **{chr(i): chr(i) for i in range(33, 127)},
        **{chr(i): chr(256 + i) for i in range(33)},
        "\x7f": "\u0121",
    }
    tokens = [*letters.values()]
    merges = [
        (a, b)
        for kind in ("0123456789", " \n\t", "aAB")
        for a in map(letters.get, kind)
        for b in map(letters.get, kind)
    ]
    tokens += [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if normalizer:
        tokenizer.normalizer = getattr(normalizers, normalizer)()
    tokenizer.add_tokens([AddedToken(t.removeprefix("~"), normalized=t.startswith("~")) for t in added])
    return tokenizer


@pytest.mark.usefixtures("without_fastokens")
@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-z]+|\p{N}{1,3}+",  # in Oniguruma any number of digits, in Python three
        r"\S+|\s++$|\s",
        r"^\s+|\S+",
        r"\w+\Z|\w",
        r"\d{2}?|\w+",
        r"(?i:\p{Lu})+",
        r"\d{,}|b",
        r"(?m:a.b)|\w+",
        r"(?<=a)|B",
    ],
)
def test_expressions_that_mean_another_thing_in_python(pattern: str):
    check(vocabulary(pattern))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    "added", [("~<a>", "a>b"), ("a>b", "~<a>b"), ("~<a>bc", "a>b"), ("~b<a", "<a>"), ("<a", "<a>b", "<a>")]
)
def test_added_tokens_that_overlap(added: tuple[str, ...], fast: bool, monkeypatch: pytest.MonkeyPatch):
    if not fast:
        monkeypatch.setitem(sys.modules, "fastokens", None)
    check(vocabulary(PIECES, *added))


@pytest.mark.usefixtures("without_fastokens")
def test_added_tokens_that_may_be_spelled_otherwise():
    check(vocabulary(PIECES, "~\uff1ca>b", normalizer="NFKC"))


def check(tokenizer: Tokenizer) -> None:
    encoder = TextEncoder(tokenizer)

    @settings(max_examples=300, deadline=None)
    @given(st.text(st.sampled_from("01234 \n\tabcAB<>"), max_size=12))
    @example("12345")
    @example("12 \n \na\n")
    @example("a\nb\n")
    @example("b<a>bc<a>b")
    @example("aB")
    def same_ids(text: str) -> None:
        assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids

    same_ids()


@pytest.mark.parametrize("pattern", [r"[\p{L}&&[^a]]", r"[[a]b]", r"\p{Han}+", r"[\p{Latin}]"])
def test_patterns_that_are_left_alone(pattern: str):
    with pytest.raises(ValueError):
        over_ascii(pattern)

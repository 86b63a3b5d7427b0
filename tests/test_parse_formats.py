"""Every call format over a byte-level vocabulary: canonical answers, broken ones, and any way of cutting them up."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentcore_rl_toolkit.rollout_gateway.parsed import (
    CallArgumentsDelta,
    CallStartDelta,
    ContentDelta,
    Delta,
    ParsedCall,
    ParsedMessage,
    ReasoningDelta,
)
from agentcore_rl_toolkit.rollout_gateway.render.parse import parser_for

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "q": {"type": "string"},
                    "n": {"type": "integer"},
                    "x": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "on": {"type": "boolean"},
                    "tags": {"type": "array"},
                    "where": {"$ref": "#/$defs/Place"},
                },
                "$defs": {"Place": {"type": "object"}},
            },
        },
    }
    for name in ("search", "get_time")
]


def byte_tokenizer(special: list[str], added: list[str] = ()) -> Tokenizer:  # type: ignore[assignment]
    """One token per byte, and these added tokens."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in added])
    return tokenizer


@dataclass
class Family:
    """A format as a checkpoint shows it, an answer in it with two calls, and how much of the answer it can say."""

    template: str
    special: list[str]
    added: list[str]
    answer: str
    name: str
    reasoning: str = "hm, é"
    content: str = "Let me see."
    calls: list[dict[str, Any]] = field(
        default_factory=lambda: [{"q": 'a "b" {c} 日本', "n": 3}, {"on": True, "tags": ["x", 1]}]
    )
    ids: list[str | None] = field(default_factory=lambda: [None, None])


def json_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


Q1, Q2 = json_of({"q": 'a "b" {c} 日本', "n": 3}), json_of({"on": True, "tags": ["x", 1]})
HERMES = (
    "<think>\nhm, é\n</think>\n\nLet me see.\n"
    f'<tool_call>\n{{"name": "search", "arguments": {Q1}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "get_time", "arguments": {Q2}}}\n</tool_call><|im_end|>'
)
FAMILIES = {
    "hermes": Family(
        "{{ '<tool_call>' }} </think>",
        ["<|im_start|>", "<|im_end|>"],
        ["<tool_call>", "</tool_call>", "<think>", "</think>"],
        HERMES,
        "hermes",
    ),
    "hermes-text": Family("<tool_call> <think></think>", ["<|im_start|>", "<|im_end|>"], [], HERMES, "hermes"),
    "xml": Family(
        "<tool_call>\\n<function= </think>",
        ["<|im_end|>"],
        ["<tool_call>", "</tool_call>", "<think>", "</think>"],
        "<think>\nhm, é\n</think>\n\nLet me see.\n\n<tool_call>\n<function=search>\n<parameter=q>\n"
        'a "b" {c} 日本\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n'
        '<function=get_time>\n<parameter=on>\nTrue\n</parameter>\n<parameter=tags>\n["x", 1]\n</parameter>\n'
        "</function>\n</tool_call><|im_end|>",
        "xml",
    ),
    "glm": Family(
        "<tool_call><arg_key> </think>",
        ["<|user|>", "<|observation|>"],
        [
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<think>",
            "</think>",
        ],
        "\n<think>hm, é</think>\nLet me see.\n<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>"
        'a "b" {c} 日本</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n'
        "<tool_call>get_time<arg_key>on</arg_key><arg_value>true</arg_value><arg_key>tags</arg_key>"
        '<arg_value>["x", 1]</arg_value></tool_call><|observation|>',
        "glm",
    ),
    "minimax": Family(
        "'<minimax:tool_call>' </think>",
        ["[e~["],
        ["<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"],
        '<think>\nhm, é\n</think>\n\nLet me see.\n<minimax:tool_call>\n<invoke name="search">\n'
        '<parameter name="q">a "b" {c} 日本</parameter>\n<parameter name="n">3</parameter>\n</invoke>\n'
        '<invoke name="get_time">\n<parameter name="on">true</parameter>\n'
        '<parameter name="tags">["x", 1]</parameter>\n</invoke>\n</minimax:tool_call>[e~[',
        "minimax",
    ),
    "dsml": Family(
        "'<' + dsml_token + 'tool_calls>' </think>",
        ["<｜end▁of▁sentence｜>"],
        ["｜DSML｜", "<think>", "</think>"],
        '<think>hm, é</think>Let me see.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="search">\n'
        '<｜DSML｜parameter name="q" string="true">a "b" {c} 日本</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="get_time">\n<｜DSML｜parameter name="on" string="false">true</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="tags" string="false">["x", 1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls><｜end▁of▁sentence｜>",
        "dsml",
    ),
    "deepseek-v3": Family(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜>```json</think>",
        ["<｜end▁of▁sentence｜>"],
        [
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "<think>",
            "</think>",
        ],
        "<think>\nhm, é\n</think>\n\nLet me see.<｜tool▁calls▁begin｜>"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n"
        f"```json\n{Q1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{Q2}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "deepseek-v3",
    ),
    "deepseek": Family(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜></think>",
        ["<｜end▁of▁sentence｜>"],
        [
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "<think>",
            "</think>",
        ],
        "<think>hm, é</think>Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>"
        f"{Q1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{Q2}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "deepseek",
    ),
    "kimi": Family(
        "<|tool_calls_section_begin|></think>",
        ["<|im_end|>"],
        [
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
            "<think>",
            "</think>",
        ],
        "<think>hm, é</think>Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0"
        f"<|tool_call_argument_begin|>{Q1}<|tool_call_end|><|tool_call_begin|>functions.get_time:1"
        f"<|tool_call_argument_begin|>{Q2}<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
        "kimi",
        ids=["functions.search:0", "functions.get_time:1"],
    ),
    "mistral": Family(
        "[TOOL_CALLS][CALL_ID][ARGS]",
        ["</s>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"],
        [],
        f"[THINK]hm, é[/THINK]Let me see."
        f"[TOOL_CALLS]search[CALL_ID]abcdefgh1[ARGS]{Q1}[TOOL_CALLS]get_time[ARGS]{Q2}</s>",
        "mistral",
        ids=["abcdefgh1", None],
    ),
    "mistral-list": Family(
        "[TOOL_CALLS][",
        ["</s>", "[TOOL_CALLS]"],
        [],
        f'Let me see.[TOOL_CALLS][{{"name": "search", "arguments": {Q1}, "id": "abcdefgh1"}}, '
        f'{{"name": "get_time", "arguments": {Q2}}}]</s>',
        "mistral-list",
        reasoning="",
        ids=["abcdefgh1", None],
    ),
    "gemma4": Family(
        "<|tool_call>call:<channel|>",
        ["<turn|>", "<|tool_response>"],
        ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
        "<|channel>thought\nhm, é\n<channel|>Let me see."
        '<|tool_call>call:search{n:3,q:<|"|>a "b" {c} 日本<|"|>}<tool_call|>'
        '<|tool_call>call:get_time{on:true,tags:[<|"|>x<|"|>,1]}<tool_call|><|tool_response>',
        "gemma4",
    ),
    "llama": Family(
        "<|start_header_id|> tool_calls <|python_tag|>",
        ["<|eot_id|>", "<|eom_id|>", "<|python_tag|>"],
        [],
        f'{{"name": "search", "parameters": {Q1}}}; {{"name": "get_time", "parameters": {Q2}}}<|eot_id|>',
        "llama",
        reasoning="",
        content="",
    ),
    "llama-tag": Family(
        "<|start_header_id|> tool_calls <|python_tag|>",
        ["<|eot_id|>", "<|eom_id|>", "<|python_tag|>"],
        [],
        f'<|python_tag|>{{"name": "search", "parameters": {Q1}}}; {{"name": "get_time", "parameters": {Q2}}}<|eom_id|>',
        "llama",
        reasoning="",
        content="",
    ),
    "json": Family(
        "{% for m in messages %}<|im_start|>{{ m.role + m.content }}{% if m.tool_calls %}<|tool_call|>"
        "{{ m.tool_calls | map(attribute='function') | list | tojson }}<|/tool_call|>{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}",
        ["<|im_start|>", "<|im_end|>", "<|tool_call|>", "<|/tool_call|>"],
        [],
        f'Let me see.<|tool_call|>[{{"name": "search", "arguments": {Q1}}}, {{"name": "get_time", "arguments": {Q2}}}]'
        "<|/tool_call|><|im_end|>",
        "json",
        reasoning="",
    ),
    "harmony": Family(
        "<|start|>assistant<|channel|>",
        ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"],
        [],
        "<|channel|>analysis<|message|>hm, é<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        f"<|start|>assistant to=functions.search<|channel|>commentary json<|message|>{Q1}<|call|>"
        f"<|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{Q2}<|call|>",
        "harmony",
    ),
}


def family(key: str) -> tuple[Tokenizer, Any]:
    f = FAMILIES[key]
    tokenizer = byte_tokenizer(f.special, f.added)
    return tokenizer, parser_for(tokenizer, f.template)


LOADED = {key: family(key) for key in FAMILIES}


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def put_together(deltas: list[Delta]) -> ParsedMessage:
    message = ParsedMessage()
    for delta in deltas:
        match delta:
            case ReasoningDelta(text):
                message.reasoning += text
            case ContentDelta(text):
                message.content += text
            case CallStartDelta(index, name, call_id):
                assert index == len(message.tool_calls)
                message.tool_calls.append(ParsedCall(name, "", id=call_id))
            case CallArgumentsDelta(index, text):
                assert index == len(message.tool_calls) - 1
                message.tool_calls[index].arguments += text
    return message


def parse(
    key: str,
    ids: list[int],
    cuts: list[int] | None = None,
    *,
    prompt: str = "",
    reason: str = "stop",
    tools: Any = TOOLS,
) -> ParsedMessage:
    """The message; the deltas are checked against it."""
    tokenizer, factory = LOADED[key]
    parser = factory(prompt_ids=ids_of(tokenizer, prompt), tools=tools)
    deltas: list[Delta] = []
    bounds = [0, *sorted(cuts or []), len(ids)]
    for start, end in itertools.pairwise(bounds):
        deltas += parser.feed(ids[start:end])
    rest, message = parser.finish(reason)
    said = put_together(deltas + rest)
    assert (said.reasoning, said.content) == (message.reasoning, message.content)
    assert [(c.name, c.arguments, c.id) for c in said.tool_calls] == [
        (c.name, c.arguments, c.id) for c in message.tool_calls
    ]
    assert all(d.text for d in deltas + rest if not isinstance(d, CallStartDelta))
    return message


def parse_text(key: str, text: str, **options: Any) -> ParsedMessage:
    return parse(key, ids_of(LOADED[key][0], text), **options)


# -- well-formed answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", FAMILIES)
def test_canonical_answer(key: str) -> None:
    f = FAMILIES[key]
    assert LOADED[key][1].name == f.name
    message = parse_text(key, f.answer)
    assert message.reasoning == f.reasoning
    assert message.content == f.content
    assert [c.name for c in message.tool_calls] == ["search", "get_time"]
    assert [json.loads(c.arguments) for c in message.tool_calls] == f.calls
    assert [c.id for c in message.tool_calls] == f.ids
    assert [c.status for c in message.tool_calls] == ["ok", "ok"]
    assert not message.ill_formed
    assert message.raw == f.answer


@pytest.mark.parametrize("key", FAMILIES)
def test_every_prefix_of_an_answer_parses_and_one_by_one_is_the_same(key: str) -> None:
    ids = ids_of(LOADED[key][0], FAMILIES[key].answer)
    for end in range(0, len(ids), 3):
        whole = parse(key, ids[:end], reason="length")
        assert parse(key, ids[:end], list(range(1, end)), reason="length") == whole
        assert whole.raw == LOADED[key][0].decode(ids[:end], skip_special_tokens=False)
        if key not in ("hermes-text", "llama", "llama-tag"):  # where half a marker is text
            assert FAMILIES[key].content.startswith(whole.content.rstrip("\n")) or whole.ill_formed


@pytest.mark.parametrize("key", ["hermes", "xml", "minimax"])
@pytest.mark.parametrize("answer", ["Hi.", "Hi.\n", "\nHi.", " ", "\n\n", "", "a\n\n\nb", "日本\u2028語 😀"])
def test_plain_content_is_kept_exactly(key: str, answer: str) -> None:
    end = FAMILIES[key].special[-1]
    message = parse_text(key, answer + end)
    assert (message.content, message.reasoning, message.tool_calls) == (answer, "", [])
    assert not message.ill_formed
    after = parse_text(key, f"<think>\nr\n</think>\n\n{answer}{end}")
    assert (after.reasoning, after.content) == ("r", answer)


@pytest.mark.parametrize("key", ["hermes", "hermes-text"])
def test_text_around_calls(key: str) -> None:
    call = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    message = parse_text(key, f"one\n{call}\ntwo\n{call}\n\nthree\n<|im_end|>")
    assert message.content == "one\ntwo\n\nthree\n"
    assert len(message.tool_calls) == 2
    assert parse_text(key, f"\n\n{call}\n{call}\n").content == ""
    assert parse_text(key, f"one\n\n{call}").content == "one\n"  # one newline is the format's
    assert parse_text(key, f"{call}\nafter").content == "after"


def test_thinking_opened_by_the_prompt() -> None:
    for key in ("hermes", "hermes-text"):
        message = parse_text(key, "r\n</think>\n\nx<|im_end|>", prompt="<|im_start|>assistant\n<think>\n")
        assert (message.reasoning, message.content, message.ill_formed) == ("r", "x", False)
        # Cut off: it is all reasoning, and nothing is an answer.
        message = parse_text(key, "First,", prompt="<think>\n", reason="length")
        assert (message.reasoning, message.content, message.ill_formed) == ("First,", "", True)
        # Opened and closed by the prompt.
        message = parse_text(key, "x<|im_end|>", prompt="<think>\n\n</think>\n\n")
        assert (message.reasoning, message.content) == ("", "x")
    # The newline after the closing marker is the format's, whoever wrote the marker.
    assert parse_text("glm", "\nx<|user|>", prompt="<|assistant|>\n<think></think>").content == "x"
    message = parse_text("harmony", "hm<|end|><|start|>assistant<|channel|>final<|message|>x<|return|>", prompt=(
        "<|start|>user<|message|>u<|end|><|start|>assistant<|channel|>analysis<|message|>"))  # fmt: skip
    assert (message.reasoning, message.content, message.ill_formed) == ("hm", "x", False)


def test_draft_call_in_reasoning_is_reasoning() -> None:
    draft = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    message = parse_text("hermes", f"<think>\nmaybe {draft}?\n</think>\n\nno<|im_end|>")
    assert message.reasoning == f"maybe {draft}?"
    assert (message.content, message.tool_calls, message.ill_formed) == ("no", [], True)


def test_reasoning_between_calls_is_kept() -> None:
    call = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    message = parse_text("hermes", f"<think>\na\n</think>\n\n{call}\n<think>\nb\n</think>\n\n{call}<|im_end|>")
    assert (message.reasoning, message.content, len(message.tool_calls)) == ("a\nb", "", 2)


# -- types ---------------------------------------------------------------------------------------------------


def xml_call(**values: str) -> str:
    inside = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function=search>\n{inside}</function>\n</tool_call><|im_end|>"


@pytest.mark.parametrize(
    ("key", "written", "means"),
    [
        ("q", "5", '"5"'),
        ("q", "true", '"true"'),
        ("q", " a\n\nb ", '" a\\n\\nb "'),
        ("q", "</parameter> <tool_call", '"</parameter> <tool_call"'),
        ("n", "5", "5"),
        ("n", "five", '"five"'),
        ("x", "1e3", "1e3"),
        ("x", "null", "null"),
        ("x", "None", "null"),
        ("x", "NaN", '"NaN"'),
        ("on", "False", "false"),
        ("tags", '["a",  2]', '["a",  2]'),
        ("where", '{"a": 1}', '{"a": 1}'),
        ("unheard", "5", '"5"'),
    ],
)
def test_argument_types_come_from_the_schema(key: str, written: str, means: str) -> None:
    message = parse_text("xml", xml_call(**{key: written}))
    assert message.tool_calls == [ParsedCall("search", f'{{"{key}": {means}}}')]


def test_a_schema_of_another_shape_is_no_error() -> None:
    for parameters in (None, {}, {"properties": None}, {"properties": {"q": True}}, {"properties": {"q": {"$ref": 3}}}):
        tools = [{"type": "function", "function": {"name": "search", "parameters": parameters}}]
        assert parse_text("xml", xml_call(q="1"), tools=tools).tool_calls == [ParsedCall("search", '{"q": "1"}')]


# -- broken answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["hermes", "hermes-text"])
@pytest.mark.parametrize(
    ("inside", "name", "arguments", "status"),
    [
        ('{"name": "search", "arguments": {"a":}}', "search", '{"a":}', "invalid_json"),
        ('{"name": "search", "arguments": {"a": 1}', "search", '{"a": 1}', "invalid_json"),
        ('{"name": "search", "arguments": {"a": 1}}}', "search", '{"a": 1}', "invalid_json"),
        ('{"name": "search", "arguments": {"a": NaN}}', "search", '{"a": NaN}', "invalid_json"),
        ('{"name": "search", "arguments": "{\\"a\\": 1}"}', "search", '"{\\"a\\": 1}"', "invalid_json"),
        ('{"name": "search" "arguments": {}}', "search", '{"name": "search" "arguments": {}}', "invalid_json"),
        ('{"arguments": {"a": 1e3}, "name": "search"}', "search", '{"a": 1e3}', "ok"),
        ('{"name": "search", "parameters": {}}', "search", "{}", "ok"),
        ('{"name": "search"}', "search", "{}", "ok"),
        ('{"name": "nobody", "arguments": {}}', "nobody", "{}", "unknown_tool"),
        ('{"name": "s\\u0065arch", "arguments": {"a": "\\ud800"}}', "search", '{"a": "\\ud800"}', "ok"),
    ],
)
def test_json_calls(key: str, inside: str, name: str, arguments: str, status: str) -> None:
    message = parse_text(key, f"<tool_call>\n{inside}\n</tool_call><|im_end|>")
    assert [(c.name, c.arguments, c.status) for c in message.tool_calls] == [(name, arguments, status)]
    assert message.content == ""
    assert message.ill_formed == (status == "invalid_json")


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("hermes", "<tool_call>{}</tool_call>"),
        ("hermes", 'x\n<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "sea'),
        ("hermes", "<tool_call>"),
        ("hermes", "a</tool_call>b"),
        ("hermes-text", "<tool_call>{}</tool_call>"),
        ("xml", "<tool_call>\nhello\n</tool_call>"),
        ("glm", "<tool_call>\n</tool_call>"),
        ("kimi", "<|tool_call_begin|>functions.search:0<|tool_call_end|>"),
        ("gemma4", "<|tool_call>what<tool_call|>"),
    ],
)
def test_a_call_without_a_name_stays_text(key: str, answer: str) -> None:
    message = parse_text(key, answer)
    assert (message.content, message.tool_calls, message.ill_formed) == (answer, [], True)


@pytest.mark.parametrize("key", FAMILIES)
def test_cut_in_a_call(key: str) -> None:
    f = FAMILIES[key]
    cut = f.answer.index("日本")
    message = parse_text(key, f.answer[:cut], reason="length")
    assert [(c.name, c.status) for c in message.tool_calls] == [("search", "unclosed")]
    assert message.tool_calls[0].arguments in f.answer[:cut]
    assert 'a "b" {c}' in message.tool_calls[0].arguments.replace('\\"', '"')
    assert (message.content, message.ill_formed) == (f.content, True)


@pytest.mark.parametrize("key", [k for k in FAMILIES if k not in ("xml", "glm", "minimax", "dsml", "gemma4")])
def test_malformed_json_keeps_the_raw_text(key: str) -> None:
    broken = FAMILIES[key].answer.replace('"n": 3}', '"n" 3}')
    message = parse_text(key, broken)
    assert [c.status for c in message.tool_calls] == ["invalid_json", "ok"]
    assert message.tool_calls[0].arguments.startswith(Q1.replace('"n": 3', '"n" 3'))
    assert message.ill_formed


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("xml", "</parameter>\n<parameter=n>", "\n<parameter=n>"),
        ("glm", "</arg_key>\n<arg_value>3", "</arg_key>3"),
        ("minimax", "</parameter>\n</invoke>\n<invoke", "\n</invoke>\n<invoke"),
        ("dsml", "3</｜DSML｜parameter>", "3"),
        ("gemma4", "{n:3,", "{n 3,"),
    ],
)
def test_malformed_markup_keeps_the_raw_text(key: str, good: str, bad: str) -> None:
    assert good in FAMILIES[key].answer
    message = parse_text(key, FAMILIES[key].answer.replace(good, bad, 1))
    call = message.tool_calls[0]
    assert (call.name, message.ill_formed) == ("search", True) or key == "xml"
    if key != "xml":  # a parameter that never ends swallows the next one: still well-formed
        assert call.status == "invalid_json"
        assert call.arguments in message.raw


def test_a_missing_end_marker() -> None:
    opened = '<tool_call>\n{"name": "search", "arguments": {}}\n'
    message = parse_text("hermes", f"{opened}{opened}</tool_call><|im_end|>")
    assert [c.status for c in message.tool_calls] == ["unclosed", "ok"]
    message = parse_text("hermes", f"{opened}<|im_end|>")
    assert [(c.status, c.arguments) for c in message.tool_calls] == [("unclosed", "{}")]


def test_a_marker_spelled_in_ordinary_tokens_is_text() -> None:
    tokenizer, _ = LOADED["hermes"]
    for text in ("<tool_call>", "</think>", "<|im_end|>", '<tool_call>{"name": "search", "arguments": {}}</tool_call>'):
        ids = [i for char in text for i in ids_of(tokenizer, char)]
        message = parse("hermes", ids)
        assert (message.content, message.tool_calls, message.ill_formed) == (text, [], False)
        inside = ids_of(tokenizer, '<tool_call>\n{"name": "search", "arguments": {"q": "')
        message = parse("hermes", [*inside, *ids, *ids_of(tokenizer, '"}}\n</tool_call><|im_end|>')])
        assert message.tool_calls[0].arguments == f'{{"q": "{text}"}}'


def test_stop_tokens_at_the_end_only() -> None:
    message = parse_text("hermes", "a<|im_end|>b<|im_end|><|im_end|>")
    assert (message.content, message.ill_formed) == ("a<|im_end|>b", True)
    message = parse_text("hermes", "<|im_end|>")
    assert message == ParsedMessage(raw="<|im_end|>")
    assert parse("hermes", []) == ParsedMessage()


@pytest.mark.parametrize("key", FAMILIES)
@pytest.mark.parametrize("length", [495, 505, 512, 520, 2000])
def test_long_names(key: str, length: int) -> None:
    """A name is found while it arrives or at the end; the message is the same."""
    name = "s" * length
    ids = ids_of(LOADED[key][0], FAMILIES[key].answer.replace("search", name))
    message = parse(key, ids)
    assert parse(key, ids, list(range(0, len(ids), 5))) == message
    if key not in ("kimi", "mistral", "deepseek", "deepseek-v3"):  # whose names end with their header
        assert message.tool_calls[0].name == name


def test_half_characters() -> None:
    tokenizer, _ = LOADED["hermes"]
    smile = ids_of(tokenizer, "😀")
    for end in range(1, 4):
        ids = [*ids_of(tokenizer, "a"), *smile[:end]]
        for cuts in (None, list(range(len(ids)))):
            message = parse("hermes", ids, cuts)
            assert message.content == message.raw == tokenizer.decode(ids, skip_special_tokens=False)
            assert message.content.startswith("a\ufffd")
        assert parse("hermes", [*ids, *ids_of(tokenizer, "<|im_end|>")]).content == message.content


def test_without_tools_names_are_not_checked() -> None:
    message = parse_text("hermes", '<tool_call>{"name": "any", "arguments": {}}</tool_call>', tools=[])
    assert [c.status for c in message.tool_calls] == ["ok"]


@pytest.mark.parametrize(
    "answer",
    [
        '{"answer": 5}',
        '{"name": "Ada", "age": 36}',
        '{"name": "Ada", "age',
        "{",
        '{"name',
        'Use {"name": "search", "parameters": {}}',
        "{not json}",
        '{"name": "search", "parameters": 5',
    ],
)
def test_an_answer_in_json_is_no_llama_call(answer: str) -> None:
    message = parse_text("llama", answer + "<|eot_id|>")
    assert (message.content, message.tool_calls, message.ill_formed) == (answer, [], False)
    assert parse_text("llama", '{"name": "f", "parameters": {}}', tools=[]).tool_calls == []


def test_llama_code_after_the_tag_is_text() -> None:
    message = parse_text("llama", "<|python_tag|>print(1)<|eom_id|>")
    assert (message.content, message.tool_calls, message.ill_formed) == ("print(1)", [], True)


def test_harmony_headers() -> None:
    message = parse_text("harmony", "<|channel|>final<|message|>x<|return|>")
    assert (message.content, message.ill_formed) == ("x", False)
    message = parse_text("harmony", "no header at all")
    assert (message.content, message.ill_formed) == ("no header at all", True)
    message = parse_text("harmony", "<|channel|>ana", reason="length")
    assert (message.content, message.reasoning, message.ill_formed) == ("", "", True)
    message = parse_text("harmony", "<|channel|>analysis<|message|>hm<|channel|>final<|message|>x<|return|>")
    assert (message.reasoning, message.content) == ("hm", "x")
    message = parse_text("harmony", "<|channel|>analysis to=python code<|message|>print(1)<|call|>")
    assert message.tool_calls == [ParsedCall("python", "print(1)", "invalid_json")]


def test_unknown_formats_are_plain_text_and_say_so() -> None:
    tokenizer = byte_tokenizer(["<|end|>"], ["<think>", "</think>"])
    factory = parser_for(tokenizer, "{{ messages }}")
    assert factory.name == "text"
    parser = factory(prompt_ids=[], tools=TOOLS)
    parser.feed(ids_of(tokenizer, "<think>\nr\n</think>\n\n<tool_call>{}</tool_call><|end|>"))
    message = parser.finish("stop")[1]
    assert (message.reasoning, message.content) == ("r", "<tool_call>{}</tool_call>")


@pytest.mark.parametrize(
    ("opening", "before", "between", "closing", "special"),
    [
        ("<|tool_call|>", "[", ", ", "]<|/tool_call|>", ["<|tool_call|>", "<|/tool_call|>"]),
        ("<function_calls>\n", "", "\n", "\n</function_calls>", []),
        ("<call>", "", "</call><call>", "</call>", ["<call>", "</call>"]),
        ("TOOL: ", "", "\nTOOL: ", "", []),
        ("", "", "; ", "", []),
    ],
)
@pytest.mark.parametrize("name", ["name", "tool_name"])
def test_a_json_format_in_no_list_is_learned_from_the_template(
    opening: str, before: str, between: str, closing: str, special: list[str], name: str
) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}"
        f"{{% if loop.first %}}{{{{ {opening + before!r} }}}}{{% else %}}{{{{ {between!r} }}}}{{% endif %}}"
        f'{{"{name}": "{{{{ c.function.name }}}}", "parameters": {{{{ c.function.arguments | tojson }}}}}}'
        f"{{% if loop.last %}}{{{{ {closing!r} }}}}{{% endif %}}"
        "{% endfor %}{{ eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = byte_tokenizer(["<|im_start|>", "<|im_end|>"], special)
    factory = parser_for(tokenizer, template)
    assert factory.name == "json"
    calls = between.join(f'{{"{name}": "{n}", "parameters": {a}}}' for n, a in (("search", Q1), ("get_time", Q2)))
    content = "" if not opening else "See {this}."
    ids = ids_of(tokenizer, f"{content}{opening}{before}{calls}{closing}<|im_end|>")
    for width in (1, 7, len(ids)):
        parser = factory(prompt_ids=[], tools=TOOLS)
        for start in range(0, len(ids), width):
            parser.feed(ids[start : start + width])
        message = parser.finish("stop")[1]
        assert [(c.name, c.arguments, c.status) for c in message.tool_calls] == [
            ("search", Q1, "ok"),
            ("get_time", Q2, "ok"),
        ]
        assert (message.content, message.ill_formed) == (content, False)


# -- other vocabularies -----------------------------------------------------------------------------------


def test_sentencepiece_vocabularies() -> None:
    """The space that SentencePiece puts before the first word is no content; bytes make characters."""
    vocab = {"<unk>": 0, "▁Hello": 1, "▁world": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    factory = parser_for(tokenizer, "")
    ids = [1, 2, *(3 + b for b in "é".encode()), 2]
    message = ParsedMessage(content="Hello worldé world", raw="Hello worldé world")
    assert tokenizer.decode(ids) == message.content
    parser = factory(prompt_ids=[], tools=[])
    said = "".join(delta.text for token in ids for delta in parser.feed([token]))  # type: ignore[union-attr]
    assert said == message.content
    assert parser.finish("stop")[1] == message
    tokenizer.decoder = decoders.Sequence(steps)  # Gemma: the space is the text's own
    parser = parser_for(tokenizer, "")(prompt_ids=[], tools=[])
    parser.feed(ids)
    assert parser.finish("stop")[1].content == tokenizer.decode(ids) == " Hello worldé world"


def test_a_decoder_of_another_kind() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "play": 1, "##ing": 2, "now": 3}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    parser = parser_for(tokenizer, "")(prompt_ids=[], tools=[])
    parser.feed([1, 2, 3])
    assert parser.finish("stop")[1].content.strip() == tokenizer.decode([1, 2, 3]) == "playing now"


# -- any chunking, any garbage -----------------------------------------------------------------------------


@st.composite
def hostile(draw: st.DrawFn) -> tuple[str, list[int], list[int], str]:
    """Ids of markers, their halves, pieces of well-formed answers, and any bytes; and where to cut them."""
    key = draw(st.sampled_from(sorted(FAMILIES)))
    f, tokenizer = FAMILIES[key], LOADED[key][0]
    pieces = st.one_of(
        st.sampled_from([*f.special, *f.added, "\n", "\n\n", " ", "{", "}", '"', "<", "x", ",", "[", "]", ";", "```"]),
        st.tuples(st.integers(0, len(f.answer)), st.integers(0, 30)).map(lambda p: f.answer[p[0] : p[0] + p[1]]),
        st.text(max_size=4),
    )
    parts = draw(st.lists(st.one_of(pieces, st.integers(0, 255)), max_size=14))
    ids = [i for part in parts for i in ([part] if isinstance(part, int) else ids_of(tokenizer, part))]
    cuts = draw(st.lists(st.integers(0, len(ids)), max_size=8))
    return key, ids, cuts, draw(st.sampled_from(["stop", "length"]))


@settings(max_examples=400, deadline=None)
@given(hostile())
def test_any_chunking_gives_the_same_message(case: tuple[str, list[int], list[int], str]) -> None:
    key, ids, cuts, reason = case
    whole = parse(key, ids, reason=reason)
    assert parse(key, ids, cuts, reason=reason) == whole
    assert parse(key, ids, list(range(len(ids))), reason=reason) == whole
    assert whole.raw == LOADED[key][0].decode(ids, skip_special_tokens=False)
    for call in whole.tool_calls:
        assert call.name
        if call.status in ("ok", "unknown_tool"):
            assert isinstance(json.loads(call.arguments), dict)
    assert whole.ill_formed >= any(c.status in ("invalid_json", "unclosed") for c in whole.tool_calls)

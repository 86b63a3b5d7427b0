"""The drift matrix: what a model samples and what a client sends back are never quite what the template would write.

A case is a conversation over HTTP: the engine says the case's tokens, the client sends the history back in its own
way. ``play`` holds the conversation and asserts what must be true of its prompts and rows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import jinja2

from agentcore_rl_toolkit.rollout_gateway import TraceRecord
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records
from gateway.support import client_of, serving

from .families import ARGUMENTS, LOOKUP, Family, Message, Said

REASONS = {"reasoning_dropped", "calls_dropped", "content_moved", "closer_rewritten"}
"""Why a row may fork in ``history="template"``."""
ALLOWED = {"gpt-oss": {"closer_rewritten"}}
"""Why a row may fork in ``history="preserve"``: ``<|return|>`` is sampled, history says ``<|end|>``."""
MANGLED = {"query": "Zürich weather", "limit": 1000.0, "exact": True}


@dataclass
class Answer:
    """One answer of the engine: its tokens, what the client must get (None: not judged), the request's limit."""

    ids: list[int]
    said: Said | None = None
    max_tokens: int | None = None


Answers = Callable[[Family], list[Answer]]
Replay = Callable[[Message, int], None]


@dataclass(frozen=True)
class Case:
    """``needs``: what a family must have for it (``calls``, ``reasons``, ``parallel``, ``json``). ``replay`` changes an
    assistant message, the ``n``-th, before the client sends it back. ``say``: put into user and tool messages."""

    name: str
    about: str
    answers: Answers
    replay: Replay = lambda message, n: None
    needs: frozenset[str] = frozenset()
    say: str = ""

    def applies(self, family: Family) -> bool:
        return all(getattr(family, need) for need in self.needs)


# -- what the engine says ------------------------------------------------------------------------------------


def said(family: Family, *, reasoning: str | None = None) -> list[Said]:
    """Two rounds of call and final answer; plain answers where the model calls no tools."""
    if reasoning is None and family.reasons:
        reasoning = "Hm, let me think."
    text = [Said(f"Fine {n}.", reasoning=reasoning) for n in range(2)]
    if not family.calls:
        return text
    calls = Said(calls=(ARGUMENTS,), reasoning=reasoning)
    return [calls, text[0], calls, text[1]]


def emissions(family: Family, answers: Sequence[Said]) -> list[tuple[str, Said]]:
    """The answers of one conversation as text. Where a template drops something of an answer, so does the text made
    from it: then the client can't get it either."""
    texts = []
    for before, answer in zip([None, *answers], answers, strict=False):
        text = family.emission(answer, after_call=bool(before and before.calls))
        if answer.reasoning and answer.reasoning not in text:
            answer = replace(answer, reasoning=None)
        if answer.text not in text:
            answer = replace(answer, text="")
        texts.append((text, answer))
    return texts


def plain(family: Family, answers: Sequence[Said] | None = None) -> list[Answer]:
    texts = emissions(family, said(family) if answers is None else answers)
    return [Answer(family.encode(text), answer) for text, answer in texts]


def rewritten(change: Callable[[Family, str], str], *, judged: bool = True) -> Answers:
    """The usual answers after a change to their text."""

    def answers(family: Family) -> list[Answer]:
        texts = emissions(family, said(family))
        return [Answer(family.encode(change(family, text)), s if judged else None) for text, s in texts]

    return answers


def _split(family: Family) -> list[Answer]:
    rng = random.Random(7)
    return [Answer(family.split(a.ids, rng), a.said) for a in plain(family)]


def _spaced(family: Family, text: str) -> str:
    compact = json.dumps(ARGUMENTS, ensure_ascii=False, separators=(",", ":"))
    wide = json.dumps(ARGUMENTS, ensure_ascii=False, indent=2)
    usual = json.dumps(ARGUMENTS, ensure_ascii=False)
    if usual in text:
        return text.replace(usual, compact if len(text) % 2 else wide)
    return text.replace(">\n<", ">\n\n<").replace("</function>\n", "</function>")


def _reordered(family: Family) -> list[Answer]:
    backwards = dict(reversed(ARGUMENTS.items()))
    return plain(family, [Said(s.text, tuple(backwards for _ in s.calls), s.reasoning) for s in said(family)])


def _numbers(family: Family, text: str) -> str:
    if family.json:
        return text.replace("1000", "1e3").replace("Zürich", "Z\\u00fcrich")
    return text.replace("1000", "1000.0").replace("True", "true")


def _empty_reasoning(family: Family) -> list[Answer]:
    return plain(family, said(family, reasoning=""))


def _parallel(family: Family) -> list[Answer]:
    reasoning = "Two things." if family.reasons else None
    both = Said(calls=(ARGUMENTS, {"query": "second", "limit": 2, "exact": False}), reasoning=reasoning)
    return plain(family, [both, Said("Both.", reasoning=reasoning), both, Said("Again.", reasoning=reasoning)])


def _mixed(family: Family) -> list[Answer]:
    reasoning = "Hm." if family.reasons else None
    mixed = Said("Let me see.", (ARGUMENTS,), reasoning)
    return plain(family, [mixed, Said("Fine.", reasoning=reasoning)] * 2)


def _trailing(family: Family, text: str) -> str:
    return text.replace("Fine 0.", "Fine 0. \n\n").replace("Fine 1.", "Fine 1.\n")


def _leading(family: Family, text: str) -> str:
    return text.replace("Fine 0.", "\n\n Fine 0.").replace("Fine 1.", "\nFine 1.")


def _before_call(family: Family) -> list[Answer]:
    answers = []
    for answer in _mixed(family):
        text = family.decode(answer.ids)
        if answer.said and answer.said.calls:
            text = text.replace("Let me see.", "Let me see. \n\n ") if "Let me see." in text else " \n\n" + text
        answers.append(Answer(family.encode(text), answer.said))
    return answers


def _spelled(family: Family) -> list[Answer]:
    """The model talks about its own control tokens, in ordinary tokens."""
    answers = []
    for n in range(2):
        text = f"Write {spelled(family)} here."
        before, _, after = family.emission(Said("Fine.", reasoning="Hm." if family.reasons else None)).partition(
            "Fine."
        )
        ids = family.encode(before) + family.spelled(text) + family.encode(after)
        answers.append(Answer(ids, Said(text, reasoning="Hm." if family.reasons else None) if n else None))
    return answers


def spelled(family: Family) -> str:
    """Control tokens of the family as somebody may spell them in a text."""
    stop = family.encode(family.emission(Said("Fine.")))[-1]
    names = [t for t in family.added if t.strip("<>|[]") in ("tool_call", "im_start", "User", "INST", "start", "/INST")]
    return " ".join([family.tokenizer.id_to_token(stop), *names[:3], "."])


def _cut(where: str) -> Answers:
    """The limit ends an answer in its text, its call or its reasoning; the conversation goes on."""

    def answers(family: Family) -> list[Answer]:
        reasoning = "Hm, let me think of this for a while." if family.reasons else None
        long = {
            "text": Said("This is a rather long answer.", reasoning=reasoning),
            "call": Said(calls=(ARGUMENTS,), reasoning=reasoning),
            "reasoning": Said("Fine.", reasoning=reasoning),
        }[where]
        mark = {"text": "rather", "call": "weather", "reasoning": "think of"}[where]
        ids = family.encode(family.emission(long))
        limit = next(n for n in range(len(ids)) if mark in family.decode(ids[:n]))
        judged = {
            "text": None,
            "call": None,
            "reasoning": Said(reasoning=family.decode(ids[:limit]).partition("Hm")[1] + ", let me think of"),
        }[where]
        fine = [Said(f"Fine {n}.", reasoning=said(family)[0].reasoning) for n in range(2)]
        rest = [plain(family, [long, answer])[1] if where == "call" else plain(family, [answer])[0] for answer in fine]
        return [Answer(ids, judged, limit), rest[0], Answer(ids, judged, limit), rest[1]]

    return answers


def _malformed(family: Family, text: str) -> str:
    """A call that is none: broken JSON, or a closing mark left out."""
    if family.json:
        return text.replace('"limit": 1000', '"limit": 10, 00')
    for closer in ("</parameter>", "</arg_value>", "</｜DSML｜parameter>"):
        if closer in text:
            return text.replace(closer, "", 1)
    return text


def _half_a_character(family: Family) -> list[Answer]:
    """The answer ends in the middle of a character."""
    answers = []
    for answer in plain(family):
        if answer.said and not answer.said.calls:
            before, _, after = family.decode(answer.ids).partition(answer.said.text)
            for letter in "🦜𒀀𓀀":
                ids = family.encode(letter)
                if len(ids) > 1:
                    break
            answer = Answer(family.encode(before + answer.said.text) + ids[:-1] + family.encode(after))
        answers.append(answer)
    return answers


# -- how the client sends it back ------------------------------------------------------------------------------


def _arguments(message: Message, change: Callable[[Any], Any]) -> None:
    for each in message.get("tool_calls") or ():
        each["function"]["arguments"] = change(each["function"]["arguments"])


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _like_javascript(arguments: str) -> str:
    value = _parsed(arguments)
    if not isinstance(value, dict):
        return arguments
    value = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in sorted(value.items())}
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def again(message: Message, n: int) -> None:
    """As an SDK does it: arguments parsed and printed again, fields of its own, other ids."""
    _arguments(message, _like_javascript)
    message.update(refusal=None, audio=None)


def _as_objects(message: Message, n: int) -> None:
    _arguments(message, _parsed)


def _without_reasoning(message: Message, n: int) -> None:
    message.pop("reasoning_content", None)


def _other_name(message: Message, n: int) -> None:
    if "reasoning_content" in message:
        message["reasoning"] = message.pop("reasoning_content")


def _no_content(message: Message, n: int) -> None:
    if message.get("tool_calls"):
        message["content"] = None
        if n:
            del message["content"]


def _empty_calls(message: Message, n: int) -> None:
    if not message.get("tool_calls"):
        message["tool_calls"] = [] if n % 2 else None


def _stripped(message: Message, n: int) -> None:
    if n % 2 and message.get("content"):
        message["content"] = message["content"].strip()


_CALLS, _REASONS = frozenset({"calls"}), frozenset({"reasons"})

CASES: list[Case] = [
    Case("tool", "a canonical call and its result", lambda f: plain(f)[:2], again, _CALLS),
    Case("user", "a canonical text answer and a new user message", lambda f: plain(f, said(f)[1::2]), again),
    Case("b", "tokens split where the tokenizer would merge", _split, again),
    Case("ws", "compact or indented JSON, other spacing of XML", rewritten(_spaced), again, _CALLS),
    Case("ord", "another key order", _reordered, again, _CALLS),
    Case("num", "numbers as `1e3`, letters as `\\u00fc`", rewritten(_numbers), again, _CALLS),
    Case("raw", "arguments sent back as the very string", plain, needs=_CALLS),
    Case("obj", "arguments sent back as an object", plain, _as_objects, _CALLS),
    Case("d2", "reasoning not sent back", plain, _without_reasoning, _REASONS),
    Case("d3", "reasoning sent back, also after a new user message", plain, needs=_REASONS),
    Case("d4", "empty reasoning", _empty_reasoning, needs=_REASONS),
    Case("d5", "reasoning sent back as `reasoning`", plain, _other_name, _REASONS),
    Case("par", "two calls in one answer", _parallel, again, frozenset({"parallel"})),
    Case("mix", "text beside a call", _mixed, again, _CALLS),
    Case("nul", "content null or absent", plain, _no_content, _CALLS),
    Case("[]", "`tool_calls` empty or null", plain, _empty_calls),
    Case("g1", "white space behind the text, kept or stripped by the client", rewritten(_trailing), _stripped),
    Case("g2", "white space before the text", rewritten(_leading), _stripped),
    Case("g3", "white space before a call", _before_call, _stripped, _CALLS),
    Case("h", "control tokens spelled as text, by the model and to it", _spelled, say="{spelled}"),
    Case("tr", "cut off in the text", _cut("text")),
    Case("trc", "cut off in a call", _cut("call"), needs=_CALLS),
    Case("trr", "cut off in the reasoning", _cut("reasoning"), needs=_REASONS),
    Case("bad", "a malformed call", rewritten(_malformed, judged=False), needs=_CALLS),
    Case("u8", "half a character at the end", _half_a_character),
]
CASE = {case.name: case for case in CASES}


# -- the conversation ----------------------------------------------------------------------------------------


@dataclass
class Outcome:
    rows: list[TraceRecord]
    prompts: list[list[int]]
    outputs: list[list[int]]

    @property
    def forks(self) -> list[str | None]:
        return [row.metadata["fork"] for row in self.rows[1:]]


async def play(family: Family, case: Case, history: str, *, stream: bool = False) -> Outcome:
    """Hold the conversation and assert that no token is wrong and that rows fork only where they may."""
    answers = case.answers(family)
    backend = ScriptedBackend([answer.ids for answer in answers])
    asked: list[list[Message]] = []
    async with serving(backend, rendered_by=family.renderer, history=history) as gateway, client_of(gateway) as client:
        messages: list[Message] = [{"role": "user", "content": _say(family, case, "Question")}]
        for n, answer in enumerate(answers):
            limit = {"max_tokens": answer.max_tokens} if answer.max_tokens else {}
            tools = {"tools": [LOOKUP]} if family.calls else {}
            asked.append(deepcopy(messages))
            got = await client.ask(messages, stream=stream, **tools, **limit)
            if answer.said:
                _assert_understood(got, answer.said)
            sent = deepcopy(got)
            case.replay(sent, n)
            messages = [*messages, sent, *_next(got, _say(family, case, f"part{n}"))]
        rows = await gateway.finish_session(client.session.session_id)
    outputs = [a.ids[: a.max_tokens] for a in answers]
    outcome = Outcome(rows, [prompt for prompt, _ in backend.calls], outputs)
    assert check_records(rows) == sum(map(len, outputs)), "a sampled token is lost"
    for n, (prompt, known) in enumerate(_pairs(outcome), 1):
        if prompt[: len(known)] == known:
            _assert_tail(family, case, prompt[len(known) :], asked[n])
        elif history == "template":
            _assert_rendered(family, prompt, asked[n])
    allowed = REASONS if history == "template" else ALLOWED.get(family.name, set())
    broken = sum(prompt[: len(known)] != known for prompt, known in _pairs(outcome))
    assert len(rows) == 1 + broken, f"{len(rows)} rows, but {broken} prompts do not begin with what was held"
    assert set(outcome.forks) <= allowed, f"rows forked: {outcome.forks}"
    assert rows[0].metadata["fork"] is None
    return outcome


def _say(family: Family, case: Case, text: str) -> str:
    return f"{text} {case.say.format(spelled=spelled(family))}".strip() if case.say else text


def _next(got: Message, text: str) -> list[Message]:
    if not got.get("tool_calls"):
        return [{"role": "user", "content": text}]
    return [
        {"role": "tool", "tool_call_id": c["id"], "content": f"{text} of {i}"} for i, c in enumerate(got["tool_calls"])
    ]


def _pairs(outcome: Outcome) -> Iterator[tuple[list[int], list[int]]]:
    """Each later prompt, and the tokens held before it."""
    for n in range(1, len(outcome.prompts)):
        yield outcome.prompts[n], outcome.prompts[n - 1] + outcome.outputs[n - 1]


def _assert_understood(got: Message, said: Said) -> None:
    assert (got.get("content") or "").strip() == said.text.strip()
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in got.get("tool_calls") or ()]
    assert calls == [("lookup", arguments) for arguments in said.calls]
    assert (got.get("reasoning_content") or "").strip() == (said.reasoning or "").strip()


def _assert_tail(family: Family, case: Case, tail: list[int], asked: list[Message]) -> None:
    """What was appended says the new messages, each once, and nothing that was said before."""
    text = family.decode(tail)
    new = [m["content"] for m in asked[max(i for i, m in enumerate(asked) if m["role"] == "assistant") + 1 :]]
    for content in new:
        assert text.count(content) == 1, f"{content!r} is not once in {text!r}"
    for message in asked[: -len(new)]:
        if message["role"] == "user":
            assert message["content"] not in text
    if case.say:
        neutral = family.encode(text.replace(spelled(family), ""))
        control = [i for i in tail if i in family.special]
        assert control == [i for i in neutral if i in family.special], f"a spelled token became a real one: {text!r}"


def _assert_rendered(family: Family, prompt: list[int], asked: list[Message]) -> None:
    """A forked prompt is the template's own rendering of what the client sent."""
    messages = [canonical(family, message) for message in asked]
    if any(token in json.dumps(messages, ensure_ascii=False) for token in family.added if len(token.strip()) > 1):
        return  # transformers takes spelled control tokens for real ones
    if any(isinstance(_parsed(c["function"]["arguments"]), str) for m in messages for c in m.get("tool_calls", ())):
        return  # not JSON: each template has its own way to refuse or to double-encode it
    try:
        expected = family.ids(messages, tools=family.calls)
    except jinja2.TemplateError:
        return  # gpt-oss refuses text beside reasoning and call
    assert prompt == expected, f"{family.decode(prompt)!r}\nis not\n{family.decode(expected)!r}"


def canonical(family: Family, message: Message) -> Message:
    """A client's message as transformers' templates expect it."""
    message = {k: v for k, v in deepcopy(message).items() if k not in ("refusal", "audio")}
    message["content"] = message.get("content") or ""
    if "reasoning" in message:
        message["reasoning_content"] = message.pop("reasoning")
    for each in message.get("tool_calls") or ():
        value = _parsed(each["function"]["arguments"])
        each["function"]["arguments"] = json.dumps(value, ensure_ascii=False) if family.arguments_as_text else value
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    return message

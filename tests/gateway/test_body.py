"""Request bodies are read as ``json.loads`` reads them, whatever was read before, however they are written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agentcore_rl_toolkit.rollout_gateway.body import RawMessages, goes_on, read_body

from .support import client_of, encode, serving
from .test_wire_anthropic import scripted

NAME = "messages"
keys = st.sampled_from([NAME, "a", 'a"messages', "mess\u0061ges ", "model", "", "é", "\\"])
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=8) | st.sampled_from(['"messages": [', '\\"messages":[1]', "]}", ",", "\ud800", "<|im_end|>"])
values = st.recursive(
    scalars | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": values})
spaces = st.sampled_from(["", "", " ", "\n\t", "\r\n  "])


@st.composite
def text_of(draw: st.DrawFn, value: Any) -> str:
    """JSON text of a value: spaces anywhere, characters escaped or not."""
    if isinstance(value, dict):
        return draw(object_of(list(value.items())))
    if isinstance(value, list):
        items = [draw(spaces) + draw(text_of(item)) + draw(spaces) for item in value]
        return f"[{','.join(items) or draw(spaces)}]"
    text = json.dumps(value, ensure_ascii=draw(st.booleans()))
    if isinstance(value, str) and "\\" not in text and draw(st.booleans()):
        text = text.replace("a", "\\u0061")
    return text


@st.composite
def object_of(draw: st.DrawFn, pairs: list[tuple[str, Any]]) -> str:
    members = [
        f"{draw(spaces)}{draw(text_of(key))}{draw(spaces)}:{draw(spaces)}{draw(text_of(value))}{draw(spaces)}"
        for key, value in pairs
    ]
    return f"{{{','.join(members) or draw(spaces)}}}"


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Mostly objects with a list of messages; duplicate and nested keys; then damaged, or encoded otherwise."""
    pairs = draw(st.lists(st.tuples(keys, values), max_size=3))
    for _ in range(draw(st.sampled_from([1, 1, 1, 0, 2]))):
        pairs.insert(draw(st.integers(0, len(pairs))), (NAME, draw(st.lists(messages, max_size=3))))
    text = draw(object_of(pairs))
    match draw(st.sampled_from([*["as it is"] * 5, "list", "trailing", "cut", "comma", "changed"])):
        case "list":
            text = f"[{text}]"
        case "trailing":
            text += draw(st.sampled_from(["x", "]", "}", ' {"messages": [1]}', "\0", " \n"]))
        case "cut":
            text = text[: draw(st.integers(0, len(text)))]
        case "comma":
            text = text.replace("]", ",]", 1)
        case "changed" if text:
            at = draw(st.integers(0, len(text) - 1))
            text = (
                text[:at] + draw(st.sampled_from(['"', "\\", "[", "]", "{", "}", ",", ":", "\n", "1"])) + text[at + 1 :]
            )
    data = text.encode(
        draw(st.sampled_from([*["utf-8"] * 6, "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])), "surrogatepass"
    )
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data)))
        data = (
            data[:at] + draw(st.sampled_from([b"\xff", b"\x80", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\0"])) + data[at:]
        )
    return data


def plain(value: Any) -> Any:
    """The body with its messages parsed."""
    if isinstance(value, dict) and isinstance(value.get(NAME), RawMessages):
        return {**value, NAME: [*value[NAME]]}
    return value


def outcome(read: Any, data: bytes) -> str:
    """What a reader makes of a body, as text that tells 1, 1.0 and True apart."""
    try:
        return repr(plain(read(data)))
    except (ValueError, RecursionError):
        return "not JSON"


def check(data: bytes, earlier: list[RawMessages]) -> None:
    """Read as ``json.loads`` does; what was read joins ``earlier``, as a session keeps it."""
    assert outcome(lambda d: read_body(d, NAME, earlier), data) == outcome(json.loads, data)
    try:
        body = read_body(data, NAME, earlier)
    except (ValueError, RecursionError):
        return
    raw = body.get(NAME) if isinstance(body, dict) else None
    if isinstance(raw, RawMessages):
        expected = json.loads(data)[NAME]
        for start in range(len(expected) + 1):
            assert raw[start:] == expected[start:]
        assert len(raw) == len(expected)
        assert raw[-1] == expected[-1]
        raw.forget()
        assert raw[len(raw) :] == []
        assert [*raw] == expected
        raw.forget()
        earlier.append(raw)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(bodies())
@example(b'{"a\\"messages": [1], "messages": [2]}')
@example(b'{"messages": [{}], "mess\\u0061ges": [1]}')
@example(b'{"x": {"messages": [{}]}}')
@example(b'{"x": "\\"messages\\": [1]", "messages": [{}]}')
@example(b'{"messages": [{},]}')
@example(b'{"messages": [{}]} {}')
@example(b'{"messages": [NaN, 1e999]}')
@example(b'{"x": 18446744073709551616, "messages": [-9223372036854775809, 1]}')
@example(b'{"messages": [{}], "messages": [123456789012345678901234567890]}')
@example('{"x": "'.encode("utf-16-le") + b'"messages":[1]' + '"}'.encode("utf-16-le"))
def test_any_body_is_read_as_the_standard_library_reads_it(data):
    check(data, [])


@st.composite
def histories(draw: st.DrawFn) -> list[bytes]:
    """Bodies of which most begin like an earlier one and then go on, or do anything else."""
    head = draw(st.sampled_from(["{", ' {"model": "m", ', '{"x": {"messages": [1]}, ', '{"messages": 0, ']))
    ends = [
        "}",
        ', "stream": true}',
        ', "messages": [3]}',
        ', "mess\\u0061ges": 4}',
        "",
        "}}",
        ",}",
        ', "tools": [{"messages": [5]}]}',
    ]
    items: list[str] = []
    found = []
    for _ in range(draw(st.integers(2, 6))):
        match draw(st.sampled_from([*["grow"] * 5, "edit", "write anew", "shorten", "again", "head"])):
            case "edit" if items:
                items[draw(st.integers(0, len(items) - 1))] = draw(text_of(draw(messages)))
            case "write anew":
                items = [draw(text_of(json.loads(item))) for item in items]
            case "shorten" if items:
                items = items[: draw(st.integers(0, len(items) - 1))]
            case "again":
                pass
            case "head":
                head = draw(st.sampled_from(["{", '{"messages": [{}], ']))
            case _:
                items = [*items, *(draw(text_of(m)) for m in draw(st.lists(messages, min_size=1, max_size=2)))]
        between = draw(st.sampled_from([",", ", ", " ,\n", ",,", " "])) if draw(st.integers(0, 9)) == 0 else ","
        closer = draw(st.sampled_from(["]", " ]", ",]", "", "}"])) if draw(st.integers(0, 4)) == 0 else "]"
        end = draw(st.sampled_from(ends)) if draw(st.booleans()) else "}"
        found.append(f'{head}"messages":[{between.join(items)}{closer}{end}'.encode("utf-8", "surrogatepass"))
    return found


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(histories())
def test_a_body_after_others_is_read_as_if_it_were_the_first(history):
    earlier: list[RawMessages] = []
    for data in history:
        check(data, earlier)


def test_what_is_known_is_not_parsed_again_and_what_is_new_is():
    first = read_body(b'{"messages": [{"n": 1}, {"n": 2}], "a": 1}', NAME, [])[NAME]
    first.forget()
    second = read_body(b'{"messages": [{"n": 1}, {"n": 2} , {"n": 3} ], "a": 2}', NAME, [first])
    assert second["a"] == 2
    assert second[NAME]._items == [{"n": 3}]
    assert goes_on(second[NAME], first)
    assert not goes_on(first, second[NAME])
    assert not goes_on(first, first)
    other = read_body(b'{"messages": [{"n": 1}, {"n": 4}, {"n": 3}], "a": 2}', NAME, [first])[NAME]
    assert other._items == [{"n": 1}, {"n": 4}, {"n": 3}]
    assert not goes_on(other, first)
    long = b', {"content": "the same words at the end of both"}'
    first = read_body(b'{"messages": [{"n": 1}' + long + b"]}", NAME, [])[NAME]
    edited = read_body(b'{"messages": [{"n": 2}' + long + b", {}]}", NAME, [first])[NAME]
    assert edited[0] == {"n": 2}
    assert not goes_on(edited, first)
    with pytest.raises(ValueError, match="Expecting value"):
        read_body(b'{"messages": [{"n": ]}' + long + b", {}]}", NAME, [first])


@pytest.mark.parametrize("deep", [b"[" * 100_000, b'{"messages": [{"a":' * 100_000, b'{"messages": [' + b"[" * 100_000])
def test_deep_nesting_is_an_error_of_the_same_kind(deep):
    with pytest.raises((ValueError, RecursionError)):
        read_body(deep, NAME, [])


async def test_a_session_reads_growing_edited_and_rewritten_bodies_alike():
    """Three ways to write one conversation are one row, and an edit in the middle of the text is seen."""
    backend = scripted(*(f"{word}<|im_end|>" for word in ("one", "two", "three", "four")))
    async with serving(backend) as gateway, client_of(gateway) as client:
        history: list[dict[str, Any]] = []
        for write in (
            lambda m: json.dumps({"model": "m", "messages": m}),
            lambda m: json.dumps({"model": "m", "messages": m}),
            lambda m: json.dumps({"messages": m, "model": "m"}, indent=1),
            lambda m: json.dumps({"model": "m", "messages": m}).replace("two", "tw\\u006f").replace("one", "ONE"),
        ):
            history.append({"role": "user", "content": f"é {len(history)}"})
            status, data = await client.post(write(history).encode())
            assert status == 200
            history.append(data["choices"][0]["message"])
        rows = await gateway.finish_session(client.session.session_id)
    assert [row.metadata["fork"] for row in rows] == [None, "edited"]
    assert len(rows[0].metadata["turns"]) == 3
    assert encode("ONE")[0] not in backend.calls[2][0]
    assert "ONE" in gateway.renderer.decode(backend.calls[3][0])

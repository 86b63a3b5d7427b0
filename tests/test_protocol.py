"""What agent and trainer agree on, and what is kept out of it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import math
import reprlib
import textwrap
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import numpy as np
import pydantic
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentcore_rl_toolkit._redact import Redactor, find_secrets, is_secret_name
from agentcore_rl_toolkit.errors import ContractError, Outcome
from agentcore_rl_toolkit.protocol import (
    RolloutConfig,
    dumps,
    error_result,
    is_success,
    make_input_id,
    make_session_id,
    result_key,
    result_outcome,
    success_result,
    to_jsonable,
)

CONFIG = RolloutConfig(exp_id="e", input_id="i", s3_bucket="bucket")
KEY = "e/i/s.json"

unicode_text = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | unicode_text,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(unicode_text, children, max_size=4),
    max_leaves=20,
)


def strict_loads(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# -- strict JSON ----------------------------------------------------------------------------------------------


@given(json_values)
def test_json_values_pass_unchanged(value: Any) -> None:
    assert to_jsonable(value) == value
    assert strict_loads(dumps(value)) == json.loads(json.dumps(value))
    dumps(value).encode("utf-8")


@given(json_values)
def test_a_large_value_is_encoded_to_the_same_text(value: Any) -> None:
    large = {"text": "x" * 1_100_000, "value": value, "values": [value, value]}
    assert dumps(large) == json.dumps(large, allow_nan=False, ensure_ascii=False)


@pytest.mark.parametrize(
    "large", [{"messages": [{"content": "some\n text " * 200}] * 30_000}, [0.1 + i for i in range(1_000_000)]]
)
def test_a_large_value_does_not_keep_other_threads_waiting(large: Any) -> None:
    """As one call of ``json.dumps`` does, until its end."""
    start = time.perf_counter()
    text = json.dumps(large, ensure_ascii=False)
    one_call = time.perf_counter() - start
    assert min(_longest_wait(lambda: dumps(large)) for _ in range(3)) < one_call / 2
    assert dumps(large) == text


def _longest_wait(work: Callable[[], object]) -> float:
    """Seconds that another thread had to wait at most while ``work`` ran."""
    done, waits = threading.Event(), [0.0]

    def tick() -> None:
        last = time.perf_counter()
        while not done.wait(0.001):
            now = time.perf_counter()
            waits.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return max(waits)


class Color(enum.Enum):
    RED = "red"


class Model(pydantic.BaseModel):
    x: int
    when: dt.datetime


@dataclasses.dataclass
class Point:
    x: float
    tags: tuple[str, ...]


# Each kind of value beside its JSON form, written down by hand.
CONVERTED: list[tuple[Any, Any]] = [
    (np.float32(0.5), 0.5),
    (np.float64(0.25), 0.25),
    (np.int64(7), 7),
    (np.bool_(True), True),
    (np.str_("s"), "s"),
    (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
    (np.array(5), 5),
    (dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC), "2024-02-29T12:00:00+00:00"),
    (dt.date(2024, 2, 29), "2024-02-29"),
    (Color.RED, "red"),
    (Outcome.TIMED_OUT, "timed_out"),
    (Model(x=1, when=dt.datetime(2024, 1, 2)), {"x": 1, "when": "2024-01-02T00:00:00"}),
    (Point(1.5, ("a", "b")), {"x": 1.5, "tags": ["a", "b"]}),
    ({3}, [3]),
]
convertible = st.sampled_from(CONVERTED)


@given(st.lists(convertible, max_size=5), st.dictionaries(st.text("abc"), convertible, max_size=5))
def test_known_kinds_are_converted_at_any_depth(items: list[Any], named: dict[str, Any]) -> None:
    value = {"items": [pair[0] for pair in items], "named": {name: pair[0] for name, pair in named.items()}}
    expected = {"items": [pair[1] for pair in items], "named": {name: pair[1] for name, pair in named.items()}}
    assert strict_loads(dumps(value)) == expected


REFUSED: list[tuple[Any, str]] = [
    (math.nan, "NaN is not JSON"),
    (-math.inf, "-inf is not JSON"),
    (np.float32("nan"), "NaN is not JSON"),
    (10**5000, "can't be read back"),
    (np.datetime64("2024-01-01", "ns"), "datetime64[ns] is not JSON"),
    (b"raw", "bytes is not JSON"),
    (object(), "object is not JSON"),
    (1j, "complex is not JSON"),
    (np.datetime64("NaT", "s"), "is not JSON"),
    (Point, "type is not JSON"),
    ("\ud800", "not valid Unicode"),
    ({1: 2}, "key 1 is int, JSON keys are strings"),
    ({None: 2}, "key None is NoneType"),
    ({"\ud800": 1}, "not valid Unicode"),
]


@pytest.mark.parametrize(("value", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_everything_else_is_refused_with_its_path(value: Any, reason: str) -> None:
    with pytest.raises(ContractError) as caught:
        dumps({"metrics": {"loss": [0, value]}})
    message = str(caught.value)
    assert message.startswith("metrics.loss[1]")
    assert reason in message
    message.encode("utf-8")


def test_cycles_and_endless_nesting_are_refused() -> None:
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    for value in (cycle, {"deep": deep}):
        with pytest.raises(ContractError, match="nested too deeply, or it contains itself"):
            dumps(value)
        with pytest.raises(ContractError, match="nested too deeply, or it contains itself"):
            success_result(value, CONFIG, KEY)


# -- keys -----------------------------------------------------------------------------------------------------

good_part = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1, max_size=256)


@given(good_part, good_part, good_part)
def test_good_parts_make_a_key_that_can_be_taken_apart(exp: str, inp: str, session: str) -> None:
    assume(all(".." not in part and part != "." for part in (exp, inp, session)))
    assume(len("/".join((exp, inp, session)).encode()) <= 1019)
    key = result_key(exp, inp, session)
    assert key.removesuffix(".json").split("/") == [exp, inp, session]


@settings(deadline=None)
@given(st.sampled_from(["/", "..", "\0", "\n", "\x7f", "\ud800"]), st.text("ab", max_size=3), st.integers(0, 2))
def test_bad_parts_are_refused_by_name(bad: str, around: str, position: int) -> None:
    parts = ["e", "i", "s"]
    parts[position] = around + bad + around
    with pytest.raises(ContractError, match=("exp_id", "input_id", "session_id")[position]):
        result_key(*parts)


@pytest.mark.parametrize("bad", ["", ".", "x" * 257, None, 7, b"x", ["x"]])
def test_parts_that_are_no_names_are_refused(bad: Any) -> None:
    with pytest.raises(ContractError, match="input_id"):
        result_key("e", bad, "s")


def test_a_key_that_s3_would_not_take_is_refused() -> None:
    assert len(result_key("日" * 256, "i" * 200, "s" * 36).encode()) == 1011
    with pytest.raises(ContractError, match="the result's key has 1067 bytes, S3 takes 1024"):
        result_key("日" * 256, "i" * 256, "s" * 36)


# -- the rollout config ------------------------------------------------------------------------------------------


def test_config_keeps_what_it_does_not_know() -> None:
    raw = {"exp_id": "e", "input_id": "i", "s3_bucket": "b", "api_key": "sk-live", "temperature": 0.5}
    config = RolloutConfig.from_payload({"prompt": "hi", "_rollout": raw})
    assert config is not None
    assert (config.api_key, config.base_url, config.extra) == ("sk-live", None, {"temperature": 0.5})
    assert config.result_key("s") == "e/i/s.json"
    assert "sk-live" not in repr(config)


@pytest.mark.parametrize("payload", [{}, {"_rollout": None}, {"_rollout": {}}, {"_rollout": {"base_url": "x"}}])
def test_a_payload_without_an_address_is_a_direct_call(payload: dict[str, Any]) -> None:
    assert RolloutConfig.from_payload(payload) is None


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        ([], "payload"),
        ({"_rollout": []}, "_rollout"),
        ({"_rollout": "x"}, "_rollout"),
        ({"_rollout": {"exp_id": "e", "input_id": "i"}}, "s3_bucket"),
        ({"_rollout": {"exp_id": "e", "input_id": "i", "s3_bucket": "b", "api_key": 1}}, "api_key"),
        ({"_rollout": {"exp_id": "e", "input_id": "i", "s3_bucket": "b", "sampling_params": []}}, "sampling_params"),
    ],
)
def test_a_malformed_config_is_refused_by_field(payload: Any, field: str) -> None:
    with pytest.raises(ContractError, match=field):
        RolloutConfig.from_payload(payload)


# -- results and outcomes -----------------------------------------------------------------------------------------


def test_a_success_keeps_the_agents_fields() -> None:
    returned = {"rewards": [0.0, 1.0], "stop_reason": "max_turns", "result_key": KEY}
    result = success_result(returned, CONFIG, KEY)
    assert result == {
        "status_code": 200,
        "stop_reason": "max_turns",
        "rewards": [0.0, 1.0],
        "input_id": "i",
        "s3_bucket": "bucket",
        "result_key": KEY,
    }
    assert is_success(result)
    assert result_outcome(result) is Outcome.SUCCEEDED


@pytest.mark.parametrize("name", ["input_id", "s3_bucket", "result_key"])
def test_a_field_that_belongs_to_the_address_is_refused(name: str) -> None:
    with pytest.raises(ContractError, match=f"^{name}: "):
        success_result({"rewards": 1.0, name: "elsewhere"}, CONFIG, KEY)


class Header(str):
    """A string with an identity of its own, as some libraries' header and column names are."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def test_keys_that_collide_as_json_are_refused() -> None:
    with pytest.raises(ContractError, match=r"^m: two of its keys"):
        dumps({"m": {Header("x"): 1, "x": 2}})


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        ({}, Outcome.SUCCEEDED),
        ({"status_code": 200, "outcome": "agent_failed"}, Outcome.SUCCEEDED),
        ({"status_code": 500}, Outcome.AGENT_FAILED),
        ({"status_code": 404, "outcome": "succeeded"}, Outcome.AGENT_FAILED),
        ({"status_code": 500, "outcome": "nonsense"}, Outcome.AGENT_FAILED),
        ({"status_code": 500, "outcome": {"x": 1}}, Outcome.AGENT_FAILED),
        (error_result("no", CONFIG, KEY), Outcome.AGENT_FAILED),
        (error_result("no", CONFIG, KEY, outcome=Outcome.REJECTED), Outcome.REJECTED),
        (error_result("no", CONFIG, KEY, outcome=Outcome.RUNTIME_FAILED), Outcome.RUNTIME_FAILED),
    ],
)
def test_an_outcome_is_read_from_the_result(result: dict[str, Any], outcome: Outcome) -> None:
    assert result_outcome(result) is outcome


def test_identities_are_stable_and_sorted() -> None:
    ids = [make_input_id("run", index, sample) for index in range(12) for sample in range(3)]
    assert ids == sorted(ids)
    assert ids[-1] == "run-00000011-002"
    sessions = [make_session_id("run", input_id, attempt) for input_id in ids for attempt in range(2)]
    assert len(set(sessions)) == len(sessions)
    assert sessions[0] == make_session_id("run", ids[0])
    assert str(uuid.UUID(sessions[0])) == sessions[0]


# -- secrets -------------------------------------------------------------------------------------------------------


SECRET_NAMES = """
    api_key apiKey x-api-key OPENAI_API_KEY key token accessToken session_token secret clientSecret password
    db_password passwd Authorization proxy-authorization cookie credentials aws_secret_access_key keys key_id auth
"""
OTHER_NAMES = "keyword max_tokens tokenizer tokens author monkeys prompt session_id base_url"


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", OTHER_NAMES.split())
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


secret_values = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=4, max_size=20).filter(
    lambda s: s.strip() == s and s.lower() not in ("empty", "none", "null", "true", "false", "dummy", "bearer", "basic")
)


@given(secret_values, unicode_text, unicode_text)
def test_a_known_secret_never_comes_through(secret: str, before: str, after: str) -> None:
    assume("***" not in secret and secret not in "***")
    redactor = Redactor(find_secrets({"deep": [{"api_key": secret}]}))
    text = f"{before} {secret} {after}"
    fields = redactor.fields({"password": "p", "x": {secret: secret}})
    masked = [redactor.text(text), *redactor.values({"x": [text]})["x"], *fields["x"], *fields["x"].values()]
    assert not [m for m in masked if secret in m.replace("***", " ")]
    assert fields["password"] == "***"
    assert json.dumps(secret)[1:-1] not in redactor.text(json.dumps({"x": text})).replace("***", " ")


def parts(secret: str) -> set[str]:
    return {secret[i : i + 8] for i in range(len(secret) - 7)}


# Without dots: one before an ellipsis is taken for a part of it.
long_secrets = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=".…*"), min_size=16, max_size=90)
long_secrets |= st.text("ab", min_size=16, max_size=90) | st.text("abc'\"\\é%/", min_size=16, max_size=90)
long_secrets = long_secrets.filter(lambda s: s.strip() == s)


@given(
    long_secrets, unicode_text, st.integers(0, 90), st.integers(0, 90), st.sampled_from(["...", "…", " [...]", "....."])
)
def test_a_shortened_secret_never_comes_through(secret: str, other: str, head: int, tail: int, ellipsis: str) -> None:
    assume(not [part for part in parts(secret) if part in repr(other)])
    short = reprlib.Repr()
    short.maxstring = head + tail
    start, end = secret[:head], secret[max(0, len(secret) - tail) :]
    texts = [short.repr(secret), f"{start}{ellipsis}{end}", f"{start!r}{ellipsis}{end!r}", f"{ellipsis}{end}{ellipsis}"]
    texts += [json.dumps(texts[1]), f"?key={quote(start, '')}{ellipsis}{quote(end, '')}"]
    for value in secret, [secret], {"api_key": secret}, {other: secret, "x": other}:
        with pytest.raises(pydantic.ValidationError) as caught:
            pydantic.TypeAdapter(None).validate_python(value)
        texts.append(str(caught.value))
    redactor = Redactor(["another-long-secret", secret])
    for text in texts:
        for masked in redactor.text(text), redactor.values(text):
            assert not [part for part in parts(secret) if part in masked.replace("***", "\0")], (text, masked)


@given(st.lists(long_secrets, max_size=4), st.lists(unicode_text | st.sampled_from(["...", "…", " [...] ", "." * 9])))
def test_a_text_without_secrets_stays_as_it_is(secrets: list[str], words: list[str]) -> None:
    text = "".join(words)
    assume(not [part for secret in secrets for part in parts(secret) if part in text])
    assume(Redactor().text(text) == text)
    assert Redactor(secrets).text(text) == text


LONG = "sk-live-abcdefghijkl.mnopqrstuvwxyz"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (textwrap.shorten(f"with {LONG}", 20), "with *** [...]"),
        (f"'{LONG[:20]}...{LONG[-12:]}'", "'***...***'"),
        (f"{LONG[:21]}...", "***...."),
        (f"{LONG}...{LONG}", "***...***"),
        (f"...{LONG[-9:]}...{LONG[:9]}...", "...***...***..."),
        (f"{LONG[:7]}...{LONG[-7:]}", "sk-live...tuvwxyz"),
        (f"{LONG[:12]} and more ...", "sk-live-abcd and more ..."),
        (f"{LONG[1:12]}...", "k-live-abcd..."),
        ("sk-lives-...", "sk-lives-..."),
        ("fifteen-long...", "fifteen-long..."),
        ("api-keys...", "api-keys..."),
        ("sk-api-key-1-of...", "***..."),
    ],
)
def test_the_parts_of_a_long_secret_are_masked_beside_an_ellipsis(text: str, masked: str) -> None:
    assert Redactor([LONG, "api-key-1", "fifteen-longish", "sk-api-key-1-of-2"]).text(text) == masked


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://h:8000/sessions/abc.def/v1 failed", "http://h:8000/sessions/***/v1 failed"),
        ("postgres://user:pw@db:5432/x", "postgres://user:***@db:5432/x"),
        ("http://h:8000/v1", "http://h:8000/v1"),
        ("GET /x?api_key=abc&page=2", "GET /x?api_key=***&page=2"),
        ("Authorization: Bearer abcdef", "Authorization: Bearer ***"),
        ("api_key EMPTY is fine", "api_key EMPTY is fine"),
    ],
)
def test_what_looks_like_a_secret_is_masked_unasked(text: str, masked: str) -> None:
    assert Redactor(["EMPTY"]).text(text) == masked


KEY = "Zq9xT3wLmZ7aRb2N"


@pytest.mark.parametrize(
    "text",
    [
        "api_key={}",
        "{{'api_key': '{}'}}",
        '{{"api_key": "{}"}}',
        '{{\\"hub_token\\": \\"{}\\"}}',
        "x-api-key: {}",
        "Client(password='{}', n=1)",
        "OPENAI_API_KEY={}",
        "AWS_SECRET_ACCESS_KEY = {}",
        "refused: sk-{}",
        "hf_{}, ghp_{}",
    ],
)
def test_a_secret_that_nobody_knows_is_masked_by_the_name_before_it(text: str) -> None:
    said = Redactor().text(f"ValueError: {text.format(KEY, KEY)} in step 3")
    assert KEY not in said
    assert "***" in said
    assert said.startswith("ValueError: ")
    assert said.endswith(" in step 3")


@pytest.mark.parametrize(
    "text",
    [
        'OpenAI(api_key=config["api_key"], base_url=url)',
        'OpenAI(api_key="EMPTY")',
        'api_key=os.environ["OPENAI_API_KEY"]',
        "max_tokens=4096, eos_token='<|im_end|>'",
        "def call(api_key: str | None = None, hub_token: str = '')",
        "the secret: it is simple",
        "keyword=abc12345678, disk-abcdefghijklmnopqrstuvwxyz",
        "See the log /tmp/agentcore-rl-x/sessions/01cf83a5-9d4e-4c26-aa8c-5e268bd68833/agent.log.",
    ],
)
def test_code_and_paths_are_not_taken_for_secrets(text: str) -> None:
    assert Redactor().text(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "is this an answer?" + json.dumps([{"token": i, "logprob": -0.5} for i in range(8000)], separators=(",", ":")),
        "https://x/?" + "key" * 100_000,
        "secret=" * 40_000,
        "://a:" * 40_000,
        "Bearer " * 40_000,
        "'" + "token='" * 40_000,
        "..." * 100_000,
    ],
    ids=["json", "url", "names", "users", "headers", "quotes", "ellipses"],
)
def test_long_texts_are_masked_in_time_that_grows_with_their_length(text: str) -> None:
    began = time.process_time()
    Redactor(["a-secret-of-some-length"]).text(text)
    list(find_secrets({"text": text}))
    assert time.process_time() - began < 2.0  # by the square of it: a minute


def test_keys_are_found_inside_urls_and_headers() -> None:
    payload = {
        "url": "http://u:pw12@h/sessions/live.key/v1",
        "headers": {"Authorization": "Bearer tok-1"},
        "keys": {"openai": ["k-1"]},
        "keyword": "python",
        "max_tokens": "100",
    }
    assert set(find_secrets(payload)) == {"pw12", "live.key", "Bearer tok-1", "k-1"}
    assert Redactor(find_secrets(payload)).text("said tok-1 and live.key to python") == "said *** and *** to python"

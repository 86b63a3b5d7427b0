"""The tiny policy: exact logprobs, an exact gradient, repeatable sampling, and it learns. Its data and its agent."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import re
import statistics
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from agentcore_rl_toolkit.errors import EngineError
from agentcore_rl_toolkit.local import policy as module
from agentcore_rl_toolkit.local.grpo import group_advantages
from agentcore_rl_toolkit.local.math_tasks import math_tasks
from agentcore_rl_toolkit.local.policy import FOLDER, MESSAGE_END, MESSAGE_START, VOCAB_SIZE, TinyPolicy
from agentcore_rl_toolkit.rollout_gateway.sampling.base import StreamingBackend
from agentcore_rl_toolkit.rollout_gateway.traces.record import TraceRecord

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def ask(question: str) -> list[int]:
    return encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


def answer_tool(text: str) -> list[int]:
    body = f"<tool_response>\n{text}\n</tool_response>"
    return encode(f"\n<|im_start|>user\n{body}<|im_end|>\n<|im_start|>assistant\n")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def agent() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries it imports
        return load(ROOT / "examples/local_math_agent/rl_app.py")


async def play(policy: TinyPolicy, agent: ModuleType, task: dict[str, Any], seed: int) -> TraceRecord:
    """The agent's loop without HTTP: one rollout, its reward and its row."""
    ids = ask(task["prompt"])
    mask: list[int] = []
    logprobs: list[float] = []
    prompt_length = len(ids)
    while True:
        turn = await policy.generate(prompt_ids=ids, sampling_params={"max_tokens": 64, "seed": seed})
        ids = ids + turn.output_ids
        mask += [1] * len(turn.output_ids)
        logprobs += turn.output_log_probs
        text = TOKENIZER.decode(turn.output_ids)
        call = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text, re.DOTALL)
        if not call or len(ids) > 200:
            numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
            reward = float(bool(numbers) and not call and float(numbers[-1]) == task["answer"])
            return TraceRecord(ids, mask, logprobs, reward=reward)
        assert len(ids) - prompt_length == len(mask)
        try:
            arguments = json.dumps(json.loads(call[1])["arguments"])
            function = SimpleNamespace(name="calculator", arguments=arguments)
            result = agent.call_tool(SimpleNamespace(function=function))
        except (ValueError, KeyError, TypeError):
            result = "Error"
        tail = answer_tool(result)
        ids = ids + tail
        mask += [0] * len(tail)
        logprobs += [0.0] * len(tail)


def logprob(weights: np.ndarray, before: list[int], token: int, temperature: float = 1.0) -> float:
    """The formula of the module's docstring, written out slowly; only the choice of rows is the module's."""
    s = [math.fsum(column) for column in weights[module._Context(before).rows()].astype(float).T]
    starts = [i for i, t in enumerate(before) if t == MESSAGE_START]
    start, end = starts[-2:] if len(starts) > 1 else (0, 0)
    message = before[start:end][-64:]
    logits = s[:VOCAB_SIZE]
    for place in range(2, len(message)):
        logits[message[place]] += s[VOCAB_SIZE + message[place - 2]]
        if message[place - 1] == before[-1]:
            logits[message[place]] += s[2 * VOCAB_SIZE]
    logits = [x / temperature for x in logits]
    return logits[token] - math.log(math.fsum(map(math.exp, logits)))


# -- the engine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0])
async def test_logprobs_are_those_of_the_formula(temperature: float):
    policy = TinyPolicy()
    weights = policy._state[1]
    for prompt in (ask("What is 17 times 23?"), ask("?") + encode("so") + answer_tool("391"), encode("abc"), []):
        turn = await policy.generate(
            prompt_ids=prompt, sampling_params={"max_tokens": 12, "seed": 3, "temperature": temperature}
        )
        row = prompt + turn.output_ids
        expected = [
            logprob(weights, row[: len(prompt) + i], token, temperature or 1.0)
            for i, token in enumerate(turn.output_ids)
        ]
        assert turn.output_log_probs == pytest.approx(expected, abs=1e-6)


async def test_tokens_come_with_the_probability_they_are_sampled_with():
    policy = TinyPolicy()
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17'
    prompt = ask("What is 17 times 23?") + encode(call)
    turns = [
        await policy.generate(prompt_ids=prompt, sampling_params={"max_tokens": 1, "seed": seed})
        for seed in range(1000)
    ]
    for sign in (" *", " +"):
        probabilities = [math.exp(t.output_log_probs[0]) for t in turns if t.output_ids == encode(sign)]
        p = probabilities[0]
        assert len(probabilities) / 1000 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 1000))
        assert 0.02 < p < 0.98


async def test_the_same_seed_and_prompt_give_the_same_answer_streamed_or_not():
    policy = TinyPolicy()
    assert isinstance(policy, StreamingBackend)
    prompt = ask("What is 17 times 23?")
    params = {"max_tokens": 40, "seed": 1}
    turns = await asyncio.gather(*(policy.generate(prompt_ids=prompt, sampling_params=params) for _ in range(4)))
    chunks = [chunk async for chunk in policy.stream(prompt_ids=prompt, sampling_params=params)]
    assert len(chunks) > 1
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "stop"
    streamed = [t for chunk in chunks for t in chunk.output_ids]
    assert all(turn == turns[0] for turn in turns)
    assert turns[0].output_ids == streamed
    assert turns[0].output_log_probs == [x for chunk in chunks for x in chunk.output_log_probs]
    assert streamed[-1] == MESSAGE_END
    assert turns[0].policy_version == policy.version == 0

    others = [
        await policy.generate(prompt_ids=prompt, sampling_params={"max_tokens": 40, "seed": seed})
        for seed in range(2, 8)
    ]
    assert len({tuple(turn.output_ids) for turn in others}) > 2


async def test_limits_and_stops():
    policy = TinyPolicy()
    prompt = ask("What is 17 times 23?")
    full = await policy.generate(prompt_ids=prompt, sampling_params={"max_tokens": 64, "seed": 1})
    cut = await policy.generate(prompt_ids=prompt, sampling_params={"max_tokens": 5, "seed": 1})
    assert (cut.output_ids, cut.finish_reason) == (full.output_ids[:5], "length")
    stop = full.output_ids[3]
    stopped = await policy.generate(
        prompt_ids=prompt, sampling_params={"max_tokens": 64, "seed": 1, "stop_token_ids": [stop]}
    )
    assert stopped.finish_reason == "stop"
    assert stopped.output_ids == full.output_ids[: full.output_ids.index(stop) + 1]


async def test_values_that_ask_for_nothing_are_honoured():
    nothing = {"top_p": 1.0, "top_k": 0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    params = {"max_tokens": 3, "seed": 1}
    plain, same = [
        await TinyPolicy().generate(prompt_ids=[5], sampling_params=asked) for asked in (params, params | nothing)
    ]
    assert same.output_ids == plain.output_ids


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([VOCAB_SIZE], {"max_tokens": 1}, "prompt_ids must be in"),
        ([-1], {"max_tokens": 1}, "prompt_ids must be in"),
        ([5], {}, "max_tokens"),
        ([5], {"max_tokens": 1, "top_p": 0.9}, "top_p=0.9"),
        ([5], {"max_tokens": 1, "stop": ["x"]}, "stop="),
        ([5], {"max_tokens": 1, "temperature": -1}, "temperature"),
    ],
)
async def test_what_it_cannot_do_is_an_engine_error(prompt: list[int], params: dict[str, Any], message: str):
    with pytest.raises(EngineError, match=re.escape(message)):
        await TinyPolicy().generate(prompt_ids=prompt, sampling_params=params)


async def test_the_event_loop_runs_while_it_samples():
    policy = TinyPolicy()
    params = {"max_tokens": 64, "seed": 1, "stop_token_ids": [VOCAB_SIZE]}
    work = [asyncio.ensure_future(policy.generate(prompt_ids=[5] * n, sampling_params=params)) for n in range(1, 25)]
    ticks = 0
    while not all(turn.done() for turn in work):
        await asyncio.sleep(0)
        ticks += 1
    assert ticks >= 24 * 64 / 8 / 2  # about once for each chunk of 8 tokens
    assert all(turn.result().finish_reason == "length" for turn in work)


# -- the learner -----------------------------------------------------------------------------------------


async def test_update_is_the_gradient_of_the_objective(agent: ModuleType):
    """Against central differences, for rows sampled by other weights and at another temperature."""
    policy = TinyPolicy()
    temperature, advantages = 0.7, [1.3, -0.4]
    records = [await play(policy, agent, task, seed) for seed, task in enumerate(math_tasks(1, 2))]
    for record in records:
        record.logprobs = [x - 0.1 * m for x, m in zip(record.logprobs, record.loss_mask, strict=True)]
    old = policy._state[1]
    metrics = policy.update(records, advantages, learning_rate=1.0, temperature=temperature)
    step = policy._state[1].astype(float) - old

    def objective(weights: np.ndarray) -> float:
        total = 0.0
        for record, advantage in zip(records, advantages, strict=True):
            for i, (mask, captured) in enumerate(zip(record.loss_mask, record.logprobs, strict=True)):
                if mask:
                    at = record.prompt_length + i
                    now = logprob(weights, record.token_ids[:at], record.token_ids[at], temperature)
                    total += advantage * math.exp(now - captured)
        return total / len(records)

    largest = np.argsort(np.abs(step), axis=None)[::-1]
    kinds = (range(VOCAB_SIZE), range(VOCAB_SIZE, 2 * VOCAB_SIZE), [2 * VOCAB_SIZE])
    cells = [np.unravel_index(i, step.shape) for i in largest[:20000]]
    chosen = [cell for kind in kinds for cell in [c for c in cells if c[1] in kind][:2]]
    assert {c[1] // VOCAB_SIZE for c in chosen} == {0, 1, 2}
    eps = 0.0625
    for cell in chosen:
        up, down = old.copy(), old.copy()
        up[cell] += eps
        down[cell] -= eps
        numeric = (objective(up) - objective(down)) / (float(up[cell]) - float(down[cell]))
        assert step[cell] == pytest.approx(numeric, rel=0.02, abs=1e-5), cell
    assert metrics["grad_norm"] == pytest.approx(float(np.linalg.norm(step)), rel=1e-3)
    assert metrics["tokens"] == sum(sum(record.loss_mask) for record in records)


async def test_the_gap_shows_tokens_that_are_not_what_was_sampled(agent: ModuleType):
    policy = TinyPolicy()
    record = await play(policy, agent, math_tasks(2, 1)[0], 5)
    assert policy.update([record], [0.0], learning_rate=1.0)["max_logprob_gap"] < 1e-9
    assert policy.version == 1
    response = record.token_ids[record.prompt_length :]
    wrong_prefix = TraceRecord(ask("Add 1 to 2.") + response, record.loss_mask, record.logprobs)
    shifted = TraceRecord(record.token_ids, [0, *record.loss_mask[:-1]], [0.0, *record.logprobs[:-1]])
    for broken in (wrong_prefix, shifted):
        assert policy.update([broken], [0.0], learning_rate=1.0)["max_logprob_gap"] > 1e-3
    with pytest.raises(ValueError, match="1 records, but 2 advantages"):
        policy.update([record], [1.0, 2.0], learning_rate=1.0)
    assert policy.update([], [], learning_rate=1.0)["tokens"] == 0


async def test_it_learns(agent: ModuleType):
    policy = TinyPolicy()
    curve = []
    for step in range(12):
        records: list[TraceRecord] = []
        advantages: list[float] = []
        rewards: list[float] = []
        for index, task in enumerate(math_tasks(step, 6)):
            group = [await play(policy, agent, task, (step * 6 + index) * 6 + sample) for sample in range(6)]
            rewards += [record.reward or 0.0 for record in group]
            for record, advantage in zip(group, group_advantages([r.reward for r in group]), strict=True):
                if advantage is not None:
                    records.append(record)
                    advantages.append(advantage)
        metrics = policy.update(records, advantages, learning_rate=1.0)
        assert metrics["max_logprob_gap"] < 1e-9
        curve.append(statistics.fmean(rewards))
    assert policy.version == 12
    assert curve[0] <= 0.45
    assert statistics.fmean(curve[-3:]) >= 0.7, curve


def test_two_trainings_with_the_same_rows_agree_to_the_bit():
    row = ask("What is 17 times 23?") + encode("The answer is 391.<|im_end|>")
    record = TraceRecord(row, [1] * 8, [-1.0] * 8)
    weights = []
    for _ in range(2):
        policy = TinyPolicy()
        policy.update([record, record], [1.0, -0.5], learning_rate=0.5)
        weights.append(policy._state[1])
    assert (weights[0] == weights[1]).all()
    assert (weights[0] != module.warmed_up()).any()


# -- advantages and tasks --------------------------------------------------------------------------------


def test_group_advantages():
    rewards = [1.0, 0.0, 0.0, 1.0, 0.25]
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    assert group_advantages(rewards) == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards])
    assert group_advantages([1.0, None, 0.0]) == [pytest.approx(0.999998), None, pytest.approx(-0.999998)]
    for nothing_to_learn in ([], [1.0], [None, None], [0.5, None], [1.0, 1.0, 1.0]):
        assert group_advantages(nothing_to_learn) == [None] * len(nothing_to_learn)


def test_tasks_are_right_and_repeatable():
    tasks = math_tasks(7, 60)
    assert tasks == math_tasks(7, 60)
    assert tasks != math_tasks(8, 60)
    words = {"times": "{} * {}", "plus": "{} + {}", "minus": "{} - {}", "divided": "{} / {}"}
    for task in tasks:
        a, b = map(int, re.findall(r"\d+", task["prompt"]))
        word = next((w for w in words if w in task["prompt"]), None)
        if word:
            assert task["answer"] == eval(words[word].format(a, b))
        else:
            assert task["answer"] == (b - a if "Subtract" in task["prompt"] else b / a)
        assert type(task["answer"]) is int


# -- the data --------------------------------------------------------------------------------------------


def test_the_tokenizer_is_what_its_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = load(ROOT / "scripts/make_tiny_tokenizer.py")
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    script.main()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), "run scripts/make_tiny_tokenizer.py"


def test_the_tokenizer_encodes_anything():
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE
    special = {"<|endoftext|>": 0, "<|im_start|>": MESSAGE_START, "<|im_end|>": MESSAGE_END}
    assert {token: TOKENIZER.token_to_id(token) for token in special} == special
    text = "".join(map(chr, range(1, 0x250))) + " \r\n\t日本語 🙂 é -5 --5 1234567890"
    assert TOKENIZER.decode(encode(text), skip_special_tokens=False) == text
    assert all(len(encode(f"{number:02}")) == 1 for number in range(100))
    assert len(encode('<tool_call>\n{"name": "calculator", "arguments": {"expression": "17 * 23"}}\n</tool_call>')) < 32


def test_the_template_only_appends(agent: ModuleType):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string((FOLDER / "chat_template.jinja").read_text(encoding="utf-8"))

    def call(expression: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "calculator", "arguments": expression}}

    messages = [
        {"role": "system", "content": agent.SYSTEM_PROMPT},
        {"role": "user", "content": "What is 17 times 23?"},
        {"role": "assistant", "content": None, "tool_calls": [call({"expression": "17 * 23"})]},
        {"role": "tool", "content": "391"},
        {"role": "assistant", "content": "Once more.", "tool_calls": [call('{"a": 1}'), call({"b": "ü"})]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "The answer is 391."},
        {"role": "user", "content": "Thanks."},
    ]

    def render(count: int, ask: bool) -> str:
        return template.render(messages=messages[:count], tools=[agent.CALCULATOR], add_generation_prompt=ask)

    whole = render(len(messages), True)
    for count, message in enumerate(messages):
        if message["role"] == "assistant":
            assert whole.startswith(render(count, True))
        elif message["role"] == "user" and count:
            assert whole.startswith(render(count, False))
    assert whole[len(render(1, False)) :] == (
        "<|im_start|>user\nWhat is 17 times 23?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "17 * 23"}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n391\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\nOnce more.\n<tool_call>\n{"name": "calculator", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "calculator", "arguments": {"b": "ü"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nThe answer is 391.<|im_end|>\n"
        "<|im_start|>user\nThanks.<|im_end|>\n<|im_start|>assistant\n"
    )


# -- the agent -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("calculator", '{"expression": "17 * 23"}', "391"),
        ("calculator", '{"expression": "84 / 7"}', "12"),
        ("calculator", '{"expression": "-(1 + 2.5) / 3"}', "-1.17"),
        ("calculator", '{"expression": "1 / 0"}', "Error: ZeroDivisionError: division by zero"),
        ("calculator", '{"expression": "2 ** 999999999"}', "Error: ValueError: only numbers"),
        ("calculator", '{"expression": "__import__(\'os\')"}', "Error: ValueError: only numbers"),
        ("calculator", '{"expression": "1 +"}', "Error: SyntaxError"),
        ("calculator", '{"expression": 5}', "Error: TypeError"),
        ("calculator", '{"term": "1"}', "Error: KeyError: 'expression'"),
        ("calculator", "[]", "Error: TypeError"),
        ("calculator", "{", "Error: JSONDecodeError"),
        ("calculator", '{"expression": "' + "(" * 5000 + '"}', "Error: "),
        ("calculator", '{"expression": "' + "-" * 50000 + '1"}', "Error: "),
        ("search", "{}", "Error: there is no tool 'search'"),
    ],
)
def test_the_calculator_answers_everything(agent: ModuleType, name: str, arguments: str, answer: str):
    function = SimpleNamespace(name=name, arguments=arguments)
    assert agent.call_tool(SimpleNamespace(function=function)).startswith(answer)

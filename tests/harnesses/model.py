"""The model that plays behind the gateway: it works out the task of ``drivers/_task.py`` from what it has seen.

Three turns at least: one call, then two calls at once that go on from its result, then the answer. What it goes on from
are the numbers in the prompt, so a right answer means that the harness ran its tools and sent back what they said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

import agentcore_rl_toolkit.local
from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer

PROMPT = "What is 6 * 7? And that plus 8, and that minus 2?"
ANSWER = "50 and 40"
RESULTS_FILE = "results.txt"
"""Where shell commands leave what they print, too."""

TINY = Path(agentcore_rl_toolkit.local.__file__).parent / "data" / "tiny"
TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
_ANSWER = '"<|im_start|>assistant\\n" + content }}'
_THOUGHT = """"<|im_start|>assistant\\n" }}
        {%- if message.reasoning_content %}
            {{- "<think>\\n" + message.reasoning_content + "\\n</think>\\n\\n" }}
        {%- endif %}
        {{- content }}"""


def renderer() -> HfTemplateRenderer:
    """The tiny model's, with reasoning: some harnesses send it back, others drop it."""
    template = (TINY / "chat_template.jinja").read_text()
    assert _ANSWER in template
    return HfTemplateRenderer(TINY, chat_template=template.replace(_ANSWER, _THOUGHT))


@dataclass(frozen=True)
class Manner:
    """How a harness lets its model act.

    ``acts``: text that evaluates each of the given expressions. ``answers``: text that ends the task with an answer.
    ``results``: the results so far, in the text after the question. ``leads``: what to say in another conversation than
    the one that has the question, None in that one.
    """

    acts: Callable[[Sequence[str]], str]
    answers: Callable[[str], str] = str
    results: Callable[[str], list[str]] = field(default=lambda text: _tool_results(text))
    leads: Callable[[str], str | None] = lambda text: None


@dataclass
class Player:
    """The script of an engine. ``sampled``: the token ids of every answer."""

    manner: Manner
    sampled: list[list[int]] = field(default_factory=list)

    def __call__(self, prompt_ids: list[int]) -> list[int]:
        text = TOKENIZER.decode(prompt_ids, skip_special_tokens=False)
        results = self.manner.results(text.rpartition(PROMPT)[2])
        said = self.manner.leads(text) or self._next(results)
        answer = f"<think>\nWhat I have: {results}\n</think>\n\n{said}<|im_end|>"
        self.sampled.append(TOKENIZER.encode(answer, add_special_tokens=False).ids)
        return self.sampled[-1]

    def _next(self, results: list[str]) -> str:
        match results:
            case []:
                return "Let me see… ✓ 數\n" + self.manner.acts(["6 * 7"])
            case [product]:
                return self.manner.acts([f"{product} + 8", f"{product} - 2"])
            case [_, more, less]:
                return self.manner.answers(f"{more} and {less}")
        return self.manner.answers(f"I did not expect these results: {results}")


def call(name: str, **arguments: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def _tool_results(text: str) -> list[str]:
    """The last number of each tool's result."""
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.DOTALL)
    return [re.findall(r"\d+", result)[-1] for result in results]


def _numbers_alone(text: str) -> list[str]:
    """Lines that are a number. Of calls at once, smolagents tells the results in any order."""
    first, *others = re.findall(r"^(\d+)(?:<\|im_end\|>)?$", text, re.MULTILINE) or [""]
    return [first, *sorted(others, reverse=True)] if first else []


def _shell(tool: str, argument: str, **more: str) -> Callable[[Sequence[str]], str]:
    def acts(expressions: Sequence[str]) -> str:
        commands = [f"echo $(({expression})) | tee -a {RESULTS_FILE}" for expression in expressions]
        return "\n".join(call(tool, **{argument: command}, **more) for command in commands)

    return acts


def _calculations(expressions: Sequence[str]) -> str:
    return "\n".join(call("calculator", expression=expression) for expression in expressions)


def _code(expressions: Sequence[str]) -> str:
    return "<code>\n" + "\n".join(f'print(calculator("{e}"))' for e in expressions) + "\n</code>"


def _leads(text: str) -> str | None:
    if "Ask the calculating agent." not in text:
        return None
    return ANSWER if f"<tool_response>\n{ANSWER}\n" in text else call("calculating", input=PROMPT)


FUNCTIONS = Manner(_calculations)
DELEGATED = Manner(_calculations, leads=_leads)
CLAUDE_CODE = Manner(_shell("Bash", "command", description="Calculate"))
CODEX = Manner(_shell("exec_command", "cmd"))
MINI_SWE_AGENT = Manner(
    _shell("bash", "command"),
    lambda answer: call("bash", command=f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo {answer}"),
)
SMOL_TOOLS = Manner(_calculations, lambda answer: call("final_answer", answer=answer), _numbers_alone)
SMOL_CODE = Manner(_code, lambda answer: f'<code>\nfinal_answer("{answer}")\n</code>', _numbers_alone)

"""The model families of the suite: checkpoint folders, the reference renderings, and what a model of each says.

Everything here comes from transformers' ``apply_chat_template`` and the tokenizers library, never from our own code.
"""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import agentcore_rl_toolkit.local
from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer

Message = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
TINY = Path(agentcore_rl_toolkit.local.__file__).parent / "data" / "tiny"
TOKENIZERS = Path(os.environ.get("AGENTCORE_RL_TOKENIZERS") or ROOT.parent / "shared" / "tokenizers")
FAST = ("tiny", "qwen3", "deepseek-v3.1", "gpt-oss")
"""Families of the fast part: one of each kind (no tools in history but ChatML, thinking, own markers, harmony)."""
NAMES = (
    "tiny",
    "qwen2.5",
    "qwen3",
    "qwen3-2507",
    "qwen3-coder",
    "qwen3.5",
    "qwen3.6",
    "deepseek-v3",
    "deepseek-v3.1",
    "deepseek-v4",
    "gpt-oss",
    "mistral-nemo",
    "mistral-small-3.2",
    "glm4.5-surrogate",
    "minimax-m2-surrogate",
    "smollm3-surrogate",
    "smollm2",
)

LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for."},
                "limit": {"type": "number", "description": "How many results."},
                "exact": {"type": "boolean", "description": "Exact matches only."},
            },
            "required": ["query"],
        },
    },
}
ARGUMENTS: dict[str, Any] = {"query": "Zürich weather", "limit": 1000, "exact": True}


@dataclass(frozen=True)
class Said:
    """One answer of the model, before it is written in the family's format."""

    text: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    reasoning: str | None = None

    def message(self, *, arguments_as_text: bool) -> Message:
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call(a, i, as_text=arguments_as_text) for i, a in enumerate(self.calls)]
        return message


def call(arguments: dict[str, Any], number: int = 0, *, as_text: bool = False) -> dict[str, Any]:
    value = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    return {"type": "function", "id": f"abcdefgh{number}", "function": {"name": "lookup", "arguments": value}}


@dataclass
class Family:
    """One checkpoint folder. Its large parts are loaded when first needed and live as long as the object."""

    name: str
    folder: Path
    chat_template: str | None = None

    @property
    def surrogate(self) -> bool:
        return self.name.endswith("-surrogate")

    @functools.cached_property
    def reference(self) -> Any:
        import transformers

        return transformers.AutoTokenizer.from_pretrained(self.folder)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @functools.cached_property
    def renderer(self) -> HfTemplateRenderer:
        return HfTemplateRenderer(self.folder, chat_template=self.chat_template)

    # -- the reference -----------------------------------------------------------------------------------

    def text(self, messages: Sequence[Message], *, tools: bool = True, prompt: bool = True, **variables: Any) -> str:
        """What the template writes, by transformers. Whatever it raises is the template's refusal."""
        return self.reference.apply_chat_template(
            list(messages),
            tools=[LOOKUP] if tools else None,
            chat_template=self.chat_template,
            add_generation_prompt=prompt,
            tokenize=False,
            **variables,
        )

    def ids(self, messages: Sequence[Message], *, tools: bool = True, **variables: Any) -> list[int]:
        return self.reference.apply_chat_template(
            list(messages),
            tools=[LOOKUP] if tools else None,
            chat_template=self.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **variables,
        )

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    # -- what the template can do --------------------------------------------------------------------------

    @functools.cached_property
    def arguments_as_text(self) -> bool:
        """The template concatenates arguments instead of printing them: it takes JSON text only."""
        return not self._renders(Said(calls=(ARGUMENTS,)).message(arguments_as_text=False)) and self._renders(
            Said(calls=(ARGUMENTS,)).message(arguments_as_text=True)
        )

    def _renders(self, answer: Message) -> bool:
        try:
            return "weather" in self.text([{"role": "user", "content": "."}, answer], prompt=False)
        except Exception:  # noqa: BLE001 - a template refuses with any exception
            return False

    @functools.cached_property
    def calls(self) -> bool:
        """Its model calls tools (SmolLM3's template drops calls from history; the model makes them all the same)."""
        return self.name == "smollm3-surrogate" or self.renders_calls

    @functools.cached_property
    def renders_calls(self) -> bool:
        """Calls in history are rendered."""
        return self._renders(Said(calls=(ARGUMENTS,)).message(arguments_as_text=self.arguments_as_text))

    @functools.cached_property
    def mixes(self) -> bool:
        """Text beside reasoning and a call is taken (gpt-oss' template refuses it)."""
        return self._renders(Said("Let me see.", (ARGUMENTS,), "Hm.").message(arguments_as_text=self.arguments_as_text))

    @functools.cached_property
    def json(self) -> bool:
        """Calls are written as JSON (else as XML)."""
        return self.calls and json.dumps(ARGUMENTS, ensure_ascii=False) in self.emission(Said(calls=(ARGUMENTS,)))

    @functools.cached_property
    def parallel(self) -> bool:
        """Two calls in one answer are rendered."""
        answer = Said(calls=(ARGUMENTS, {"query": "second"})).message(arguments_as_text=self.arguments_as_text)
        try:
            text = self.text([{"role": "user", "content": "."}, answer], prompt=False)
        except Exception:  # noqa: BLE001
            return False
        return "weather" in text and "second" in text

    @functools.cached_property
    def reasons(self) -> bool:
        """Its model writes reasoning that the client sees apart."""
        if self.name in ("smollm3-surrogate", "gpt-oss"):
            return True
        user = {"role": "user", "content": "."}
        if self.text([user]).rstrip().endswith("<think>"):
            return True
        answer = Said("Fine.", reasoning="Hmmm.").message(arguments_as_text=False)
        return "Hmmm." in self.text([user, answer], prompt=False)

    # -- what a model says -----------------------------------------------------------------------------------

    def emission(self, said: Said, *, after_call: bool = False) -> str:
        """The answer as a model of this family samples it, up to and with its stop token.

        It is what the template writes for it behind the generation prompt, after a user message or after a call and
        its result. Two families sample something else than their templates put into history.
        """
        if self.name == "gpt-oss":
            return _harmony(said)
        if self.name == "smollm3-surrogate":
            return _smollm3(said)
        before: list[Message] = [{"role": "user", "content": "."}]
        if after_call:
            asked = Said(calls=(ARGUMENTS,)).message(arguments_as_text=self.arguments_as_text)
            before += [asked, {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "."}]
        answer = said.message(arguments_as_text=self.arguments_as_text)
        prompt, whole = self.text(before), self.text([*before, answer], prompt=False)
        if whole.startswith(prompt):
            body = whole[len(prompt) :]
        else:  # thinking is opened by the prompt and dropped from history
            opened = prompt.rindex("<think>")
            assert whole.startswith(prompt[:opened]), "the reference's history does not begin with its prompt"
            body = f"{said.reasoning or ''}\n</think>\n\n" + whole[opened:]
        return self._stopped(body, bool(said.calls))

    def _stopped(self, body: str, calls: bool) -> str:
        if self.name == "glm4.5-surrogate":  # the next role's marker ends the turn
            return body + ("<|observation|>" if calls else "<|user|>")
        body = body.rstrip("\n")
        assert self.encode(body)[-1] in self.special, f"no stop token at the end of {body[-40:]!r}"
        return body

    @functools.cached_property
    def special(self) -> dict[int, str]:
        return {i: t.content for i, t in self.tokenizer.get_added_tokens_decoder().items() if t.special}

    @functools.cached_property
    def added(self) -> dict[str, int]:
        return {t.content: i for i, t in self.tokenizer.get_added_tokens_decoder().items()}

    def spelled(self, text: str) -> list[int]:
        """Ids of ``text`` in which no control token is one: cut behind the first character of each."""
        pieces = [text]
        for token in sorted(self.added, key=len, reverse=True):
            pieces = [p for piece in pieces for p in _cut(piece, token)]
        return [i for piece in pieces if piece for i in self.encode(piece)]

    def split(self, ids: Sequence[int], rng: random.Random, rate: float = 0.5) -> list[int]:
        """Other tokens for the same text: ordinary tokens are cut in two where the halves are tokens too."""
        out: list[int] = []
        for token in ids:
            piece = self.tokenizer.id_to_token(token)
            halves = []
            if token not in self.added.values() and rng.random() < rate:
                pairs = [(self.tokenizer.token_to_id(piece[:k]), self.tokenizer.token_to_id(piece[k:]))
                         for k in range(1, len(piece))]  # fmt: skip
                halves = [p for p in pairs if None not in p and not set(p) & set(self.added.values())]
            out += rng.choice(halves) if halves else [token]
        assert self.decode(out) == self.decode(ids)
        return out


def _cut(text: str, token: str) -> list[str]:
    parts = text.split(token)
    if len(parts) == 1 or len(token) < 2:
        return [text]
    return [parts[0] + token[0], *(token[1:] + part + token[0] for part in parts[1:-1]), token[1:] + parts[-1]]


def _harmony(said: Said) -> str:
    text = ""
    if said.reasoning is not None:
        text += f"<|channel|>analysis<|message|>{said.reasoning}<|end|><|start|>assistant"
    if not said.calls:
        return text + f"<|channel|>final<|message|>{said.text}<|return|>"
    if said.text:
        text += f"<|channel|>commentary<|message|>{said.text}<|end|><|start|>assistant"
    [arguments] = said.calls  # the model makes one call at a time
    arguments = json.dumps(arguments, ensure_ascii=False)
    return text + f"<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{arguments}<|call|>"


def _smollm3(said: Said) -> str:
    text = "" if said.reasoning is None else f"<think>\n{said.reasoning}\n</think>\n"
    calls = [{"name": "lookup", "arguments": arguments} for arguments in said.calls]
    bodies = [f"<tool_call>\n{json.dumps(c, ensure_ascii=False)}\n</tool_call>" for c in calls]
    return text + "\n".join(filter(None, [said.text, *bodies])) + "<|im_end|>"


def find(name: str) -> Family | None:
    """The family, or None where its folder is not there."""
    folder = TINY if name == "tiny" else TOKENIZERS / name
    return Family(name, folder) if (folder / "tokenizer.json").is_file() else None


MISSING = "no {name} in {folder}: run scripts/fetch_tokenizers.py, or set AGENTCORE_RL_TOKENIZERS"

"""``HfTemplateRenderer``: render with a checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ...errors import RenderError, SetupError
from ..messages import Message, Tool
from ..names import random_hex
from ..parsed import OutputParser, ParserFactory
from .base import Fork
from .checkpoint import Checkpoint, load
from .parse import parser_for
from .probe import Report, probe
from .splice import SENTINEL, NotAppended, text_answer
from .tails import MAX_SHAPES
from .template import ChatTemplate
from .text import TextEncoder
from .traits import TemplateTraits

logger = logging.getLogger(__name__)


class HfTemplateRenderer:
    """Messages to token ids by the checkpoint's template, held tokens extended by splice, token ids to messages.

    ``tokenizer``: a transformers tokenizer, or the path of a checkpoint folder (``tokenizer.json``,
    ``tokenizer_config.json``, ``chat_template.jinja``); the second needs no transformers.
    ``chat_template``: another template text. ``parser``: an own parser for answers. ``stop_token_ids``: replaces what
    is found in the configuration and the template. ``variables``: defaults for template variables
    (``enable_thinking=False``). ``report``: what the start-up check found of this template (:mod:`.probe`).
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        parser: ParserFactory | None = None,
        stop_token_ids: Sequence[int] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> None:
        checkpoint = load(tokenizer, chat_template)
        self._text = TextEncoder(checkpoint.tokenizer)
        self._template = ChatTemplate(checkpoint.template, {**checkpoint.special, **(variables or {})})
        self._traits = TemplateTraits(self._template, self._text)
        self._divergence: dict[tuple[Any, ...], str | None] = {}
        self._parser = parser or parser_for(checkpoint.tokenizer, checkpoint.template)
        self.stop_token_ids = list(stop_token_ids or self._found_stops(checkpoint))
        splicer = self._traits.splicer
        self._closers = (self._text.encode(splicer.closer), self._text.encode(splicer.call_closer or splicer.closer))
        self.report = self._probe()
        logger.info("answers parsed as %s; %s", getattr(self._parser, "name", "custom"), self.report.line())

    # -- messages to tokens ------------------------------------------------------------------------------

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, prefill: str = "", **variables: Any
    ) -> list[int]:
        text = self.render_text(messages, tools, **variables)
        return self._text.encode(text + self._prefill_text(prefill, variables) if prefill else text)

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as the template writes it; control tokens spelled in content carry a guard."""
        return self._template.render(
            [self._for_template(m) for m in messages],
            [self._guarded(tool) for tool in tools],
            generation_prompt=generation_prompt,
            **variables,
        )

    def extend(
        self, sampled: Sequence[int], answer: Message, new: Sequence[Message], *, prefill: str = "", **variables: Any
    ) -> list[int] | Fork:
        if (bool(answer.get("tool_calls")), new[0]["role"]) in self._unlike:
            return Fork("splice_differs")
        try:
            text = self._traits.splicer.tail(answer, [self._for_template(m) for m in new], **variables)
        except NotAppended:
            return Fork("content_moved")
        if prefill:
            text += self._prefill_text(prefill, variables)
        last = sampled[-1]
        if last not in self.stop_token_ids:  # cut off: what closes the answer is context, like the rest
            if self._reasoning_is_open(answer, sampled):
                text = self._traits.reasoning_closer + text
            return self._text.encode(text)
        tail = self._text.encode(text)
        closer = self._closers[bool(answer.get("tool_calls"))]
        if last in tail[: len(closer) or 1]:  # the model has begun what the template would write here
            return tail[tail.index(last) + 1 :]
        if last in self._closers[False]:
            # The template writes another closer into history than the one the model samples (gpt-oss).
            return Fork("closer_rewritten")
        return tail

    def _prefill_text(self, prefill: str, variables: dict[str, Any]) -> str:
        """What follows the generation prompt where an answer begins with ``prefill``, as the template writes one."""
        user = {"role": "user", "content": "."}
        asked = self._template.render([user], **variables)
        said = self._template.render([user, text_answer()], generation_prompt=False, **variables).partition(SENTINEL)[0]
        if not said.startswith(asked):
            raise RenderError(
                "this template can't continue an answer that begins in the request: it asks for one otherwise"
            )
        return said[len(asked) :] + self._text.guard(prefill, special_only=True)

    def divergence(
        self, messages: Sequence[Message], answered: int, tools: Sequence[Tool] = (), **variables: Any
    ) -> str | None:
        whole = self.render_text(messages, tools, **variables)
        asked = self.render_text(messages[: answered - 1], tools, **variables)
        said = self.render_text(messages[:answered], tools, generation_prompt=False, **variables)
        said = said.removesuffix(self._traits.splicer.closer_of(messages[answered - 1]))
        answer = self._for_template(messages[answered - 1])
        for part, reason in (
            (answer.get(self._traits.reasoning_name or "reasoning_content", ""), "reasoning_dropped"),
            (answer["content"], "content_dropped"),
            *((call["function"]["name"], "calls_dropped") for call in answer.get("tool_calls", ())),
        ):
            if part.strip() not in said or part.strip() not in whole:
                return reason
        return None if whole.startswith(said) and said.startswith(asked) else "content_moved"

    def usual_divergence(self, answer: Message, new: Sequence[Message], **variables: Any) -> str | None:
        shape = (
            bool(answer.get("reasoning_content")),
            bool(answer["content"]),
            len(answer.get("tool_calls", ())),
            tuple(message["role"] for message in new),
            tuple(sorted((name, repr(value)) for name, value in variables.items())),
        )
        try:
            return self._divergence[shape]
        except KeyError:
            if len(self._divergence) >= MAX_SHAPES:
                self._divergence.clear()
        try:
            stub = [{"role": "user", "content": "."}, answer, *new]
            reason = self.divergence(stub, 2, **variables)
        except RenderError:
            reason = "content_moved"
        self._divergence[shape] = reason
        return reason

    # -- tokens to messages ------------------------------------------------------------------------------

    def parser(self, *, prompt_ids: Sequence[int], tools: Sequence[Tool]) -> OutputParser:
        return self._parser(prompt_ids=prompt_ids, tools=tools)

    def encode(self, text: str) -> list[int]:
        return self._text.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._text.tokenizer.decode(list(ids), skip_special_tokens=False))

    def call_id(self, parsed_id: str | None, number: int) -> str:
        if parsed_id:
            return parsed_id
        # Nine alphanumerics please every template that looks at ids; the client sees nothing odd in them.
        return random_hex(9)

    # -- preparing messages for the template ---------------------------------------------------------------

    def _for_template(self, message: Message) -> Message:
        if message["role"] != "assistant":
            prepared = {key: self._guarded(value) for key, value in message.items()}
            if "tool_call_id" in prepared:
                prepared["tool_call_id"] = self._traits.call_id(prepared["tool_call_id"])
            return prepared
        content = self._text.guard(message["content"], special_only=True)
        reasoning = self._text.guard(message.get("reasoning_content") or "", special_only=True)
        prepared = {"role": "assistant", "content": content}
        if message.get("tool_calls"):
            prepared["tool_calls"] = [self._call_for_template(call) for call in message["tool_calls"]]
            if reasoning and content and not self._traits.reasoning_beside_content:
                reasoning, prepared["content"] = f"{reasoning}\n\n{content}", ""
        if reasoning:
            prepared[self._traits.reasoning_name or "reasoning_content"] = reasoning
        return prepared

    def _call_for_template(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = self._guarded(function["arguments"])
        if not isinstance(arguments, str):
            arguments = self._traits.arguments(arguments)
        elif not self._traits.takes_text:  # text that is no JSON object, for a template that needs a mapping
            arguments = {"arguments": arguments}
        return {
            **call,
            "id": self._traits.call_id(call["id"]),
            "function": {"name": self._guarded(function["name"]), "arguments": arguments},
        }

    def _guarded(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text.guard(value)
        if isinstance(value, dict):
            return {self._guarded(key): self._guarded(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._guarded(item) for item in value]
        return value

    def _probe(self) -> Report:
        """Check the splice against full rendering; situations in which they differ are not extended."""
        report = probe(
            whole=lambda messages, tools, prompt: self.render_text(messages, tools, generation_prompt=prompt),
            closer=self._traits.splicer.closer_of,
            tail=self._traits.splicer.tail,
            divergence=self.divergence,
        )
        self._unlike = set(report.differing.values())
        return report

    def _reasoning_is_open(self, answer: Message, sampled: Sequence[int]) -> bool:
        """Whether an answer without stop token was cut inside its reasoning."""
        if not answer.get("reasoning_content") or answer["content"] or answer.get("tool_calls"):
            return False
        closer = next(self._text.find_control.finditer(self._traits.reasoning_closer), None)
        return closer is None or self._text.control[closer[0]] not in sampled

    def _found_stops(self, checkpoint: Checkpoint) -> list[int]:
        """The configured end tokens and those that the template closes an assistant's turn with."""
        found = {*checkpoint.end_tokens, *self._traits.stop_tokens()}
        if (eos := checkpoint.special.get("eos_token")) in self._text.control:
            found.add(self._text.control[str(eos)])
        if not found:
            raise SetupError("no stop token found in the tokenizer or template: pass stop_token_ids=[…]")
        return sorted(found)

"""``HfTemplateRenderer``: render with a checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import contextlib
import json
import secrets
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...errors import RenderError, SetupError
from ..messages import Message, Tool
from ..parsed import OutputParser, ParserFactory
from .base import Fork
from .parse import parser_for
from .splice import SENTINEL, Splicer, text_answer
from .template import ChatTemplate
from .text import TextEncoder

PROBE_CALL_ID = "abcdefghi"  # nine alphanumerics: what Mistral's templates insist on


class HfTemplateRenderer:
    """Messages to token ids by the checkpoint's template, held tokens extended by splice, token ids to messages.

    ``tokenizer``: a transformers tokenizer, or the path of a checkpoint folder (``tokenizer.json``,
    ``tokenizer_config.json``, ``chat_template.jinja``); the second needs no transformers.
    ``chat_template``: another template text. ``parser``: an own parser for answers. ``stop_token_ids``: replaces what
    is found in the configuration and the template. ``variables``: defaults for template variables
    (``enable_thinking=False``).
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
        backend, source, special = _load(tokenizer)
        self._text = TextEncoder(backend)
        self._template = ChatTemplate(chat_template or source, {**special, **(variables or {})})
        self._arguments = self._argument_form()
        self._splicer = Splicer(self._template, self._sentinel_arguments, PROBE_CALL_ID, self._text.find_control)
        self._reasoning_closer = self._find_reasoning_closer()
        self._divergence: dict[tuple[Any, ...], str | None] = {}
        self._parser = parser or parser_for(backend, self._template.source)
        self.stop_token_ids = (
            list(stop_token_ids) if stop_token_ids is not None else self._stop_tokens(tokenizer, special)
        )

    # -- messages to tokens ------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), **variables: Any) -> list[int]:
        return self._text.encode(self.render_text(messages, tools, **variables))

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
        self, held: Sequence[int], sampled: int, answer: Message, new: Sequence[Message], **variables: Any
    ) -> list[int] | Fork:
        text = self._splicer.tail(answer, [self._for_template(m) for m in new], **variables)
        if held[-1] not in self.stop_token_ids:  # cut off: what closes the answer is context, like the rest
            if self._reasoning_is_open(answer, held[len(held) - sampled :]):
                text = self._reasoning_closer + text
            return self._text.encode(text)
        tail = self._text.encode(text)
        if tail[:1] == [held[-1]]:
            return tail[1:]
        if self._closes(self._splicer.closer) == held[-1]:
            # The template writes another closer into history than the one the model samples (gpt-oss).
            return Fork("closer_rewritten")
        return tail

    def divergence(
        self, messages: Sequence[Message], answered: int, tools: Sequence[Tool] = (), **variables: Any
    ) -> str | None:
        whole = self.render_text(messages, tools, **variables)
        asked = self.render_text(messages[: answered - 1], tools, **variables)
        said = self.render_text(messages[:answered], tools, generation_prompt=False, **variables)
        closer = self._splicer.call_closer if messages[answered - 1].get("tool_calls") else self._splicer.closer
        said = said.removesuffix(closer)
        if whole.startswith(said) and said.startswith(asked):
            return None
        reasoning = str(messages[answered - 1].get("reasoning_content") or "").strip()
        return "reasoning_dropped" if reasoning and reasoning not in whole else "content_moved"

    def usual_divergence(self, answer: Message, new: Sequence[Message], **variables: Any) -> str | None:
        shape = (
            bool(answer.get("reasoning_content")),
            bool(answer["content"]),
            len(answer.get("tool_calls", ())),
            tuple(message["role"] for message in new),
            tuple(sorted((name, repr(value)) for name, value in variables.items())),
        )
        if shape not in self._divergence:
            try:
                stub = [{"role": "user", "content": "."}, answer, *new]
                self._divergence[shape] = self.divergence(stub, 2, **variables)
            except RenderError:
                self._divergence[shape] = "content_moved"
        return self._divergence[shape]

    # -- tokens to messages ------------------------------------------------------------------------------

    def parser(self, *, prompt_ids: Sequence[int], tools: Sequence[Tool]) -> OutputParser:
        return self._parser(prompt_ids=prompt_ids, tools=tools)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._text.tokenizer.decode(list(ids), skip_special_tokens=False))

    def call_id(self, parsed_id: str | None, number: int) -> str:
        if parsed_id:
            return parsed_id
        # Nine alphanumerics please every template that looks at ids; the client sees nothing odd in them.
        alphabet = string.ascii_letters + string.digits
        return "".join(secrets.choice(alphabet) for _ in range(9))

    # -- preparing messages for the template ---------------------------------------------------------------

    def _for_template(self, message: Message) -> Message:
        if message["role"] != "assistant":
            return {key: self._guarded(value) for key, value in message.items()}
        prepared = dict(message)
        prepared["content"] = self._text.guard(message["content"], special_only=True)
        if message.get("reasoning_content"):
            prepared["reasoning_content"] = self._text.guard(message["reasoning_content"], special_only=True)
        if message.get("tool_calls"):
            prepared["tool_calls"] = [self._call_for_template(call) for call in message["tool_calls"]]
        return prepared

    def _call_for_template(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = self._guarded(function["arguments"])
        if not isinstance(arguments, str):
            arguments = self._arguments(arguments)
        elif self._arguments is _as_mapping:
            arguments = {"arguments": arguments}  # text that is no JSON object, for a template that needs a mapping
        return {**call, "function": {"name": self._guarded(function["name"]), "arguments": arguments}}

    def _guarded(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text.guard(value)
        if isinstance(value, dict):
            return {self._guarded(key): self._guarded(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._guarded(item) for item in value]
        return value

    # -- what the template is like ---------------------------------------------------------------------------

    def _argument_form(self) -> Callable[[dict[str, Any]], Any]:
        """Whether this template takes a call's arguments as a mapping or only as JSON text."""
        for form in (_as_mapping, _as_text):
            call = {
                "type": "function",
                "id": PROBE_CALL_ID,
                "function": {"name": "f", "arguments": form({"k": SENTINEL})},
            }
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                text = self._template.render([{"role": "user", "content": "."}, answer], generation_prompt=False)
            except RenderError:
                continue
            if SENTINEL in text:
                return form
        return _as_mapping

    def _sentinel_arguments(self, body: str) -> Any:
        return self._arguments({"k": body})

    def _find_reasoning_closer(self) -> str:
        """What the template writes between reasoning and content, ``""`` where it knows no reasoning."""
        answer = {"role": "assistant", "content": SENTINEL, "reasoning_content": SENTINEL}
        try:
            text = self._template.render([{"role": "user", "content": "."}, answer], generation_prompt=False)
        except RenderError:
            return ""
        parts = text.split(SENTINEL)
        return parts[1] if len(parts) == 3 else ""

    def _reasoning_is_open(self, answer: Message, sampled: Sequence[int]) -> bool:
        """Whether an answer without stop token was cut inside its reasoning."""
        if not answer.get("reasoning_content") or answer["content"] or answer.get("tool_calls"):
            return False
        closer = next(self._text.find_control.finditer(self._reasoning_closer), None)
        return closer is None or self._text.control[closer[0]] not in sampled

    def _closes(self, ending: str) -> int | None:
        """The control token that ``ending`` begins with."""
        match = self._text.find_control.match(ending)
        return self._text.control[match[0]] if match else None

    def _stop_tokens(self, tokenizer: Any, special: dict[str, str]) -> list[int]:
        """The configured end tokens and those that the template closes an assistant's turn with."""
        found = set(_generation_config_stops(tokenizer))
        if special.get("eos_token") in self._text.control:
            found.add(self._text.control[special["eos_token"]])
        endings = [self._splicer.closer, self._splicer.call_closer]
        if not self._splicer.closer:  # the next role's marker ends the turn (GLM)
            for role in ("user", "tool"):
                with contextlib.suppress(RenderError):
                    endings.append(self._splicer.tail(text_answer(), [{"role": role, "content": "."}]))
        found.update(token for ending in endings if (token := self._closes(ending)) is not None)
        if not found:
            raise SetupError("no stop token found in the tokenizer or template: pass stop_token_ids=[…]")
        return sorted(found)


def _as_mapping(arguments: dict[str, Any]) -> Any:
    return arguments


def _as_text(arguments: dict[str, Any]) -> Any:
    return json.dumps(arguments, ensure_ascii=False)


def _load(tokenizer: Any) -> tuple[Tokenizer, str, dict[str, str]]:
    """``(backend, template, special tokens)`` of a transformers tokenizer or of a checkpoint folder."""
    if isinstance(tokenizer, str | Path):
        return _load_folder(Path(tokenizer))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SetupError(f"{type(tokenizer).__name__} is no fast tokenizer: pass one, or the checkpoint folder's path")
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    if not template:
        raise SetupError("the tokenizer has no chat template: pass chat_template=…")
    special = {k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    return Tokenizer.from_str(backend.to_str()), template, special


def _load_folder(folder: Path) -> tuple[Tokenizer, str, dict[str, str]]:
    if not (folder / "tokenizer.json").is_file():
        raise SetupError(f"{folder} holds no tokenizer.json: pass the folder of a checkpoint")
    config: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    template = config.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text("utf-8")
    if isinstance(template, list):  # named templates
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("tool_use") or named.get("default")
    if not template:
        raise SetupError(f"{folder} holds no chat template: pass chat_template=…")
    special = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                special[name] = text
    return Tokenizer.from_file(str(folder / "tokenizer.json")), template, special


def _generation_config_stops(tokenizer: Any) -> list[int]:
    if not isinstance(tokenizer, str | Path):
        return []
    path = Path(tokenizer) / "generation_config.json"
    if not path.is_file():
        return []
    eos = json.loads(path.read_text("utf-8")).get("eos_token_id")
    return [eos] if isinstance(eos, int) else list(eos or [])

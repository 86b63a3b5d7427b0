"""Chat templates that nobody ships: ways to write conversations that the generic path has to cope with or refuse."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Strange:
    """``stop``: what the model ends an answer with. ``works``: conversations are served (False: the reason why not is
    given, when the renderer is made or at the turn; None: either)."""

    name: str
    source: str
    stop: str = "<|im_end|>"
    works: bool | None = True


MESSAGE = r"'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'"
PROMPT = r"{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"


def each(message: str, prompt: str = PROMPT, messages: str = "messages") -> str:
    """A template that writes one message after the other."""
    return f"{{%- for m in {messages} -%}}{{{{ {message} }}}}{{%- endfor -%}}{prompt}"


TEMPLATES = [
    Strange(
        "system inside the first user message, [INST] marks, no role headers",
        r"""{%- set system, rest = '', messages -%}
{%- if messages[0].role == 'system' -%}
{%- set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' -%}{%- set rest = messages[1:] -%}
{%- endif -%}
{%- for m in rest -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- if m.role == 'user' -%}{{ '[INST] ' + (system if loop.first else '') + m.content.strip() + ' [/INST]' }}
{%- else -%}{{ ' ' + m.content.strip() + ' ' + eos_token }}{%- endif -%}
{%- endfor -%}""",
        " <|im_end|>",
    ),
    Strange(
        "plain words as role headers, one control token at the end of each message",
        each(r"m.role.upper() + ': ' + m.content + eos_token + '\n'", "{{ 'ASSISTANT: ' if add_generation_prompt }}"),
    ),
    Strange(
        "a closer of several tokens",
        each(r"'<|im_start|>' + m.role + '\n' + m.content + '\n--- end of turn ---\n<|im_end|>\n\n'"),
        "\n--- end of turn ---\n<|im_end|>",
    ),
    Strange(
        "no closer: the next role's marker ends the answer",
        each(
            "('<|endoftext|>' if m.role == 'assistant' else '<|im_start|>') + m.content",
            "{{ '<|endoftext|>' if add_generation_prompt }}",
        ),
        "<|im_start|>",
    ),
    Strange(
        "every text trimmed, the last message marked",
        each(r"'<|im_start|>' + m.role + ('!' if loop.last else '') + '\n' + m.content | trim + '<|im_end|>'"),
    ),
    Strange(
        "messages numbered by their place",
        each(
            r"'<|im_start|>' + m.role + ' #' ~ loop.index ~ '\n' + m.content + '<|im_end|>\n'",
            r"{{ '<|im_start|>assistant #' ~ (messages | length + 1) ~ '\n' if add_generation_prompt }}",
        ),
    ),
    Strange(
        "the number of messages at the front",
        "{{ '<|im_start|>' ~ (messages | length) ~ ' messages<|im_end|>' }}" + each(MESSAGE),
    ),
    Strange("answers in history are dropped", each(f"'' if m.role == 'assistant' else {MESSAGE}"), works=False),
    Strange(
        "answers in history in capitals",
        each(MESSAGE.replace("m.content", "(m.content | upper if m.role == 'assistant' else m.content)")),
        works=None,
    ),
    Strange(
        "of the user's messages only the last is shown",
        each(f"{MESSAGE} if loop.last or m.role == 'assistant' else ''"),
    ),
    Strange("the newest message first", each(MESSAGE, messages="messages | reverse"), works=None),
    Strange("a syntax error", "{% for m in messages %}{{ m.content }", works=False),
    Strange("only the configuration's end token ends an answer", each("m.content + ' '", ""), ""),
]

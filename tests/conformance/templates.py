"""Chat templates that nobody ships: ways to write conversations that the generic path has to cope with or refuse."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Strange:
    """``stop``: what the model ends an answer with. ``works``: conversations are served (False: the reason why not is
    given, when the renderer is made or at the turn; None: either)."""

    name: str
    source: str
    stop: str
    works: bool | None = True


TEMPLATES = [
    Strange(
        "system inside the first user message, [INST] marks, no role headers",
        """{%- if messages[0].role == 'system' -%}
{%- set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- if m.role == 'user' -%}{{ '[INST] ' + (system if loop.first else '') + m.content.strip() + ' [/INST]' }}
{%- else -%}{{ ' ' + m.content.strip() + ' ' + eos_token }}{%- endif -%}
{%- endfor -%}""",
        " <|im_end|>",
    ),
    Strange(
        "plain words as role headers, one control token at the end of each message",
        """{%- for m in messages -%}{{ m.role.upper() + ': ' + m.content + eos_token + '\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT: ' }}{%- endif -%}""",
        "<|im_end|>",
    ),
    Strange(
        "a closer of several tokens",
        """{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '\\n--- end of turn ---\\n<|im_end|>\\n\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}""",
        "\n--- end of turn ---\n<|im_end|>",
    ),
    Strange(
        "no closer: the next role's marker ends the answer",
        """{%- for m in messages -%}{{ ('<|im_start|>' if m.role != 'assistant' else '<|endoftext|>') + m.content }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|endoftext|>' }}{%- endif -%}""",
        "<|im_start|>",
    ),
    Strange(
        "every text trimmed, the last message marked",
        """{%- for m in messages -%}{{ '<|im_start|>' + m.role + ('!' if loop.last else '') + '\\n' + m.content | trim + '<|im_end|>' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}""",
        "<|im_end|>",
    ),
    Strange(
        "messages numbered by their place",
        """{%- for m in messages -%}{{ '<|im_start|>' + m.role + ' #' ~ loop.index ~ '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant #' ~ (messages | length + 1) ~ '\\n' }}{%- endif -%}""",
        "<|im_end|>",
    ),
    Strange(
        "the number of messages at the front",
        """{{ '<|im_start|>' ~ (messages | length) ~ ' messages<|im_end|>' }}
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}""",
        "<|im_end|>",
    ),
    Strange(
        "answers in history are dropped",
        """{%- for m in messages if m.role != 'assistant' -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}""",
        "<|im_end|>",
        works=False,
    ),
    Strange(
        "answers in history in capitals",
        """{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + (m.content | upper if m.role == 'assistant' else m.content) + '<|im_end|>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}""",
        "<|im_end|>",
        works=None,
    ),
    Strange(
        "only the last user message is shown",
        """{%- for m in messages -%}{%- if loop.last or m.role == 'assistant' -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}""",
        "<|im_end|>",
    ),
    Strange(
        "the newest message first",
        """{%- for m in messages | reverse -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}""",
        "<|im_end|>",
        works=None,
    ),
    Strange(
        "a syntax error",
        "{% for m in messages %}{{ m.content }",
        "<|im_end|>",
        works=False,
    ),
    Strange(
        "nothing that ends an answer",
        """{%- for m in messages -%}{{ m.content + ' ' }}{%- endfor -%}""",
        "",  # only the configuration's end token
    ),
]

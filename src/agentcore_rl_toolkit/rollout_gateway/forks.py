"""Why a request begins a new row instead of going on with one: the reason codes of a record's ``fork``.

``retry``: the same messages once more. ``branch``: another continuation of an answer that was continued already.
``new_conversation``: nothing of the session's answers is in it (a sub-agent). ``tools_changed``: the same history under
other tools. ``compacted``: the history was shortened, by leaving out its beginning or by a summary the model wrote.
``edited``: the history holds answers that nobody gave here. ``rendered_differently``: an engine that renders chats
itself (:mod:`.proxied`) gave what it had sampled back in other tokens. The renderer adds reasons of its own, see
:class:`.render.base.Fork`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .messages import Message, chain, tools_key
from .traces import TokenTree, Turn
from .wires import WireRequest

_QUOTE = 32
"""Characters of an answer that another message repeats only on purpose."""


def fork_reason(
    tree: TokenTree, request: WireRequest, new: Sequence[Message], key: bytes, parent: Turn | None
) -> str | None:
    """The reason code for a request whose ``new`` messages follow ``parent``; None if it simply goes on."""
    if not tree.turns or (parent is not None and not parent.extended):
        return None
    if any(turn.prompt_key == key for turn in tree.turns):
        return "retry"
    messages = request.decode_messages(0)
    if parent is None and _under_other_tools(tree, messages, request):
        return "tools_changed"
    if _is_compacted(tree, messages, new):
        return "compacted"
    if any(message["role"] == "assistant" for message in new):
        return "edited"
    return "branch" if parent is not None else "new_conversation"


def _under_other_tools(tree: TokenTree, messages: Sequence[Message], request: WireRequest) -> bool:
    own = tools_key(request.tools)
    return any(
        tree.match(messages, chain(messages, (), start=start)) is not None for start in tree.tools_keys if start != own
    )


def _is_compacted(tree: TokenTree, messages: Sequence[Message], new: Sequence[Message]) -> bool:
    answers = [message for message in new if message["role"] == "assistant"]
    if answers and len(messages) < max(turn.depth for turn in tree.turns):
        given = {key for turn in tree.turns for key in chain([turn.answer], ())}
        if given.issuperset(key for answer in answers for key in chain([answer], ())):
            return True
    prompts = [message["content"] for message in new if message["role"] == "user"]
    turns = tree.turns
    if messages[0]["role"] == "system":  # a sub-agent may be told what the main agent said
        opening = chain(messages[:1], ())[0]
        turns = [turn for turn in turns if turn.opening == opening]
    said = (turn.message.content.strip() for turn in turns)
    return any(len(text) >= _QUOTE and any(text in prompt for prompt in prompts) for text in said)

"""Templates of other kinds: they work, or the reason is said; they are never silently wrong.

The reference: in transformers' rendering of the whole conversation, what stands behind the last answer is what the
splice has to append to it.
"""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.errors import RenderError, SetupError
from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer
from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records
from gateway.support import client_of, serving

from .families import TINY, Family
from .templates import TEMPLATES, Strange

TALK = ["How are you?", "And now?", " spaced \n", "Last."]
SAID = ["Fine.", "two\nlines", "Quite fine.", "Bye."]


@pytest.fixture(scope="module", params=TEMPLATES, ids=[t.name for t in TEMPLATES])
def strange(request):
    pytest.importorskip("transformers", reason="the reference renderings come from transformers")
    return request.param


def made(family: Family) -> tuple[HfTemplateRenderer | None, str]:
    """The renderer, or the reason why there is none."""
    try:
        return family.renderer, ""
    except (RenderError, SetupError) as error:
        return None, str(error)


async def converse(family: Family, strange: Strange, renderer: HfTemplateRenderer, history: str):
    outputs = [family.encode(text + strange.stop) for text in SAID]
    backend = ScriptedBackend(outputs)
    messages: list[dict] = []
    statuses = []
    async with serving(backend, rendered_by=renderer, history=history) as gateway, client_of(gateway) as client:
        for text in TALK:
            messages = [*messages, {"role": "user", "content": text}]
            status, body = await client.post({"model": "m", "messages": messages})
            statuses.append((status, body))
            if status != 200:
                break
            messages = [*messages, body["choices"][0]["message"]]
        rows = await gateway.finish_session(client.session.session_id)
    assert check_records(rows) == sum(map(len, outputs[: len(backend.calls)]))
    return backend, outputs, messages, statuses, rows


@pytest.mark.parametrize("history", ["preserve", "template"])
async def test_a_strange_template_works_or_says_why_not(strange: Strange, history: str):
    family = Family("strange", TINY, chat_template=strange.source)
    renderer, reason = made(family)
    if renderer is None:
        assert strange.works is not True, reason
        assert len(reason) > 20
        return
    backend, outputs, messages, statuses, rows = await converse(family, strange, renderer, history)
    status, body = statuses[-1]
    if status != 200:
        assert strange.works is not True, body
        assert status == 400
        assert len(body["error"]["message"]) > 20
        return
    assert strange.works is not False, "this can't have worked"
    prompts = [prompt for prompt, _ in backend.calls]
    assert prompts[0] == family.ids(messages[:1], tools=False)
    for n in range(1, len(prompts)):
        whole = family.text(messages[: 2 * n + 1], tools=False)
        held = prompts[n - 1] + outputs[n - 1]
        if prompts[n][: len(held)] != held:
            assert prompts[n] == family.encode(whole), "a new row begins with the template's own rendering"
            assert any(row.metadata["fork"] for row in rows)
            continue
        found, rest = whole.rpartition(SAID[n - 1])[1:]
        if not found:  # the template shows the answer in another form
            found, rest = whole.rpartition(SAID[n - 1].upper())[1:]
        assert found, "the template drops the answer, yet the row goes on"
        # What the model wrote before its stop token is content to the client, and stands there once more.
        shown = strange.stop.rpartition("<|")[0]
        rest = rest.removeprefix(shown) if rest.startswith(shown + strange.stop) else rest
        stop = strange.stop if rest.startswith(strange.stop) else ""
        assert prompts[n][len(held) :] == family.encode(rest.removeprefix(stop)), "not what the template appends"

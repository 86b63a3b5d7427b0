"""Why a row forked: the reason codes, over real HTTP, for what agents and harnesses do to their histories."""

from __future__ import annotations

from typing import Any

import pytest

from agentcore_rl_toolkit.rollout_gateway.testing import ScriptedBackend, check_records

from .support import CALCULATOR, client_of, encode, serving
from .wires import WIRES, Talker

Messages = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "You are the main agent."}
OTHER_TOOL = {"type": "function", "function": {**CALCULATOR["function"], "name": "abacus"}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def words(text: str) -> ScriptedBackend:
    """Says one of these lines after the other."""
    return ScriptedBackend([encode(f"{line}<|im_end|>") for line in text.split("|")])


async def linear(talker: Talker, history: Messages, *asked: str, **fields: Any) -> Messages:
    """The history after these user messages were answered."""
    for text in asked:
        history = [*history, user(text)]
        history = [*history, await talker.ask(history, **fields)]
    return history


class Told:
    """A session, its talker, and what became of it."""

    def __init__(self, wire: str, text: str) -> None:
        self.wire, self.backend = wire, words(text)
        self.rows: list[Any] = []

    async def run(self, conversation: Any, **options: Any) -> list[str | None]:
        """The reason of each row, and the check that the turns say the same."""
        async with serving(self.backend, **options) as gateway, client_of(gateway) as client:
            await conversation(WIRES[self.wire](client))
            self.rows = await gateway.finish_session(client.session.session_id)
        check_records(self.rows, sampled_twice=True)
        for row in self.rows:
            forks = [turn["fork"] for turn in row.metadata["turns"] if "fork" in turn]
            assert row.metadata["fork"] == (forks[-1] if forks else None)
        return [row.metadata["fork"] for row in self.rows]


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    return request.param


async def test_going_on_is_no_fork(wire):
    told = Told(wire, "one|two|three")
    assert await told.run(lambda t: linear(t, [SYSTEM], "a", "b", "c")) == [None]
    assert all("fork" not in turn for turn in told.rows[0].metadata["turns"])


async def test_the_same_request_again_is_a_retry(wire):
    async def talk(talker):
        history = await linear(talker, [], "a", "b")
        await talker.ask(history[:-1])
        await talker.ask(history[:1])

    told = Told(wire, "one|two|other two|other one")
    assert await told.run(talk) == [None, "retry", "retry"]
    turns = [turn.get("fork") for turn in told.rows[1].metadata["turns"]]
    assert turns == [None, "retry"]  # the answer before it is shared


async def test_another_continuation_of_an_answer_is_a_branch(wire):
    async def talk(talker):
        history = await linear(talker, [SYSTEM], "a", "b")
        side = await linear(talker, history[:3], "c", "d")
        await linear(talker, history, "e")
        await linear(talker, side[:5], "f")

    told = Told(wire, "one|two|three|four|five|six")
    assert await told.run(talk) == ["branch", None, "branch"]
    assert [t.get("fork") for t in told.rows[2].metadata["turns"]] == [None, "branch", "branch"]


async def test_a_sub_agent_is_a_new_conversation(wire):
    async def talk(talker):
        history = await linear(talker, [SYSTEM], "a")
        await linear(talker, [{"role": "system", "content": "You search."}], "b", "c")
        await linear(talker, history, "d")

    assert await Told(wire, "one|two|three|four").run(talk) == ["new_conversation", None]


async def test_the_same_history_under_other_tools(wire):
    async def talk(talker):
        history = await linear(talker, [SYSTEM], "a", tools=[CALCULATOR])
        history = await linear(talker, history, "b", tools=[CALCULATOR, OTHER_TOOL])
        history = await linear(talker, history, "c", tools=[CALCULATOR, OTHER_TOOL])
        await linear(talker, history, "d")

    told = Told(wire, "one|two|three|four")
    assert await told.run(talk) == [None, "tools_changed", "tools_changed"]
    assert [len(row.metadata["turns"]) for row in told.rows] == [1, 2, 1]


async def test_other_tools_for_a_first_message_are_another_conversation(wire):
    async def talk(talker):
        await linear(talker, [SYSTEM], "a", tools=[CALCULATOR])
        await linear(talker, [SYSTEM], "a", tools=[OTHER_TOOL])

    assert await Told(wire, "one|two").run(talk) == [None, "new_conversation"]


async def test_a_sliding_window_is_compaction_every_time_it_slides(wire):
    async def talk(talker):
        history = await linear(talker, [SYSTEM], "a", "b", "c")
        for text in "de":
            history = [SYSTEM, *history[3:]]  # the oldest question and answer are left out
            history = await linear(talker, history, text)
        await linear(talker, history, "f")

    told = Told(wire, "one|two|three|four|five|six")
    assert await told.run(talk) == [None, "compacted", "compacted"]
    assert [len(row.metadata["turns"]) for row in told.rows] == [3, 1, 2]


async def test_a_window_that_keeps_the_first_question_is_compaction_too(wire):
    async def talk(talker):
        history = await linear(talker, [SYSTEM], "a", "b", "c", "d")
        await linear(talker, [*history[:3], *history[7:]], "e")

    told = Told(wire, "one|two|three|four|five")
    assert await told.run(talk) == [None, "compacted"]


SUMMARY = "The user asked for 1+1 and was told that it is 2; nothing is left to be done."


async def test_a_summary_that_the_model_wrote_is_compaction(wire):
    async def talk(talker):
        history = await linear(talker, [SYSTEM], "a", "b", "Summarize all of this.")
        history = await linear(talker, [SYSTEM], f"This session goes on from another:\n{SUMMARY}\nGo on.")
        await linear(talker, history, "c")

    told = Told(wire, f"one|two|{SUMMARY}|four|five")
    assert await told.run(talk) == [None, "compacted"]
    assert len(told.rows[1].metadata["turns"]) == 2


async def test_a_summary_without_any_system_prompt_is_compaction_too(wire):
    async def talk(talker):
        await linear(talker, [], "a", "Summarize all of this.")
        await linear(talker, [], f"{SUMMARY} Go on.")

    assert await Told(wire, f"one|{SUMMARY}|three").run(talk) == [None, "compacted"]


async def test_a_sub_agent_that_is_told_what_the_main_agent_said_is_none(wire):
    """Nor is the next one, with the same system prompt as the first: nothing of its own was shortened."""

    async def talk(talker):
        searcher = {"role": "system", "content": "You search."}
        await linear(talker, [SYSTEM], "a")
        await linear(talker, [searcher], f"The main agent says: {SUMMARY}")
        await linear(talker, [searcher], f"Look again. The main agent says: {SUMMARY}")

    told = Told(wire, f"{SUMMARY}|found|found nothing")
    assert await told.run(talk) == [None, "new_conversation", "new_conversation"]


async def test_short_answers_that_another_prompt_repeats_by_chance_are_none(wire):
    async def talk(talker):
        await linear(talker, [SYSTEM], "a")
        await linear(talker, [SYSTEM], "Is yes. a word?")

    assert await Told(wire, "yes.|sure").run(talk) == [None, "new_conversation"]


async def test_answers_that_nobody_gave_here_are_edits(wire):
    async def talk(talker):
        history = await linear(talker, [SYSTEM], "a", "b")
        await linear(talker, [*history[:2], assistant("something else"), *history[3:]], "c")
        await linear(talker, [*history[:4], assistant("something else")], "c")

    told = Told(wire, "one|two|three|four")
    assert await told.run(talk) == [None, "edited", "edited"]
    assert [len(row.metadata["turns"]) for row in told.rows] == [2, 1, 2]  # what is before the edit is shared


async def test_a_question_that_was_edited_makes_the_answers_after_it_edits(wire):
    async def talk(talker):
        history = await linear(talker, [SYSTEM], "a", "b")
        await linear(talker, [SYSTEM, user("A"), *history[2:]], "c")

    assert await Told(wire, "one|two|three").run(talk) == [None, "edited"]


async def test_a_reordered_history_is_an_edit(wire):
    async def talk(talker):
        history = await linear(talker, [SYSTEM], "a", "b")
        await linear(talker, [SYSTEM, *history[3:], *history[1:3]], "c")

    assert await Told(wire, "one|two|three").run(talk) == [None, "edited"]


async def test_what_the_template_would_leave_out_forks_under_its_own_reason():
    """The tiny template keeps everything; an answer that a client replays without its text is an edit there too."""

    async def talk(talker):
        history = await linear(talker, [SYSTEM], "a")
        await linear(talker, history, "b")
        await linear(talker, [*history[:2], assistant("")], "c")

    assert await Told("chat", "one|two|three").run(talk, history="template") == [None, "edited"]

"""The oracle property for every family: whatever clients and engines do, no trained token is wrong."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.test_property import converse, plans

from .drift import ALLOWED, CASES
from .families import Family


def outputs(family: Family) -> st.SearchStrategy[list[int]]:
    """What the family's model says in any case of the matrix, and random tokens."""
    said = [answer.ids for case in CASES if case.applies(family) for answer in case.answers(family)]
    size = family.tokenizer.get_vocab_size()
    noise = st.lists(st.integers(0, size - 1), min_size=1, max_size=12)
    return st.one_of(st.sampled_from(said), st.sampled_from(said), noise)


def check(family: Family, history: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(plans(outputs(family)), st.booleans())
    def run(plan, streaming_engine):
        asyncio.run(
            converse(
                plan,
                streaming_engine=streaming_engine,
                history=history,
                rendered_by=family.renderer,
                allowed_forks=frozenset(ALLOWED.get(family.name, ())),
            )
        )

    run()


@pytest.mark.parametrize("history", ["preserve", "template"])
@pytest.mark.timeout(240)
def test_no_trained_token_is_wrong(family: Family, history: str):
    check(family, history, 8)


@pytest.mark.conformance
@pytest.mark.parametrize("history", ["preserve", "template"])
@pytest.mark.timeout(600)
def test_no_trained_token_is_wrong_in_many_conversations(family: Family, history: str):
    check(family, history, 50)

"""The drift matrix: one conversation is one row, whatever was sampled and however it comes back."""

from __future__ import annotations

import pytest

from .drift import CASE, play
from .families import Family


@pytest.mark.parametrize("history", ["preserve", "template"])
@pytest.mark.parametrize("case", CASE)
async def test_every_cell_holds(family: Family, case: str, history: str):
    if not CASE[case].applies(family):
        pytest.skip("the family has none of this")
    outcome = await play(family, CASE[case], history, stream=history == "preserve")
    if family.name != "gpt-oss" and history == "preserve":
        assert len(outcome.rows) == 1

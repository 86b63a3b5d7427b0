"""Every test that asks for ``family`` runs for every family; pytest keeps one family's tests together."""

from __future__ import annotations

import pytest

from .families import FAST, MISSING, NAMES, TOKENIZERS, Family, find

PARAMS = [pytest.param(n, id=n, marks=() if n in FAST else pytest.mark.conformance) for n in NAMES]


@pytest.fixture(scope="session", params=PARAMS)
def family(request: pytest.FixtureRequest) -> Family:
    pytest.importorskip("transformers", reason="the reference renderings come from transformers")
    found = find(request.param)
    if found is None:
        pytest.skip(MISSING.format(name=request.param, folder=TOKENIZERS))
    return found

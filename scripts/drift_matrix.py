"""Run the drift matrix of the conformance suite and write it to docs/conformance.md.

    python scripts/drift_matrix.py            # needs all families: see fetch_tokenizers.py
    python scripts/drift_matrix.py --check    # say what would change, write nothing

Exit code 1 where a cell is broken (or, with --check, where the page is not up to date).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "conformance.md"
sys.path.insert(0, str(ROOT / "tests"))

from conformance.drift import CASES, REASONS, Case, play  # noqa: E402 - after the path is set
from conformance.families import NAMES, Family, find  # noqa: E402

MARKS = {"reasoning_dropped": "R", "calls_dropped": "D", "content_moved": "M", "closer_rewritten": "C"}

INTRO = """\
# Conformance

What a model samples, and what a client sends back, are never quite what a chat template would write. This page says
what becomes of it, per model family and case: each cell is a conversation over HTTP with an engine that says the
case's tokens. In every cell every sampled token is trained exactly once and carries the logprob of the very prefix
that the engine saw. Written by `scripts/drift_matrix.py`; the same cells are tests (`make test-conformance`).

- `o`: one row for the whole conversation
- `R` `D` `M` `C`: the conversation forks into more rows, with the reason in the record's `fork`: `reasoning_dropped`
  (the template or the client removed earlier reasoning), `calls_dropped` (the template removes earlier tool calls),
  `content_moved` (it writes earlier content elsewhere or otherwise), `closer_rewritten` (history ends an answer with
  another token than the model samples)
- `-`: the family has none of this · `X`: broken
- `*`: a surrogate, the family's real template over another vocabulary
"""


def cell(family: Family, case: Case, history: str) -> str:
    if not case.applies(family):
        return "-"
    try:
        outcome = asyncio.run(play(family, case, history))
    except Exception as error:  # noqa: BLE001 - whatever is wrong is a broken cell
        print(f"{family.name} {case.name} {history}: {type(error).__name__} {str(error)[:300]}", file=sys.stderr)
        return "X"
    return "".join(sorted({MARKS[fork] for fork in outcome.forks if fork in REASONS})) or "o"


def table(rows: Iterable[Sequence[str]]) -> str:
    head = ["family", *(case.name for case in CASES)]
    lines = [head, ["---"] + [":-:"] * len(CASES), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page() -> str:
    rows: dict[str, list[list[str]]] = {"preserve": [], "template": []}
    missing = []
    for name in NAMES:
        family = find(name)
        if family is None:
            missing.append(name)
            continue
        label = name.removesuffix("-surrogate") + " *" * family.surrogate
        for history, lines in rows.items():
            lines.append([label, *(cell(family, case, history) for case in CASES)])
        print(f"{name}: {' '.join(rows['preserve'][-1][1:])}", file=sys.stderr)
    if missing:
        raise SystemExit(f"the page is about all families; missing: {', '.join(missing)} (scripts/fetch_tokenizers.py)")
    return "\n".join(
        [
            INTRO,
            "## The cases\n",
            "| case | what it is |\n| --- | --- |",
            *(f"| {case.name} | {case.about} |" for case in CASES),
            "",
            '## `history="preserve"` (the default)\n',
            "Earlier content stays as the model saw and produced it.\n",
            table(rows["preserve"]),
            "",
            '## `history="template"`\n',
            "The messages as the client sent them, rendered by the template, decide what stays in context.\n",
            table(rows["template"]),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page would change")
    check = parser.parse_args().check
    logging.disable(logging.ERROR)  # broken cells are reported here
    text = page()
    if check:
        return int(not PAGE.is_file() or PAGE.read_text("utf-8") != text)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, "utf-8")
    return int(" X " in text)


if __name__ == "__main__":
    raise SystemExit(main())

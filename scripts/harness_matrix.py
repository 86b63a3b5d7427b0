"""Run the harness tests and write what came out into docs/harnesses.md.

python scripts/harness_matrix.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.harnesses.environments import MANIFEST  # noqa: E402
from tests.harnesses.test_harnesses import Case, cases  # noqa: E402

PAGE = ROOT / "docs" / "harnesses.md"
_TABLE = re.compile(r"(?<=<!-- matrix -->\n).*?(?=<!-- /matrix -->)", re.DOTALL)


def outcomes() -> dict[str, bool]:
    """Whether each case passed, by its name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "harness", "tests/harnesses", "-k", "tool_loop", "-q"]
        subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, check=False)
        tests = ElementTree.parse(report).iter("testcase")
        bad = ("failure", "error", "skipped")
        return {
            re.sub(r".*\[(.*)\]", r"\1", test.get("name", "")): not any(child.tag in bad for child in test)
            for test in tests
        }


def table(all_cases: Iterable[Case], passed: dict[str, bool]) -> str:
    lines = ["| harness | wire | modes | streamed | rows | |", "|---|---|---|---|---|---|"]
    all_cases = list(all_cases)
    notes = list(dict.fromkeys(case.why for case in all_cases if case.why))
    for (harness, wire), group in groupby(all_cases, lambda case: (case.harness, case.wire)):
        found = list(group)
        [packages] = MANIFEST[harness].values()
        rows = ", ".join(sorted({f"{c.rows} ({notes.index(c.why) + 1})" if c.why else str(c.rows) for c in found}))
        failed = [f"`{case.mode}`" for case in found if not passed.get(str(case))]
        cells = [
            " ".join(f"`{package}`" for package in packages),
            wire,
            *(" ".join(f"`{c.mode}`" for c in found if c.stream == stream) for stream in (False, True)),
            rows,
            f"FAILS: {' '.join(failed)}" if failed else "passes",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{i}. {note}" for i, note in enumerate(notes, 1))]).rstrip() + "\n"


def main() -> int:
    passed, page = outcomes(), PAGE.read_text()
    PAGE.write_text(_TABLE.sub(lambda _: table(cases(), passed), page))
    return 0 if all(passed.values()) and passed else 1


if __name__ == "__main__":
    sys.exit(main())

"""The published packages that a benchmark stands beside, each in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path


def environment(folder: Path, wanted: list[str]) -> Path:
    """A virtual environment with exactly these requirements, made once."""
    python = folder / "bin" / "python"
    marker = folder / ".wanted"
    if not marker.is_file() or marker.read_text("utf-8").split("\n") != wanted:
        print(f"making {folder} with {', '.join(wanted)} …", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted], check=True)
        marker.write_text("\n".join(wanted), "utf-8")
    return python

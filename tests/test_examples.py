"""The examples, run as their readers run them."""

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from processes import assert_nothing_is_left

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_train_locally_trains(tmp_path):
    mark = uuid.uuid4().hex
    ended = subprocess.run(
        [sys.executable, EXAMPLES / "train_locally.py"],
        cwd=tmp_path,
        env={**os.environ, "EXAMPLE_TEST_MARK": mark},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    rewards = [float(reward) for reward in re.findall(r"^\d+: mean reward (\S+), 0 failed$", ended.stdout, re.M)]
    assert len(rewards) == 8, ended.stdout
    assert max(rewards[-3:]) >= rewards[0] + 0.2  # a step's mean moves by a few hundredths from chance alone
    assert list(tmp_path.iterdir()) == []
    assert_nothing_is_left(mark)

"""Names for answers and tool calls: unlike each other, but no secrets."""

from __future__ import annotations

import random

_random = random.Random()


def random_hex(digits: int) -> str:
    """Random hexadecimal digits. A generator seeded once: asking the system for each name costs more than a lookup."""
    return f"{_random.getrandbits(4 * digits):0{digits}x}"

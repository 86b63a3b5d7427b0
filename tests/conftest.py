"""What every test may rely on."""

from __future__ import annotations

import signal

# A shell's background job is started with SIGINT ignored, and hands that on to what it starts: Ctrl-C is tested here.
signal.signal(signal.SIGINT, signal.default_int_handler)

"""What holds for all tests."""

from __future__ import annotations

import signal

# Whoever runs the tests in the background may have them ignore Ctrl-C, and what they start would inherit that: some
# tests interrupt what they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

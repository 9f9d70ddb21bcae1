"""Signals to the launcher, which it passes on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

__all__ = ["take_signals"]


def take_signals(loop: asyncio.AbstractEventLoop, on_signal: Callable[[int], None]) -> Callable[[], None]:
    """Passes SIGINT, SIGTERM and SIGHUP to `on_signal`, except those that were ignored when we were started (nohup).
    Returns what gives them back."""
    taken = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.getsignal(number) for number in taken}
    for number in taken:
        loop.add_signal_handler(number, on_signal, int(number))

    def give_back() -> None:
        for number in taken:
            loop.remove_signal_handler(number)
            if before[number] is not None:
                signal.signal(number, before[number])

    return give_back

"""Garbage collections of a process that has many objects and answers within milliseconds.

Python walks all objects whenever a quarter more of them have survived, at a moment that nobody chooses: with 10,000
tasks and 1,000 connections in memory some 280,000 objects, every few seconds while they change. Here what is there at
the beginning (modules, functions) is never walked again, young objects are collected as ever, and all objects are
walked at fixed times only, so how long and how often that stops the process is known.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Final

__all__ = ["collect_at_times"]

EVERY_S: Final = 600.0
_NEVER: Final = 1 << 30
"""Collections of the middle generation between two of the oldest."""


async def collect_at_times(every_s: float = EVERY_S) -> None:
    """Until it is cancelled; then Python chooses again."""
    young, middle, oldest = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, middle, _NEVER)
    try:
        while True:
            await asyncio.sleep(every_s)
            gc.collect()
    finally:
        gc.set_threshold(young, middle, oldest)
        gc.unfreeze()

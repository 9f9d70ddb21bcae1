"""Pauses before another try."""

from __future__ import annotations

import random
from typing import Final

__all__ = ["spread"]

_RNG: Final = random.SystemRandom()
"""Of our own: a program's own draws from the module's generator, which checkpoints keep, must not depend on how often a
server had to be asked again."""


def spread(pause_s: float) -> float:
    """Half of `pause_s` to all of it, by chance: those who wait for the same server do not all come back at once."""
    return _RNG.uniform(0.5, 1) * pause_s

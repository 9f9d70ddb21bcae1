"""Seeds of simulations beyond those of every test run: some for `make test-slow`, the rest are campaigns.

In blocks, so that workers run them side by side and a rotating part of the campaigns is small.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from tests.support.campaigns.shards import campaign

__all__ = ["more_seeds"]

SLOW: Final = [pytest.mark.slow, pytest.mark.timeout(900)]
BLOCK_S: Final = 30.0
"""Processor time of a block of a campaign."""


def more_seeds(first: int, end: int, *, blocks: int, wide: int, seed_s: float) -> list[Any]:
    """Parameters: ranges from `first` to `end` that are slow, and campaigns from there to `wide`.

    `seed_s`: processor time of one seed.
    """
    step = -(-(end - first) // blocks)
    slow = [pytest.param(range(at, min(at + step, end)), marks=SLOW) for at in range(first, end, step)]
    step = max(1, round(BLOCK_S / seed_s))
    ranges = [range(at, min(at + step, wide)) for at in range(end, wide, step)]
    return [*slow, *(pytest.param(seeds, marks=campaign(expected_s=len(seeds) * seed_s)) for seeds in ranges)]

"""Seeds of simulations beyond those of every test run: some for `make test-slow`, the rest for `make test-campaigns`.

In blocks, so that workers run them side by side.
"""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["more_seeds"]

SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]
CAMPAIGN = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(3600)]


def more_seeds(first: int, end: int, *, blocks: int, wide: int) -> list[Any]:
    """Parameters: ranges from `first` to `end` that are slow, and one from there to `wide` that is a campaign."""
    step = -(-(end - first) // blocks)
    slow = [pytest.param(range(at, min(at + step, end)), marks=SLOW) for at in range(first, end, step)]
    return [*slow, pytest.param(range(end, wide), marks=CAMPAIGN)]

"""What the benchmark of GPUs makes of the times that it took."""

from __future__ import annotations

import pytest
from bench.collectives.ranks.gpu import Watch, shared_share


def test_a_sum_is_under_way_from_its_start_until_its_end_was_seen() -> None:
    watch = Watch()
    watch.see("copy_to_host", 0, 0, 5)
    watch.see("submit", 0, 5, 1_000_000_000)
    watch.see("submit", 1, 1_000_000_000, 2_000_000_000)
    watch.see("copy_to_device", 0, 0, 3_000_000_000)
    watch.see("copy_to_device", 1, 0, 4_000_000_000)
    assert watch.sums == [(1.0, 3.0), (2.0, 4.0)]


def test_the_shared_share_is_of_the_time_with_copies() -> None:
    assert shared_share([(0.0, 2.0), (1.0, 4.0)], [(3.0, 9.0)]) == pytest.approx(0.25)
    assert shared_share([], [(0.0, 1.0)]) == 0.0

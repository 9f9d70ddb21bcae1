from __future__ import annotations

import pytest
from bench.cluster.month import is_met, month
from bench.report import Options


@pytest.mark.parametrize(
    ("value", "better", "limit", "met"),
    [
        (0.9899, "higher", 0.99, False),
        (0.99, "higher", 0.99, True),
        (0.4e-3, "lower", 0.4e-3, True),
        (0.41e-3, "lower", 0.4e-3, False),
    ],
)
def test_a_figure_meets_its_target_or_misses_it(value: float, better: str, limit: float, *, met: bool) -> None:
    assert is_met(value, better, limit) is met


def test_each_row_of_the_month_with_a_target_has_its_verdict() -> None:
    rows = {row.metric: row for row in month(Options("tiny", ("month/1.1",)))}
    assert {name for name, row in rows.items() if row.met is None} == {"lost_node_hours"}
    assert rows["utilisation_share"].met is False  # a day of 20 nodes is half empty
    for name in ("largest_first_start_s", "largest_queued_s"):
        row = rows[name]
        others = [peer.median for peer in row.peers.values() if not isinstance(peer, str)]
        assert len(others) == 3
        assert row.met is (row.ours.median <= min(others))

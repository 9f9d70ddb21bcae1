"""How often somebody may ask."""

from __future__ import annotations

from fireflyer.base.units import SECOND
from fireflyer.cluster.manager.web import rates
from fireflyer.cluster.manager.web.rates import Rates


def test_a_burst_is_allowed_then_so_many_a_second() -> None:
    bucket = Rates(2, 3)
    assert [bucket.wait_ns("ada", 0) for _ in range(3)] == [0, 0, 0]
    wait_ns = bucket.wait_ns("ada", 0)
    assert SECOND // 2 <= wait_ns <= SECOND // 2 + 2
    assert bucket.wait_ns("ada", wait_ns) == 0
    assert bucket.wait_ns("ada", wait_ns) > 0


def test_who_asks_too_often_does_not_push_the_next_time_away() -> None:
    bucket = Rates(1, 1)
    assert bucket.wait_ns("ada", 0) == 0
    for at in range(0, SECOND, SECOND // 10):
        assert bucket.wait_ns("ada", at) > 0
    assert bucket.wait_ns("ada", SECOND + 1) == 0


def test_users_do_not_share_a_bucket() -> None:
    bucket = Rates(1, 1)
    assert bucket.wait_ns("ada", 0) == 0
    assert bucket.wait_ns("bob", 0) == 0


def test_buckets_are_bounded() -> None:
    bucket = Rates(1, 1)
    for number in range(rates.MAX_BUCKETS + 10):
        bucket.wait_ns(str(number), 0)
    assert len(bucket._buckets) == rates.MAX_BUCKETS

"""Fp8 sums that did not fit: who is told, how often, and with which counts."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from tests.support.collectives.thread_ranks import together

from fireflyer.base.units import SECOND
from fireflyer.collectives import Communicator, saturation
from fireflyer.collectives.saturation import SaturationWatch


class Counted:
    """A watch whose counter and clock the test sets."""

    def __init__(self) -> None:
        self.saturated = 0
        self.now_ns = 0
        self.looks = 0
        self.told: list[tuple[int, int]] = []
        self.watch = SaturationWatch(3, self._count, clock_ns=lambda: self.now_ns, warning=saturation.Once())
        self.watch.tell(lambda *counts: self.told.append(counts))

    def _count(self) -> int:
        self.looks += 1
        return self.saturated


def test_it_is_told_when_it_is_noticed_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    one = Counted()
    one.now_ns = SECOND
    one.watch.called(1000)
    one.saturated = 7
    one.now_ns += SECOND
    one.watch.called(500)
    assert one.told == [(7, 1000)]
    one.saturated = 9
    one.now_ns += SECOND
    one.watch.called(500)
    assert one.told == [(7, 1000)]  # once, until the end
    one.watch.end()
    one.watch.end()
    assert one.told == [(7, 1000), (9, 2000)]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "fp8_saturation=7 values=1000 rank=3" in record.message


def test_nothing_is_said_where_all_fitted_or_no_fp8_was_summed(caplog: pytest.LogCaptureFixture) -> None:
    one = Counted()
    one.watch.end()
    assert one.looks == 0
    one.watch.called(10)
    one.watch.end()
    assert (one.told, caplog.records) == ([], [])


def test_the_counter_is_read_at_most_ten_times_a_second() -> None:
    one = Counted()
    one.now_ns = SECOND
    for _ in range(1000):
        one.now_ns += 1_000_000
        one.watch.called(1)
    assert 9 <= one.looks <= 10


def test_a_process_warns_once_for_all_its_communicators(caplog: pytest.LogCaptureFixture) -> None:
    warning = saturation.Once()
    for _ in range(3):
        watch = SaturationWatch(0, lambda: 5, warning=warning)
        watch.called(10)
        watch.end()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_each_value_of_a_result_counts_once_over_all_ranks(nodes: list[int]) -> None:
    told: dict[int, list[tuple[int, int]]] = {0: [], 1: []}

    def body(comm: Communicator) -> None:
        comm.tell_of_saturation(lambda *counts: told[comm.rank].append(counts))
        comm.allreduce(np.full(1000, 0x7E, "u1"), dtype="f8e4m3")  # the largest of its type
        comm.allreduce(np.zeros(500, "u1"), dtype="f8e4m3")
        comm.reduce_scatter(np.zeros(10, "u1"), np.zeros(20, "u1"), dtype="f8e5m2")
        comm.allreduce(np.zeros(300, "u1"))  # bytes, not fp8

    together(nodes, body)
    lasts = [counts[-1] for counts in told.values() if counts]
    assert sum(saturated for saturated, _ in lasts) == 1000
    assert {values for _, values in lasts} == {1520}

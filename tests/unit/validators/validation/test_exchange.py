"""Two ranks that send to each other say how fast, and notice what was changed on the way."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.collectives.thread_ranks import together

from fireflyer.collectives import Communicator
from fireflyer.validators.task import exchange

BLOCK = 1 << 16


class ChangingNetwork:
    """Changes one bit of each block that rank 1 receives, or gives it the block of the round before."""

    def __init__(self, communicator: Communicator, fault: str) -> None:
        self._communicator, self._fault = communicator, fault
        self._before: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def recv(self, array: Any, *, source: int, async_op: bool) -> Any:
        work = self._communicator.recv(array, source=source, async_op=async_op)
        work.wait()
        if self._communicator.rank == 1:
            if self._fault == "bit":
                array[array.size // 2] ^= 1 << 40
            else:
                came = array.copy()
                array[:] = came if self._before is None else self._before
                self._before = came
        return work


def test_what_comes_as_it_was_sent_is_no_fault_and_has_a_speed() -> None:
    reports = together([0, 1], lambda comm: exchange(comm, 0.05, BLOCK))
    assert [report.wrong_blocks for report in reports] == [0, 0]
    assert all(report.bytes_per_s > 0 for report in reports)


@pytest.mark.parametrize("fault", ["bit", "block of before"])
def test_what_was_changed_is_counted_by_both(fault: str) -> None:
    reports = together([0, 1], lambda comm: exchange(ChangingNetwork(comm, fault), 0.02, BLOCK))
    assert reports[0].wrong_blocks == reports[1].wrong_blocks >= 1

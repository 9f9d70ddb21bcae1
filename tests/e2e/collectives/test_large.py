"""More bytes and more elements than 31 bits count, for each way in which the bytes of an operation travel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.collectives.thread_ranks import together

from fireflyer.base.units import SECOND
from fireflyer.collectives import Communicator

pytestmark = [pytest.mark.slow, pytest.mark.processes]

COUNT = 2**31 + 4099
STRIDE = 1_000_003
SPARE_BYTES = 2 << 30
Bytes = npt.NDArray[np.uint8]


def need(size_bytes: int) -> None:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    if free < size_bytes + SPARE_BYTES:
        pytest.skip(f"needs {(size_bytes + SPARE_BYTES) >> 30} GiB of memory, {free >> 30} GiB are available")


def array_of(comm: Communicator, count: int, memory: str) -> Bytes:
    return comm.empty(count, "u8") if memory == "arena" else np.zeros(count, "u1")


def marks(array: Bytes) -> Any:
    """What is at the places that tests write to, and how much is elsewhere."""
    return sorted(set(array[::STRIDE].tolist())), array[-1], np.count_nonzero(array)


@pytest.mark.parametrize(("nodes", "memory"), [([0, 0], "arena"), ([0, 0], "private"), ([0, 1], "private")])
def test_a_sum(nodes: list[int], memory: str) -> None:
    need(2 * COUNT)

    def body(comm: Communicator) -> Any:
        array = array_of(comm, COUNT, memory)
        array[::STRIDE] = comm.rank + 3
        array[-1] = 100
        comm.allreduce(array)
        return marks(array)

    expected = ([7], 200, len(range(0, COUNT, STRIDE)) + 1)
    assert together(nodes, body, timeout_ns=60 * SECOND) == [expected] * 2


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_an_allgather(nodes: list[int]) -> None:
    need(3 * COUNT)
    half = COUNT // 2 + 1

    def body(comm: Communicator) -> Any:
        out, mine = np.zeros(2 * half, "u1"), np.zeros(half, "u1")
        mine[::STRIDE] = comm.rank + 3
        mine[-1] = comm.rank + 100
        comm.allgather(out, mine)
        return marks(out[:half]), marks(out[half:])

    places = len(range(0, half, STRIDE)) + 1
    assert together(nodes, body, timeout_ns=60 * SECOND) == [(([3], 100, places), ([4], 101, places))] * 2

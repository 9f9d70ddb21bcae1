"""A rank whose queue is full waits for room where it may not leave an operation out that others have begun."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.collectives.thread_ranks import fill_queue, telling_of, together

from fireflyer.base.errors import Busy, UsageError
from fireflyer.collectives import Communicator
from fireflyer.collectives.compression import Compression
from fireflyer.collectives.torch.store import WorldNodes
from fireflyer.collectives.torch_group import HfreduceGroup
from fireflyer.collectives.torch_join import Joined
from fireflyer.collectives.work import when_there_is_room
from fireflyer.identity.secrets import new_secret


def while_rank_0_is_full(body: Callable[[Communicator, Callable[[], None]], Any], operation: str) -> list[Any]:
    """What `body(communicator, fill)` returns on two ranks. `fill` takes all room on rank 0; rank 1 goes on behind it
    only when rank 0 has found none for `operation`."""
    found_full = threading.Event()
    pending: list[int] = []

    def run(comm: Communicator) -> Any:
        works: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:

            def fill() -> None:
                if comm.rank == 0:
                    works.extend(fill_queue(comm))
                    pending.append(len(works))
                    patch.setattr(comm, operation, telling_of(Busy, found_full, getattr(comm, operation)))
                else:
                    assert found_full.wait(30)
                    works.extend(comm.allreduce(np.ones(1), async_op=True) for _ in range(pending[0]))

            result = body(comm, fill)
        for work in works:
            work.wait()
        return result

    return together([0, 0], run)


def test_operations_of_a_torch_group_wait_for_room() -> None:
    def body(comm: Communicator, fill: Callable[[], None]) -> list[float]:
        group = HfreduceGroup(Joined(comm, WorldNodes((0, 0), new_secret()), "tcp"))
        tensors = [torch.full((5,), float(number)) for number in range(3)]
        fill()
        work = group.allreduce_coalesced(tensors)
        last = torch.full((5,), 100.0)
        group.allreduce([last]).wait()
        work.wait()
        return [float(tensor[-1]) for tensor in (*tensors, last)]

    assert while_rank_0_is_full(body, "allreduce") == [[0.0, 2.0, 4.0, 200.0]] * 2


def test_the_second_step_of_a_compressed_mean_waits_for_room() -> None:
    def body(comm: Communicator, fill: Callable[[], None]) -> float:
        array = np.full(1000, comm.rank + 1.0, "f4")
        mean = Compression("fp8").start(comm, "bucket", array)
        comm.barrier()
        fill()
        for work in mean.advance():
            work.wait()
        mean.finish()
        return float(array[-1])

    assert while_rank_0_is_full(body, "allgather") == [1.5, 1.5]


def test_other_errors_are_told_at_once() -> None:
    def closed() -> None:
        raise UsageError("the communicator is closed")

    with pytest.raises(UsageError, match="is closed"):
        when_there_is_room(closed)

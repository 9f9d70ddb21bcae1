"""The caller's memory without a copy, and batches of reads spread over the replicas."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.fs.client.memory import memory_of
from fireflyer.fs.client.replica_selector import READ, Reads, ReplicaSelector, check_reads
from fireflyer.fs.schema.routing import Chain, Member, Routing, TargetState

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "given",
    [bytearray(24), memoryview(bytearray(24)), np.zeros((2, 3), np.float32), torch.zeros(12, dtype=torch.bfloat16)],
    ids=["bytearray", "memoryview", "array", "tensor"],
)
def test_what_is_written_into_the_view_is_in_the_memory(given: object) -> None:
    view = memory_of(given, writable=True)
    assert (view.format, view.nbytes) == ("B", 24)
    view[3] = 7
    same = given.view(torch.uint8).numpy() if isinstance(given, torch.Tensor) else given
    assert memoryview(same).cast("B")[3] == 7  # type: ignore[arg-type]


def test_a_view_of_a_tensor_keeps_it() -> None:
    tensor = torch.zeros(4)
    gone = weakref.ref(tensor)
    view = memory_of(tensor, writable=True)
    del tensor
    gc.collect()
    assert gone() is not None
    assert view.nbytes == 16


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (b"abc", "read-only"),
        (np.zeros((4, 4))[:, :2], "not contiguous"),
        (torch.zeros(4, 4).T, "not contiguous"),
        (torch.zeros(4, device="meta"), "on meta"),
        ([1, 2], "does not support the buffer protocol"),
    ],
)
def test_other_memory_is_refused(given: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        memory_of(given, writable=True)


def test_bytes_may_be_written_from_and_nothing_is_memory_too() -> None:
    assert memory_of(b"abc", writable=False).tobytes() == b"abc"
    assert memory_of(np.zeros(0), writable=True).nbytes == 0


def routing(*chains: tuple[int, list[int]]) -> Routing:
    """Chain ids with their serving nodes; of each, node 99 is offline."""
    made = [
        Chain(
            chain,
            chain * 10,
            (*(Member(one, one, TargetState.SERVING) for one in nodes), Member(99, 99, TargetState.OFFLINE)),
        )
        for chain, nodes in chains
    ]
    return Routing(1, chains=tuple(made))


def reads(*chains: int) -> Reads:
    some = np.zeros(len(chains), READ)
    some["chain"], some["length"] = chains, 8
    some["at"] = np.arange(len(chains)) * 8
    return some


def test_reads_go_to_those_that_serve_in_turns() -> None:
    spread = ReplicaSelector(routing((3, [1, 2]), (5, [2, 4])), {1: 11, 2: 12, 4: 14, 99: 19})
    placed, lost = spread.place(reads(*[3] * 8, *[5] * 8))
    assert lost is None
    assert sorted(placed["server"][:8].tolist()) == [11] * 4 + [12] * 4
    assert sorted(placed["server"][8:].tolist()) == [12] * 4 + [14] * 4
    assert placed["chain_version"].tolist() == [30] * 8 + [50] * 8


def test_what_nobody_can_be_asked_for_is_said() -> None:
    spread = ReplicaSelector(routing((3, [1, 2]), (5, [4])), {1: 0})
    placed, lost = spread.place(reads(3, 5, 3, 4, 9))
    assert lost is not None
    assert lost.tolist() == [False, True, False, True, True]
    assert placed["server"][[0, 2]].tolist() == [0, 0]
    assert ReplicaSelector(Routing(0), {}).place(reads(1))[1] is not None


@pytest.mark.parametrize(("field", "value"), [("at", 9), ("length", 17), ("at", (1 << 64) - 4), ("offset", 1 << 26)])
def test_reads_that_do_not_fit_are_refused(field: str, value: int) -> None:
    some = reads(1, 1)
    check_reads(some, 16)
    some[field][1] = value
    with pytest.raises(UsageError):
        check_reads(some, 16)

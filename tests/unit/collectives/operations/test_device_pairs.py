"""Allreduce in pairs, then in lanes: with the device of the tests, whose copies are made by threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.collectives.thread_device import ThreadCopies
from tests.support.collectives.thread_ranks import together
from tests.support.torch_ranks.values import scattered

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.units import MIB
from fireflyer.collectives import Communicator
from fireflyer.collectives.torch import cuda
from fireflyer.collectives.torch.pairs import PAIRED, IpcBuffers, halves
from fireflyer.collectives.torch_devices import DeviceCommunicator
from fireflyer.collectives.torch_pair_join import check_pairs, join_pairs
from fireflyer.identity.secrets import new_secret
from fireflyer.runtime.store import LocalStore

PLACE_BYTES = 4096
ARENA_BYTES = 64 * MIB


@pytest.fixture(autouse=True)
def tensors_are_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cuda.DEVICES, "cpu", ThreadCopies)


def ranks(nodes: list[int], pairs: list[tuple[int, int]], body: Callable[[DeviceCommunicator], Any]) -> list[Any]:
    store, secret = LocalStore(), new_secret()
    boxes: dict[int, torch.Tensor] = {}
    partner_of = {rank: other for pair in pairs for rank, other in (pair, pair[::-1])}

    def run(communicator: Communicator) -> Any:
        comm = DeviceCommunicator.of(communicator)

        def show(pair: Communicator) -> IpcBuffers:
            boxes[comm.rank] = torch.zeros(4 * PLACE_BYTES, dtype=torch.uint8)
            pair.barrier()
            return IpcBuffers(boxes[comm.rank], boxes[partner_of[comm.rank]])

        create = partial(Communicator.create, store=store, secret=secret, arena_bytes=ARENA_BYTES)
        places = [ThreadCopies() for _ in range(3)]
        join_pairs(comm, pairs, create, show, (places[0], places[1], places[2]))
        try:
            return body(comm)
        finally:
            comm.close()
            for place in places:
                place.close()

    return together(nodes, run, arena_bytes=ARENA_BYTES)


def raised(results: list[Any]) -> None:
    assert not [result for result in results if isinstance(result, BaseException)]


def values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return scattered(count, dtype, seed, least=1, most=2)


@given(elements=st.integers(0, 5000), place=st.integers(1, 700))
def test_the_halves_of_a_pair_are_all_of_the_array(elements: int, place: int) -> None:
    first, second = (halves(elements, place, first=which) for which in (True, False))
    seen = [0] * elements
    for mine, others in zip(first, second, strict=True):
        assert (mine.begin, mine.end, mine.other_begin, mine.other_end) == (*others[2:], *others[:2])
        assert max(mine.end - mine.begin, others.end - others.begin) <= place
        for half in (mine, others):
            for element in range(half.begin, half.end):
                seen[element] += 1
    assert seen == [1] * elements


@pytest.mark.parametrize(
    ("nodes", "pairs"), [([0, 0], [(0, 1)]), ([0, 0, 1, 1], [(1, 0), (2, 3)]), ([0] * 4, [(0, 2), (1, 3)])], ids=str
)
def test_sums_of_pairs_are_sums_of_all(nodes: list[int], pairs: list[tuple[int, int]]) -> None:
    world = len(nodes)
    combine: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda every: every.sum(0),
        "mean": lambda every: every.mean(0),
        "min": lambda every: every.amin(0),
        "max": lambda every: every.amax(0),
        "product": lambda every: every.prod(0),
    }

    def body(comm: DeviceCommunicator) -> None:
        works, checks = [], []
        for count in (0, 1, 2, 9001):
            for dtype in PAIRED:
                for op in combine:
                    if op == "mean" and not dtype.is_floating_point:
                        continue
                    mine = values(count, dtype, comm.rank)
                    every = torch.stack([values(count, dtype, rank).double() for rank in range(world)])
                    works.append(comm.allreduce(mine, op=op, async_op=True))
                    checks.append((mine, combine[op](every)))
        for work in works:
            work.wait()
        for found, expected in checks:
            assert torch.equal(found.double(), expected)
        whole = torch.zeros(world * 5)  # other operations go between, in the order of the calls
        comm.allgather(whole, torch.full((5,), float(comm.rank)))
        assert whole.view(world, 5)[:, 0].tolist() == list(range(world))
        assert comm.pairs is not None
        sums = comm.pairs._circle.lane.communicator.stats()
        assert sums.operations["allreduce"] > 0

    raised(ranks(nodes, pairs, body))


def test_only_half_of_the_bytes_go_through_the_host() -> None:
    def body(comm: DeviceCommunicator) -> tuple[int, int]:
        comm.allreduce(torch.ones(100_000))
        assert comm.pairs is not None
        return comm.pairs._circle.lane.communicator.stats().bytes, comm.communicator.stats().bytes

    assert ranks([0, 0, 1, 1], [(0, 1), (2, 3)], body) == [(200_000, 0)] * 4


def test_float8_goes_the_ordinary_way() -> None:
    def body(comm: DeviceCommunicator) -> list[float]:
        tensor = torch.ones(100).to(torch.float8_e4m3fn)
        comm.allreduce(tensor)
        return sorted(set(tensor.float().tolist()))

    assert ranks([0, 0], [(0, 1)], body) == [[2.0]] * 2


def test_a_rank_that_gives_up_fails_all_of_them() -> None:
    go = threading.Event()

    def body(comm: DeviceCommunicator) -> BaseException:
        comm.allreduce(torch.ones(10))
        if comm.rank == 3:
            assert go.wait(30)
            assert comm.pairs is not None
            comm.pairs.abort("rank 3 has had enough")
        work = comm.allreduce(torch.ones(50_000), async_op=True)
        if comm.rank == 0:
            time.sleep(0.01)
            go.set()
        with pytest.raises(FireflyerError) as caught:
            work.wait()
        with pytest.raises(FireflyerError):
            comm.allreduce(torch.ones(5))
        return caught.value

    errors = ranks([0, 0, 1, 1], [(0, 1), (2, 3)], body)
    assert all("rank 3 has had enough" in str(error) for error in errors), errors


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([(0, 1)], "name each of 4 ranks once"),
        ([(0, 1), (2, 2)], "name each of 4 ranks once"),
        ([(0, 2), (1, 3)], "on different nodes"),
    ],
)
def test_pairs_that_cannot_be_are_refused(pairs: list[tuple[int, int]], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check_pairs(pairs, [0, 0, 1, 1])

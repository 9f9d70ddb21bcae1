"""send, recv, all_to_all, gather and scatter: what arrives, and what is said about bad arguments and unlike calls."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.collectives.thread_ranks import together
from tests.support.jobs.launching import wait_until
from tests.support.patience import allowed_s

from fireflyer.base.errors import Aborted, FireflyerError, PeerFailed, Timeout, UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.collectives import Communicator
from fireflyer.collectives.p2p.exchange import RankExchange
from fireflyer.collectives.p2p.peer_listener import PeerListener

LAYOUTS = [[0, 0], [0, 1], [0, 0, 1, 1], [0, 1, 0], [0, 1, 2], [0, 0, 0, 1]]
SIZES = [0, 1, 1000, 16_383, 16_384, 70_000, 600_000]  # of float32: short, the border at 64 KiB, several segments
pairs = pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
layouts = pytest.mark.parametrize("nodes", LAYOUTS, ids=lambda nodes: "".join(map(str, nodes)))


def pattern(source: int, target: int, size: int) -> Any:
    return np.arange(size, dtype="f4") + np.float32(1000 * source + 10 * target)


@layouts
def test_all_to_all_transposes_equal_parts(nodes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        me, ranks = comm.rank, range(comm.world_size)
        for size in SIZES:
            out = np.full(size * comm.world_size, -1, "f4")
            comm.all_to_all(out, np.concatenate([pattern(me, other, size) for other in ranks]))
            assert np.array_equal(out, np.concatenate([pattern(other, me, size) for other in ranks]))

    assert together(nodes, body) == [None] * len(nodes)


@layouts
def test_gather_and_scatter_are_each_others_reverse(nodes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        for number, size in enumerate(SIZES):
            root = number % comm.world_size
            mine = pattern(comm.rank, 0, size)
            at_root = comm.rank == root
            whole = np.empty(size * comm.world_size, "f4") if at_root else None
            comm.gather(mine, root=root, out=whole)
            if whole is not None:
                assert np.array_equal(whole, np.concatenate([pattern(r, 0, size) for r in range(comm.world_size)]))
            back = np.empty_like(mine)
            comm.scatter(back, root=root, array=whole)
            assert np.array_equal(back, mine)

    assert together(nodes, body) == [None] * len(nodes)


@layouts
def test_messages_of_a_pair_arrive_in_order_whatever_their_sizes(nodes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        ranks = [rank for rank in range(comm.world_size) if rank != comm.rank]
        sizes = [*SIZES, 3, 200_000, 0, 5]
        sent = [comm.send(pattern(comm.rank, to, size), to=to, async_op=True) for size in sizes for to in ranks]
        for size in sizes:
            for source in reversed(ranks):
                got = np.empty(size, "f4")
                comm.recv(got, source=source)
                assert np.array_equal(got, pattern(source, comm.rank, size))
        for work in sent:
            work.wait()

    assert together(nodes, body) == [None] * len(nodes)


def test_other_operations_do_not_disturb_messages_and_the_other_way_round() -> None:
    def body(comm: Communicator) -> None:
        other = 1 - comm.rank
        total, got = np.ones(200_000, "f4"), np.empty(300_000, "f4")
        incoming = comm.recv(got, source=other, async_op=True)
        works = [comm.allreduce(total, async_op=True) for _ in range(3)]
        outgoing = comm.send(np.full(300_000, comm.rank, "f4"), to=other, async_op=True)
        out = np.empty(4, "i8")
        comm.all_to_all(out, np.full(4, comm.rank))
        for work in (*works, incoming, outgoing):
            assert work is not None
            work.wait()
        assert (total == 8).all()
        assert (got == other).all()
        assert out.tolist() == [0, 0, 1, 1]

    assert together([0, 0], body) == [None, None]
    assert together([0, 1], body) == [None, None]


def test_tensors_and_any_element_type_travel() -> None:
    def body(comm: Communicator) -> None:
        other = 1 - comm.rank
        arrays: list[Any] = [
            np.full(7, comm.rank, "c16"),
            torch.full((2, 3), comm.rank == 1),
            np.full(3, comm.rank, "u2"),
        ]
        arrays += [torch.full((5,), float(comm.rank)).to(kind) for kind in (torch.bfloat16, torch.float8_e4m3fn)]
        for array in arrays:
            got = torch.empty_like(array) if isinstance(array, torch.Tensor) else np.empty_like(array)
            work = comm.send(array, to=other, async_op=True)
            comm.recv(got, source=other)
            work.wait()
            flat = got.float().flatten().tolist() if isinstance(got, torch.Tensor) else got.tolist()
            assert flat == [other] * len(flat)
        out = np.zeros(3, "c16")
        comm.all_to_all(
            out,
            np.full(3, comm.rank, "c16"),
            in_splits=[1, 2] if comm.rank else [2, 1],
            out_splits=[2, 1] if not comm.rank else [1, 2],
        )

    assert together([0, 1], body) == [None, None]


def test_a_rank_alone_exchanges_with_itself() -> None:
    def body(comm: Communicator) -> None:
        out = np.zeros(4)
        comm.all_to_all(out, np.arange(4.0))
        assert out.tolist() == [0, 1, 2, 3]
        comm.gather(np.full(4, 7.0), root=0, out=out)
        assert out.tolist() == [7] * 4
        comm.scatter(out, root=0, array=np.full(4, 8.0))
        assert out.tolist() == [8] * 4

    assert together([0], body) == [None]


def test_waiting_has_its_own_limit_and_the_message_comes_later() -> None:
    late = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            assert late.wait(30)
            comm.send(np.ones(3), to=0)
            return
        got = np.zeros(3)
        work = comm.recv(got, source=1, async_op=True)
        with pytest.raises(Timeout, match="recv has not completed within 20 ms"):
            work.wait(20 * MS)
        assert not work.done()
        late.set()
        work.wait(30 * SECOND)
        assert got.tolist() == [1, 1, 1]

    assert together([0, 0], body) == [None, None]


F = np.zeros(4, "f4")
BAD: dict[str, tuple[Callable[[Communicator], object], str]] = {
    "to itself": (lambda c: c.send(F, to=0), "rank 0 cannot send to or from itself"),
    "no such rank": (lambda c: c.recv(F, source=2), "source 2 is not a rank"),
    "tag": (lambda c: c.send(F, to=1, tag=-1), "tag -1 is out of range"),
    "parts": (lambda c: c.all_to_all(np.zeros(3, "f4"), F), "out of 3 elements does not divide among 2 ranks"),
    "splits": (lambda c: c.all_to_all(F + 0, F, in_splits=[1, 2]), "in_splits must be 2 numbers"),
    "negative": (lambda c: c.all_to_all(F + 0, F, out_splits=[5, -1]), "out_splits must be 2 numbers"),
    "own part": (lambda c: c.all_to_all(F + 0, F, in_splits=[1, 3]), "sends 4 bytes to itself but expects 8"),
    "types": (lambda c: c.all_to_all(np.zeros(4, "i4"), F), "out holds i32, but the array f32"),
    "in place": (lambda c: c.all_to_all(F, F), "share memory"),
    "no out": (lambda c: c.gather(F, root=0), "the root must pass out="),
    "small out": (lambda c: c.gather(F, root=0, out=np.zeros(7, "f4")), "2 parts of 4 f32 are needed"),
    "no array": (lambda c: c.scatter(F, root=0), "the root must pass array="),
    "no root": (lambda c: c.scatter(F, root=5), "root 5 is not a rank"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_argument_is_told_in_one_line_and_harms_nothing(what: str) -> None:
    call, message = BAD[what]

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(UsageError, match=message) as caught:
                call(comm)
            assert "\n" not in str(caught.value)
        comm.all_to_all(np.empty(4, "f4"), F)

    assert together([0, 0], body) == [None, None]


def received(comm: Communicator, size: int, dtype: str, tag: int) -> None:
    if comm.rank == 0:
        comm.send(np.ones(10, "f4"), to=1)
    else:
        comm.recv(np.empty(size, dtype), source=0, tag=tag)


@pairs
def test_a_message_of_another_size_or_type_ends_its_calls_and_not_the_group(nodes: list[int]) -> None:
    def body(comm: Communicator) -> list[str]:
        told = []
        for sent, wanted in [(10, 11), (10**6, 10**6 + 1), (10**6, 10**6)]:
            array = np.ones(sent) if comm.rank == 0 else np.ones(wanted, "i8" if sent == wanted else "f8")
            try:
                if comm.rank == 0:
                    comm.send(array, to=1)
                else:
                    comm.recv(array, source=0)
            except UsageError as error:
                told.append(str(error))
            comm.allreduce(np.ones(10))
        return told

    sender, receiver = together(nodes, body)
    assert len(sender) == 2  # a short message was sent before anybody could say so
    assert len(receiver) == 3
    assert receiver[0].startswith(
        "rank 0 called send #0 to rank 1 (10 f64, tag 0), but rank 1 called recv #0 from rank 0"
    )
    assert "the message is lost" in receiver[0]
    assert sender == receiver[1:]
    assert "send #1 to rank 1 (1000000 f64, tag 0), but rank 1 called recv #1 from rank 0 (1000001 f64" in sender[0]
    assert "1000000 i64" in sender[1]


@pairs
def test_tags_choose_among_the_messages_of_a_pair(nodes: list[int]) -> None:
    def body(comm: Communicator) -> list[float]:
        sizes = [5, 70_000, 9, 300_000]
        if comm.rank == 0:
            works = [comm.send(np.full(n, n, "f4"), to=1, tag=tag, async_op=True) for tag, n in enumerate(sizes)]
            for work in works:
                work.wait()
            return []
        got = [np.zeros(n, "f4") for n in sizes]
        for tag in reversed(range(len(sizes))):
            comm.recv(got[tag], source=0, tag=tag)
        return [float(array.mean()) for array in got]

    assert together(nodes, body)[1] == [5, 70_000, 9, 300_000]


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 1, 2], [0, 0, 1]], ids=str)
def test_a_receive_from_any_rank_says_whose_message_it_is(nodes: list[int]) -> None:
    def body(comm: Communicator) -> list[int]:
        if comm.rank != 0:
            for size in (3, 100_000):
                comm.send(np.full(size, comm.rank, "f4"), to=0, tag=size)
            return []
        sources = []
        for size in (100_000, 3):
            for _ in range(2):
                got = np.zeros(size, "f4")
                work = comm.recv(got, source=None, tag=size, async_op=True)
                work.wait()
                assert (got == work.source).all()
                sources.append(work.source)
        return sources

    sources = together(nodes, body)[0]
    assert sorted(sources[:2]) == sorted(sources[2:]) == [1, 2]


def test_a_rank_alone_receives_from_nobody() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="no other rank to receive from"):
            comm.recv(np.zeros(3), source=None)

    assert together([0], body) == [None]


UNLIKE: dict[str, tuple[Callable[[Communicator], object], list[str]]] = {
    "tag": (lambda c: received(c, 10, "f4", 3), ["recv #0 from rank 0 (tag 3)", "barrier #0"]),
    "splits": (
        lambda c: c.all_to_all(np.zeros(2), np.zeros(2)) if c.rank == 0 else c.all_to_all(np.zeros(4), np.zeros(4)),
        ["sends", "8", "16", "bytes", "in all_to_all #0, but rank"],
    ),
    "kind": (
        lambda c: c.all_to_all(np.zeros(2), np.zeros(2)) if c.rank == 0 else c.gather(np.zeros(2), root=0),
        ["all_to_all #0", "gather #0"],
    ),
    "root": (
        lambda c: c.gather(np.zeros(2), root=c.rank, out=np.zeros(4)),
        ["root 0", "root 1", "all ranks must make the same calls"],
    ),
    "allreduce": (
        lambda c: c.all_to_all(np.zeros(2), np.zeros(2)) if c.rank == 0 else c.allreduce(np.zeros(2)),
        ["all_to_all #0", "allreduce #0"],
    ),
}


@pytest.mark.parametrize("what", UNLIKE)
@pairs
def test_unlike_calls_are_told_to_both_ranks_with_both_calls(nodes: list[int], what: str) -> None:
    call, words = UNLIKE[what]

    def body(comm: Communicator) -> None:
        call(comm)
        comm.barrier()

    for error in together(nodes, body, timeout_ns=4 * SECOND):
        assert isinstance(error, UsageError), error
        for word in (*words, "rank 0 ", "rank 1 "):
            assert word in str(error), error


def test_a_closed_communicator_says_so_and_a_peer_that_closed_is_named() -> None:
    def body(comm: Communicator) -> Any:
        if comm.rank == 1:
            comm.close()
            with pytest.raises(UsageError, match="is closed"):
                comm.send(F, to=0)
            return None
        with pytest.raises(PeerFailed) as caught:
            comm.recv(np.empty(3), source=1)
        return caught.value.rank

    assert together([0, 0], body) == [1, None]
    assert together([0, 1], body) == [1, None]


def test_a_message_that_nobody_waits_for_may_take_longer_than_the_timeout() -> None:
    sent = threading.Event()

    def body(comm: Communicator) -> float:
        got = np.zeros(100_000)
        if comm.rank == 0:
            work = comm.recv(got, source=1, async_op=True)
            assert sent.wait(30)  # who waited for the message itself would begin to count
            work.wait()
        else:
            time.sleep(0.9)  # the subject: three timeouts
            comm.send(got + 1, to=0)
            sent.set()
        return float(got[-1])

    assert together([0, 0], body, timeout_ns=300 * MS) == [1, 0]


@pairs
def test_a_message_and_a_sum_that_wait_for_each_other_are_told_as_a_deadlock(nodes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.recv(np.zeros(3), source=1)
        comm.allreduce(np.zeros(3))

    for error in together(nodes, body, timeout_ns=SECOND):
        assert isinstance(error, UsageError), error
        assert "rank 0 in recv #0 from rank 1 (tag 0), rank 1 in allreduce #0 for rank 0" in str(error)


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 1, 1]], ids=["one node", "two nodes"])
def test_abort_ends_messages_too(nodes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 2:
            comm.abort("enough")
            return
        comm.recv(np.zeros(3), source=2)

    first, second, _ = together(nodes, body)
    for error in (first, second):
        assert isinstance(error, Aborted), error
        assert "enough" in str(error)


@pytest.mark.slow
@pytest.mark.processes
@pairs
def test_more_than_two_gigabytes(nodes: list[int]) -> None:
    size = 2**31 + 4099

    def body(comm: Communicator) -> None:
        array = np.zeros(size, "u1")
        if comm.rank == 0:
            array[::1_000_003] = 7
            comm.send(array, to=1)
        else:
            comm.recv(array, source=0)
            assert (array[::1_000_003] == 7).all()
            assert np.count_nonzero(array) == len(range(0, size, 1_000_003))

    assert together(nodes, body, timeout_ns=60 * SECOND) == [None, None]


def received_when_the_sender_had_closed(nodes: list[int]) -> float:
    """The sum of a message of 10 000 ones."""
    closed = threading.Event()

    def body(comm: Communicator) -> float:
        got = np.zeros(10_000, "f4")
        if comm.rank == 0:
            comm.send(np.ones(10_000, "f4"), to=1)
            comm.close()
            closed.set()
        else:
            assert closed.wait(30)
            comm.recv(got, source=0)
        return float(got.sum())

    _, total = together(nodes, body)
    assert isinstance(total, float), total
    return total


@pairs
def test_a_short_message_outlives_the_communicator_that_sent_it(nodes: list[int]) -> None:
    assert received_when_the_sender_had_closed(nodes) == 10_000


@pairs
def test_a_message_of_a_rank_that_came_and_left_before_it_was_let_in(
    nodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = threading.Event()
    admit, dial = RankExchange.admit, PeerListener.dial

    def admit_late(self: RankExchange, rank: int, fd: int) -> None:
        assert refused.wait(30)
        admit(self, rank, fd)

    def dial_in_vain(self: PeerListener, rank: int, *, local: bool, timeout_ns: int) -> int:
        try:
            return dial(self, rank, local=local, timeout_ns=timeout_ns)
        except (FireflyerError, OSError):
            refused.set()
            raise

    monkeypatch.setattr(RankExchange, "admit", admit_late)
    monkeypatch.setattr(PeerListener, "dial", dial_in_vain)
    assert received_when_the_sender_had_closed(nodes) == 10_000


def test_nothing_is_left_behind() -> None:
    def body(comm: Communicator) -> None:
        comm.all_to_all(np.empty(400_000), np.ones(400_000))
        if comm.rank == 0:
            raise FireflyerError("enough")

    gc.collect()  # what earlier tests left to it
    before = (set(threading.enumerate()), len(os.listdir("/proc/self/fd")))
    for _ in range(3):
        together([0, 0, 1], body)
        assert (set(threading.enumerate()), len(os.listdir("/proc/self/fd"))) == before


def test_a_call_that_another_rank_left_out_is_found_though_the_next_one_is_alike() -> None:
    """Rank 0 gives, and is in its barrier long before rank 1 comes to one without having taken."""
    first: list[Communicator] = []

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            first.append(comm)
            comm.scatter(np.empty(10, "f4"), root=0, array=np.ones(20, "f4"))
        else:
            wait_until(
                lambda: first and {"barrier"} == {r.kind for r in first[0].records().records[-1:]}, allowed_s(10)
            )
        comm.barrier()

    for error in together([0, 0], body, timeout_ns=2 * SECOND):
        assert isinstance(error, UsageError), error
        assert "called scatter" in str(error), error
        assert "called barrier" in str(error), error

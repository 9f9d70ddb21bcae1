"""What the communicator says to good and to bad arguments; ranks are threads of this process."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fireflyer.base.errors import Aborted, FireflyerError, PeerFailed, Timeout, UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.units import MS, SECOND
from fireflyer.collectives import Communicator, make_plan
from fireflyer.identity.secrets import Secret, new_secret
from fireflyer.runtime.store import LocalStore


@pytest.fixture
def alone() -> Iterator[Communicator]:
    with Communicator.create(rank=0, world_size=1, node=0, store=LocalStore(), secret=new_secret()) as comm:
        yield comm


def together(nodes: list[int], body: Callable[[int, dict[str, Any]], Any], **options: Any) -> list[Any]:
    """What `body(rank, arguments of create)` returns or raises on each of several threads."""
    store, secret = LocalStore(), new_secret()
    results: list[Any] = [None] * len(nodes)

    def run(rank: int) -> None:
        arguments = {"rank": rank, "world_size": len(nodes), "node": nodes[rank], "store": store, "secret": secret}
        try:
            results[rank] = body(rank, arguments | options)
        except FireflyerError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


NUMPY = ["float64", "float32", "float16", "int32", "int64"]
TORCH = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]])
def test_numpy_arrays_and_tensors_of_any_shape_are_summed_in_place(nodes: list[int]) -> None:
    def body(rank: int, arguments: dict[str, Any]) -> list[Any]:
        arrays: list[Any] = [np.full((3, 5), rank + 1, dtype) for dtype in NUMPY]
        arrays += [torch.full((2, 3, 4), rank + 1, dtype=dtype) for dtype in TORCH]
        arrays += [torch.full((7,), rank + 1.0).to(dtype) for dtype in FP8]
        arrays += [np.array(rank + 1.0), np.empty((0, 4), "f4")]
        with Communicator.create(**arguments) as comm:
            for array in arrays:
                comm.allreduce(array)
        return arrays

    for arrays in together(nodes, body):
        for array in arrays:
            wide = array.float().numpy() if isinstance(array, torch.Tensor) else array
            assert (wide == 3).all()


def test_types_that_numpy_lacks_go_by_name() -> None:
    def body(rank: int, arguments: dict[str, Any]) -> list[Any]:
        arrays = {"bf16": np.full(5, 0x3F80, "u2"), "f8e4m3": np.full(5, 0x38, "u1"), "f8e5m2": np.full(5, 0x3C, "u1")}
        with Communicator.create(**arguments) as comm:
            for dtype, array in arrays.items():
                comm.allreduce(array, dtype=dtype)
        return list(arrays.values())

    for bf16, e4m3, e5m2 in together([0, 0], body):  # 1 + 1 = 2
        assert bf16.tolist() == [0x4000] * 5
        assert e4m3.tolist() == [0x40] * 5
        assert e5m2.tolist() == [0x40] * 5


def test_a_type_may_be_called_what_numpy_and_torch_call_it(alone: Communicator) -> None:
    five: Any = np.int64(5)
    root: Any = np.int32(0)
    for asked in ("f32", "float32", np.float32, np.dtype("f4"), torch.float32, np.zeros(1, "f4").dtype):
        assert alone.empty(10, asked).dtype == np.dtype(np.float32)
        assert alone.empty([2, five], asked).shape == (2, 5)
        alone.allreduce(np.zeros(4, "f4"), dtype=asked)
    for dtype in NUMPY:
        assert alone.empty((3,), dtype).dtype == alone.empty(3, np.dtype(dtype)).dtype == np.dtype(dtype)
    assert alone.empty(2, "i8").dtype == np.int8  # in NumPy's short names that is int64
    for asked in ("bfloat16", torch.bfloat16, "bf16"):
        assert alone.empty(2, asked).dtype == np.uint16
        alone.reduce(torch.zeros(2, dtype=torch.bfloat16), root=root, dtype=asked)
        alone.reduce_scatter(np.zeros(2, "u2"), np.zeros(2, "u2"), dtype=asked)


def test_any_type_can_be_broadcast() -> None:
    def body(rank: int, arguments: dict[str, Any]) -> list[Any]:
        arrays: list[Any] = [np.full(9, rank, "u2"), torch.full((3,), rank == 1), np.full(2, rank, "c16")]
        with Communicator.create(**arguments) as comm:
            for array in arrays:
                comm.broadcast(array, root=1)
        return arrays

    for array in itertools.chain(*together([0, 0, 1], body)):
        assert (array == 1).all()


READ_ONLY = np.zeros(4, "f4")
READ_ONLY.flags.writeable = False
LINE = np.zeros(8, "f4")


def without_memory() -> torch.Tensor:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    return tensor


BAD: dict[str, tuple[Callable[[Communicator], object], str]] = {
    "a list": (lambda c: c.allreduce([1.0, 2.0]), "cannot reduce a list"),
    "not contiguous": (lambda c: c.allreduce(np.zeros((4, 4), "f4").T[1:]), "not contiguous"),
    "a tensor that is not contiguous": (lambda c: c.allreduce(torch.zeros(4, 4).t()), "not contiguous"),
    "read-only": (lambda c: c.allreduce(READ_ONLY), "read-only"),
    "a device": (lambda c: c.allreduce(torch.zeros(2, device="meta")), "is on meta"),
    "unsigned": (lambda c: c.allreduce(np.zeros(4, "u2")), "cannot sum elements of type uint16"),
    "big endian": (lambda c: c.allreduce(np.zeros(4, ">f4")), "cannot sum elements of type >f4"),
    "Python objects": (lambda c: c.broadcast(np.array([object()])), "holds Python objects"),
    "a lazy negation": (lambda c: c.allreduce(torch._neg_view(torch.ones(4))), "pass tensor.resolve_neg"),
    "a lazy conjugate": (lambda c: c.broadcast(torch.ones(2, dtype=torch.complex64).conj()), "resolve_conj"),
    "memory given back": (lambda c: c.allreduce(without_memory()), "has no memory of its own"),
    "shifted": (lambda c: c.allreduce(LINE[:6], out=LINE[1:7]), "share memory"),
    "a part in the wrong place": (lambda c: c.allgather(LINE[:4], LINE[1:5]), "share memory"),
    "unknown name": (lambda c: c.allreduce(np.zeros(4, "u2"), dtype="fp8"), "dtype 'fp8' is not known"),
    "wrong carrier": (lambda c: c.allreduce(np.zeros(4, "f4"), dtype="bf16"), "needs an array of uint16"),
    "unknown op": (lambda c: c.allreduce(np.zeros(4, "f4"), op="xor"), "op 'xor' is not known"),
    "root too high": (lambda c: c.broadcast(np.zeros(4, "f4"), root=1), "root 1 is not a rank"),
    "NumPy's short name": (lambda c: c.empty(4, "f4"), r"dtype 'f4' is not known; use one of f64 \(float64\), "),
    "big endian asked for": (lambda c: c.empty(4, np.dtype(">f4")), r"dtype dtype\('>f4'\) is not known"),
    "an abstract type": (lambda c: c.empty(4, np.floating), "is not known"),
    "a carrier": (lambda c: c.empty(4, np.uint16), "is not known"),
    "a list for a type": (lambda c: c.allreduce(LINE, dtype=["f4\n"]), "is not known"),  # type: ignore[arg-type]
    "root as text": (lambda c: c.broadcast(LINE, root="0"), "root '0' is not a whole number"),  # type: ignore[arg-type]
    "root in parts": (lambda c: c.gather(LINE, root=0.0), "root 0.0 is not a whole"),  # type: ignore[arg-type]
    "to nobody": (lambda c: c.send(LINE, to=None), "to None is not a whole number"),  # type: ignore[arg-type]
    "splits in parts": (lambda c: c.all_to_all(LINE, LINE * 2, in_splits=[8.0]), "in_splits, 8.0 is not"),  # type: ignore[list-item]
    "a size in parts": (lambda c: c.empty(10.5), "size 10.5 is not a whole number; pass an int"),  # type: ignore[arg-type]
    "negative sizes": (lambda c: c.empty((-2, -3)), "sizes are not negative"),
    "a size that wraps": (lambda c: c.empty((2**40, 2**40)), "the arena has no 4835703278458516698824704 bytes left"),
    "root negative": (lambda c: c.reduce(np.zeros(4, "f4"), root=-1), "root -1 is not a rank"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_argument_is_told_in_one_line_and_harms_nothing(what: str, alone: Communicator) -> None:
    call, message = BAD[what]
    with pytest.raises(UsageError, match=message) as caught:
        call(alone)
    assert "\n" not in str(caught.value)
    array = np.arange(3.0)
    alone.allreduce(array)
    assert array.tolist() == [0, 1, 2]


def test_a_reader_of_reduce_and_broadcast_may_be_read_only(alone: Communicator) -> None:
    alone.broadcast(READ_ONLY, root=0)
    with pytest.raises(UsageError, match="read-only"):
        alone.reduce(READ_ONLY, root=0)


def test_work_is_asynchronous_and_keeps_its_array_alive() -> None:
    def body(rank: int, arguments: dict[str, Any]) -> tuple[int, float]:
        with Communicator.create(**arguments) as comm:
            works = [comm.allreduce(np.ones(50_000, "f4"), async_op=True) for _ in range(20)]
            last = np.ones(10, "f4")
            work = comm.allreduce(last, async_op=True)
            work.wait()
            assert all(earlier.done() and earlier.error() is None for earlier in works)
            stats = comm.stats()
            assert stats.in_flight_ns > 0
            assert stats.bytes == 20 * 200_000 + 40
            return stats.operations["allreduce"], float(last[0])

    assert together([0, 0], body) == [(21, 2.0), (21, 2.0)]


def test_an_interrupted_call_keeps_its_array_until_the_operation_is_over() -> None:
    store, secret, interrupted = LocalStore(), new_secret(), threading.Event()
    late: list[float] = []

    def follow() -> None:
        with Communicator.create(rank=1, world_size=2, node=0, store=store, secret=secret) as comm:
            interrupted.wait()
            array = np.ones(300_000, "f4")
            comm.allreduce(array)
            late.append(float(array[-1]))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    follower = threading.Thread(target=follow)
    follower.start()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Communicator.create(rank=0, world_size=2, node=0, store=store, secret=secret) as comm:
            array = np.ones(300_000, "f4")
            alive = weakref.ref(array)
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # while the caller works on it itself
            with pytest.raises(KeyboardInterrupt) as caught:
                comm.allreduce(array)
            del array, caught
            gc.collect()
            assert alive() is not None
            interrupted.set()
    finally:
        interrupted.set()
        follower.join()
        signal.signal(signal.SIGALRM, before)
    assert late == [2.0]


def test_what_is_said_at_the_end_arrives_as_text_whatever_it_was() -> None:
    def body(rank: int, arguments: dict[str, Any]) -> str:
        with Communicator.create(**arguments) as comm:
            if rank == 0:
                comm.abort("a\n\x07" + "é" * 300)
            with pytest.raises(Aborted) as raised:
                comm.barrier()
            return str(raised.value)

    first, second = together([0, 1], body)
    assert "a ?éé" in first
    assert "a ?éé" in second


def test_waiting_has_its_own_limit_and_the_operation_goes_on() -> None:
    entered = threading.Event()

    def body(rank: int, arguments: dict[str, Any]) -> float:
        with Communicator.create(**arguments) as comm:
            array = np.ones(3, "f4")
            if rank == 1:
                assert entered.wait(30)
                comm.allreduce(array)
                return float(array[0])
            work = comm.allreduce(array, async_op=True)
            with pytest.raises(Timeout, match="has not completed within 20 ms"):
                work.wait(20 * MS)
            entered.set()
            work.wait(30 * SECOND)
            return float(array[0])

    assert together([0, 0], body) == [2.0, 2.0]


def test_a_closed_communicator_says_so(alone: Communicator) -> None:
    alone.close()
    alone.close()
    with pytest.raises(UsageError, match="is closed"):
        alone.allreduce(np.ones(1, "f4"))


def test_a_rank_that_closes_early_is_named() -> None:
    def body(rank: int, arguments: dict[str, Any]) -> Any:
        comm = Communicator.create(**arguments)
        try:
            if rank == 1:
                return None
            with pytest.raises(PeerFailed, match=r"rank 1 .* closed its communicator") as caught:
                comm.allreduce(np.ones(3, "f4"))
            return caught.value.rank
        finally:
            comm.close()

    assert together([0, 0], body) == [1, None]
    assert together([0, 1], body) == [1, None]


DISAGREEMENTS: dict[str, Callable[[Communicator, bool], object]] = {
    "size": lambda comm, odd: comm.allreduce(np.ones(11 if odd else 10, "f4")),
    "type": lambda comm, odd: comm.allreduce(np.ones(10, "i4" if odd else "f4")),
    "operation": lambda comm, odd: comm.broadcast(np.ones(9)) if odd else comm.allreduce(np.ones(9)),
    "root": lambda comm, odd: comm.broadcast(np.ones(10, "f4"), root=1 if odd else 0),
    "reduce for broadcast": lambda c, odd: c.reduce(np.ones(9), root=0) if odd else c.broadcast(np.ones(9), root=1),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 1, 2, 3], [0, 0, 1, 1]])
def test_ranks_that_make_different_calls_are_told_so(nodes: list[int], what: str) -> None:
    def body(rank: int, arguments: dict[str, Any]) -> None:
        with Communicator.create(**arguments) as comm:
            DISAGREEMENTS[what](comm, rank == len(nodes) - 1)
            comm.barrier()

    for error in together(nodes, body, timeout_ns=4 * SECOND):
        assert isinstance(error, UsageError)
        assert "all ranks must make the same calls in the same order" in str(error)


def test_the_same_name_can_be_used_again_after_closing() -> None:
    def body(rank: int, arguments: dict[str, Any]) -> list[float]:
        sums = []
        for value in (1, 2):
            with Communicator.create(**arguments) as comm:
                array = np.full(3, value, "f4")
                comm.allreduce(array)
                sums.append(float(array[0]))
        return sums

    assert together([0, 1], body) == [[2.0, 4.0], [2.0, 4.0]]


def test_a_process_started_by_hand_is_a_group_of_one() -> None:
    with Communicator.from_environment(RankEnvironment()) as comm:
        assert (comm.rank, comm.world_size, comm.node, comm.nodes) == (0, 1, 0, 1)
        comm.barrier()


def test_a_missing_rank_is_named_to_all_that_came() -> None:
    def body(rank: int, arguments: dict[str, Any]) -> None:
        if rank != 1:
            Communicator.create(**arguments)

    first, _, third = together([0, 0, 0], body, join_timeout_ns=SECOND // 2)
    for error in (first, third):
        assert isinstance(error, UsageError)
        assert "rank 1 did not join" in str(error)


def test_another_secret_is_refused() -> None:
    other: Secret = new_secret()

    def body(rank: int, arguments: dict[str, Any]) -> None:
        Communicator.create(**arguments | ({"secret": other} if rank == 1 else {}))

    first, second = together([0, 0], body, join_timeout_ns=SECOND // 2)
    assert isinstance(first, Timeout)
    assert "rank 1 did not connect" in str(first)
    assert isinstance(second, FireflyerError)


def test_plans_must_agree_with_each_other_and_with_the_group() -> None:
    def unlike(rank: int, arguments: dict[str, Any]) -> None:
        Communicator.create(**arguments, plan=make_plan([0, 0], chunk_bytes=4096 * (rank + 1)))

    def elsewhere(rank: int, arguments: dict[str, Any]) -> None:
        Communicator.create(**arguments, plan=make_plan([0, 1]))

    for error in together([0, 0], unlike):
        assert isinstance(error, UsageError)
        assert "rank 1 was given another plan than rank 0" in str(error)
    for error in together([0, 0], elsewhere):
        assert "the plan is for ranks on nodes 0,1, but the group has them on 0,0" in str(error)


def test_a_plan_given_to_one_rank_is_everybodys() -> None:
    plan = make_plan([0, 1], chunk_bytes=8192)

    def body(rank: int, arguments: dict[str, Any]) -> Any:
        with Communicator.create(**arguments, plan=plan if rank == 1 else None) as comm:
            return comm.plan

    assert together([0, 1], body) == [plan, plan]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rank": 2}, "rank 2 is out of range"), ({"timeout_ns": 5}, "nanoseconds"), ({"node": 3}, "without gaps")],
)
def test_bad_arguments_of_create(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"rank": 0, "world_size": 1, "node": 0, "store": LocalStore(), "secret": new_secret()}
    with pytest.raises(UsageError, match=message):
        Communicator.create(**arguments | change)


def test_a_host_that_is_not_ours_is_told() -> None:
    def body(rank: int, arguments: dict[str, Any]) -> None:
        Communicator.create(**arguments)

    for error in together([0, 1], body, host="192.0.2.1", join_timeout_ns=SECOND):
        assert isinstance(error, UsageError)
        assert "cannot listen on host '192.0.2.1'" in str(error)

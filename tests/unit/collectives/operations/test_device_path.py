"""Tensors on a device, through pinned slots: with the device of the tests, whose copies are made by threads."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.collectives.thread_device import Stream, ThreadCopies
from tests.support.collectives.thread_ranks import fill_queue, telling_of, together
from tests.support.torch_ranks.values import NUMBERS, scattered

from fireflyer.base.errors import Aborted, Busy, FireflyerError, PeerFailed, UsageError
from fireflyer.base.units import MIB, SECOND
from fireflyer.collectives import Communicator
from fireflyer.collectives.devices import engine as device_engine
from fireflyer.collectives.devices import pieces
from fireflyer.collectives.devices.engine import DeviceEngine
from fireflyer.collectives.torch import cuda
from fireflyer.collectives.torch_devices import DeviceCommunicator, reaching

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
ARENA_BYTES = 64 * MIB


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are those of the device here, and pieces are small, so that there are many. All of them take
    the long way, but in tests that ask for `at_once`."""
    monkeypatch.setitem(cuda.DEVICES, "cpu", ThreadCopies)
    monkeypatch.setattr(pieces, "SMALLEST_PIECE_BYTES", 256)
    monkeypatch.setattr(pieces, "AT_ONCE_BYTES", -1)


AT_ONCE = pytest.mark.parametrize("at_once_bytes", [-1, MIB], ids=["engine", "at once"], indirect=True)


@pytest.fixture
def at_once_bytes(request: pytest.FixtureRequest, small_pieces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "AT_ONCE_BYTES", request.param)


def ranks(
    nodes: list[int],
    body: Callable[[DeviceCommunicator], Any],
    *,
    slot_bytes: int = 4096,
    slots: int = 3,
    **places: Any,
) -> list[Any]:
    """`places`: options of each rank's `ThreadCopies`."""

    def run(communicator: Communicator) -> Any:
        comm = communicator.attached = DeviceCommunicator(communicator, slot_bytes=slot_bytes, slots=slots)
        copies = ThreadCopies(**places)
        comm.use(torch.device("cpu"), copies)
        try:
            return body(comm)
        finally:
            comm.close()
            assert copies.under_way == 0
            assert all(memory.released for memory in copies.pinned)
            copies.close()

    return together(nodes, run, arena_bytes=ARENA_BYTES)


def values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return scattered(count, dtype, seed, least=0, most=3)


def total(count: int, dtype: torch.dtype, world: int) -> torch.Tensor:
    return sum(values(count, dtype, rank).to(torch.float32) for rank in range(world)).to(dtype)  # type: ignore[union-attr]


@AT_ONCE
@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 1]], ids=str)
def test_every_operation_gives_what_it_gives_in_host_memory(nodes: list[int], at_once_bytes: None) -> None:
    world = len(nodes)

    def body(comm: DeviceCommunicator) -> None:
        for dtype in [*NUMBERS, *FLOAT8]:
            for count in (0, 5001):
                mine, expected = values(count, dtype, comm.rank), total(count, dtype, world)
                out = torch.zeros_like(mine)
                comm.allreduce(mine, out=out)
                assert torch.equal(out.float(), expected.float())
                assert torch.equal(mine.float(), values(count, dtype, comm.rank).float())
                comm.allreduce(mine)
                assert torch.equal(mine.float(), expected.float())
                mine = values(count, dtype, comm.rank)
                comm.reduce(mine, root=1)
                assert torch.equal(
                    mine.float(), (expected if comm.rank == 1 else values(count, dtype, comm.rank)).float()
                )
                comm.broadcast(mine, root=1)
                assert torch.equal(mine.float(), expected.float())
                whole = torch.zeros(world * count, dtype=dtype)
                comm.allgather(whole, values(count, dtype, comm.rank))
                every = torch.cat([values(count, dtype, rank).float() for rank in range(world)])
                assert torch.equal(whole.float(), every)
                part = torch.zeros(count, dtype=dtype)
                comm.reduce_scatter(part, values(world * count, dtype, comm.rank))
                expected = total(world * count, dtype, world)[comm.rank * count : (comm.rank + 1) * count]
                assert torch.equal(part.float(), expected.float())

    assert together_ok(ranks(nodes, body, slot_bytes=8000))


def together_ok(results: list[Any]) -> bool:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return True


@AT_ONCE
def test_ops_are_those_of_the_communicator(at_once_bytes: None) -> None:
    expected = {"sum": 7.0, "mean": 3.5, "min": 2.0, "max": 5.0, "product": 10.0}

    def body(comm: DeviceCommunicator) -> None:
        for op, value in expected.items():
            tensor = torch.full((3000,), (2.0, 5.0)[comm.rank])
            comm.allreduce(tensor, op=op)
            assert bool((tensor == value).all()), op

    assert together_ok(ranks([0, 0], body))


def test_operations_of_the_exchange_are_copied_as_a_whole() -> None:
    def body(comm: DeviceCommunicator) -> None:
        other = 1 - comm.rank
        for _ in range(2):
            out = torch.zeros(3, 2)
            comm.all_to_all(
                out,
                torch.full((3, 2), float(comm.rank)),
                in_splits=[2, 4] if comm.rank else [4, 2],
                out_splits=[4, 2] if comm.rank == 0 else [2, 4],
            )
            assert out.flatten().tolist() == ([0.0] * 4 + [1.0] * 2 if comm.rank == 0 else [0.0] * 2 + [1.0] * 4)
            gathered = torch.zeros(2, 5) if comm.rank == 1 else None
            comm.gather(torch.full((5,), comm.rank + 1.0), root=1, out=gathered)
            if gathered is not None:
                assert gathered.tolist() == [[1.0] * 5, [2.0] * 5]
            mine = torch.zeros(5)
            comm.scatter(mine, root=1, array=gathered)
            assert mine.tolist() == [comm.rank + 1.0] * 5
            sent = comm.send(torch.full((7,), comm.rank + 5, dtype=torch.int64), to=other, async_op=True)
            got = torch.zeros(7, dtype=torch.int64)
            comm.recv(got, source=other)
            sent.wait()
            assert got.tolist() == [other + 5] * 7

    assert together_ok(ranks([0, 0], body))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=5),
    slots=st.integers(1, 4),
    delays=st.lists(st.sampled_from([0.0, 0.0, 0.0002, 0.002]), min_size=1, max_size=7),
    data=st.data(),
)
def test_late_copies_change_nothing(sizes: list[int], slots: int, delays: list[float], data: st.DataObject) -> None:
    """Several operations under way, each copy late by something else on each rank."""
    kinds = data.draw(
        st.lists(st.sampled_from(["allreduce", "allgather", "broadcast", "host"]), min_size=5, max_size=5)
    )

    def late(_direction: str, number: int) -> None:
        time.sleep(delays[(number * 5 + threading.get_ident()) % len(delays)])

    def body(comm: DeviceCommunicator) -> None:
        works, checks = [], []
        for size, kind in zip(sizes, kinds, strict=False):
            mine = values(size, torch.float32, comm.rank)
            if kind == "host":  # has its place among the others, though these are not submitted yet
                comm.barrier()
                continue
            if kind == "allreduce":
                works.append(comm.allreduce(mine, async_op=True))
                checks.append((mine, total(size, torch.float32, 2)))
            elif kind == "broadcast":
                works.append(comm.broadcast(mine, root=1, async_op=True))
                checks.append((mine, values(size, torch.float32, 1)))
            else:
                whole = torch.zeros(2 * size)
                works.append(comm.allgather(whole, mine, async_op=True))
                checks.append((whole, torch.cat([values(size, torch.float32, rank) for rank in range(2)])))
        for work in reversed(works):
            work.wait()
        for found, expected in checks:
            assert torch.equal(found, expected)

    assert together_ok(ranks([0, 0], body, slots=slots, before=late))


def slow_ups(direction: str, _number: int) -> None:
    time.sleep(0.003 if direction == "up" else 0)


def long_sum(comm: DeviceCommunicator) -> bool:
    mine = values(20_000, torch.float32, comm.rank)
    comm.allreduce(mine)
    return torch.equal(mine, total(20_000, torch.float32, 2))


def test_a_slot_is_used_again_only_after_its_copy_up() -> None:
    """... and that this test would see it: an engine that forgets the copy up mixes pieces."""

    class Forgetful(DeviceEngine):
        def _copy_to_host(self, step: Any) -> None:
            self._device_copies[step.slot] = None
            super()._copy_to_host(step)

    assert ranks([0, 0], long_sum, before=slow_ups) == [True, True]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fireflyer.collectives.torch_devices.DeviceEngine", Forgetful)
        assert False in ranks([0, 0], long_sum, before=slow_ups)


@AT_ONCE
def test_who_receives_only_waits_for_the_slot_too(at_once_bytes: None) -> None:
    def body(comm: DeviceCommunicator) -> bool:
        mine = values(20_000, torch.float32, comm.rank)
        comm.broadcast(mine, root=0)
        return torch.equal(mine, values(20_000, torch.float32, 0))

    assert ranks([0, 0], body, before=slow_ups) == [True, True]


def test_copies_down_run_beside_sums() -> None:
    """While a piece is summed, the next ones come: all slots are in use before the first copy up ends."""
    seen: list[int] = []

    def body(comm: DeviceCommunicator) -> None:
        copies: Any = comm.place(torch.device("cpu"))

        def look(direction: str, number: int) -> None:
            if direction == "up" and number == 0:
                for _ in range(2000):
                    if copies._numbers["down"] >= 3:
                        break
                    time.sleep(0.001)
                seen.append(copies._numbers["down"])

        copies._before = look
        long_sum(comm)

    assert together_ok(ranks([0, 0], body))
    assert min(seen) >= 3


def test_the_callers_stream_orders_operations() -> None:
    """The input is computed late on a stream, the result is used on it, and the caller waits for neither."""

    def body(comm: DeviceCommunicator) -> None:
        copies: Any = comm.place(torch.device("cpu"))
        stream = Stream("compute")
        go = threading.Event()
        mine = torch.zeros(20_000)
        results: list[torch.Tensor] = []

        def late() -> None:
            assert go.wait(30)
            mine.copy_(values(20_000, torch.float32, comm.rank))

        with copies.stream(stream):
            stream.give(late)
            work = comm.allreduce(mine, async_op=True)
            assert not work.done()
            go.set()
            work.wait()
            stream.give(lambda: results.append(mine.clone()))
            copies.here().wait()
        stream.close()
        assert torch.equal(results[0], total(20_000, torch.float32, 2))

    assert together_ok(ranks([0, 0], body, before=slow_ups))


def test_a_result_comes_after_what_the_caller_still_does_with_the_tensor() -> None:
    """The stream still reads the old values of a tensor that is received."""

    def body(comm: DeviceCommunicator) -> None:
        copies: Any = comm.place(torch.device("cpu"))
        stream = Stream("compute")
        mine = torch.full((20_000,), float(comm.rank))
        old: list[torch.Tensor] = []

        def read_late() -> None:
            time.sleep(0.2 * comm.rank)  # long after rank 0 has sent
            old.append(mine.clone())

        with copies.stream(stream):
            stream.give(read_late)
            work = comm.broadcast(mine, root=0, async_op=True)
            work.wait()
            copies.here().wait()
        stream.close()
        assert set(old[0].tolist()) == {float(comm.rank)}
        assert set(mine.tolist()) == {0.0}

    assert together_ok(ranks([0, 0], body))


def test_a_device_that_fails_fails_the_operation_everywhere_after_its_copies() -> None:
    """... and later ones; pinned memory is given back."""

    def body(comm: DeviceCommunicator) -> list[BaseException]:
        copies: Any = comm.place(torch.device("cpu"))

        def fail(direction: str, number: int) -> None:
            time.sleep(0.001)
            if comm.rank == 1 and direction == "down" and number == 5:
                raise RuntimeError("uncorrectable error")

        copies._before = fail
        errors: list[BaseException] = []
        works = [comm.allreduce(torch.ones(20_000), async_op=True) for _ in range(2)]
        for work in works:
            with pytest.raises((FireflyerError, RuntimeError)) as caught:
                work.wait()
            errors.append(caught.value)
        assert copies.under_way == 0
        with pytest.raises(FireflyerError):
            comm.allreduce(torch.ones(5))
        return errors

    first, second = ranks([0, 0], body)
    assert isinstance(first[0], Aborted)
    assert "failed on the device of rank 1: uncorrectable error" in str(first[0])
    assert "uncorrectable error" in str(second[0])


def test_a_rank_without_room_for_more_operations_leaves_out_no_piece() -> None:
    """Rank 0 has as many operations pending as it may have while rank 1 has none: only one of them is told `Busy`."""
    found_full = threading.Event()
    pending: list[int] = []

    def body(comm: DeviceCommunicator) -> tuple[bool, bool]:
        communicator, mine = comm.communicator, values(20_000, torch.float32, comm.rank)
        if comm.rank == 0:
            works = fill_queue(communicator)
            pending.append(len(works))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(communicator, "allreduce", telling_of(Busy, found_full, communicator.allreduce))
                work = comm.allreduce(mine, async_op=True)
                assert found_full.wait(30)
                work.wait(60 * SECOND)
        else:
            assert found_full.wait(30)
            works = [communicator.allreduce(np.ones(1), async_op=True) for _ in range(pending[0])]
            comm.allreduce(mine)
        for work in works:
            work.wait()
        return torch.equal(mine, total(20_000, torch.float32, 2)), long_sum(comm)

    assert ranks([0, 0], body) == [(True, True), (True, True)]


def test_what_cannot_be_started_gives_its_memory_back() -> None:
    def body(comm: DeviceCommunicator) -> int:
        for _ in range(3):
            with pytest.raises(UsageError, match="cannot send to or from itself"):
                comm.send(torch.ones(100), to=comm.rank)
        copies: Any = comm.place(torch.device("cpu"))
        return len(copies.pinned)

    assert ranks([0, 0], body) == [1, 1]


@AT_ONCE
def test_calls_that_differ_raise_on_all_ranks(at_once_bytes: None) -> None:
    def body(comm: DeviceCommunicator) -> BaseException:
        with pytest.raises(FireflyerError) as caught:
            comm.allreduce(torch.ones(5000 + comm.rank * 3000))
        return caught.value

    assert all(isinstance(error, UsageError | PeerFailed) for error in ranks([0, 0], body))


@AT_ONCE
def test_tensors_of_inference_mode_are_taken(at_once_bytes: None) -> None:
    def body(comm: DeviceCommunicator) -> bool:
        with torch.inference_mode():
            return long_sum(comm)

    assert ranks([0, 0], body) == [True, True]


def test_integers_have_a_mean_and_bitwise_operations() -> None:
    def body(comm: DeviceCommunicator) -> list[float]:
        mean, odd = torch.tensor([-3 - 4 * comm.rank]), torch.tensor([5 + comm.rank], dtype=torch.int32)
        comm.allreduce(mean, op="mean")
        comm.allreduce(odd, op="bxor")
        return [mean.item(), odd.item()]

    assert ranks([0, 0], body) == [[-5, 3]] * 2


def test_arguments_are_checked_before_anything_is_started() -> None:
    def body(comm: DeviceCommunicator) -> None:
        wrong: list[tuple[str, Callable[[], Any]]] = [
            ("bool", lambda: comm.allreduce(torch.ones(3, dtype=torch.bool))),
            ("combines the bits of integers", lambda: comm.allreduce(torch.ones(3), op="bxor")),
            ("op 'xor'", lambda: comm.allreduce(torch.ones(3), op="xor")),
            ("its size and type", lambda: comm.allreduce(torch.ones(3), out=torch.ones(4))),
            ("root 2 is not a rank", lambda: comm.broadcast(torch.ones(3), root=2)),
            ("times the 4", lambda: comm.allgather(torch.ones(3), torch.ones(4))),
            ("not contiguous", lambda: comm.allreduce(torch.ones(4, 4).t())),
        ]
        for text, call in wrong:
            with pytest.raises(UsageError, match=text):
                call()
        assert long_sum(comm)

    assert together_ok(ranks([0, 0], body))


def test_the_end_of_a_communicator_ends_its_threads() -> None:
    def body(communicator: Communicator) -> weakref.ref[Any]:
        comm = DeviceCommunicator.of(communicator)
        assert DeviceCommunicator.of(comm) is comm is DeviceCommunicator.of(communicator)
        comm.allreduce(torch.ones(5000))
        assert comm._engine is not None
        return weakref.ref(comm._engine)

    engines = together([0, 0], body, arena_bytes=ARENA_BYTES)
    gc.collect()
    assert [engine() for engine in engines] == [None, None]


def test_the_child_of_a_fork_ends_though_its_parent_had_copies_under_way() -> None:
    statuses: list[int] = []
    forked = threading.Event()

    def wait_for_fork(_direction: str, _number: int) -> None:
        assert forked.wait(30)

    def body(comm: DeviceCommunicator) -> bool:
        mine = values(20_000, torch.float32, comm.rank)
        work = comm.allreduce(mine, async_op=True)
        if comm.rank == 0:
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)  # the end of one that waits
                comm.close()
                os._exit(int(comm._dropper is None or comm._dropper.alive))
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            forked.set()
        work.wait()
        return torch.equal(mine, total(20_000, torch.float32, 2))

    assert ranks([0, 0], body, before=wait_for_fork) == [True, True]
    assert statuses == [0]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ranks_may_wait_at_once_or_not(data: st.DataObject) -> None:
    """Each rank decides for each operation; all cut alike, and keep one order."""
    sizes = data.draw(st.lists(st.integers(0, 9000), min_size=1, max_size=6))
    waits = [data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))) for _ in range(2)]

    def body(comm: DeviceCommunicator) -> None:
        works, checks = [], []
        for number, (size, at_once) in enumerate(zip(sizes, waits[comm.rank], strict=True)):
            mine, expected = values(size, torch.float32, comm.rank), total(size, torch.float32, 2)
            if number % 3 == 2:
                whole = torch.zeros(2 * size)
                work = comm.allgather(whole, mine, async_op=True, at_once=at_once)
                checks.append((whole, torch.cat([values(size, torch.float32, rank) for rank in range(2)])))
            else:
                work = comm.allreduce(mine, async_op=True, at_once=at_once)
                checks.append((mine, expected))
            if at_once:
                work.wait()
                assert torch.equal(*checks[-1])
            works.append(work)
        for work in works:
            work.wait()
        for found, right in checks:
            assert torch.equal(found, right)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "AT_ONCE_BYTES", 30_000)
        assert together_ok(ranks([0, 0], body))


def has_threads(comm: DeviceCommunicator) -> bool:
    return comm._engine is not None


@pytest.mark.parametrize("at_once_bytes", [MIB], indirect=True)
def test_what_is_short_takes_no_thread_where_the_caller_waits(at_once_bytes: None) -> None:
    def body(comm: DeviceCommunicator) -> None:
        for _ in range(3):
            assert long_sum(comm)
        assert not has_threads(comm)
        copies: Any = comm.place(torch.device("cpu"))
        assert len(copies.pinned) == 1, "the memory is used again"
        work = comm.allreduce(torch.ones(20_000), async_op=True)
        assert has_threads(comm), "who does not wait is not held up by the copy to the host"
        work.wait()

    assert together_ok(ranks([0, 0], body, before=slow_ups))


@pytest.mark.parametrize("at_once_bytes", [MIB], indirect=True)
def test_a_device_that_fails_at_once_fails_the_operation_everywhere(at_once_bytes: None) -> None:
    def body(comm: DeviceCommunicator) -> BaseException:
        copies: Any = comm.place(torch.device("cpu"))

        def fail(direction: str, _number: int) -> None:
            if comm.rank == 1 and direction == "down":
                raise RuntimeError("uncorrectable error")

        copies._before = fail
        with pytest.raises((FireflyerError, RuntimeError)) as caught:
            comm.allreduce(torch.ones(20_000))
        return caught.value

    first, second = ranks([0, 0], body)
    assert "a copy failed on the device of rank 1: uncorrectable error" in str(first)
    assert "uncorrectable error" in str(second)


@pytest.mark.parametrize("at_once_bytes", [MIB], indirect=True)
def test_at_once_too_no_piece_is_left_out_where_there_is_no_room(at_once_bytes: None) -> None:
    """The communicator has room for the first piece only: the others wait, and are not started twice."""
    started: list[int] = []

    def body(comm: DeviceCommunicator) -> bool:
        real, refused = comm.communicator.allreduce, [0]

        def allreduce(part: Any, **options: Any) -> Any:
            if comm.rank == 0 and started and refused[0] < 3:
                refused[0] += 1
                raise Busy("no room")
            if comm.rank == 0:
                started.append(len(part))
            return real(part, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comm.communicator, "allreduce", allreduce)
            return long_sum(comm)

    assert ranks([0, 0], body) == [True, True]
    assert sum(started) == 20_000
    assert len(started) > 2


def test_only_known_devices_are_reached() -> None:
    assert reaching("anything", {"cpu"}) == "anything"
    with pytest.raises(UsageError, match="cannot take tensors on xpu"):
        reaching("anything", {"xpu"})
    with pytest.raises(UsageError, match="cannot take tensors on cuda"):
        reaching("anything", {"cuda"})


def test_slots_are_bounded() -> None:
    assert device_engine.SLOTS * device_engine.SLOT_BYTES == 32 * MIB

"""Snapshots of tensors on a device, and loading into them: with the devices of the tests, whose copies are made by
threads, and a thread that trains. On a GPU: tests/e2e/torch/test_cuda_checkpoints.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.checkpoints.states import SHARD, flip, manager
from tests.support.collectives.thread_device import Stream, ThreadCopies, ThreadPoint

from fireflyer.base.errors import DataCorruption, NoSpace
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.ports import DIRECT_ALIGN_BYTES
from fireflyer.base.units import SECOND
from fireflyer.checkpoint import CheckpointManager, State, TrainingLoop
from fireflyer.checkpoint import manager as manager_module
from fireflyer.checkpoint.copying import DeviceCopies, SnapshotCopies
from fireflyer.checkpoint.core.copying import plan_copies
from fireflyer.checkpoint.core.schedule import choose_period
from fireflyer.checkpoint.engine import loading
from fireflyer.runtime.disk import RealDisk

LIMIT_S = 60
COUNT = 5000


@given(st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.booleans())))
def test_each_tensor_is_copied_once_and_what_is_deferred_last(tensors: list[tuple[str | None, bool]]) -> None:
    plan = plan_copies([device for device, _ in tensors], [deferred for _, deferred in tensors])
    numbers = [*plan.host, *(number for batch in plan.batches for number in batch.tensors)]
    assert sorted(numbers) == list(range(len(tensors)))
    assert all(tensors[number][0] is None for number in plan.host)
    for batch in plan.batches:
        assert batch.tensors == sorted(batch.tensors)
        assert {tensors[number] for number in batch.tensors} == {(batch.device, batch.deferred)}
    keys = [(batch.deferred, batch.device) for batch in plan.batches]
    assert len(set(keys)) == len(keys)
    assert [later for later, _ in keys] == sorted(later for later, _ in keys)


class Gate:
    """Copies stop here, each time, until it is open."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        self.is_held: Callable[[str, int], bool] = lambda direction, number: direction == "down"

    def open(self) -> None:
        self._open.set()

    def __call__(self, direction: str, number: int) -> None:
        if self.is_held(direction, number):
            self.reached.set()
            assert self._open.wait(LIMIT_S)


class Gpus:
    """Devices, and on which of them tensors are; all others are in host memory. `train` is the current stream of
    whoever is in `training`."""

    def __init__(self) -> None:
        self.before: Callable[[str, int], None] = lambda direction, number: None
        self.engines: dict[str, ThreadCopies] = {}
        self.places: dict[int, str] = {}
        self.everything: str | None = None
        self.train = Stream("train")

    def put(self, tensor: torch.Tensor, device: str = "gpu") -> torch.Tensor:
        self.places[tensor.data_ptr()] = device
        return tensor

    def device_of(self, tensor: torch.Tensor) -> str | None:
        return self.everything or self.places.get(tensor.data_ptr())

    def engine(self, device: str = "gpu") -> ThreadCopies:
        if device not in self.engines:
            self.engines[device] = ThreadCopies(before=lambda direction, number: self.before(direction, number))
        return self.engines[device]

    def training(self, device: str = "gpu") -> Any:
        return self.engine(device).stream(self.train)

    def close(self) -> None:
        self.train.close()
        for engine in self.engines.values():
            engine.close()
            assert engine.under_way == 0


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    some = Gpus()
    monkeypatch.setattr(manager_module, "DeviceCopies", lambda: DeviceCopies(some.device_of, some.engine))
    yield some
    some.close()


@pytest.fixture
def ours(gpus: Gpus, tmp_path: Path) -> Iterator[CheckpointManager]:
    with manager(tmp_path, keep=100) as one:
        yield one


def full(value: float) -> torch.Tensor:
    return torch.full((COUNT,), value)


def overwrite(tensor: torch.Tensor) -> Callable[[], None]:
    def act() -> None:
        tensor.fill_(-1.0)

    return act


def saved(one: CheckpointManager) -> dict[str, torch.Tensor]:
    restored = one.restore()
    assert restored is not None
    return restored.shared


# Saving.


def test_a_step_that_overwrites_at_once_changes_nothing_that_is_saved(gpus: Gpus, ours: CheckpointManager) -> None:
    x, gate = gpus.put(full(0.0)), Gate()
    gpus.before = gate
    with gpus.training():
        handle = ours.save(1, State({"x": x}))
        overwritten = gpus.train.give(overwrite(x))
        assert gate.reached.wait(LIMIT_S), "save has returned before the copy was made"
        gate.open()
        handle.result()
        overwritten.wait()
    assert torch.equal(saved(ours)["x"], full(0.0))
    assert torch.equal(x, full(-1.0))


def test_what_was_computed_before_is_saved(gpus: Gpus, ours: CheckpointManager) -> None:
    x, begin, order = gpus.put(full(0.0)), threading.Event(), list[str]()
    gpus.before = lambda direction, number: order.append("copied")

    def compute() -> None:
        assert begin.wait(LIMIT_S)
        order.append("computed")
        x.fill_(3.0)

    with gpus.training():
        gpus.train.give(compute)
        handle = ours.save(1, State({"x": x}))
        begin.set()
        handle.result()
    assert order == ["computed", "copied"]
    assert torch.equal(saved(ours)["x"], full(3.0))


def test_deferred_copies_hold_up_the_update_and_nothing_before_it(gpus: Gpus, ours: CheckpointManager) -> None:
    x, gate = gpus.put(full(3.0)), Gate()
    gpus.before = gate
    with gpus.training():
        handle = ours.save(1, State({"x": x}), deferred={"x"})
        gpus.train.give(lambda: None).wait()  # a forward and backward pass, while nothing is copied
        handle.before_update()
        updated = gpus.train.give(overwrite(x))
        gate.open()
        updated.wait()
        handle.result()
    assert torch.equal(saved(ours)["x"], full(3.0))


def test_what_is_not_deferred_is_copied_first_and_waited_for(gpus: Gpus, ours: CheckpointManager) -> None:
    x, buffer, gate = gpus.put(full(3.0)), gpus.put(full(4.0)), Gate()
    gate.is_held = lambda direction, number: number == 1
    gpus.before = gate
    with gpus.training():
        handle = ours.save(1, State({"x": x, "buffer": buffer}), deferred={"x"})
        gpus.train.give(overwrite(buffer)).wait()  # though x is not copied yet
        handle.before_update()
        gpus.train.give(overwrite(x))
        gate.open()
        handle.result()
    found = saved(ours)
    assert torch.equal(found["x"], full(3.0))
    assert torch.equal(found["buffer"], full(4.0))


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
def test_without_the_order_these_tests_would_see_torn_tensors(
    gpus: Gpus, ours: CheckpointManager, monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    monkeypatch.setattr(SnapshotCopies, "follow", lambda self, *, deferred: None)
    x, gate = gpus.put(full(3.0)), Gate()
    gpus.before = gate
    with gpus.training():
        handle = ours.save(1, State({"x": x}), deferred={"x"} if deferred else ())
        handle.before_update()
        gpus.train.give(overwrite(x)).wait()
        gate.open()
        handle.result()
    assert torch.equal(saved(ours)["x"], full(-1.0))


def test_several_devices_beside_host_memory(gpus: Gpus, ours: CheckpointManager) -> None:
    on_a, on_b, on_host = gpus.put(full(1.0), "a"), gpus.put(full(2.0), "b"), full(3.0)
    views = {"scalar": torch.tensor(2.5), "strided": torch.arange(12.0).reshape(3, 4).t()}
    state = State({"a": on_a, "b": on_b, "host": on_host, **{n: gpus.put(v, "a") for n, v in views.items()}})
    expected = {name: tensor.clone() for name, tensor in state.shared.items()}
    with gpus.training("a"), gpus.training("b"):
        handle = ours.save(1, state)
        for tensor in state.shared.values():
            if tensor is not on_host:
                gpus.train.give(overwrite(tensor))
        on_host.fill_(-1.0)
        handle.result()
    found = saved(ours)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_period_that_is_chosen_counts_the_time_until_devices_have_copied(gpus: Gpus, tmp_path: Path) -> None:
    class Clock:
        time_ns = 10_000 * SECOND

        def now_ns(self) -> int:
            return Clock.time_ns

    gate = Gate()
    gpus.before = gate
    with manager(tmp_path, clock=Clock(), mttf_ns=8 * 3600 * SECOND) as one, gpus.training():
        handle = one.save(1, State({"x": gpus.put(full(1.0))}))
        Clock.time_ns += 7 * SECOND
        gate.open()
        handle.result()
        one.wait()
        one.due_here(2, Clock.time_ns)
        assert one._schedule.chosen == choose_period(8 * 3600 * SECOND, 7 * SECOND, 7 * SECOND)


def test_a_copy_that_fails_fails_the_save_and_no_other(gpus: Gpus, ours: CheckpointManager) -> None:
    x = gpus.put(full(3.0))

    def fail(direction: str, number: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gpus.before = fail
    error = ours.save(1, State({"x": x}), deferred={"x"}).error()
    assert error is not None
    assert "illegal memory access" in error.message
    gpus.before = lambda direction, number: None
    ours.wait()
    ours.save(2, State({"x": x})).result()
    assert torch.equal(saved(ours)["x"], full(3.0))


def test_a_copy_that_cannot_be_started_waits_for_those_that_were(
    gpus: Gpus, ours: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State({"a": gpus.put(full(1.0), "a"), "b": gpus.put(full(2.0), "b")})

    def refuse(*_: object) -> ThreadPoint:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(gpus.engine("b"), "tensors_to_host", refuse)
    gpus.before = lambda direction, number: time.sleep(0.3)  # save must not return before
    handle = ours.save(1, state)
    assert gpus.engine("a").under_way == 0
    error = handle.error()
    assert error is not None
    assert "out of memory" in error.message


class FullDisk(RealDisk):
    def mkdir(self, path: str) -> None:
        if "/.tmp-" in path:
            raise NoSpace("no space left")
        super().mkdir(path)


def test_a_save_that_fails_early_ends_when_its_copies_have(gpus: Gpus, tmp_path: Path) -> None:
    x, gate = gpus.put(full(3.0)), Gate()
    gpus.before = gate
    with manager(tmp_path, disk=FullDisk()) as ours:
        handle = ours.save(1, State({"x": x}), deferred={"x"})
        assert isinstance(handle.error(), NoSpace)
        assert ours.saving, "another save would copy into the image while this one does"
        gate.open()
        ours.wait()
        assert gpus.engine().under_way == 0


def test_the_image_is_pinned_once_and_released_when_it_grows(gpus: Gpus, ours: CheckpointManager) -> None:
    small, large = gpus.put(full(1.0)), gpus.put(torch.full((3 * COUNT,), 2.0))
    ours.reserve(State({"x": small}))
    for step in (1, 2):
        ours.save(step, State({"x": small}), blocking=True).result()
    assert [memory.released for memory in gpus.engine().pinned] == [False]
    ours.save(3, State({"x": large}), blocking=True).result()
    assert [memory.released for memory in gpus.engine().pinned] == [True, False]
    assert torch.equal(saved(ours)["x"], large)


def test_a_state_that_moves_to_a_device_has_its_image_pinned(gpus: Gpus, ours: CheckpointManager) -> None:
    x = full(1.0)
    ours.save(1, State({"x": x}), blocking=True).result()
    assert not gpus.engines
    ours.save(2, State({"x": gpus.put(x)}), blocking=True).result()
    assert len(gpus.engine().pinned) == 1
    assert torch.equal(saved(ours)["x"], full(1.0))


# Loading.


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each buffer is used again many times."""
    monkeypatch.setattr(loading, "READ_BYTES", 2 * DIRECT_ALIGN_BYTES)


def loadable() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"a": 1, "b": 0, "c": 70_001, "d": 5000, "e": 3}
    return {name: torch.rand(size, generator=generator) for name, size in sizes.items()}


@pytest.mark.usefixtures("small_pieces")
def test_tensors_on_devices_are_filled_in_place(gpus: Gpus, ours: CheckpointManager) -> None:
    ours.save(1, State(loadable()), blocking=True).result()
    places = {"a": "one", "b": "one", "c": "one", "d": "two"}
    into = {name: torch.zeros_like(tensor) for name, tensor in loadable().items()}
    for name, device in places.items():
        gpus.put(into[name], device)
    restored = ours.restore(into=into)
    assert restored is not None
    for name, tensor in loadable().items():
        assert torch.equal(restored.shared[name], tensor), name
        assert restored.shared[name] is into[name]
    assert all(memory.released for engine in gpus.engines.values() for memory in engine.pinned)


def test_what_a_device_was_given_before_a_restore_comes_before(gpus: Gpus, ours: CheckpointManager) -> None:
    ours.save(1, State({"x": full(3.0)}), blocking=True).result()
    x, begin, order = gpus.put(full(0.0)), threading.Event(), list[str]()

    def use() -> None:
        assert begin.wait(LIMIT_S)
        order.append("used")
        x.fill_(-1.0)

    gpus.before = lambda direction, number: order.append("copied")
    with gpus.training():
        gpus.train.give(use)
        threading.Timer(0.3, begin.set).start()  # a copy that does not wait is made long before
        ours.restore(into={"x": x})
    assert order == ["used", "copied"]
    assert torch.equal(x, full(3.0))


@pytest.mark.usefixtures("small_pieces")
def test_a_buffer_is_not_read_into_while_a_device_copies_from_it(gpus: Gpus, ours: CheckpointManager) -> None:
    ours.save(1, State(loadable()), blocking=True).result()
    into = {name: gpus.put(torch.zeros_like(tensor)) for name, tensor in loadable().items()}
    # late: other reads would have ended long ago if they were let into the buffer
    gpus.before = lambda direction, number: time.sleep(0.01)
    restored = ours.restore(into=into)
    assert restored is not None
    assert all(torch.equal(restored.shared[name], tensor) for name, tensor in loadable().items())


@pytest.mark.usefixtures("small_pieces")
def test_what_is_damaged_is_found_and_nothing_is_left_under_way(
    gpus: Gpus, ours: CheckpointManager, tmp_path: Path
) -> None:
    name = ours.save(1, State(loadable()), blocking=True).result()
    flip(tmp_path / str(name) / SHARD, 100_000)
    into = {name: gpus.put(torch.zeros_like(tensor)) for name, tensor in loadable().items()}
    with pytest.raises(DataCorruption, match="checksum"):
        ours.restore(into=into)
    assert gpus.engine().under_way == 0
    assert all(memory.released for memory in gpus.engine().pinned)


def test_a_copy_to_a_device_that_fails_fails_the_restore(gpus: Gpus, ours: CheckpointManager) -> None:
    ours.save(1, State({"x": full(1.0)}), blocking=True).result()

    def fail(direction: str, number: int) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    gpus.before = fail
    with pytest.raises(RuntimeError, match="launch failure"):
        ours.restore(into={"x": gpus.put(full(0.0))})
    assert all(memory.released for memory in gpus.engine().pinned)


# The loop.


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(x)).square().mean()  # type: ignore[no-any-return]


def train(gpus: Gpus, directory: Path, update: Callable[[int, torch.optim.Optimizer], None], **options: Any) -> None:
    """Saves after each of three steps; in `update` is what happens after the backward pass. Everything is on a device
    that has one batch of copies for each save, or two with deferred tensors."""
    gpus.everything = "gpu"
    torch.manual_seed(2)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected: dict[int, dict[str, torch.Tensor]] = {}
    with TrainingLoop(directory, model, optimizer, period_steps=1, keep=9, env=RankEnvironment(), **options) as loop:
        for step in loop.steps(3):
            optimizer.zero_grad()
            model(torch.rand(16, 8)).backward()
            update(step, optimizer)
            loop.manager.wait()
            expected[step] = {name: tensor.clone() for name, tensor in loop._state().shared.items()}
    assert not optimizer._optimizer_step_pre_hooks
    gpus.everything = None
    for step in (3, 2, 1):
        with manager(directory) as one:
            restored = one.restore()
        assert restored is not None
        assert restored.step == step
        torn = [name for name, tensor in expected[step].items() if not torch.equal(restored.shared[name], tensor)]
        assert not torn, f"of step {step}: {torn}"
        (directory / restored.name).rename(directory.with_name(f"seen-{step}"))


def test_the_optimizer_waits_for_the_copies_and_the_passes_before_it_do_not(gpus: Gpus, tmp_path: Path) -> None:
    gates = {2 * step + 1: Gate() for step in range(2)}  # the second batch of each save: what is deferred
    gpus.before = lambda direction, number: gates[number](direction, number) if number in gates else None

    def update(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step > 1:
            gate = gates[2 * (step - 2) + 1]
            assert gate.reached.wait(LIMIT_S)
            assert gpus.engine().under_way == 1, "the forward and backward pass have not waited"
            threading.Timer(0.05, gate.open).start()  # while the optimizer waits
        optimizer.step()

    train(gpus, tmp_path / "c", update)
    assert len(gpus.engine().made) == 5, "the last save defers nothing, as nothing follows"


def test_without_an_optimizer_that_waits_the_loop_is_found_out(
    gpus: Gpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SnapshotCopies, "before_update", lambda self: None)
    gate = Gate()
    gate.is_held = lambda direction, number: number == 1
    gpus.before = gate

    def update(step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        if step == 2:
            gate.open()

    with pytest.raises(AssertionError, match=r"of step [12]"):  # the first for certain; the second is looked at before
        train(gpus, tmp_path / "c", update)


def test_the_loop_defers_nothing_where_it_is_told_so(gpus: Gpus, tmp_path: Path) -> None:
    train(gpus, tmp_path / "c", lambda step, optimizer: optimizer.step(), copies_beside_steps=False)
    assert len(gpus.engine().made) == 3


def test_after_a_step_without_an_update_nothing_is_deferred(gpus: Gpus, tmp_path: Path) -> None:
    def update(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step == 1:
            optimizer.step()

    train(gpus, tmp_path / "c", update)
    assert len(gpus.engine().made) == 4

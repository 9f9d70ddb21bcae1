"""Checkpoints of tensors on a GPU, taken beside training: `pytest -m gpu`.

Copies are held up where a test needs to know that they have not taken place yet: a kernel that only waits is given to
the stream of the copies first. What is asserted follows from the order of streams, not from how long something takes.
The order itself is tested without a GPU in tests/unit/checkpoint/test_device_copies.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.support.checkpoints.states import manager
from torch import nn

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.ports import DIRECT_ALIGN_BYTES
from fireflyer.checkpoint import CheckpointManager, SaveHandle, State, TrainingLoop
from fireflyer.checkpoint.copying import SnapshotCopies
from fireflyer.checkpoint.engine import loading

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

COUNT = 5_000_000
BUSY_CYCLES = 1_000_000_000
"""More than half a second of a GPU."""


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[CheckpointManager]:
    with manager(tmp_path, keep=100) as one:
        yield one


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def sleep() -> None:
    """The current stream does nothing for a while."""
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]


def hold_copies(one: CheckpointManager) -> torch.cuda.Event:
    """What is copied to the host from now on waits. The event is reached when it does no longer."""
    stream: torch.cuda.Stream = one._devices.engine(gpu())._to_host  # type: ignore[attr-defined]
    with torch.cuda.stream(stream):
        sleep()
    return point(stream)


def point(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream or torch.cuda.current_stream())
    return event


def reached(event: torch.cuda.Event) -> bool:
    done: bool = event.query()  # type: ignore[no-untyped-call]
    return done


def warm(one: CheckpointManager, state: State) -> None:
    """Memory is pinned, and everything loaded."""
    one.reserve(state)
    one.save(1, state, blocking=True).result()


def saved(one: CheckpointManager) -> dict[str, torch.Tensor]:
    restored = one.restore()
    assert restored is not None
    return restored.shared


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = left.detach().cpu().contiguous(), right.detach().cpu().contiguous()
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


# Saving.


def test_a_step_that_overwrites_at_once_changes_nothing_that_is_saved(ours: CheckpointManager) -> None:
    x = torch.zeros(COUNT, device=gpu())
    warm(ours, State({"x": x}))
    sleep()
    x.fill_(3.0)  # the device has not come to it when `save` is called
    computed = point()
    hold_copies(ours)
    handle = ours.save(2, State({"x": x}))
    returned_early = not reached(computed)
    x.fill_(-1.0)
    handle.result()
    assert returned_early, "save has waited for the device"
    assert same_bits(saved(ours)["x"], torch.full((COUNT,), 3.0))
    assert same_bits(x, torch.full((COUNT,), -1.0))


def test_deferred_copies_hold_up_the_update_and_nothing_before_it(ours: CheckpointManager) -> None:
    x, buffer, other = (torch.full((COUNT,), value, device=gpu()) for value in (3.0, 4.0, 0.0))
    state = State({"x": x, "buffer": buffer})
    warm(ours, state)
    other.add_(1.0)  # the first use of a kernel waits until the device has loaded it, and so for all that runs there
    released = hold_copies(ours)
    handle = ours.save(2, state, deferred={"x", "buffer"})
    other.add_(1.0)
    point().synchronize()
    assert not reached(released), "what was computed has waited for the copies, or they were not held up for long"
    handle.before_update()
    x.fill_(-1.0)
    buffer.fill_(-1.0)
    updated = point()
    updated.synchronize()
    assert reached(released), "the update has not waited for the copies"
    handle.result()
    found = saved(ours)
    assert same_bits(found["x"], torch.full((COUNT,), 3.0))
    assert same_bits(found["buffer"], torch.full((COUNT,), 4.0))


def test_of_deferred_and_others_only_others_are_waited_for_at_once(ours: CheckpointManager) -> None:
    x, buffer = (torch.full((COUNT,), value, device=gpu()) for value in (3.0, 4.0))
    state = State({"x": x, "buffer": buffer})
    warm(ours, state)
    released = hold_copies(ours)
    handle = ours.save(2, state, deferred={"x"})
    buffer.fill_(-1.0)
    changed = point()
    changed.synchronize()
    assert reached(released)
    handle.before_update()
    x.fill_(-1.0)
    handle.result()
    found = saved(ours)
    assert same_bits(found["x"], torch.full((COUNT,), 3.0))
    assert same_bits(found["buffer"], torch.full((COUNT,), 4.0))


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
def test_without_the_order_these_tests_would_see_torn_tensors(
    ours: CheckpointManager, monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    x = torch.full((COUNT,), 3.0, device=gpu())
    warm(ours, State({"x": x}))
    monkeypatch.setattr(SnapshotCopies, "follow", lambda self, *, deferred: None)
    hold_copies(ours)
    handle = ours.save(2, State({"x": x}), deferred={"x"} if deferred else ())
    handle.before_update()
    x.fill_(-1.0)
    handle.result()
    assert same_bits(saved(ours)["x"], torch.full((COUNT,), -1.0))


def test_memory_that_is_given_back_is_not_used_again_before_it_is_copied(ours: CheckpointManager) -> None:
    expected = torch.full((COUNT,), 3.0)
    warm(ours, State({"x": expected.to(gpu())}))
    torch.cuda.empty_cache()
    x = expected.to(gpu())
    hold_copies(ours)
    handle = ours.save(2, State({"x": x}), deferred={"x"})
    x.untyped_storage().resize_(0)  # as sharded models do: whoever refers to the tensor, its memory goes back
    others = [torch.full((COUNT,), -1.0, device=gpu()) for _ in range(4)]
    point().synchronize()
    handle.result()
    assert same_bits(saved(ours)["x"], expected)
    assert all(bool((other == -1.0).all()) for other in others)


def test_every_kind_of_tensor_beside_those_in_host_memory(ours: CheckpointManager) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(64, 48, 5, 5, generator=generator)
    host = {
        "f32": torch.randn(1001, generator=generator),
        "bf16": torch.randn(333, generator=generator).to(torch.bfloat16),
        "f8": torch.randn(77, generator=generator).to(torch.float8_e4m3fn),
        "bool": torch.rand(99, generator=generator) > 0.5,
        "i64": torch.arange(7),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "complex": torch.randn(9, dtype=torch.complex64, generator=generator),
    }
    on_gpu = {
        **{f"gpu/{name}": tensor.to(gpu()) for name, tensor in host.items()},
        "gpu/transposed": whole[0, 0].to(gpu()).t(),
        "gpu/slice": whole.to(gpu())[:, ::3, 1],
        "gpu/channels_last": whole.to(gpu()).to(memory_format=torch.channels_last),
        "gpu/parameter": nn.Parameter(torch.randn(12, 12, device=gpu())),
        "gpu/expanded": torch.randn(5, 1, device=gpu()).expand(5, 4),
    }
    state = State({**host, **on_gpu}, {"rng": torch.arange(4).to(gpu())})
    for step in (1, 2):
        ours.save(step, state, blocking=True).result()
        restored = ours.restore()
        assert restored is not None
        assert restored.shared.keys() == state.shared.keys()
        for name, tensor in state.shared.items():
            assert same_bits(restored.shared[name], tensor), name
        assert restored.own is not None
        assert same_bits(restored.own["rng"], torch.arange(4))


def test_a_larger_state_gets_a_larger_image(ours: CheckpointManager) -> None:
    for step, count in enumerate((1000, COUNT, 10, 2 * COUNT), 1):
        x = torch.full((count,), float(step), device=gpu())
        handle = ours.save(step, State({"x": x}))
        x.zero_()
        handle.result()
        ours.wait()
        assert same_bits(saved(ours)["x"], torch.full((count,), float(step)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")
def test_several_devices_of_one_process(ours: CheckpointManager) -> None:
    state = State({f"x{number}": torch.full((COUNT,), 1.0 + number, device=f"cuda:{number}") for number in range(2)})
    warm(ours, state)
    handle = ours.save(2, state)
    for tensor in state.shared.values():
        tensor.fill_(-1.0)
    handle.result()
    for number in range(2):
        assert same_bits(saved(ours)[f"x{number}"], torch.full((COUNT,), 1.0 + number))


# Loading.


def test_tensors_on_a_gpu_are_filled_in_place(ours: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "READ_BYTES", 16 * DIRECT_ALIGN_BYTES)  # each buffer is used again many times
    generator = torch.Generator().manual_seed(2)
    state = {f"w{number}": torch.randn(size, generator=generator) for number, size in enumerate((1, 0, 70_001, COUNT))}
    state["scalar"] = torch.tensor(7.5)
    ours.save(1, State(state), blocking=True).result()
    into = {name: torch.zeros_like(tensor, device=gpu()) for name, tensor in state.items()}
    into["scalar"] = torch.zeros((), dtype=torch.float64, device=gpu())
    in_host_memory = into["w2"] = torch.zeros(70_001)
    sleep()
    for tensor in into.values():
        tensor.fill_(-1.0)  # what was given to the device before comes before
    restored = ours.restore(into=into)
    assert restored is not None
    for name, tensor in state.items():
        assert same_bits(restored.shared[name], tensor), name
        assert (restored.shared[name] is into[name]) is (name != "scalar")
    assert same_bits(in_host_memory, state["w2"])


def test_damage_is_found_where_tensors_are_on_a_gpu(ours: CheckpointManager, tmp_path: Path) -> None:
    state = {"x": torch.arange(COUNT, dtype=torch.float32)}
    name = ours.save(1, State(state), blocking=True).result()
    shard = next((tmp_path / str(name)).glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(COUNT)
        byte = file.read(1)[0]
        file.seek(COUNT)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(DataCorruption):
        ours.restore(into={"x": torch.zeros(COUNT, device=gpu())})


# The loop.


class Model(nn.Module):
    """Has parameters that only the optimizer changes, and with `buffers` some that a forward pass does."""

    def __init__(self, *, buffers: bool) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(256) if buffers else nn.LayerNorm(256)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.square().mean()


Step = Callable[[TrainingLoop, torch.optim.Optimizer], None]


def train(
    directory: Path, last: int, *, beside: bool, update: Step, capturable: bool = False, buffers: bool = True
) -> None:
    """Saves after each step, and then looks whether each checkpoint is what a copy on the device was at its step. The
    copies of a checkpoint are held up, so that the next step finds them not made."""
    torch.manual_seed(5)
    model = Model(buffers=buffers).to(gpu())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=capturable)
    rows = torch.randn(64, 256, device=gpu())
    expected: dict[int, dict[str, torch.Tensor]] = {}
    with TrainingLoop(
        directory, model, optimizer, period_steps=1, keep=100, env=RankEnvironment(), copies_beside_steps=beside
    ) as loop:
        for step in loop.steps(last):
            optimizer.zero_grad(set_to_none=False)
            model(rows).backward()
            update(loop, optimizer)
            loop.manager.wait()  # no checkpoint is skipped
            expected[step] = {name: tensor.clone() for name, tensor in loop._state().shared.items()}
            hold_copies(loop.manager)
    for step, tensors in expected.items():
        check_checkpoint(directory, step, tensors)


def check_checkpoint(directory: Path, step: int, expected: dict[str, torch.Tensor]) -> None:
    alone = directory.with_name(f"only-{step}")
    alone.mkdir()
    name = f"step-{step:08}"
    (directory / name).rename(alone / name)
    with manager(alone) as one:
        found = saved(one)
    assert found.keys() == expected.keys()
    torn = [name for name, tensor in expected.items() if not same_bits(found[name], tensor)]
    assert not torn, f"step {step}: {len(torn)} of {len(expected)} tensors are not those of the step: {torn[:5]}"


def eagerly(loop: TrainingLoop, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


@pytest.mark.parametrize("buffers", [True, False], ids=["buffers", "parameters alone"])
@pytest.mark.parametrize("beside", [False, True], ids=["at once", "beside steps"])
def test_checkpoints_of_a_training_that_goes_on_are_those_of_their_steps(
    tmp_path: Path, beside: bool, buffers: bool
) -> None:
    train(tmp_path / "c", 5, beside=beside, update=eagerly, buffers=buffers)


def test_a_loop_whose_optimizer_does_not_wait_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SaveHandle, "before_update", lambda self: None)
    with pytest.raises(AssertionError, match="tensors are not those of the step"):
        # Without buffers: the forward pass waits for their copies, and those of parameters follow at once.
        train(tmp_path / "c", 4, beside=True, update=eagerly, buffers=False)


def test_a_graph_that_replays_the_update_changes_nothing_that_is_saved(tmp_path: Path) -> None:
    graph: list[torch.cuda.CUDAGraph] = []

    def update(loop: TrainingLoop, optimizer: torch.optim.Optimizer) -> None:
        if loop.step == 0:
            optimizer.step()  # makes its state
            graph.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graph[0]):
                optimizer.step()
        graph[0].replay()

    train(tmp_path / "c", 4, beside=True, update=update, capturable=True)


def test_no_graph_is_captured_that_would_not_wait_for_a_checkpoint(tmp_path: Path) -> None:
    def update(loop: TrainingLoop, optimizer: torch.optim.Optimizer) -> None:
        if loop.step < 2:
            optimizer.step()
            return
        loop.manager.wait()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.zero_grad(set_to_none=False)  # torch warns of a graph that holds nothing
            optimizer.step()

    with pytest.raises(UsageError, match="capture it before the first checkpoint"):
        train(tmp_path / "c", 4, beside=True, update=update, capturable=True)

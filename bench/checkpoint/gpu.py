"""Checkpoints of tensors on a GPU: for how long training is held up, and loading into tensors that are there.

A step is a computation that reads the tensors (as long as a forward and backward pass might take) and an update that
changes all of them. `gpu/SHAPE`: `held_up_s` is how much longer than such a step one takes that begins with a save, on
the device; `call_s` is how long the save keeps the host. Contenders:

    ours           the update waits for the copies, as `TrainingLoop` has it
    ours at once   everything after the save waits (`CheckpointManager.save` by itself)
    pinned copy    the bound: the same tensors into pinned memory that is there, one after the other, then a wait
    DCP pinned     `async_save` with pinned memory that is used again
    DCP beside     the same, staged in a thread and stream of its own; the update waits for the end of that
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from bench.checkpoint.program import State, aligned, read_raw, write_raw
from bench.checkpoint.states import SHAPES, Shape, random_state, same
from bench.report import Bound, Figure, Options, Result, figure, say
from fireflyer.checkpoint import CheckpointManager
from fireflyer.checkpoint import State as SavedState
from fireflyer.runtime.disk import RealDisk

__all__ = ["run"]

_STEP_S: Final = 0.2
"""About as long the computation of a step takes."""
_SIDE: Final = 4096
"""Of the matrices that are multiplied."""


class _Saved(NamedTuple):
    before_update: Callable[[], object]
    durable: Callable[[], object]


class _Contender(Protocol):
    def save(self, state: State) -> _Saved: ...


def run(options: Options) -> Iterator[Result]:
    shapes = [shape for shape in SHAPES[options.scale] if any(map(options.selects, _cases(shape)))]
    if shapes and not torch.cuda.is_available():
        say("gpu: there is no CUDA device")
        return
    for shape in shapes:
        where = Path("build/bench")
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="checkpoint-gpu-", dir=where) as directory:
            state = {name: tensor.cuda() for name, tensor in random_state(shape.tensors, shape.size_bytes).items()}
            if options.selects(_cases(shape)[0]):
                yield from _saves(options, shape, state, directory)
            if options.selects(_cases(shape)[1]):
                yield _loads(options, shape, state, directory)


def _cases(shape: Shape) -> tuple[str, str]:
    return f"gpu/{shape.name}", f"gpu/{shape.name}/load"


class _Ours:
    def __init__(self, directory: str, state: State, *, deferred: bool) -> None:
        self._manager = CheckpointManager(directory, rank=0, world_size=1, store=None, disk=RealDisk(), keep=1)
        self._manager.reserve(SavedState(state))
        self._deferred = frozenset(state) if deferred else frozenset[str]()
        self._step = 0

    def save(self, state: State) -> _Saved:
        self._step += 1
        handle = self._manager.save(self._step, SavedState(state), deferred=self._deferred)

        def durable() -> None:
            handle.result()
            self._manager.wait()

        return _Saved(handle.before_update, durable)


class _Dcp:
    def __init__(self, directory: str, *, beside: bool) -> None:
        self._path = os.path.join(directory, "dcp")
        self._stager = DefaultStager(StagingOptions(True, False, beside, True))

    def save(self, state: State) -> _Saved:
        writer = FileSystemWriter(self._path, sync_files=True, thread_count=2)
        answer = async_save(state, storage_writer=writer, async_stager=self._stager, no_dist=True)
        staged, uploaded = (
            (answer.staging_completion, answer.upload_completion)
            if isinstance(answer, AsyncSaveResponse)
            else (None, answer)
        )

        def durable() -> None:
            uploaded.result()
            shutil.rmtree(self._path)

        return _Saved(lambda: None if staged is None else staged.result(), durable)


class _PinnedCopy:
    def __init__(self, state: State) -> None:
        self._copies = {name: torch.empty_like(tensor, device="cpu").pin_memory() for name, tensor in state.items()}

    def save(self, state: State) -> _Saved:
        for name, tensor in state.items():
            self._copies[name].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        return _Saved(lambda: None, lambda: None)


class _Steps:
    """What is computed. The update gives the tensors other values, and the same ones at every second time."""

    def __init__(self, state: State) -> None:
        self._tensors = list(state.values())
        self._matrix = torch.rand(_SIDE, _SIDE, device="cuda")
        self._products = 1
        self._compute()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self._compute()
        torch.cuda.synchronize()
        self._products = max(1, int(_STEP_S / (time.perf_counter() - begin)))

    def _compute(self) -> None:
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)

    def elapsed_s(self, save: Callable[[], _Saved] | None) -> tuple[float, float, _Saved | None]:
        """Of one step that begins with `save`, on the device and for the call alone."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        saved = save() if save is not None else None
        called_s = time.perf_counter() - begin
        self._compute()
        if saved is not None:
            saved.before_update()
        torch._foreach_neg_(self._tensors)
        torch.cuda.synchronize()
        return time.perf_counter() - begin, called_s, saved


def _saves(options: Options, shape: Shape, state: State, directory: str) -> Iterator[Result]:
    makers: dict[str, Callable[[str], _Contender]] = {
        "ours": lambda where: _Ours(where, state, deferred=True),
        "ours at once": lambda where: _Ours(where, state, deferred=False),
        "pinned copy": lambda _: _PinnedCopy(state),
        "DCP pinned": lambda where: _Dcp(where, beside=False),
        "DCP beside": lambda where: _Dcp(where, beside=True),
    }
    steps = _Steps(state)
    held: dict[str, list[float]] = {}
    called: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    contenders: dict[str, _Contender] = {}
    for number in range(options.rounds + 1):
        for name, make in makers.items():
            if name in missing:
                continue
            try:
                if name not in contenders:
                    where = os.path.join(directory, name.replace(" ", "-"))
                    os.mkdir(where)
                    contenders[name] = make(where)
                one = contenders[name]
                plain_s, _, _ = steps.elapsed_s(None)
                with_save_s, call_s, saved = steps.elapsed_s(lambda one=one: one.save(state))  # type: ignore[misc]
                assert saved is not None
                saved.durable()
            except Exception as error:  # of a peer, in a release that cannot do it
                if name.startswith("ours"):
                    raise
                missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
                continue
            if number:  # the first round touches memory
                held.setdefault(name, []).append(with_save_s - plain_s)
                called.setdefault(name, []).append(call_s)
    copy_s = statistics.median(called["pinned copy"])
    bound = Bound(copy_s, "one copy of the tensors into pinned memory that is there")
    for metric, samples in (("held_up_s", held), ("call_s", called)):
        yield _result(_cases(shape)[0], metric, samples, missing, bound, 0.25 if shape.judged else None)


def _loads(options: Options, shape: Shape, state: State, directory: str) -> Result:
    """From the disk, not from memory: files are dropped from the page cache before."""
    where = os.path.join(directory, "load")
    os.mkdir(where)
    with CheckpointManager(where, rank=0, world_size=1, store=None, disk=RealDisk(), keep=1) as manager:
        manager.save(1, SavedState(state), blocking=True).result()
        file, raw, image = os.path.join(directory, "file"), os.path.join(directory, "raw"), aligned(shape.total_bytes)
        safetensors.torch.save_file({name: tensor.cpu() for name, tensor in state.items()}, file)
        write_raw(raw, image)
        target = {name: torch.empty_like(tensor) for name, tensor in state.items()}

        def theirs() -> None:
            for name, tensor in safetensors.torch.load_file(file, device="cuda").items():
                target[name].copy_(tensor)

        works: dict[str, Callable[[], object]] = {
            "ours": lambda: manager.restore(target),
            "safetensors": theirs,
            "disk": lambda: read_raw(raw, image),
        }
        samples: dict[str, list[float]] = {}
        for number in range(options.rounds + 1):
            for name, work in works.items():
                _forget(file)
                for tensor in target.values():
                    tensor.zero_()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                work()
                torch.cuda.synchronize()
                if number:
                    samples.setdefault(name, []).append(time.perf_counter() - begin)
                assert name == "disk" or same(target, state), f"{name} has not loaded what was saved"
    bound = Bound(statistics.median(samples.pop("disk")), "the same bytes into ready memory with O_DIRECT")
    return _result(_cases(shape)[1], "loaded_s", samples, {}, bound, 1.3 if shape.judged else None)


def _forget(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _result(
    case: str,
    metric: str,
    samples: dict[str, list[float]],
    missing: dict[str, str],
    bound: Bound,
    factor: float | None,
) -> Result:
    """`factor`: how many times the bound ours may take."""
    figures: dict[str, Figure | str] = {**{name: figure(some) for name, some in samples.items()}, **missing}
    ours = figures.pop("ours")
    assert isinstance(ours, Figure)
    target = f"at most {factor} x the bound" if factor is not None else ""
    met = ours.median <= factor * bound.value if factor is not None else None
    return Result(
        suite="checkpoint",
        case=case,
        metric=metric,
        better="lower",
        ours=ours,
        peers=figures,
        bound=bound,
        target=target,
        met=met,
        verdicts={target: met} if target else {},
    )

"""Copies from devices into the image of a snapshot, in the order that `core.copying` describes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from fireflyer.checkpoint.core.copying import plan_copies
from fireflyer.collectives.devices.copies import CopyEngine, CopyEvent
from fireflyer.collectives.torch.cuda import CudaCopyEngine

__all__ = ["Device", "DeviceCopies", "SnapshotCopies", "cuda_device_of"]

Device = Any
"""A `torch.device`; tests have others."""


_IS_CUDA = attrgetter("is_cuda")


def cuda_device_of(tensor: torch.Tensor) -> torch.device | None:
    return tensor.device if tensor.is_cuda else None


class _Copied(NamedTuple):
    """One batch that was started: `end` is reached when the device has copied it."""

    engine: CopyEngine
    deferred: bool
    end: CopyEvent


class SnapshotCopies:
    """The copies of one snapshot that devices were given. `before_update` is for the thread that trains, `wait` for the
    one that saves."""

    def __init__(self) -> None:
        self._batches: list[_Copied] = []
        self._sources: list[torch.Tensor] = []
        """Their memory must not be given to others while it is read, whoever allocated it."""

    def add(self, engine: CopyEngine, sources: list[torch.Tensor], *, deferred: bool, end: CopyEvent) -> None:
        self._batches.append(_Copied(engine, deferred, end))
        self._sources += sources

    def follow(self, *, deferred: bool) -> None:
        """What the calling thread gives to the devices from now on starts after these copies. Does not block."""
        for batch in self._batches:
            if batch.deferred is deferred:
                batch.engine.follow([batch.end])

    def before_update(self) -> None:
        """As `follow`, of the tensors that were deferred."""
        self.follow(deferred=True)

    def wait(self) -> None:
        """Blocks until the image is complete. Waits for every copy, then raises what the first that failed raised."""
        failed: Exception | None = None
        for batch in self._batches:
            try:
                batch.end.wait()
            except Exception as error:
                failed = failed or error
        self._sources = []
        if failed is not None:
            raise failed


class DeviceCopies:
    """How a process copies from and to each of its devices: an engine for each, made when it is first needed.

    `device_of` says where a tensor lies, None: in host memory; `make` gives the engine of a device."""

    def __init__(
        self,
        device_of: Callable[[torch.Tensor], Device | None] = cuda_device_of,
        make: Callable[[Device], CopyEngine] = CudaCopyEngine,
    ) -> None:
        self.device_of = device_of
        self._make = make
        self._engines: dict[Device, CopyEngine] = {}

    def engine(self, device: Device) -> CopyEngine:
        if device not in self._engines:
            self._engines[device] = self._make(device)
        return self._engines[device]

    def any_of(self, tensors: Sequence[torch.Tensor]) -> Device | None:
        """A device on which one of them lies."""
        if self.device_of is cuda_device_of and not any(map(_IS_CUDA, tensors)):
            return None  # no Python runs for each: there may be a million
        return next(filter(None, map(self.device_of, tensors)), None)

    def start(
        self,
        names: Sequence[str],
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        deferred: Collection[str],
    ) -> SnapshotCopies:
        """Copies what lies in host memory, and has devices copy the rest to `targets`, which are pinned. `deferred`:
        names of those that do not change before `SnapshotCopies.before_update`. If it raises, every copy that was
        started has ended."""
        plan = plan_copies([self.device_of(source) for source in sources], [name in deferred for name in names])
        copies = SnapshotCopies()
        begins = {batch.device: self.engine(batch.device).here() for batch in plan.batches}
        try:
            for device, later, numbers in plan.batches:
                engine, chosen = self.engine(device), [sources[number] for number in numbers]
                end = engine.tensors_to_host(chosen, [targets[number] for number in numbers], [begins[device]])
                copies.add(engine, chosen, deferred=later, end=end)
            copies.follow(deferred=False)
            if plan.host:
                torch._foreach_copy_([targets[number] for number in plan.host], [sources[n] for n in plan.host])
        except BaseException:
            with contextlib.suppress(Exception):
                copies.wait()
            raise
        return copies

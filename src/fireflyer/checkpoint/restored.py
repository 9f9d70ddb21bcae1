"""A checkpoint in memory, and where its bytes go while it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from fireflyer.base.errors import InvariantViolation
from fireflyer.base.events import SkippedCheckpoint
from fireflyer.checkpoint.copying import DeviceCopies
from fireflyer.checkpoint.core.manifest import Manifest, ShardRecord, TensorRecord, plans_of
from fireflyer.checkpoint.core.shares import OWN_PREFIX, split_own
from fireflyer.checkpoint.core.slices import Box, whole
from fireflyer.checkpoint.engine.loading import DevicePlace, Place, Places, places_of
from fireflyer.checkpoint.engine.ranges import scatter
from fireflyer.checkpoint.sharding import box_of, local_part, new_like
from fireflyer.checkpoint.tensors import (
    DTYPES,
    HostTensors,
    bytes_of,
    can_be_filled,
    empty_tensor,
    flat_bytes,
    host_tensors,
)

__all__ = ["Collector", "Restored", "Targets"]


class Restored:
    """A checkpoint in memory. `own` is None on a rank that the saving job did not have."""

    def __init__(
        self,
        *,
        name: str,
        manifest: Manifest,
        shared: dict[str, torch.Tensor],
        own: dict[str, torch.Tensor] | None,
        passed_over: tuple[SkippedCheckpoint, ...],
    ) -> None:
        self.name = name
        self.step = manifest.step
        self.attempt = manifest.attempt
        self.world_size = manifest.world_size
        self.values = manifest.values
        self.job_plan = manifest.job_plan
        self.plans = plans_of(manifest)
        """With how many ranks, and by which plan, the job has come here; the last one wrote the checkpoint."""
        self.shared = shared
        self.own = own
        self.passed_over = passed_over

    def __repr__(self) -> str:
        return f"Restored({self.name!r}, {len(self.shared)} shared tensors, skipped {len(self.passed_over)})"


class Targets(NamedTuple):
    """What a restore is to fill, as the caller gave it."""

    into: Mapping[str, torch.Tensor]
    like: Mapping[str, DTensor]
    wanted: Callable[[str], bool] | None = None
    """Of shared tensors; None: all."""


class _Target(NamedTuple):
    """Where the bytes of a tensor go."""

    tensor: torch.Tensor
    """What `Restored.shared` holds: whole, or sharded as the caller has it."""
    part: torch.Tensor
    """Contiguous: this rank's part of it, or what is copied there at the end. On a device only where one read fills
    it."""
    box: Box


class Collector:
    """Where the bytes of a checkpoint go: into tensors of `into` that take them, else into new ones in host memory.
    What is not `wanted` is left out.

    A sharded tensor of `into` gets this rank's part, whatever the slices in which it is stored; one of the shape of
    `like[prefix]`, for a name `prefix/…`, becomes a new tensor that is sharded as that one. All others are whole.
    """

    def __init__(self, rank: int, manifest: Manifest, targets: Targets, devices: DeviceCopies) -> None:
        self._into, self._like, self._wanted = targets
        self._devices = devices
        self._targets: dict[str, _Target] = {}
        """Of those that are not filled in place at once."""
        self._filled: dict[str, torch.Tensor] = {}
        """What `Restored.shared` holds, in the order of the checkpoint."""
        self.own: dict[str, torch.Tensor] | None = {} if rank < manifest.world_size else None
        self._rank = rank
        self._manifest = manifest

    def sink(self, shard: ShardRecord) -> Places:
        """Most tensors of nearly all checkpoints are filled at once: these are found together."""
        given = self._given(shard)
        found = self._at_once(list(given.values()), [shard.tensors[at] for at in given])
        if len(given) == len(shard.tensors) and found.fits.all():
            self._filled.update(zip([record.name for record in shard.tensors], given.values(), strict=True))
            return Places(found.addresses, {})
        addresses = zip(given, found.fits.tolist(), found.addresses.tolist(), strict=True)
        fitting = {at: address for at, fits, address in addresses if fits}
        places: list[Place | None] = []
        for at, record in enumerate(shard.tensors):
            if at in fitting:
                self._filled[record.name] = given[at]
                places.append(fitting[at])
            else:
                places.append(self._place_of(record))
        return places_of(places)

    def _given(self, shard: ShardRecord) -> dict[int, torch.Tensor]:
        """By the number of a tensor in the shard, what is to be filled with all of it."""
        into, wanted = self._into, self._wanted
        return {
            at: into[name]
            for at, record in enumerate(shard.tensors)
            if (name := record.name) in into
            and record.slice is None
            and not name.startswith(OWN_PREFIX)
            and (wanted is None or wanted(name))
        }

    def _at_once(self, given: list[torch.Tensor], records: list[TensorRecord]) -> HostTensors:
        if self._devices.any_of(given) is not None:
            nothing = np.zeros(len(given), np.bool_)
            return HostTensors(nothing, nothing.astype(np.uint64))
        return host_tensors(given, [record.dtype for record in records], [record.shape for record in records])

    def _place_of(self, record: TensorRecord) -> Place | None:
        if record.name.startswith(OWN_PREFIX) and (own := split_own(record.name)) is not None:
            if own[0] != self._rank or self.own is None:
                return None
            if own[1] in self.own:  # its address is known to the load: it must stay
                raise InvariantViolation(f"{record.name[:80]!r} is the second tensor of that name")
            target = self.own[own[1]] = empty_tensor(record.dtype, record.shape)
            return target.data_ptr()
        name = record.name if record.slice is None else record.slice.of
        if self._wanted is not None and not self._wanted(name):
            return None
        if name not in self._targets:
            self._targets[name] = self._target(record)
        found = self._targets[name]
        self._filled[name] = found.tensor
        if record.box == found.box:
            return self._place(found.part)
        return scatter(record, [(found.box, bytes_of(found.part))])

    def _target(self, record: TensorRecord) -> _Target:
        name, dtype, shape = record.whole_name, record.dtype, record.whole_shape
        given, like = self._into.get(name), self._like.get(name.rpartition("/")[0])
        if isinstance(given, DTensor) and tuple(given.shape) == shape and given.dtype == DTYPES[dtype]:
            part = local_part(given.detach())
            box = box_of(given)
            if not can_be_filled(part, dtype, box.shape) or self._devices.device_of(part) is not None:
                part = empty_tensor(dtype, box.shape)
            return _Target(given, part, box)
        if given is None and like is not None and tuple(like.shape) == shape:
            box = box_of(like)
            part = empty_tensor(dtype, box.shape)
            return _Target(new_like(like, part), part, box)
        if given is None or not can_be_filled(given, dtype, shape):
            given = empty_tensor(dtype, shape)
        pieces = record.slice is not None and self._devices.device_of(given) is not None
        return _Target(given, empty_tensor(dtype, shape) if pieces else given, whole(shape))

    def _place(self, tensor: torch.Tensor) -> Place:
        device = self._devices.device_of(tensor)
        if device is None or tensor.numel() == 0:
            return tensor.data_ptr() if device is None else memoryview(bytearray())
        return DevicePlace(self._devices.engine(device), flat_bytes(tensor))

    @torch.no_grad()
    def restored(self, name: str, passed_over: tuple[SkippedCheckpoint, ...]) -> Restored:
        """When everything has been loaded."""
        for target in self._targets.values():
            if target.part is target.tensor:
                continue
            into = local_part(target.tensor.detach())
            if into.data_ptr() != target.part.data_ptr():
                into.copy_(target.part)
        return Restored(name=name, manifest=self._manifest, shared=self._filled, own=self.own, passed_over=passed_over)

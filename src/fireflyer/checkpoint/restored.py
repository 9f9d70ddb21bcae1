"""A checkpoint in memory, and where its bytes go while it is read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fireflyer.base.events import SkippedCheckpoint
from fireflyer.checkpoint.copying import DeviceCopies
from fireflyer.checkpoint.core.manifest import Manifest, TensorRecord, plans_of
from fireflyer.checkpoint.core.shares import split_own
from fireflyer.checkpoint.engine.loading import DevicePlace, Place
from fireflyer.checkpoint.tensors import bytes_of, can_be_filled, empty_tensor, flat_bytes

__all__ = ["Collector", "Restored"]


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


class Collector:
    """Where the bytes of a checkpoint go: into tensors of `into` that take them, else into new ones in host memory."""

    def __init__(self, rank: int, manifest: Manifest, into: Mapping[str, torch.Tensor], devices: DeviceCopies) -> None:
        self._into = into
        self._devices = devices
        self.shared: dict[str, torch.Tensor] = {}
        self.own: dict[str, torch.Tensor] | None = {} if rank < manifest.world_size else None
        self._rank = rank
        self._manifest = manifest

    def sink(self, _writer: int, tensor: TensorRecord) -> Place | None:
        own = split_own(tensor.name)
        if own is not None and own[0] != self._rank:
            return None
        if own is None:
            given = self._into.get(tensor.name)
            if given is not None and can_be_filled(given, tensor.dtype, tensor.shape):
                self.shared[tensor.name] = given
                return self._place(given)
            target = self.shared[tensor.name] = self._new(tensor)
            return bytes_of(target)
        target = self._new(tensor)
        if self.own is not None:
            self.own[own[1]] = target
        return bytes_of(target)

    def _place(self, tensor: torch.Tensor) -> Place:
        device = self._devices.device_of(tensor)
        if device is None or tensor.numel() == 0:
            return bytes_of(tensor) if device is None else memoryview(bytearray())
        return DevicePlace(self._devices.engine(device), flat_bytes(tensor))

    @staticmethod
    def _new(tensor: TensorRecord) -> torch.Tensor:
        return empty_tensor(tensor.dtype, tensor.shape)

    def restored(self, name: str, passed_over: tuple[SkippedCheckpoint, ...]) -> Restored:
        """When everything has been loaded."""
        return Restored(name=name, manifest=self._manifest, shared=self.shared, own=self.own, passed_over=passed_over)

"""A rank's share of the state, copied into memory in which it lies as in its file.

What follows from names, types and shapes alone (who writes what, where it lies) is found out once and used again as
long as they stay the same: with ten thousand tensors it takes longer than to copy them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from fireflyer.checkpoint.copying import Device, DeviceCopies
from fireflyer.checkpoint.core.safetensors import PlacedTensor, TensorSpec, place
from fireflyer.checkpoint.core.shares import HeldSlice, layout_digest, own_name, share_of
from fireflyer.checkpoint.engine.image import Share, header_of
from fireflyer.checkpoint.engine.memory import aligned_memory
from fireflyer.checkpoint.sharding import describe, local_part
from fireflyer.checkpoint.tensors import DTYPES, bytes_of, spec_of
from fireflyer.collectives.devices.copies import HostMemory

__all__ = ["Layout", "Snapshot", "SnapshotBuffer", "plan_snapshot"]

_HEADER_GROWTH_BYTES: Final = 64
"""What a header may grow by when the step gets more digits."""


class Layout(NamedTuple):
    """What one rank stores of a state, and where. Of a state with the same specs it is the same."""

    rank: int
    world_size: int
    shared: list[TensorSpec]
    own: list[TensorSpec]
    of_rank_0: frozenset[str]
    held: list[HeldSlice]
    digest: int
    placed: list[PlacedTensor]
    size_bytes: int
    """Of the tensors, without the header."""
    total_bytes: int
    """Of all ranks, if each has as much of its own as this one."""


class Snapshot(NamedTuple):
    """What is to be copied where. Made by `plan_snapshot`."""

    layout: Layout
    sources: list[torch.Tensor]
    """In the order of `layout.placed`."""


def plan_snapshot(
    rank: int,
    world_size: int,
    shared: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    of_rank_0: frozenset[str] = frozenset(),
    *,
    last: Layout | None = None,
) -> Snapshot:
    """This rank's share of the state. `last` is taken if it is of such a state. Raises `UsageError` for what cannot be
    stored."""
    described = [describe(name, tensor) for name, tensor in shared.items()]
    shared_specs = [each.spec for each in described]
    held = [each.held for each in described if each.held is not None]
    own_specs = [spec_of(name, tensor) for name, tensor in own.items()]
    key = (rank, world_size, shared_specs, own_specs, of_rank_0, held)
    layout = last if last is not None and last[: len(key)] == key else _lay_out(*key)
    mine = {own_name(rank, name): tensor for name, tensor in own.items()}
    sources = [
        mine[spec.name]
        if (spec := item.spec).name in mine
        else local_part(shared[spec.slice.of if spec.slice else spec.name])
        for item in layout.placed
    ]
    return Snapshot(layout, sources)


def _lay_out(
    rank: int,
    world_size: int,
    shared: list[TensorSpec],
    own: list[TensorSpec],
    of_rank_0: frozenset[str],
    held: list[HeldSlice],
) -> Layout:
    whole = [spec for spec in shared if spec.slice is None]
    placed = place(share_of(rank, whole, own, world_size, of_rank_0, held))
    total_bytes = _size_bytes(shared) + world_size * _size_bytes(own)
    return Layout(
        rank=rank,
        world_size=world_size,
        shared=shared,
        own=own,
        of_rank_0=of_rank_0,
        held=held,
        digest=layout_digest(shared, of_rank_0),
        placed=placed,
        size_bytes=_size_bytes([item.spec for item in placed]),
        total_bytes=total_bytes,
    )


def _size_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.size_bytes for spec in specs)


class SnapshotBuffer:
    """Memory for one rank's shard, allocated and touched once and then reused. Pinned from the first snapshot on that
    has tensors on a device. What is called `take` and `reserve` here may be called when the copies into the image of
    the last snapshot have ended (`Share.copies`)."""

    def __init__(self, devices: DeviceCopies | None = None) -> None:
        self._devices = devices or DeviceCopies()
        self._image = torch.empty(0, dtype=torch.uint8)
        self._pinned: HostMemory | None = None
        self._views: list[torch.Tensor] = []
        self._views_of: tuple[Layout, int] | None = None
        """The layout, and the bytes of the header, that `_views` belong to."""
        self._reserving: threading.Thread | None = None

    def reserve_beside(self, plan: Snapshot) -> None:
        """Makes room for snapshots like this one and touches it, in a thread. `take` waits for it."""
        size_bytes = len(header_of(plan.layout.placed, step=0, rank=plan.layout.rank)) + plan.layout.size_bytes
        self._join()
        self._reserving = threading.Thread(
            target=self.reserve,
            args=(size_bytes + _HEADER_GROWTH_BYTES,),
            kwargs={"device": self._devices.any_of(plan.sources)},
            name="checkpoint-reserve",
            daemon=True,
        )
        self._reserving.start()

    def _join(self) -> None:
        thread, self._reserving = self._reserving, None
        if thread is not None:
            thread.join()

    def reserve(self, size_bytes: int, *, device: Device | None = None) -> None:
        """Makes room and touches it: the first touch of fresh memory is ten times slower than the second. Pins it if
        tensors on a device are to be copied there."""
        if self._image.numel() < size_bytes:
            self._views, self._views_of = [], None
            if self._pinned is not None:
                self._pinned.release()
            self._pinned = None
            self._image = torch.empty(0, dtype=torch.uint8)  # first: there may be no room for both
            self._image = torch.frombuffer(aligned_memory(size_bytes), dtype=torch.uint8).zero_()
        if device is not None and self._pinned is None:
            self._pinned = self._devices.engine(device).pin(np.asarray(self._image))

    @torch.no_grad()
    def take(self, step: int, plan: Snapshot, *, deferred: Collection[str] = ()) -> Share:
        """Copies; what lies on devices they copy themselves, in the order that `core.copying` says. `deferred`: names
        of tensors that do not change before `Share.copies.before_update`. What is returned is overwritten by the next
        `take`."""
        layout, sources = plan
        header = header_of(layout.placed, step=step, rank=layout.rank)
        image_bytes = len(header) + layout.size_bytes
        device = self._devices.any_of(sources)
        self._join()
        self.reserve(image_bytes, device=device)
        views = self._views_for(layout, len(header))
        copies = None
        if device is not None:
            names = [spec.slice.of if (spec := item.spec).slice else spec.name for item in layout.placed]
            copies = self._devices.start(names, sources, views, deferred)
        elif views:
            torch._foreach_copy_(views, sources)
        image = bytes_of(self._image[:image_bytes])
        image[: len(header)] = header
        return Share(
            rank=layout.rank,
            step=step,
            layout=layout.digest,
            placed=layout.placed,
            header_bytes=len(header),
            image=image,
            total_bytes=layout.total_bytes + layout.world_size * len(header),
            copies=copies,
        )

    def _views_for(self, layout: Layout, header_bytes: int) -> list[torch.Tensor]:
        """Of each tensor of the layout, where it goes."""
        if self._views_of is None or self._views_of[0] is not layout or self._views_of[1] != header_bytes:
            self._views = [self._view(item, header_bytes) for item in layout.placed]
            self._views_of = (layout, header_bytes)
        return self._views

    def _view(self, item: PlacedTensor, header_bytes: int) -> torch.Tensor:
        begin = header_bytes + item.offset
        flat = self._image[begin : begin + item.spec.size_bytes]
        return flat.view(DTYPES[item.spec.dtype]).view(item.spec.shape)

"""A rank's share of the state, copied into memory in which it lies as in its file.

What follows from names, types and shapes alone (who writes what, where it lies) is found out once and used again as
long as they stay the same: with ten thousand tensors it takes longer than to copy them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from fireflyer.checkpoint.copying import Device, DeviceCopies
from fireflyer.checkpoint.core.manifest import check_listed
from fireflyer.checkpoint.core.safetensors import PlacedTensor, TensorSpec, encode_entries, place
from fireflyer.checkpoint.core.shares import HeldSlice, check_shared_names, layout_digest, own_name, share_of
from fireflyer.checkpoint.core.stages import StageList, StageShare, share_of_stage
from fireflyer.checkpoint.engine.image import Share, header_with
from fireflyer.checkpoint.engine.memory import aligned_memory
from fireflyer.checkpoint.sharding import describe, local_part
from fireflyer.checkpoint.tensors import DTYPES, bytes_of, host_tensors, laid_out_tensors, spec_of
from fireflyer.collectives.devices.copies import HostMemory
from fireflyer.native import copy_ranges

__all__ = ["Agreed", "Content", "Layout", "Snapshot", "SnapshotBuffer", "describe_state", "plan_snapshot"]

_HEADER_GROWTH_BYTES: Final = 64
"""What a header may grow by when the step gets more digits."""


class Content(NamedTuple):
    """What one rank has of a state, by names, types and shapes."""

    shared: list[TensorSpec]
    own: list[TensorSpec]
    of_rank_0: frozenset[str]
    held: list[HeldSlice]
    meshes: list[tuple[int, ...]]
    """Of each sharded tensor in `shared`, the ranks that together have it."""

    def listed(self) -> StageList:
        """What another rank is told of it."""
        sharded = iter(self.meshes)
        pairs = [(spec, None if spec.slice is None else next(sharded)) for spec in self.shared]
        pairs.sort(key=lambda pair: pair[0].name)
        numbers: dict[tuple[int, ...], int] = {}
        mesh_of = [numbers.setdefault(mesh, len(numbers)) for _, mesh in pairs if mesh is not None]
        return StageList(
            tuple(spec for spec, _ in pairs), tuple(sorted(self.of_rank_0)), tuple(numbers), tuple(mesh_of)
        )


class Agreed(NamedTuple):
    """Who writes what, where ranks have different tensors."""

    listed: StageList
    share: StageShare
    digest: int
    """The same on every rank."""


class Layout(NamedTuple):
    """What one rank stores of a state, and where. Of a state with the same content it is the same."""

    rank: int
    world_size: int
    content: Content
    agreed: Agreed | None
    digest: int
    placed: list[PlacedTensor]
    entries: bytes
    """What the header says of them."""
    sources: list[str]
    """Of each, the name of the shared tensor that it is (a slice of), or the stored name of an own one."""
    size_bytes: int
    """Of the tensors, without the header."""
    total_bytes: int
    """Of all ranks, if each has as much of its own as this one."""


class Snapshot(NamedTuple):
    """What is to be copied where. Made by `plan_snapshot`."""

    layout: Layout
    sources: list[torch.Tensor]
    """In the order of `layout.placed`."""


def describe_state(
    shared: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    of_rank_0: frozenset[str] = frozenset(),
    *,
    last: Content | None = None,
) -> Content:
    """`last` is returned if it is of such a state. Raises `UsageError` for what cannot be stored, also where all ranks
    together have so many slices that no manifest can list them."""
    if last is not None and last.of_rank_0 == of_rank_0 and _is_of(last.shared, shared) and _is_of(last.own, own):
        return last
    described = [describe(name, tensor) for name, tensor in shared.items()]
    content = Content(
        [each.spec for each in described],
        [spec_of(name, tensor) for name, tensor in own.items()],
        of_rank_0,
        [each.held for each in described if each.held is not None],
        [each.mesh for each in described if each.spec.slice is not None],
    )
    if content == last:
        return last
    check_shared_names(content.shared)
    check_listed((each.spec if each.held is None else each.held.spec, each.slices) for each in described)
    for specs in (content.shared, content.own):
        place(specs)  # raises for names and dtypes; later would be after other ranks have begun
    return content


def _is_of(specs: Sequence[TensorSpec], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether these are the specs of such tensors, as far as that is seen without describing each: none is sharded."""
    if list(tensors) != [spec.name for spec in specs] or any(spec.slice is not None for spec in specs):
        return False
    given = list(tensors.values())
    fits = laid_out_tensors(given, [spec.dtype for spec in specs], [spec.shape for spec in specs]).fits
    return all(_has(specs[at], given[at]) for at in np.flatnonzero(~fits).tolist())


def _has(spec: TensorSpec, tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype is DTYPES[spec.dtype]
        and tensor.shape == spec.shape
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not isinstance(tensor, DTensor)
    )


def plan_snapshot(
    rank: int,
    world_size: int,
    shared: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    content: Content,
    agreed: Agreed | None = None,
    *,
    last: Layout | None = None,
) -> Snapshot:
    """This rank's share of the state with that `content`. `last` is taken if it is of such a state; `agreed` is None
    where all ranks have the same tensors."""
    same = last is not None and last.content is content and last.agreed is agreed
    layout = last if same and last is not None else _lay_out(rank, world_size, content, agreed)
    mine = {own_name(rank, name): tensor for name, tensor in own.items()}
    sources = list(map({**shared, **mine}.__getitem__, layout.sources))
    return Snapshot(layout, [local_part(source) for source in sources] if content.held else sources)


def _lay_out(rank: int, world_size: int, content: Content, agreed: Agreed | None) -> Layout:
    if agreed is None:
        whole = [spec for spec in content.shared if spec.slice is None]
        mine = share_of(rank, whole, content.own, world_size, content.of_rank_0, content.held)
        shared_bytes, digest = _size_bytes(content.shared), layout_digest(content.shared, content.of_rank_0)
    else:
        mine = share_of_stage(rank, agreed.listed, agreed.share, content.held, content.own)
        shared_bytes, digest = agreed.share.total_bytes, agreed.digest
    placed = place(mine)
    return Layout(
        rank=rank,
        world_size=world_size,
        content=content,
        agreed=agreed,
        digest=digest,
        placed=placed,
        entries=encode_entries(placed),
        sources=[spec.slice.of if (spec := item.spec).slice else spec.name for item in placed],
        size_bytes=_size_bytes([item.spec for item in placed]),
        total_bytes=shared_bytes + world_size * _size_bytes(content.own),
    )


def _size_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.size_bytes for spec in specs)


class _Places(NamedTuple):
    """Where the tensors of a layout go in an image."""

    layout: Layout
    header_bytes: int
    addresses: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]


class SnapshotBuffer:
    """Memory for one rank's shard, allocated and touched once and then reused. Pinned from the first snapshot on that
    has tensors on a device. What is called `take` and `reserve` here may be called when the copies into the image of
    the last snapshot have ended (`Share.copies`)."""

    def __init__(self, devices: DeviceCopies | None = None) -> None:
        self._devices = devices or DeviceCopies()
        self._image = torch.empty(0, dtype=torch.uint8)
        self._pinned: HostMemory | None = None
        self._places: _Places | None = None
        self._views: list[torch.Tensor] = []
        """Empty, or those of `_places`."""
        self._reserving: threading.Thread | None = None

    def reserve_beside(self, plan: Snapshot) -> None:
        """Makes room for snapshots like this one and touches it, in a thread. `take` waits for it."""
        size_bytes = len(header_with(plan.layout.entries, step=0, rank=plan.layout.rank)) + plan.layout.size_bytes
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
            self._views, self._places = [], None
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
        header = header_with(layout.entries, step=step, rank=layout.rank)
        image_bytes = len(header) + layout.size_bytes
        device = self._devices.any_of(sources)
        self._join()
        self.reserve(image_bytes, device=device)
        places = self._places_of(layout, len(header))
        copies = None
        if device is not None:
            copies = self._devices.start(layout.sources, sources, self._views_for(layout, len(header)), deferred)
        else:
            self._copy(sources, places)
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

    def _places_of(self, layout: Layout, header_bytes: int) -> _Places:
        """Of each tensor of the layout, where it goes. Found once for a layout."""
        places = self._places
        if places is None or places.layout is not layout or places.header_bytes != header_bytes:
            begins = np.array([item.offset for item in layout.placed], np.uint64) + np.uint64(header_bytes)
            sizes = np.array([item.spec.size_bytes for item in layout.placed], np.uint64)
            places = self._places = _Places(layout, header_bytes, begins + np.uint64(self._image.data_ptr()), sizes)
            self._views = []
        return places

    def _views_for(self, layout: Layout, header_bytes: int) -> list[torch.Tensor]:
        """The same as tensors."""
        if len(self._views) != len(layout.placed):
            self._views = [self._view(item, header_bytes) for item in layout.placed]
        return self._views

    def _copy(self, sources: list[torch.Tensor], places: _Places) -> None:
        """From host memory. Tensors whose elements lie in their memory as in the file are copied in one call."""
        specs = [item.spec for item in places.layout.placed]
        found = host_tensors(sources, [spec.dtype for spec in specs], [spec.shape for spec in specs])
        if found.fits.all():
            copy_ranges(places.addresses, found.addresses, places.sizes, torch.get_num_threads())
        else:
            torch._foreach_copy_(self._views_for(places.layout, places.header_bytes), sources)

    def _view(self, item: PlacedTensor, header_bytes: int) -> torch.Tensor:
        begin = header_bytes + item.offset
        flat = self._image[begin : begin + item.spec.size_bytes]
        return flat.view(DTYPES[item.spec.dtype]).view(item.spec.shape)

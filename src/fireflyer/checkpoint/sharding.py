"""Sharded tensors (`DTensor`: FSDP2, hybrid sharding, tensor parallelism) as slices of whole ones, and back.

Which part of a tensor a rank has is PyTorch's to say (`compute_local_shape_and_global_offset`, for any coordinate of
the mesh); here that becomes boxes, and the list of ranks that have the same box.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Partial, Placement

from fireflyer.base.errors import UsageError
from fireflyer.checkpoint.core.safetensors import TensorSpec
from fireflyer.checkpoint.core.shares import HeldSlice
from fireflyer.checkpoint.core.slices import Box, Slice, covers, slice_name, whole
from fireflyer.checkpoint.tensors import spec_of

__all__ = ["Described", "address_of", "box_of", "describe", "local_part", "new_like", "sharded_like"]


class Described(NamedTuple):
    """A tensor of the state as checkpoints see it."""

    spec: TensorSpec
    """Of the whole tensor; of a sharded one with mesh and placements, the same on every rank."""
    held: HeldSlice | None
    """What this rank has of a sharded tensor; None for a whole one, or where that is nothing."""
    mesh: tuple[int, ...] = ()
    """The ranks that together have a sharded tensor, rising; empty where this one is not in its mesh."""
    slices: int = 1
    """How many different ones these ranks have of it, without empty ones."""


def describe(name: str, tensor: torch.Tensor) -> Described:
    """Raises `UsageError` for what cannot be stored: see `spec_of`; also partial sums, and parts that are no box."""
    if not isinstance(tensor, DTensor):
        return Described(spec_of(name, tensor), None)
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    if any(isinstance(placement, Partial) for placement in placements):
        raise UsageError(f"tensor {name!r} is sharded as {placements}: partial sums cannot be stored; redistribute it")
    spec = spec_of(name, tensor)
    shape, axes = spec.shape, tuple(mesh.shape)
    texts = tuple(map(str, placements))
    described = TensorSpec(name, spec.dtype, shape, Slice(name, shape, (0,) * len(shape), axes, texts))
    mine = _part_of(shape, mesh, placements)
    _check_boxes(mine, repr(name), placements)
    if mine is None or (mine.box.elements == 0 and shape and 0 not in shape):
        return Described(described, None, () if mine is None else mine.mesh)
    part = Slice(name, shape, mine.box.offset, axes, texts)
    held = TensorSpec(slice_name(name, mine.box), spec.dtype, mine.box.shape, part)
    return Described(described, HeldSlice(held, mine.holders), mine.mesh, mine.slices)


class _Part(NamedTuple):
    box: Box
    holders: tuple[int, ...]
    mesh: tuple[int, ...]
    """All ranks that have some of it."""
    slices: int
    """How many different ones all ranks have, without empty ones; 0 where a rank has more than one box."""


@lru_cache(maxsize=4096)
def _part_of(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> _Part | None:
    """What this rank has of a tensor, and who has the same; None where it is not in the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    axes = tuple(mesh.shape)
    mine = _box_at(shape, axes, list(coordinate), placements)
    places, twins = _places(mesh.mesh), sorted(_twins(mesh).items())
    boxes = {place: _box_at(shape, axes, list(place), placements) for place in places.values()}
    holders = (rank for rank, twin in twins if boxes[places[twin]] == mine)
    slices = {box for box in boxes.values() if box.elements}
    # torch gives the first element of a part and its sizes. Where a part is no box, these boxes overlap: each part has
    # the first element that the parts before it do not have, so it is its box where those are theirs.
    count = max(1, len(slices)) if covers(slices, shape) else 0
    return _Part(mine, tuple(holders), tuple(rank for rank, _ in twins), count)


def _check_boxes(part: _Part | None, what: str, placements: tuple[Placement, ...]) -> None:
    if part is not None and not part.slices:
        raise UsageError(
            f"tensor {what} is sharded as {placements}: ranks have rows of it that do not lie together, which cannot "
            "be stored; redistribute it, with Shard in place of _StridedShard"
        )


def _twins(mesh: DeviceMesh) -> dict[int, int]:
    """For each rank of the mesh that `mesh` was cut out of, the rank of `mesh` that has the same: along the axes that
    `mesh` does not have (the data-parallel one, beside tensor parallelism) all ranks are replicas."""
    root = mesh._get_root_mesh().mesh  # noqa: SLF001 - nothing public says what a mesh was cut out of
    everywhere, ours = _places(root), _places(mesh.mesh)
    if any(rank not in everywhere for rank in ours):
        return {rank: rank for rank in ours}
    one = everywhere[next(iter(ours))]
    varies = [len({everywhere[rank][axis] for rank in ours}) > 1 for axis in range(root.ndim)]
    twins: dict[int, int] = {}
    for rank, place in everywhere.items():
        twin = tuple(there if varied else here for there, here, varied in zip(place, one, varies, strict=True))
        if (found := int(root[twin])) in ours:
            twins[rank] = found
    return twins


def _places(ranks: torch.Tensor) -> dict[int, tuple[int, ...]]:
    """Of each rank, its coordinate."""
    return {int(ranks[index]): index for index in itertools.product(*map(range, ranks.shape))}


def _box_at(
    shape: tuple[int, ...], axes: tuple[int, ...], coordinate: list[int], placements: tuple[Placement, ...]
) -> Box:
    size, offset = _compute_local_shape_and_global_offset(shape, axes, coordinate, placements)
    return Box(tuple(offset), tuple(size))


def box_of(tensor: torch.Tensor) -> Box:
    """What this rank has of the whole tensor; of a plain tensor all."""
    if not isinstance(tensor, DTensor):
        return whole(tuple(tensor.shape))
    part = _part_of(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))
    _check_boxes(part, f"of shape {tuple(tensor.shape)}", tuple(tensor.placements))
    return whole((0,) * tensor.ndim) if part is None else part.box


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def address_of(tensor: torch.Tensor) -> int:
    """Equal for two tensors of one memory; 0 where a rank has no part of a sharded one."""
    return local_part(tensor.detach()).data_ptr()


def new_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A tensor that is sharded as `tensor`, of which this rank has `local`."""
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def sharded_like(value: torch.Tensor, tensor: DTensor) -> DTensor:
    """This rank's part of the whole tensor `value`, sharded as `tensor` of the same shape, on its device."""
    box = box_of(tensor)
    part = value[tuple(slice(begin, begin + size) for begin, size in zip(box.offset, box.shape, strict=True))]
    return new_like(tensor, part.to(local_part(tensor).device).clone(memory_format=torch.contiguous_format))

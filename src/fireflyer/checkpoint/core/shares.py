"""Who writes what: every shared tensor is written by exactly one rank, about the same number of bytes by each.

Each rank computes the same assignment from the same list, so nothing is said about it between ranks; a digest of the
list travels with each shard's record and tells when the lists differ. Whole tensors, largest first onto the least
loaded rank: the heaviest rank has at most 4/3 of the best possible load (Graham, 1969). Tensors in which ranks may
differ (`of_rank_0`) are rank 0's to write, so that what is stored is one rank's and no mixture.

A slice of a sharded tensor is written by one of the ranks that have it: the replicas of hybrid sharding share their
slices as all ranks share whole tensors. Ranks with the same slices see the same list, so they agree without the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.checkpoint.core.safetensors import TensorSpec
from fireflyer.native import crc32c

__all__ = ["OWN_PREFIX", "HeldSlice", "assign", "assign_slices", "layout_digest", "own_name", "share_of", "split_own"]

OWN_PREFIX = "own/"
"""Tensors that belong to a rank are stored as `own/<rank>/<name>`; shared names must not begin with it."""


class HeldSlice(NamedTuple):
    """A slice that this rank has."""

    spec: TensorSpec
    """By the slice's own name and shape."""
    holders: tuple[int, ...]
    """The ranks that have it, rising."""


def own_name(rank: int, name: str) -> str:
    return f"{OWN_PREFIX}{rank}/{name}"


def split_own(stored: str) -> tuple[int, str] | None:
    """`(rank, name)` of a stored own tensor; None for a shared one, or for a name that nobody of us wrote."""
    if not stored.startswith(OWN_PREFIX):
        return None
    rank, separator, name = stored.removeprefix(OWN_PREFIX).partition("/")
    return (int(rank), name) if separator and rank.isascii() and rank.isdigit() and len(rank) < 8 else None


def assign(specs: Sequence[TensorSpec], world_size: int, of_rank_0: frozenset[str] = frozenset()) -> dict[str, int]:
    """The rank that writes each shared tensor. Independent of the order of `specs`. Raises `UsageError`."""
    for spec in specs:
        if spec.name.startswith(OWN_PREFIX):
            raise UsageError(f"shared tensor name {spec.name[:80]!r} begins with {OWN_PREFIX!r}; choose another")
    fixed = [spec for spec in specs if spec.name in of_rank_0]
    owners = {spec.name: 0 for spec in fixed}
    loads = [(0, rank) for rank in range(world_size)]
    heapq.heapreplace(loads, (sum(spec.size_bytes for spec in fixed), 0))
    free = [spec for spec in specs if spec.name not in of_rank_0]
    for spec in sorted(free, key=lambda spec: (-spec.size_bytes, spec.name)):
        load, rank = heapq.heappop(loads)
        owners[spec.name] = rank
        heapq.heappush(loads, (load + spec.size_bytes, rank))
    return owners


def assign_slices(held: Iterable[HeldSlice], loads: Sequence[int]) -> dict[str, int]:
    """The rank that writes each slice: one of its holders. `loads` is what each rank of the world writes already, in
    bytes. Ranks that have the same slices come to the same answer about them. Raises `UsageError`."""
    groups: dict[tuple[int, ...], list[TensorSpec]] = {}
    for each in held:
        groups.setdefault(each.holders, []).append(each.spec)
    owners: dict[str, int] = {}
    for holders, specs in groups.items():
        if holders[-1] >= len(loads):
            raise UsageError(
                f"{specs[0].name[:80]!r} is also on rank {holders[-1]}, and {len(loads)} ranks save: the checkpoint "
                "manager needs all ranks of the device mesh"
            )
        heap = [(loads[rank], rank) for rank in holders]
        heapq.heapify(heap)
        for spec in sorted(specs, key=lambda spec: (-spec.size_bytes, spec.name)):
            load, rank = heap[0]
            owners[spec.name] = rank
            heapq.heapreplace(heap, (load + spec.size_bytes, rank))
    return owners


def _loads(shared: Sequence[TensorSpec], owners: dict[str, int], world_size: int) -> list[int]:
    loads = [0] * world_size
    for spec in shared:
        loads[owners[spec.name]] += spec.size_bytes
    return loads


def share_of(
    rank: int,
    shared: Sequence[TensorSpec],
    own: Sequence[TensorSpec],
    world_size: int,
    of_rank_0: frozenset[str] = frozenset(),
    held: Sequence[HeldSlice] = (),
) -> list[TensorSpec]:
    """What `rank` stores, by stored name: of the `shared` tensors, of the slices that it has, and its own."""
    owners = assign(shared, world_size, of_rank_0)
    mine = [spec for spec in shared if owners[spec.name] == rank]
    if held:
        writers = assign_slices(held, _loads(shared, owners, world_size))
        mine += [each.spec for each in held if writers[each.spec.name] == rank]
    return mine + [TensorSpec(own_name(rank, spec.name), spec.dtype, spec.shape) for spec in own]


def layout_digest(shared: Sequence[TensorSpec], of_rank_0: frozenset[str] = frozenset()) -> int:
    """Equal on two ranks exactly (up to a 32-bit coincidence) when their shared tensors are, sharded ones included: of
    those `shared` has the whole shape, the mesh and the placements."""
    return crc32c(msgspec.json.encode([sorted(shared, key=lambda spec: spec.name), sorted(of_rank_0)]))

"""Who writes what: every shared tensor is written by exactly one rank, about the same number of bytes by each.

Where all ranks have the same tensors (`core.stages` is for those that have not), each computes the same assignment from
the same list: a digest of it is all that ranks tell each other. Whole tensors, largest first onto the least loaded
rank: the heaviest has at most 4/3 of the best possible load (Graham, 1969). Tensors in which ranks may differ
(`of_rank_0`) are rank 0's to write, so that what is stored is one rank's and no mixture.

A slice of a sharded tensor is written by one of the ranks that have it: the replicas of hybrid sharding share their
slices as all ranks share whole tensors. Ranks with the same slices see the same list, so they agree without the others.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.checkpoint.core.safetensors import TensorSpec
from fireflyer.native import crc32c

__all__ = [
    "OWN_PREFIX",
    "HeldSlice",
    "assign",
    "assign_among",
    "assign_slices",
    "check_shared_names",
    "layout_digest",
    "own_name",
    "own_specs",
    "share_of",
    "split_own",
]

OWN_PREFIX = "own/"
"""Tensors that belong to a rank are stored as `own/<rank>/<name>`; shared names must not begin with it."""
_OWN = re.compile(r"own/(0|[1-9][0-9]{0,6})/(.*)", re.DOTALL)


class HeldSlice(NamedTuple):
    """A slice that this rank has."""

    spec: TensorSpec
    """By the slice's own name and shape."""
    holders: tuple[int, ...]
    """The ranks that have it, rising."""


def own_name(rank: int, name: str) -> str:
    return f"{OWN_PREFIX}{rank}/{name}"


def split_own(stored: str) -> tuple[int, str] | None:
    """`(rank, name)` of a stored own tensor; None for a shared one, or for a name that nobody of us wrote. No two
    stored names give the same: of numbers those alone are taken that are written as `own_name` does."""
    match = _OWN.fullmatch(stored)
    return None if match is None else (int(match[1]), match[2])


def assign(specs: Sequence[TensorSpec], world_size: int, of_rank_0: frozenset[str] = frozenset()) -> dict[str, int]:
    """The rank that writes each shared tensor, where all ranks have all of them. Independent of the order of `specs`.
    Raises `UsageError`."""
    check_shared_names(specs)
    fixed = [spec for spec in specs if spec.name in of_rank_0]
    loads = [0] * world_size
    loads[0] = sum(spec.size_bytes for spec in fixed)
    everyone = tuple(range(world_size))
    owners = assign_among([(spec, everyone) for spec in specs if spec.name not in of_rank_0], loads)
    return {**dict.fromkeys((spec.name for spec in fixed), 0), **owners}


def check_shared_names(specs: Iterable[TensorSpec]) -> None:
    """Raises `UsageError` for a name that looks like that of a rank's own tensor."""
    for spec in specs:
        if spec.name.startswith(OWN_PREFIX):
            raise UsageError(f"shared tensor name {spec.name[:80]!r} begins with {OWN_PREFIX!r}; choose another")


def assign_among(specs: Iterable[tuple[TensorSpec, tuple[int, ...]]], loads: list[int]) -> dict[str, int]:
    """The rank that writes each tensor, by name: one of the ranks beside it. `loads` is what each rank of the world
    writes already, in bytes, and is brought up to date. Those that the fewest ranks have come first, as there is the
    least choice; among them the largest."""
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    owners: dict[str, int] = {}
    for spec, holders in sorted(specs, key=lambda each: (len(each[1]), -each[0].size_bytes, each[0].name)):
        heap = heaps.get(holders)
        if heap is None:
            heap = heaps[holders] = [(loads[rank], rank) for rank in holders]
            heapq.heapify(heap)
        while heap[0][0] != loads[heap[0][1]]:  # it has got tensors that other ranks have too
            heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        owners[spec.name] = rank
        loads[rank] += spec.size_bytes
        heapq.heapreplace(heap, (loads[rank], rank))
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
        # Of each group from the same loads: not every rank that has these slices has those of other groups.
        owners |= assign_among([(spec, holders) for spec in specs], list(loads))
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
    return mine + own_specs(rank, own)


def own_specs(rank: int, own: Iterable[TensorSpec]) -> list[TensorSpec]:
    """A rank's own tensors by the names under which they are stored."""
    return [TensorSpec(own_name(rank, spec.name), spec.dtype, spec.shape) for spec in own]


def layout_digest(shared: Sequence[TensorSpec], of_rank_0: frozenset[str] = frozenset()) -> int:
    """Equal on two ranks exactly (up to a 32-bit coincidence) when their shared tensors are, sharded ones included: of
    those `shared` has the whole shape, the mesh and the placements."""
    return crc32c(msgspec.json.encode([sorted(shared, key=lambda spec: spec.name), sorted(of_rank_0)]))

"""Who writes what: every shared tensor is written by exactly one rank, about the same number of bytes by each.

Each rank computes the same assignment from the same list, so nothing is said about it between ranks; a digest of the
list travels with each shard's record and tells when the lists differ. Whole tensors, largest first onto the least
loaded rank: the heaviest rank has at most 4/3 of the best possible load (Graham, 1969). Tensors in which ranks may
differ (`of_rank_0`) are rank 0's to write, so that what is stored is one rank's and no mixture.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.checkpoint.core.safetensors import TensorSpec
from fireflyer.native import crc32c

__all__ = ["OWN_PREFIX", "assign", "layout_digest", "own_name", "share_of", "split_own"]

OWN_PREFIX = "own/"
"""Tensors that belong to a rank are stored as `own/<rank>/<name>`; shared names must not begin with it."""


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


def share_of(
    rank: int,
    shared: Sequence[TensorSpec],
    own: Sequence[TensorSpec],
    world_size: int,
    of_rank_0: frozenset[str] = frozenset(),
) -> list[TensorSpec]:
    """What `rank` stores, by stored name."""
    owners = assign(shared, world_size, of_rank_0)
    mine = [spec for spec in shared if owners[spec.name] == rank]
    return mine + [TensorSpec(own_name(rank, spec.name), spec.dtype, spec.shape) for spec in own]


def layout_digest(shared: Sequence[TensorSpec], of_rank_0: frozenset[str] = frozenset()) -> int:
    """Equal on two ranks exactly (up to a 32-bit coincidence) when their shared tensors are."""
    return crc32c(msgspec.json.encode([sorted(shared, key=lambda spec: spec.name), sorted(of_rank_0)]))

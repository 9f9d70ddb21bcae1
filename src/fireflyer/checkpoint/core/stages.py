"""Who writes what where ranks have different tensors: the stages of a pipeline, experts, a head on some ranks.

Ranks with the same list of tensors are a *stage* here, whatever makes them differ. One rank of each stage says what it
has (`StageList`), rank 0 computes who writes what (`plan_stages`), and each stage is told about its own tensors
(`StageShare`), so that a message is as long as what a stage has and not as what the job has.

A tensor that several stages have (tied weights) is the same one: it must have one dtype and shape, and is written once.
Where stages hold it in different forms (whole, or sharded over different meshes) it is written in the form that the
lowest rank has, by ranks that have it so. Everything else is spread as in `core.shares`, each tensor among those who
have it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.checkpoint.core.safetensors import TensorSpec
from fireflyer.checkpoint.core.shares import HeldSlice, assign_among, assign_slices, own_specs

__all__ = ["StageList", "StageShare", "list_digest", "plan_stages", "share_of_stage", "stages_of"]

_OTHERS: Final = -1
"""In the place of a writer: ranks of other stages write the tensor."""
_RANKS_SHOWN: Final = 8


class StageList(msgspec.Struct, frozen=True):
    """The shared tensors of a rank."""

    specs: tuple[TensorSpec, ...]
    """Sorted by name. Of sharded ones the whole, with mesh and placements."""
    of_rank_0: tuple[str, ...] = ()
    """Sorted: names in which ranks may differ. The lowest rank that has such a tensor writes it."""
    meshes: tuple[tuple[int, ...], ...] = ()
    """Ranks that together have a sharded tensor, rising. Distinct."""
    mesh_of: tuple[int, ...] = ()
    """For each of the sharded ones in `specs`, in their order, the number of its mesh."""


class StageShare(msgspec.Struct, frozen=True):
    """What the ranks of a stage need to know, in the order of `StageList.specs`."""

    writers: tuple[int, ...]
    """The rank that writes a whole tensor; of a sharded one, the number in `holders` of the ranks that write its
    slices; -1 for what is written by other stages in another form."""
    holders: tuple[tuple[int, ...], ...]
    loads: tuple[int, ...]
    """Bytes of whole tensors that each rank of the world writes."""
    total_bytes: int
    """Of the tensors of all stages, each once."""


def list_digest(listed: StageList) -> bytes:
    """Equal on two ranks exactly when their lists are."""
    return hashlib.blake2b(msgspec.msgpack.encode(listed), digest_size=16).digest()


def stages_of(digests: Sequence[bytes]) -> list[int]:
    """The stage of each rank. Stages are numbered by their lowest ranks."""
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(digest, len(numbers)) for digest in digests]


class _Form(NamedTuple):
    """How a stage has a tensor."""

    spec: TensorSpec
    mesh: tuple[int, ...] | None
    """None for a whole one; empty for a sharded one of which the stage has no part."""


class _Place(NamedTuple):
    stage: int
    number: int
    """In its list."""
    form: _Form


def plan_stages(lists: Sequence[StageList], stage_of: Sequence[int]) -> list[StageShare]:
    """The share of each stage; `stage_of` says of each rank in which it is. Raises `UsageError` where two stages have
    different tensors of one name."""
    ranks = [tuple(rank for rank, at in enumerate(stage_of) if at == stage) for stage in range(len(lists))]
    places = _places(lists)
    for found in places.values():
        _check_same(found, ranks)
    of_lowest = {name for listed in lists for name in listed.of_rank_0}
    holders: dict[tuple[int, ...], int] = {}
    loads = [0] * len(stage_of)
    owners: dict[str, int] = {}
    free: list[tuple[TensorSpec, tuple[int, ...]]] = []
    merged: dict[tuple[int, ...], tuple[int, ...]] = {}
    for name, found in places.items():
        writing = [place for place in found if place.form == found[0].form]
        stages = tuple(place.stage for place in writing)
        if stages not in merged:
            merged[stages] = tuple(sorted(rank for stage in stages for rank in ranks[stage]))
        having, spec = merged[stages], writing[0].form.spec
        if spec.slice is not None:
            owners[name] = holders.setdefault(having, len(holders))
        elif name in of_lowest:
            owners[name] = having[0]
            loads[having[0]] += spec.size_bytes
        else:
            free.append((spec, having))
    owners |= assign_among(free, loads)
    writers = [[_OTHERS] * len(listed.specs) for listed in lists]
    for name, found in places.items():
        for place in found:
            if place.form == found[0].form:
                writers[place.stage][place.number] = owners[name]
    total_bytes = sum(found[0].form.spec.size_bytes for found in places.values())
    return [StageShare(tuple(some), tuple(holders), tuple(loads), total_bytes) for some in writers]


def _places(lists: Sequence[StageList]) -> dict[str, list[_Place]]:
    """Where each tensor is; first in the stage whose form is stored: the lowest that has some of it."""
    places: dict[str, list[_Place]] = {}
    for stage, listed in enumerate(lists):
        meshes = iter(listed.mesh_of)
        for number, spec in enumerate(listed.specs):
            form = _Form(spec, None if spec.slice is None else listed.meshes[next(meshes)])
            places.setdefault(spec.name, []).append(_Place(stage, number, form))
    for found in places.values():
        if len(found) > 1:
            found.sort(key=lambda place: (place.form.mesh == (), place.stage))
    return places


def _check_same(found: Sequence[_Place], ranks: Sequence[tuple[int, ...]]) -> None:
    ours = found[0].form.spec
    for place in found[1:]:
        theirs = place.form.spec
        if (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
            raise UsageError(
                f"tensor {ours.name[:80]!r} is {ours.dtype} {ours.shape} on {_named(ranks[found[0].stage])} and "
                f"{theirs.dtype} {theirs.shape} on {_named(ranks[place.stage])}; tensors of one name must be the same "
                "tensor: name them by their place in the whole model"
            )


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN])) + (", …" if len(ranks) > _RANKS_SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def share_of_stage(
    rank: int, listed: StageList, share: StageShare, held: Iterable[HeldSlice], own: Sequence[TensorSpec]
) -> list[TensorSpec]:
    """What `rank` stores, by stored name, as `core.shares.share_of` says it where all ranks have the same. Raises
    `DataCorruption` for a share that is not of this list."""
    numbers = range(_OTHERS, max(len(share.loads), len(share.holders)))
    if len(share.writers) != len(listed.specs) or any(writer not in numbers for writer in share.writers):
        raise DataCorruption("rank 0 has told who writes what of another list of tensors")
    writers = list(zip(listed.specs, share.writers, strict=True))
    mine = [spec for spec, writer in writers if spec.slice is None and writer == rank]
    sharded = {spec.name: writer for spec, writer in writers if spec.slice is not None and writer != _OTHERS}
    some = [_among(each, share.holders[sharded[name]]) for each in held if (name := _whole_name(each)) in sharded]
    slices = [each for each in some if rank in each.holders]
    chosen = assign_slices(slices, share.loads)
    mine += [each.spec for each in slices if chosen[each.spec.name] == rank]
    return mine + own_specs(rank, own)


def _whole_name(held: HeldSlice) -> str:
    return held.spec.name if held.spec.slice is None else held.spec.slice.of


@lru_cache(maxsize=4096)
def _common(some: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    among = dict.fromkeys(others)
    return tuple(rank for rank in some if rank in among)


def _among(held: HeldSlice, ranks: tuple[int, ...]) -> HeldSlice:
    """A mesh that was cut out of a larger one counts all ranks of that as holders; those of other stages have no such
    tensor."""
    return HeldSlice(held.spec, _common(held.holders, ranks))

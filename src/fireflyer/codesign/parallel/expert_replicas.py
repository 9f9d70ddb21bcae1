"""Which experts a rank has copies of, beside its own, from how many tokens each expert got.

The tokens of an expert with several copies are divided equally among them, so a rank waits for less of the one expert
that most tokens choose. DeepSeek-V3 serves so: 32 copies on 32 ranks for prefill (DeepSeek-V3 report, 3.4.1).

Copies are given one after the other to the expert that has most tokens for each of its copies, which leaves the largest
share as small as it can be for so many copies. Shares are packed onto ranks with equally many on each, largest first,
no two of one expert on a rank, and exchanged in pairs as those of `expert_placement`. Where routing is limited to some
groups of experts and groups divide over nodes, a group and its copies stay on one node, so that tokens go to no more
nodes than before (as EPLB does). Deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import Experts
from fireflyer.codesign.parallel.expert_placement import imbalance, level, pack, place_experts
from fireflyer.codesign.parallel.plan import ParallelPlan

__all__ = ["ExpertLoads", "ReplicatedExperts", "rank_loads", "replica_counts", "replicate_experts", "replicate_layers"]

MAX_COPIES: Final = 1 << 12
MAX_GATES: Final = 1 << 12
"""Layers with experts that a file has loads of."""

Tokens = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class ExpertLoads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured loads of experts in the file of a plan."""

    tokens: Annotated[dict[str, tuple[Tokens, ...]], msgspec.Meta(max_length=MAX_GATES)]
    """Tokens that each expert got, by the name of its gate: `tokens` of the lines `experts` in the metrics of a run."""
    copies: int = 0
    """Copies of experts, of each layer, in an expert group, beside one of each."""


class ReplicatedExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Experts of a layer on the ranks of an expert group."""

    ranks: tuple[tuple[int, ...], ...]
    """Numbers of the experts on each rank, ascending."""
    copies: tuple[int, ...]
    """Number of copies of each expert, 1 or more."""
    before: float
    """Load of the fullest rank over the mean, with consecutive experts on each rank."""
    moved: float
    """Load of the fullest rank over the mean, with one copy of each expert, as `place_experts` puts them."""
    after: float
    """Load of the fullest rank over the mean, with the copies."""


def replicate_layers(
    measured: ExpertLoads, plan: ParallelPlan, experts: Experts | None, gpus: int
) -> dict[str, ReplicatedExperts]:
    """Experts of each gate on the ranks of an expert group of `plan`, on nodes of `gpus` GPUs. Raises `UsageError` for
    loads that are not those of `experts`, and as `replicate_experts` does."""
    if experts is None or plan.expert == 1:
        raise UsageError("[experts] has loads for ranks of expert parallelism, and expert is 1; leave [experts] out")
    nodes = max(1, plan.expert // gpus) if plan.expert % gpus == 0 else 1
    found = {}
    for gate, tokens in measured.tokens.items():
        try:
            loads = [float(one) for one in tokens]
            found[gate] = replicate_experts(loads, experts, plan.expert, measured.copies, nodes)
        except UsageError as error:
            raise UsageError(f"[experts] tokens of {gate!r}: {error}") from error
    return found


def replica_counts(loads: Sequence[float], copies: int, most: int) -> tuple[int, ...]:
    """Copies of each load, 1 and more, `copies` more than loads in all, with the smallest largest share (load over
    copies); of several such the one in which the first of equal shares is copied. None has more than `most`.

    >>> replica_counts([6, 3, 1], 2, most=3)
    (3, 1, 1)
    """
    counts = [1] * len(loads)
    for _ in range(copies):
        open_ = [one for one in range(len(loads)) if counts[one] < most]
        counts[max(open_, key=lambda one: (loads[one] / counts[one], -one))] += 1
    return tuple(counts)


def rank_loads(loads: Sequence[float], ranks: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Load of each rank that has these experts: the copies of an expert share its load equally."""
    counts = [0] * len(loads)
    for held in ranks:
        for expert in held:
            counts[expert] += 1
    return tuple(math.fsum(loads[expert] / counts[expert] for expert in held) for held in ranks)


def replicate_experts(
    loads: Sequence[float], experts: Experts, ranks: int, copies: int, nodes: int = 1
) -> ReplicatedExperts:
    """Experts for `ranks` on `nodes`, equally many on each, with `copies` beside one of each expert; without copies
    where that leaves the fullest rank with no more. Raises `UsageError` as `place_experts` does, and for copies that do
    not divide over the ranks, or are more than all ranks can hold."""
    moved = place_experts(loads, experts, ranks, nodes)
    each = experts.routed // ranks
    if not 0 <= copies <= MAX_COPIES or copies % ranks:
        raise UsageError(f"{copies} copies of experts do not divide over {ranks} ranks; use a multiple of {ranks}")
    within = nodes if experts.groups_per_token < experts.groups and experts.groups % nodes == 0 else 1
    if each + copies // ranks > experts.routed // within:
        raise UsageError(
            f"{copies} copies of experts are more than {ranks} ranks can hold without two of one expert on a rank; use "
            f"at most {ranks * (experts.routed // within - each)}"
        )
    single = tuple(tuple(sorted(moved.order[first : first + each])) for first in range(0, len(loads), each))
    placed = _placed(loads, experts, ranks, copies, within) if copies else single
    if max(rank_loads(loads, placed)) >= max(rank_loads(loads, single)):
        placed = single
    found = rank_loads(loads, placed)
    total = math.fsum(loads)
    counts = [sum(expert in held for held in placed) for expert in range(len(loads))]
    return ReplicatedExperts(
        ranks=placed,
        copies=tuple(counts),
        before=imbalance(loads, ranks),
        moved=moved.after,
        after=max(found) * ranks / total if total else 1.0,
    )


def _placed(
    loads: Sequence[float], experts: Experts, ranks: int, copies: int, within: int
) -> tuple[tuple[int, ...], ...]:
    """On each of `within` parts of the ranks, whole groups of experts with copies of them."""
    if within == 1:
        return _packed(loads, range(len(loads)), ranks, copies)
    size = experts.routed // experts.groups
    totals = [math.fsum(loads[first : first + size]) for first in range(0, len(loads), size)]
    found: list[tuple[int, ...]] = []
    for groups in pack(totals, within):
        members = [expert for group in groups for expert in range(group * size, (group + 1) * size)]
        found += _packed(loads, members, ranks // within, copies // within)
    return tuple(found)


def _packed(loads: Sequence[float], members: Sequence[int], ranks: int, copies: int) -> tuple[tuple[int, ...], ...]:
    """`members` and copies of them on `ranks`, no two of one expert on a rank."""
    counts = replica_counts([loads[expert] for expert in members], copies, ranks)
    kinds = [expert for expert, count in zip(members, counts, strict=True) for _ in range(count)]
    shares = [loads[expert] / count for expert, count in zip(members, counts, strict=True) for _ in range(count)]
    held: list[list[int]] = [[] for _ in range(ranks)]
    totals, size = [0.0] * ranks, len(kinds) // ranks
    for item in sorted(range(len(kinds)), key=lambda one: (-shares[one], one)):
        _put(item, held, totals, shares, kinds, size)
    level(shares, held, totals, kinds)
    return tuple(tuple(sorted(kinds[item] for item in one)) for one in held)


def _put(
    item: int,
    held: list[list[int]],
    totals: list[float],
    shares: Sequence[float],
    kinds: Sequence[int],
    size: int,
) -> None:
    """Into the bin with the least load that has room and no item of its kind. Where there is none, an item of a full
    bin without its kind makes room: it goes to a bin that has room, and no item of that one's kind."""
    free = [one for one in range(len(held)) if len(held[one]) < size]
    without = [one for one in range(len(held)) if all(kinds[other] != kinds[item] for other in held[one])]
    order = sorted(set(free) & set(without), key=lambda one: (totals[one], one))
    if order:
        place = order[0]
    else:
        place, target = min(without, key=lambda one: (totals[one], one)), free[0]
        there = {kinds[other] for other in held[target]}
        moved = min((one for one in held[place] if kinds[one] not in there), key=lambda one: (shares[one], one))
        held[place].remove(moved)
        held[target].append(moved)
        totals[place] -= shares[moved]
        totals[target] += shares[moved]
    held[place].append(item)
    totals[place] += shares[item]

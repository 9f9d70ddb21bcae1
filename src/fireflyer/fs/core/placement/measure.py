"""How evenly a table spreads what a dead node did, beside what is possible at all.

With u(y) targets on node y, and E(x) the targets of all nodes that may share a chain with x:

- *reads*. Replicas of a chain share its reads, so those of a dead x go to the k - 1 others of each of its chains:
  peer y takes n(x, y) / (u(x)·(k - 1)) of them, n(x, y) being the number of chains that have both.
- *recovery*. A target of x that comes back is copied from the last of the others in its chain: y takes s(x, y) / u(x),
  s(x, y) being the number of chains of x where y is that one.

The even share of y is u(y) / E(x), 1 / (v - 1) among v equal nodes. The *worst peer-load ratio* is the maximum over all
(dead node x, peer y) of the share that y takes, divided by its even share; 1 is perfect.

Besides, where x was head the next one takes over: y in h(x, y) chains. That moves no data, so it is only a count.

Its *bound*: counts are whole numbers, so the ratio is at least the smallest rho for which caps floor(rho · even share ·
total of x), at most min(u(x), u(y)) each and u(x) for a whole domain, add up to the total of x for every x; n is
symmetric, so the caps of (x, y) and (y, x) both hold. Not every bound can be reached: some designs do not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = [
    "Counts",
    "Quality",
    "bound_of",
    "caps_below",
    "count_heads",
    "count_pairs",
    "count_sources",
    "measure",
    "ratio_of",
]

Counts = npt.NDArray[np.int64]


class Quality(msgspec.Struct, frozen=True):
    """Ratios are exact fractions as floats; None where nothing is shared (one replica, or one chain member)."""

    reads_ratio: float | None
    reads_bound: float | None
    recovery_ratio: float | None
    recovery_bound: float | None
    heads_max: int
    """Chains of a dead head that one node takes over, and (`heads_bound`) how many at least."""
    heads_bound: int
    targets_min: int
    targets_max: int
    position_spread: int
    """Largest difference between how often a node has one position and another."""
    shared_min: int
    shared_max: int
    """Chains that two nodes share, of those that may."""


def count_pairs(chains: Counts, nodes: int) -> Counts:
    """(v, v): chains that have both; 0 on the diagonal. `chains`: (b, k) indices of nodes."""
    counts = np.zeros((nodes, nodes), dtype=np.int64)
    for i in range(chains.shape[1]):
        for j in range(chains.shape[1]):
            if i != j:
                np.add.at(counts, (chains[:, i], chains[:, j]), 1)
    return counts


def count_sources(chains: Counts, nodes: int) -> Counts:
    """(v, v): [x, y] is in how many chains of x node y is the last of the others."""
    counts = np.zeros((nodes, nodes), dtype=np.int64)
    replicas = chains.shape[1]
    for i in range(replicas if replicas > 1 else 0):
        np.add.at(counts, (chains[:, i], chains[:, replicas - 1 if i < replicas - 1 else i - 1]), 1)
    return counts


def count_heads(chains: Counts, nodes: int) -> Counts:
    """(v, v): [x, y] is how many chains have x as head and y next."""
    counts = np.zeros((nodes, nodes), dtype=np.int64)
    if chains.shape[1] > 1:
        np.add.at(counts, (chains[:, 0], chains[:, 1]), 1)
    return counts


def _apart(domains: Sequence[int]) -> npt.NDArray[np.bool_]:
    numbers = np.asarray(domains)
    apart: npt.NDArray[np.bool_] = numbers[:, None] != numbers[None, :]
    return apart


def ratio_of(counts: Counts, quotas: Sequence[int], domains: Sequence[int]) -> Fraction | None:
    """The worst of `counts[x, y] / counts[x].sum()` over the even share of y."""
    held = np.asarray(quotas, dtype=np.int64)
    eligible = _apart(domains) @ held
    totals = counts.sum(axis=1)
    worst: Fraction | None = None
    for x in np.flatnonzero(totals):
        peers = np.flatnonzero(counts[x])
        shares = {(int(counts[x, y]), int(held[y])) for y in peers}
        largest = max(Fraction(count, quota) for count, quota in sorted(shares))
        ratio = largest * int(eligible[x]) / int(totals[x])
        worst = ratio if worst is None else max(worst, ratio)
    return worst


def bound_of(
    per_target: int, quotas: Sequence[int], domains: Sequence[int], *, symmetric: bool
) -> tuple[Fraction | None, Counts]:
    """The bound of the ratio where a dead node of u targets leaves `per_target`·u units, and the caps that it means."""
    held = np.asarray(quotas, dtype=np.int64)
    apart = _apart(domains)
    eligible = apart @ held
    numbers = np.unique(np.asarray(domains), return_inverse=True)[1]
    limit = np.where(apart, np.minimum(held[:, None], held[None, :]), 0)
    if not per_target or not (held > 0).any():
        return None, limit

    def caps(ratio: Fraction) -> Counts:
        even = (held * per_target)[:, None] * held[None, :] * ratio.numerator
        found = np.minimum(even // np.maximum(eligible * ratio.denominator, 1)[:, None], limit)
        smaller: Counts = np.minimum(found, found.T) if symmetric else found
        return smaller

    def enough(ratio: Fraction) -> bool:
        found = caps(ratio)
        by_domain = np.zeros((len(held), int(numbers.max()) + 1), dtype=np.int64)
        np.add.at(by_domain.T, numbers, found.T)
        each = bool((np.minimum(by_domain, held[:, None]).sum(axis=1) >= held * per_target).all())
        return each and (not symmetric or _classes_fit(found, kind_of, held * per_target))

    kinds, kind_of = np.unique(np.stack([held, eligible], axis=1), axis=0, return_inverse=True)
    sizes = sorted({int(u) for u in held if u})
    candidates = sorted(
        {
            Fraction(j * e, u * per_target * size)
            for u, e in kinds.tolist()
            for size in sizes
            if u
            for j in range(1, min(u, size) + 1)
            if j * e >= u * per_target * size
        }
        | {Fraction(1)}
    )
    low, high = 0, len(candidates) - 1
    if not enough(candidates[high]):
        return None, limit
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(candidates[middle]) else (middle + 1, high)
    return candidates[low], caps(candidates[low])


def caps_below(ratio: Fraction, per_target: int, quotas: Sequence[int], domains: Sequence[int]) -> Counts:
    """(v, v): how often two nodes may meet if the worst ratio of reads has to be less than this one."""
    held = np.asarray(quotas, dtype=np.int64)
    apart = _apart(domains)
    totals = np.maximum((apart @ held) * ratio.denominator, 1)[:, None]
    even = (held * per_target)[:, None] * held[None, :] * ratio.numerator
    found = np.maximum(-(-even // totals) - 1, 0)
    caps: Counts = np.where(apart, np.minimum(np.minimum(found, found.T), np.minimum(held[:, None], held[None, :])), 0)
    return caps


def _classes_fit(caps: Counts, class_of: Counts, totals: Counts) -> bool:
    """Whether nodes with few targets, taken together, have enough whom they may meet, and those with many: what the
    first k classes or all but those need of each class is at most what that class has and the caps to it allow."""
    classes = int(class_of.max()) + 1
    allowed = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(allowed, (class_of[:, None], class_of[None, :]), caps)
    needs = np.bincount(class_of, weights=totals, minlength=classes).astype(np.int64)
    for cut in range(classes):
        for some in (slice(None, cut + 1), slice(cut, None)):
            if needs[some].sum() > np.minimum(needs, allowed[some].sum(axis=0)).sum():
                return False
    return True


def measure(chains: Counts, quotas: Sequence[int], domains: Sequence[int]) -> Quality:
    """`chains`: (b, k) indices of nodes, head first. `quotas`: targets of each node in it."""
    nodes, replicas = len(quotas), chains.shape[1]
    pairs = count_pairs(chains, nodes)
    used = np.asarray(quotas) > 0
    shared = pairs[_apart(domains) & used[:, None] & used[None, :]]
    positions = np.stack([np.bincount(chains[:, i], minlength=nodes) for i in range(replicas)], axis=1)[used]
    sources, heads = count_sources(chains, nodes), count_heads(chains, nodes)
    fewest_heads = max((quota // replicas for quota in quotas), default=0)
    return Quality(
        reads_ratio=_number(ratio_of(pairs, quotas, domains)),
        reads_bound=_number(bound_of(replicas - 1, quotas, domains, symmetric=True)[0]),
        recovery_ratio=_number(ratio_of(sources, quotas, domains)),
        recovery_bound=_number(bound_of(min(1, replicas - 1), quotas, domains, symmetric=False)[0]),
        heads_max=int(heads.max()),
        heads_bound=-(-fewest_heads // max(1, int(used.sum()) - 1)) if replicas > 1 else 0,
        targets_min=int(np.asarray(quotas)[used].min()),
        targets_max=int(max(quotas)),
        position_spread=int((positions.max(axis=1) - positions.min(axis=1)).max()),
        shared_min=int(shared.min()) if shared.size else 0,
        shared_max=int(shared.max()) if shared.size else 0,
    )


def _number(ratio: Fraction | None) -> float | None:
    return None if ratio is None else float(ratio)

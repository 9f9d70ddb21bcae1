"""Which ranks are pairs for the NVLink variant of the GPU path (see `torch.pairs`): from what ranks report. Pure.

Every rank reports its GPU, the links that its driver counts from there, and which GPUs it can reach (`torch.bridges`).
Two ranks can be a pair when both count links to the other's GPU and both reach it, or when they share one GPU. Of all
ways to make pairs on a node the one with the most pairs is taken, of those the one with the most links, of those the
first in the order of ranks. A GPU that is left over stays alone; then the group has no pairs at all, since an allreduce
goes by pairs only where every rank is in one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from fireflyer.base.errors import UsageError

__all__ = ["MAX_RANKS", "Decision", "Report", "decide", "links_of", "match"]

MAX_RANKS: Final = 16
"""Of a node, for which pairs are sought: the time doubles with each."""
_MAX_GPUS: Final = 64
_SAME_GPU: Final = 1000
"""Worth more than any number of links."""
_STYLE: Final = re.compile(r"\x1b\[[0-9;]*m")
_GPU: Final = re.compile(r"GPU[0-9]+")
_LINKS: Final = re.compile(r"NV([0-9]{1,3})")
_Name = Annotated[str, Meta(max_length=128)]


class Report(msgspec.Struct, frozen=True):
    """What a rank knows of its GPU. GPUs have names that are the same for all processes of a machine."""

    gpu: _Name = ""
    links: Annotated[dict[_Name, Annotated[int, Meta(ge=0, lt=1000)]], Meta(max_length=_MAX_GPUS)] = {}
    """NVLinks from there to other GPUs."""
    reached: Annotated[tuple[_Name, ...], Meta(max_length=_MAX_GPUS)] = ()
    """GPUs that this process sees and may copy from and to directly."""
    problem: Annotated[str, Meta(max_length=1000)] = ""
    """Why it knows nothing; empty: it does."""


class Decision(NamedTuple):
    pairs: tuple[tuple[int, int], ...]
    """Of ranks, the lower one first; all ranks are in one, or there are none."""
    reason: str
    """For people."""


def decide(reports: Sequence[Report], node_of_rank: Sequence[int]) -> Decision:
    """`reports[r]` is of rank r."""
    for rank, report in enumerate(reports):
        if report.problem:
            return Decision((), f"NVLink bridges of rank {rank} are unknown: {report.problem}")
    pairs: list[tuple[int, int]] = []
    for node in sorted(set(node_of_rank)):
        ranks = [rank for rank, where in enumerate(node_of_rank) if where == node]
        if len(ranks) > MAX_RANKS:
            return Decision((), f"node {node} has {len(ranks)} ranks; pairs are only sought among up to {MAX_RANKS}")
        links = [[_links(reports[one], reports[other]) for other in ranks] for one in ranks]
        found = [(ranks[one], ranks[other]) for one, other in match(links)]
        alone = sorted(set(ranks) - {rank for pair in found for rank in pair})
        if alone:
            return Decision((), f"rank {alone[0]} (node {node}) has no partner: its GPU is not bridged to a free one")
        pairs += found
    return Decision(tuple(pairs), f"every GPU is bridged to its partner, in {len(pairs)} pairs")


def match(links: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The most pairs (i, j), i < j, of different places with `links[i][j] > 0`; the sum of links as large as may be.

    Symmetric, of at most `MAX_RANKS` places. What is in no pair is left alone.
    """
    everybody = (1 << len(links)) - 1

    @cache
    def best(free: int) -> tuple[int, int, tuple[tuple[int, int], ...]]:
        """How many pairs, how many links, and which pairs."""
        if free == 0:
            return 0, 0, ()
        one = (free & -free).bit_length() - 1
        rest = free & ~(1 << one)
        chosen: tuple[int, int, tuple[tuple[int, int], ...]] | None = None
        for other in range(one + 1, len(links)):
            if rest >> other & 1 and links[one][other] > 0:
                count, total, pairs = best(rest & ~(1 << other))
                if chosen is None or (count + 1, total + links[one][other]) > chosen[:2]:
                    chosen = count + 1, total + links[one][other], ((one, other), *pairs)
        alone = best(rest)
        return alone if chosen is None or alone[:2] > chosen[:2] else chosen

    return list(best(everybody)[2])


def links_of(topology: str, names: Sequence[str]) -> Mapping[str, Mapping[str, int]]:
    """The NVLinks of each GPU to others, from the table that `nvidia-smi topo -m` prints; `names` in the order of its
    GPUs. Raises `UsageError` where the two do not fit or this is no such table."""
    lines = [cells for line in topology.splitlines() if (cells := _STYLE.sub("", line).split())]
    gpus = [cell for cell in (lines[0] if lines else []) if _GPU.fullmatch(cell)]
    rows = {cells[0]: cells[1:] for cells in lines[1:] if _GPU.fullmatch(cells[0])}
    if not 0 < len(names) == len(gpus) <= _MAX_GPUS or sorted(rows) != sorted(gpus):
        raise UsageError(f"`nvidia-smi topo -m` lists {len(gpus)} GPUs in {len(rows)} rows, not {len(names)} GPUs")
    found: dict[str, dict[str, int]] = {}
    for number, name in enumerate(names):
        cells = rows.get(f"GPU{number}", [])
        if len(cells) < len(names) or cells[number] != "X":
            raise UsageError(f"the row of GPU{number} in `nvidia-smi topo -m` is not understood")
        counts = [_LINKS.fullmatch(cell) for cell in cells[: len(names)]]
        found[name] = {other: int(count[1]) for other, count in zip(names, counts, strict=True) if count is not None}
    return found


def _links(one: Report, other: Report) -> int:
    if one.gpu == other.gpu:
        return _SAME_GPU
    if other.gpu not in one.reached or one.gpu not in other.reached:
        return 0
    return min(one.links.get(other.gpu, 0), other.links.get(one.gpu, 0))

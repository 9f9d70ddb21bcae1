"""From the digests of replicas to a verdict. Pure: no communication, no clock.

Replicas are compared tensor by tensor. Where more than half of them have one digest, the others are named: with three
or more replicas one that differs is. Where no such majority exists, as with two, all are named, since nothing says
which is right. The verdict is the same on all ranks, which compare the same numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from fireflyer.base.errors import DataCorruption

__all__ = ["MAX_NAMED", "CheckTime", "CorruptionFound", "GuardVerdict", "TensorDifference", "compare"]

CheckTime = Literal["before_commit", "after_commit", "before_save"]
Finding = Literal["agree", "ranks", "pair", "undecided", "no_replicas"]
MAX_NAMED: Final = 32
"""Tensors in a verdict; those beyond are counted."""
_MAX_SHOWN: Final = 4


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor whose bits differ between replicas."""

    name: str
    """Name of the tensor with its kind: `parameter layers.0.weight`, `gradient layers.0.weight`, `optimizer
    layers.0.weight exp_avg`."""
    ranks: tuple[int, ...]
    """Ranks that differ from the majority; without one, all."""
    digests: tuple[int, ...]
    """Digests of all compared ranks, in their order."""


class GuardVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one comparison, as evidence for whoever takes a node out of service."""

    step: int
    point: CheckTime
    """Time of the comparison: `before_commit`, between backward and the optimizer's step; `after_commit`; or
    `before_save`, of a checkpoint."""
    finding: Finding
    """`agree`; `ranks`: these differ from the majority; `pair`: two replicas differ; `undecided`: there is no majority;
    `no_replicas`: nothing could be compared."""
    ranks: tuple[int, ...] = ()
    """Suspects: ranks in the world."""
    compared: tuple[int, ...] = ()
    """All ranks that hold this state."""
    tensors: tuple[TensorDifference, ...] = ()
    """The first that differ, at most `MAX_NAMED`."""
    differing_tensors: int = 0
    agreed_step: int | None = None
    """The last step at one of whose looks all replicas agreed; None if there was no look before, or since a
    rewind."""

    @property
    def corrupt(self) -> bool:
        return self.finding in ("ranks", "pair", "undecided")

    def __str__(self) -> str:
        when = f"step {self.step}, {self.point.replace('_', ' ')}"
        if self.finding == "no_replicas":
            return f"{when}: no other rank holds this state, so corruption of it cannot be found"
        if not self.corrupt:
            return f"{when}: ranks {list(self.compared)} agree"
        subject = {
            "ranks": f"ranks {list(self.ranks)} differ from the majority of {list(self.compared)}",
            "pair": f"ranks {list(self.ranks)} differ, and two replicas do not say which is right",
            "undecided": f"ranks {list(self.ranks)} differ, and no majority says which are right",
        }[self.finding]
        names = ", ".join(one.name for one in self.tensors[:_MAX_SHOWN])
        more = self.differing_tensors - min(len(self.tensors), _MAX_SHOWN)
        since = "no earlier look" if self.agreed_step is None else f"they agreed at step {self.agreed_step}"
        return f"{when}: {subject}: {names}{f' and {more} more' if more else ''}; {since}"


class CorruptionFound(DataCorruption):
    """Replicas differ: go back to a checkpoint of `verdict.agreed_step` or before, without the ranks it names."""

    code = "data_corruption"

    def __init__(self, verdict: GuardVerdict) -> None:
        super().__init__(f"{verdict}; restart from a checkpoint of before, and check the nodes of these ranks")
        self.verdict = verdict


def compare(
    step: int,
    point: CheckTime,
    names: Sequence[str],
    digests: Mapping[int, Sequence[int]],
    *,
    agreed_step: int | None = None,
) -> GuardVerdict:
    """The verdict on `digests`: for each rank, one number for each of `names`."""
    ranks = tuple(sorted(digests))
    if len(ranks) < 2:
        return GuardVerdict(step=step, point=point, finding="no_replicas", compared=ranks, agreed_step=agreed_step)
    different: list[TensorDifference] = []
    undecided = False
    for index, name in enumerate(names):
        of_ranks = tuple(digests[rank][index] for rank in ranks)
        [(most, votes)] = Counter(of_ranks).most_common(1)
        if votes == len(ranks):
            continue
        decided = 2 * votes > len(ranks)
        undecided = undecided or not decided
        suspects = tuple(rank for rank, value in zip(ranks, of_ranks, strict=True) if not decided or value != most)
        different.append(TensorDifference(name=name, ranks=suspects, digests=of_ranks))
    finding: Finding = "agree"
    if different:
        finding = "pair" if len(ranks) == 2 else "undecided" if undecided else "ranks"
    return GuardVerdict(
        step=step,
        point=point,
        finding=finding,
        ranks=tuple(sorted({rank for one in different for rank in one.ranks})),
        compared=ranks,
        tensors=tuple(different[:MAX_NAMED]),
        differing_tensors=len(different),
        agreed_step=agreed_step,
    )

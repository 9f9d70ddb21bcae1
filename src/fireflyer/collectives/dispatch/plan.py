"""Where the rows of tokens go, in two hops, and in which order they are added up. Pure: nothing here moves a byte.

A *row* is a token on its way; an *entry* is a row and one of its experts. Entries are always in ascending order of
rows, and of experts within a row.

1. The *source* sends one row to each node with an expert of the token: to the rank there that has its own number in the
   node (the *forwarder*), which keeps the network's load even and needs no choice.
2. The forwarder sends one row to each rank of its node with an expert of the token. That rank repeats it for each of
   its experts.

A combine goes back the same way. Ranks send an entry's output to the forwarder, which adds those of a row in ascending
order of experts; the source adds the sums of nodes in ascending order of nodes. So a sum does not depend on which rank
or slot of a node has an expert, nor on when messages arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fireflyer.base.errors import UsageError
from fireflyer.collectives.dispatch.placement import ExpertPlacement

__all__ = [
    "MAX_ROWS",
    "ArrivalPlan",
    "Entries",
    "ForwardPlan",
    "SourcePlan",
    "add_in_order",
    "inverse",
    "plan_arrival",
    "plan_forward",
    "plan_source",
    "row_starts",
]

MAX_ROWS: Final = 2**31 - 1
Numbers = npt.NDArray[Any]
"""int64."""


@dataclass(frozen=True, slots=True)
class Entries:
    """`row` and `expert` of each; `rows` is how many rows there are."""

    rows: int
    row: Numbers
    expert: Numbers

    def __len__(self) -> int:
        return int(self.row.size)


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """Of a rank with tokens: for each node, which tokens go there."""

    tokens: int
    per_token: int
    token_of_row: list[Numbers]
    entries: list[Entries]
    choice: list[Numbers]
    """Of each entry: token * per_token + which of its choices."""


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Of a forwarder: rows of all source nodes, one after the other, and which of them each rank of its node needs."""

    entries: Entries
    source_of_row: Numbers
    """Rank."""
    first_row: Numbers
    """Of each source node, and the end."""
    first_entry: Numbers
    needed: list[Numbers]
    """Rows for each rank of the node."""
    sent: list[Entries]
    """For each rank of the node: entries, whose rows count those that it needs."""
    place: list[Numbers]
    """Of each of these entries among all."""


@dataclass(frozen=True, slots=True)
class ArrivalPlan:
    """Of a rank with experts: `row[i]` is the arrived row of the i-th entry, in ascending order of experts, then of
    source ranks, then of tokens."""

    row: Numbers
    counts: Numbers
    """Entries of each expert of this rank."""
    order: Numbers
    """Of the i-th entry: its number in the order of arrival."""
    first_row: Numbers
    """Of each forwarder of the node, and the end."""
    first_entry: Numbers
    """In the order of arrival, likewise."""


def plan_source(experts: Numbers, placement: ExpertPlacement) -> SourcePlan:
    """`experts` (tokens, per_token): the distinct experts that each token chose. Raises `UsageError`."""
    if experts.ndim != 2 or experts.dtype.kind not in "iu":
        raise UsageError(f"experts has {experts.ndim} dimensions of {experts.dtype}; pass integers (tokens, per_token)")
    tokens, per_token = experts.shape
    flat = experts.reshape(-1).astype(np.int64)
    if flat.size and not 0 <= flat.min() <= flat.max() < placement.experts:
        wrong = flat.max() if flat.max() >= placement.experts else flat.min()
        raise UsageError(f"a token chose expert {wrong}; there are experts 0 to {placement.experts - 1}")
    token = np.repeat(np.arange(tokens), per_token)
    choice = np.lexsort((flat, token))
    token, flat = token[choice], flat[choice]
    twice = (token[1:] == token[:-1]) & (flat[1:] == flat[:-1])
    if twice.any():
        at = int(np.flatnonzero(twice)[0])
        raise UsageError(f"token {token[at]} chose expert {flat[at]} twice; choices of a token must differ")
    node = placement.node_of_expert[flat]
    plan = SourcePlan(tokens, per_token, [], [], [])
    for here in range(placement.nodes):
        mine = np.flatnonzero(node == here)
        rows, row = np.unique(token[mine], return_inverse=True)
        plan.token_of_row.append(rows)
        plan.entries.append(Entries(int(rows.size), row.reshape(-1), flat[mine]))
        plan.choice.append(choice[mine])
    return plan


def plan_forward(received: Sequence[Entries], placement: ExpertPlacement, rank: int) -> ForwardPlan:
    """`received` from the forwarder's counterpart on each node."""
    number, node = placement.number_in_node(rank), int(placement.node_of_rank[rank])
    first_row = _ends([one.rows for one in received])
    row = np.concatenate([one.row + first for one, first in zip(received, first_row[:-1], strict=True)])
    whole = Entries(int(first_row[-1]), row, np.concatenate([one.expert for one in received]))
    plan = ForwardPlan(
        entries=whole,
        source_of_row=np.repeat(placement.ranks_of_node[:, number], np.diff(first_row)),
        first_row=first_row,
        first_entry=_ends([len(one) for one in received]),
        needed=[],
        sent=[],
        place=[],
    )
    target = placement.rank_of_expert[whole.expert]
    for peer in placement.ranks_of_node[node]:
        place = np.flatnonzero(target == peer)
        rows, row = np.unique(whole.row[place], return_inverse=True)
        plan.needed.append(rows)
        plan.sent.append(Entries(int(rows.size), row.reshape(-1), whole.expert[place]))
        plan.place.append(place)
    return plan


def plan_arrival(
    received: Sequence[Entries], source_of_row: Sequence[Numbers], placement: ExpertPlacement, rank: int
) -> ArrivalPlan:
    """`received` from each forwarder of the node, with the source rank of each of its rows."""
    first_row = _ends([one.rows for one in received])
    row = np.concatenate([one.row + first for one, first in zip(received, first_row[:-1], strict=True)])
    expert = np.concatenate([one.expert for one in received])
    source = np.concatenate(source_of_row)[row]
    order = np.lexsort((source, expert))  # stable: rows of a source are in the order of its tokens
    own = placement.experts_of(rank)
    return ArrivalPlan(
        row=row[order],
        counts=np.bincount(np.searchsorted(own, expert), minlength=own.size),
        order=order,
        first_row=first_row,
        first_entry=_ends([len(one) for one in received]),
    )


def inverse(order: Numbers) -> Numbers:
    """Of a permutation: `inverse(order)[order[i]]` is i."""
    found = np.empty_like(order)
    found[order] = np.arange(order.size)
    return found


def row_starts(row: Numbers, rows: int) -> Numbers:
    """(rows + 1,): where the entries of each row begin, and the end. `row` ascends."""
    return np.searchsorted(row, np.arange(rows + 1))


def add_in_order(values: npt.NDArray[Any], row: Numbers, rows: int) -> npt.NDArray[Any]:
    """(rows, width): the sum of the `values` (entries, width) of each row, from left to right; zero where it has none.

    `row` ascends.
    """
    first = row_starts(row, rows)
    sums = np.zeros((rows, values.shape[1]), values.dtype)
    having = np.diff(first)
    some = np.flatnonzero(having)
    sums[some] = values[first[some]]
    for turn in range(1, int(having.max(initial=0))):
        more = np.flatnonzero(having > turn)
        sums[more] += values[first[more] + turn]
    return sums


def _ends(counts: Sequence[int]) -> Numbers:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)

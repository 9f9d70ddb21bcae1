"""Bytes that each rank sends to each other in a dispatch and a combine, from the choices of all ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fireflyer.collectives.dispatch.messages import HEADER_BYTES
from fireflyer.collectives.dispatch.placement import ExpertPlacement
from fireflyer.collectives.dispatch.plan import plan_forward, plan_source

__all__ = ["Traffic", "traffic"]

_ROUTE_BYTES = 4


class Traffic(NamedTuple):
    """(ranks, ranks): from, to."""

    dispatch: npt.NDArray[np.int64]
    combine: npt.NDArray[np.int64]
    """Without scalars."""


def traffic(
    experts: Sequence[npt.NDArray[Any]],
    placement: ExpertPlacement,
    *,
    dispatch_row_bytes: int,
    combine_row_bytes: int,
    weight_bytes: int = 4,
) -> Traffic:
    """`experts[rank]` (tokens, per_token) are the choices of the tokens of each rank; headers and routes count too."""
    there = np.zeros((placement.ranks, placement.ranks), np.int64)
    back = np.zeros_like(there)
    sources = [plan_source(choices, placement) for choices in experts]
    for rank in range(placement.ranks):
        number, node = placement.number_in_node(rank), int(placement.node_of_rank[rank])
        for target, one in zip(placement.ranks_of_node[:, number], sources[rank].entries, strict=True):
            there[rank, target] += (
                2 * HEADER_BYTES + _entries_bytes(len(one), weight_bytes) + one.rows * dispatch_row_bytes
            )
            back[target, rank] += HEADER_BYTES + one.rows * combine_row_bytes
        received = [sources[peer].entries[node] for peer in placement.ranks_of_node[:, number]]
        for target, one in zip(
            placement.ranks_of_node[node], plan_forward(received, placement, rank).sent, strict=True
        ):
            rows = one.rows * (dispatch_row_bytes + _ROUTE_BYTES)  # with the source rank of each
            there[rank, target] += 2 * HEADER_BYTES + _entries_bytes(len(one), weight_bytes) + rows
            back[target, rank] += HEADER_BYTES + len(one) * combine_row_bytes
    np.fill_diagonal(there, 0)
    np.fill_diagonal(back, 0)
    return Traffic(there, back)


def _entries_bytes(entries: int, weight_bytes: int) -> int:
    return entries * (2 * _ROUTE_BYTES + weight_bytes)

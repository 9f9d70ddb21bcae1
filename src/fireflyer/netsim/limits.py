"""Which links can limit given paths: of links that all of them use alike one stands for all. Pure.

Routing that divides each transfer over many links uses most of them alike: all links between two switches, all spine
switches above a leaf switch. What such a link carries is known from one of them. And where the links of nodes cannot
carry enough to fill a link, it never limits. Rates are the same without either (max-min fair rates depend on the set of
rates that is possible, and on nothing else), and take a fraction of the time.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fireflyer.netsim.fair import Incidence

__all__ = ["limiting_hops"]

ROUNDING: Final = 1e-12
Integers = NDArray[np.int64]
Reals = NDArray[np.float64]


def limiting_hops(rows: Incidence, capacities: Reals) -> NDArray[np.bool_]:
    """Of each entry of `rows.links`, whether the link counts for the rates of the paths, `rows.flows` of them, whatever
    their numbers of flows and weights. Each path keeps a link."""
    if not len(rows.links):
        return np.ones(0, bool)
    owners = np.repeat(np.arange(rows.flows), np.diff(rows.starts))
    kept: NDArray[np.bool_] = _representatives(rows, owners, capacities)[rows.links]
    firsts, lasts = _end_links(rows, kept, owners, first=True), _end_links(rows, kept, owners, first=False)
    ends = np.zeros(len(capacities), bool)
    ends[rows.links[firsts]] = True
    movable = ~ends[rows.links]
    ends[rows.links[lasts]] = True
    kept &= ~(movable & _never_full(rows, kept, owners, firsts, capacities)[rows.links])
    kept &= ends[rows.links] | ~_never_full(rows, kept, owners, lasts, capacities)[rows.links]
    return kept


def _representatives(rows: Incidence, owners: Integers, capacities: Reals) -> NDArray[np.bool_]:
    """Of each link, whether it is the one with the least capacity among those with the same share of each path.

    Equal columns are found by two sums of their shares with random factors. Those of equal columns are equal to the
    last bit, since their terms come in the same order; others are as good as never.
    """
    draw = np.random.default_rng(0).random((2, rows.flows)) + 0.5
    sums = [np.bincount(rows.links, rows.weights * each[owners], minlength=len(capacities)) for each in draw]
    order = np.lexsort((np.arange(len(capacities)), capacities, sums[1], sums[0]))
    found: NDArray[np.bool_] = np.ones(len(capacities), bool)
    same = (np.diff(sums[0][order]) == 0) & (np.diff(sums[1][order]) == 0)
    found[order[1:][same]] = False
    return found


def _end_links(rows: Incidence, kept: NDArray[np.bool_], owners: Integers, *, first: bool) -> Integers:
    """Of each path the entry of its first or last link that is kept, of those with its largest share: of a node's."""
    entries = np.flatnonzero(kept)
    entries = entries[np.lexsort((-entries if first else entries, rows.weights[entries]))]
    found = np.zeros(rows.flows, np.int64)
    found[owners[entries]] = entries  # the last assignment counts
    return found


def _never_full(
    rows: Incidence, kept: NDArray[np.bool_], owners: Integers, ends: Integers, capacities: Reals
) -> NDArray[np.bool_]:
    """Of each link, whether all paths over it together carry less than it can: no more than the links of `ends`, one
    entry for each path, let through."""
    entries = np.flatnonzero(kept)
    link, end = rows.links[entries], ends[owners[entries]]
    share = rows.weights[entries] / rows.weights[end]
    pair = link * len(capacities) + rows.links[end]
    order = np.lexsort((share, pair))
    last = np.append(np.diff(pair[order]) != 0, True)  # the largest share of each pair
    most = order[last]
    through = np.bincount(link[most], share[most] * capacities[rows.links[end[most]]], minlength=len(capacities))
    found: NDArray[np.bool_] = through <= capacities * (1 + ROUNDING)
    return found

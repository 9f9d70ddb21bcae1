"""Lemon nodes: nodes that fail far more often than the fleet, found by what they did over weeks. Pure.

Every node's failures are compared with two rates: that of the fleet, r, and that of lemons, k·r, of which there is a
share p. None of the three is known. Their plausible values are weighed by how well they explain the whole fleet,
beside what was found elsewhere (1.2 to 1.7 % of nodes; arXiv:2410.21680, IV-A), and a node's probability is the mean
over all of them. Proposed is the largest set of nodes of which in the mean at most `FALSE_SHARE` are none (control of
the false discovery rate).

Only incidents count, each once: an Xid, a job that failed, a ticket and a node that was taken out within an hour are
one incident seen four times. The paper's signals explain a proposal; excluding a node is what users do, and proves
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from fireflyer.base.errors import UsageError

__all__ = ["FALSE_SHARE", "WINDOW_DAYS", "LemonReport", "NodeSignals", "Proposal", "find_lemons"]

WINDOW_DAYS: Final = 90
"""Looked at where nothing else is said. In the 28 days of the paper's signals a node of 20 times the rate has 2.5
incidents in the mean, where it takes about three to tell it from chance."""
FALSE_SHARE: Final = 0.2
LEAST_PROBABILITY: Final = 0.75
"""Of each proposed node to be a lemon: certain ones do not pay for doubtful ones."""
MIN_INCIDENTS: Final = 2
"""One incident is never enough."""
_RATIOS: Final = np.geomspace(3.0, 40.0, 14)
_SHARES: Final = np.geomspace(0.003, 0.05, 9)
_LIKELY_RATIO, _RATIO_SPREAD = 7.0, 0.35
_LIKELY_SHARE, _SHARE_SPREAD = 0.0143, 0.17
"""Prior: log-normal, the spreads in natural logarithms. The share is between 1.2 and 1.7 %; a small ratio is the likely
one, as large ones show themselves: a fleet that has them outweighs the prior."""


class NodeSignals(msgspec.Struct, frozen=True, kw_only=True):
    """One node over the window: the paper's seven signals (IV-A), and the incidents that they are seen by."""

    node: str
    days: float
    """That the node was observed."""
    incidents: int
    """Of severity low or high, and not made by a user's program; what is reported within an hour is one."""
    excl_jobid_count: int = 0
    xid_cnt: int = 0
    """Distinct Xids."""
    tickets: int = 0
    corruptions: int = 0
    """Jobs in which ranks of the node differed from the majority of their replicas. None of the paper's, and no
    incident: a user's program says it."""
    out_count: int = 0
    multi_node_node_fails: int = 0
    single_node_node_fails: int = 0
    single_node_jobs: int = 0

    @property
    def single_node_node_failure_rate(self) -> float:
        return self.single_node_node_fails / self.single_node_jobs if self.single_node_jobs else 0.0


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A node that should be taken out and tested."""

    signals: NodeSignals
    probability: float
    """That it is a lemon."""
    expected: float
    """Incidents of a node like the others, in as many days."""
    times: float
    """Its incidents over those."""
    why: tuple[str, ...]
    """One line for each signal that stands out, with its rank in the fleet."""


class LemonReport(msgspec.Struct, frozen=True, kw_only=True):
    nodes: int
    incidents_per_node_day: float
    """Of nodes that are no lemons."""
    expected_false: float
    """Of the proposed nodes, how many are none, in the mean."""
    proposals: tuple[Proposal, ...]
    """The most probable first."""


def find_lemons(fleet: Sequence[NodeSignals], *, false_share: float = FALSE_SHARE) -> LemonReport:
    """Compares every node with all others. Raises `UsageError` for an empty fleet, days that are not above 0, and a
    `false_share` outside ]0, 1[."""
    if not fleet:
        raise UsageError("there is no node to compare")
    if not 0 < false_share < 1:
        raise UsageError(f"false_share={false_share} must lie between 0 and 1")
    days = np.array([one.days for one in fleet], dtype=np.float64)
    counts = np.array([one.incidents for one in fleet], dtype=np.float64)
    if not (days > 0).all():
        raise UsageError("every node must have been observed for some time")
    probabilities, rate = _probabilities(counts, days)
    chosen = _chosen(probabilities, counts, false_share)
    proposals = tuple(
        _proposal(fleet[number], float(probabilities[number]), rate, fleet)
        for number in sorted(chosen, key=lambda number: (-probabilities[number], fleet[number].node))
    )
    false = float(sum(1 - proposal.probability for proposal in proposals))
    return LemonReport(
        nodes=len(fleet), incidents_per_node_day=rate, expected_false=false, proposals=proposals
    )  # fmt: skip


def _probabilities(counts: np.ndarray, days: np.ndarray) -> tuple[np.ndarray, float]:
    """Of each node to be a lemon, and the rate of the others: means over `_RATIOS` and `_SHARES`."""
    mean = counts.sum() / days.sum()
    if mean == 0:
        return np.zeros(len(counts)), 0.0
    (counts, days), of, nodes = np.unique((counts, days), axis=1, return_inverse=True, return_counts=True)
    ratio, share = (grid.ravel() for grid in np.meshgrid(_RATIOS, _SHARES, indexing="ij"))
    normal = mean / (1 - share + share * ratio)  # the fleet as a whole fails as it was seen to
    expected = normal[:, None] * days
    # The factor that both rates share, e^(−r·t)·(r·t)^n / n!, matters for the weights of the rates only.
    shared = counts * np.log(expected) - expected
    odds = np.log(share / (1 - share))[:, None] + counts * np.log(ratio)[:, None] - (ratio[:, None] - 1) * expected
    evidence = (shared + np.log(1 - share)[:, None] + np.logaddexp(0, odds)) @ nodes
    evidence += _log_prior(ratio, _LIKELY_RATIO, _RATIO_SPREAD) + _log_prior(share, _LIKELY_SHARE, _SHARE_SPREAD)
    weights = np.exp(evidence - evidence.max())
    weights /= weights.sum()
    lemon = 1 / (1 + np.exp(-np.clip(odds, -700, 700)))
    return (weights @ lemon)[of.ravel()], float(weights @ normal)


def _log_prior(values: np.ndarray, likely: float, spread: float) -> np.ndarray:
    return np.asarray(-0.5 * (np.log(values / likely) / spread) ** 2)


def _chosen(probabilities: np.ndarray, counts: np.ndarray, false_share: float) -> list[int]:
    """Nodes with the same history are proposed together, or not."""
    order = sorted(range(len(counts)), key=lambda number: -probabilities[number])
    chosen: list[int] = []
    false = 0.0
    best = 0
    for place, number in enumerate(order, start=1):
        if counts[number] < MIN_INCIDENTS or probabilities[number] < LEAST_PROBABILITY:
            continue
        chosen.append(number)
        false += 1 - float(probabilities[number])
        following = probabilities[order[place]] if place < len(order) else -1.0
        if false <= false_share * len(chosen) and not math.isclose(following, probabilities[number], rel_tol=1e-9):
            best = len(chosen)
    return chosen[:best]


def _proposal(one: NodeSignals, probability: float, rate: float, fleet: Sequence[NodeSignals]) -> Proposal:
    expected = rate * one.days
    return Proposal(
        signals=one,
        probability=probability,
        expected=expected,
        times=one.incidents / expected if expected else math.inf,
        why=(
            f"{one.incidents} incidents in {one.days:.0f} days, where a node like the others has {expected:.2g}",
            *_reasons(one, fleet),
        ),
    )


_SIGNALS: Final = (
    ("multi_node_node_fails", "jobs of several nodes that failed because of it: {:.0f}"),
    ("single_node_node_fails", "jobs of one node that failed on it: {:.0f}"),
    ("single_node_node_failure_rate", "share of the jobs of one node that failed on it: {:.0%}"),
    ("xid_cnt", "different Xids: {:.0f}"),
    ("out_count", "hours in which checks had it taken out: {:.0f}"),
    ("tickets", "tickets: {:.0f}"),
)


def _reasons(one: NodeSignals, fleet: Sequence[NodeSignals]) -> list[str]:
    reasons = []
    for signal, text in _SIGNALS:
        value = getattr(one, signal)
        if value:
            below = sum(getattr(other, signal) < value for other in fleet) / len(fleet)
            reasons.append(f"{text.format(value)}, more than {below:.1%} of the nodes have")
    return reasons

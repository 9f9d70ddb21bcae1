"""Who failed first, when failures come in a burst.

When one rank dies the others soon die of it, and news of the cause may arrive after news of its consequences: the
agent of a dead node sends no message, while its neighbours' ranks fail within milliseconds. Failures within a short
window are therefore compared, and the one that cannot be a consequence is blamed: the loss of a node before the
SIGKILL of a rank (nobody but us and the kernel sends it, and the agent says when it was us) before the first that was
heard of.

A rank that hangs does not fail at all: the others give up on it, and are the first to exit. What they were told by the
collectives (`PeerFailureReport`) then says who it was: of a rank's plain exit, the rank that most of the others name is
blamed, unless it failed first itself. The same holds for one that raises an error: the others may be gone before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fireflyer.base.events import PeerFailureReport
from fireflyer.cluster.core.messages import RankEnd

__all__ = ["Failure", "blame", "describe_end", "name_the_peer", "signal_name"]

SIGKILL = 9
MAX_SIGNAL = 64
MAX_REASON = 500

_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    15: "SIGTERM",
    24: "SIGXCPU",
    25: "SIGXFSZ",
}


class Failure(msgspec.Struct, frozen=True):
    """Something that went wrong in the attempt. `rank` is None where the whole node did."""

    node: int
    rank: int | None
    exit_code: int
    reason: str


def signal_name(number: int) -> str:
    return _SIGNALS.get(number, f"signal {number}")


def describe_end(node: int, end: RankEnd) -> str:
    """`rank 3 (node 1) was killed by SIGKILL`."""
    who = f"rank {end.rank} (node {node})"
    if end.note:
        return f"{who} could not be started: {end.note}"
    if 128 < end.exit_code <= 128 + MAX_SIGNAL:
        return f"{who} was killed by {signal_name(end.exit_code - 128)}"
    return f"{who} exited with code {end.exit_code}"


def _weight(failure: Failure) -> int:
    if failure.rank is None:
        return 0
    return 1 if failure.exit_code == 128 + SIGKILL else 2


def blame(failures: Sequence[Failure]) -> Failure:
    """The one that caused the others; `failures` in the order in which they were heard of, not empty."""
    return min(failures, key=_weight)


def name_the_peer(
    failure: Failure, failures: Sequence[Failure], reports: Sequence[PeerFailureReport], *, ranks_per_node: int
) -> Failure:
    """`failure`, or that of the peer that its rank gave up on. A peer that is not among the `failures` did not end by
    itself: the exit code stays that of the rank that did. Of several peers the one named by most ranks is blamed, then
    the one that was named first."""
    if _weight(failure) != 2 or not any(report.rank == failure.rank for report in reports):
        return failure
    named = {report.rank: report for report in reports}  # a rank's last word
    votes: dict[int, list[PeerFailureReport]] = {}
    for report in named.values():
        votes.setdefault(report.peer, []).append(report)
    peer, said = max(votes.items(), key=lambda item: len(item[1]))
    for own in failures:
        if own.rank == peer:
            return own
    return Failure(peer // ranks_per_node, peer, failure.exit_code, " ".join(said[0].reason.split())[:MAX_REASON])

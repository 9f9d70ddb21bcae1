"""Who failed first, when failures come in a burst.

When one rank dies the others soon die of it, and news of the cause may arrive after news of its consequences: the
supervisor of a dead node sends no message, while its neighbours' ranks fail within milliseconds. Failures within a
short window are therefore compared, and the one that cannot be a consequence is blamed: the loss of a node before the
SIGKILL of a rank (nobody but us and the kernel sends it, and the supervisor says when it was us) before the first that
was heard of.

A rank that hangs does not fail at all: the others give up on it, and are the first to exit. What they were told by the
collectives (`PeerFailureReport`) then says who it was: of a rank's plain exit, the rank that most of the others name is
blamed, unless it failed first itself. The same holds for one that raises an error: the others may be gone before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fireflyer.base.events import FailureKind, PeerFailureReport
from fireflyer.base.rank_layout import RankLayout
from fireflyer.cluster.schema.wire import RankEnd, RankError

__all__ = ["Failure", "blame", "describe_end", "failure_of_end", "gave_up_waiting", "name_the_peer", "signal_name"]

SIGKILL = 9
MAX_SIGNAL = 64
MAX_REASON = 500
_GAVE_UP_ON_A_PEER = "fireflyer.base.errors.PeerFailed"

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
    """Something that went wrong in the attempt. `rank` is None where the whole node did, `node` negative where nobody
    is to blame."""

    node: int
    rank: int | None
    exit_code: int
    reason: str
    kind: FailureKind = "unknown"
    identity: str = ""
    """Equal for failures of the same cause, as far as it is known; empty: never the same as another."""


def signal_name(number: int) -> str:
    return _SIGNALS.get(number, f"signal {number}")


def describe_end(end: RankEnd, node: int | None = None) -> str:
    """`rank 3 (node 1) was killed by SIGKILL`; without a `node`, that is left out."""
    who = f"rank {end.rank}" if node is None else f"rank {end.rank} (node {node})"
    if end.note:
        return f"{who} could not be started: {end.note}"
    if end.out_of_memory:
        return f"{who} was killed: out of memory ({end.out_of_memory})"
    if end.error is not None:
        return f"{who}: {_describe_error(end.error)}"
    if 128 < end.exit_code <= 128 + MAX_SIGNAL:
        return f"{who} was killed by {signal_name(end.exit_code - 128)}"
    return f"{who} exited with code {end.exit_code}"


def _describe_error(error: RankError) -> str:
    """`ValueError: bad batch shape (3, 4), at train.py:41`."""
    place = f", at {error.file}:{error.line}" if error.file else ""
    return f"{error.type}: {error.message}{place}" if error.message else f"{error.type}{place}"


def failure_of_end(end: RankEnd, node: int, *, nodes: int) -> Failure:
    """That of a rank that was not asked to end, with what caused it.

    The cause is the infrastructure where the kernel or somebody else killed the rank (SIGKILL), memory ran out, or
    the rank gave up on another one; an exception is the user's error; of other ends nobody knows."""
    reason = describe_end(end, node if nodes > 1 else None)
    kind: FailureKind = "unknown"
    identity = f"exit {end.exit_code} {end.note}"
    gave_up = end.error is not None and end.error.type == _GAVE_UP_ON_A_PEER
    if end.out_of_memory or end.exit_code == 128 + SIGKILL or gave_up:
        kind, identity = "infrastructure", ""
    elif end.error is not None:
        kind, identity = "user", f"{end.error.type} {end.error.file}:{end.error.line}"
    return Failure(node, end.rank, end.exit_code, reason, kind, identity)


def gave_up_waiting(end: RankEnd, reports: Sequence[PeerFailureReport]) -> bool:
    """Whether a rank ended because a collective did not: then some other rank hangs and does not know it."""
    if any(report.rank == end.rank for report in reports):
        return True
    error = end.error
    return error is not None and (error.type == _GAVE_UP_ON_A_PEER or "timed out" in error.message.lower())


def _weight(failure: Failure) -> int:
    if failure.node < 0:
        return 3
    if failure.rank is None:
        return 0
    return 1 if failure.exit_code == 128 + SIGKILL else 2


def blame(failures: Sequence[Failure]) -> Failure:
    """The one that caused the others; `failures` in the order in which they were heard of, not empty."""
    return min(failures, key=_weight)


def name_the_peer(
    failure: Failure, failures: Sequence[Failure], reports: Sequence[PeerFailureReport], layout: RankLayout
) -> Failure:
    """`failure`, or that of the peer that its rank gave up on; all are ranks of `layout`. A peer that is not among the
    `failures` did not end by itself: the exit code stays that of the rank that did. Of several peers the one named by
    most ranks is blamed, then the one that was named first."""
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
    reason = " ".join(said[0].reason.split())[:MAX_REASON]
    return Failure(layout.node_of(peer), peer, failure.exit_code, reason, "infrastructure")

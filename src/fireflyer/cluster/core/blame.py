"""Who failed first, when failures come in a burst.

When one rank dies the others soon die of it, and news of the cause may arrive after news of its consequences: the
agent of a dead node sends no message, while its neighbours' ranks fail within milliseconds. Failures within a short
window are therefore compared, and the one that cannot be a consequence is blamed: the loss of a node before the
SIGKILL of a rank (nobody but us and the kernel sends it, and the agent says when it was us) before the first that was
heard of.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fireflyer.cluster.core.messages import RankEnd

__all__ = ["Failure", "blame", "describe_end", "signal_name"]

SIGKILL = 9
MAX_SIGNAL = 64

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

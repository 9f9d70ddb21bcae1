"""The fence of a storage node: until when it may believe what the manager last told it.

    sequence = fence.sent(now_ns)      before the heartbeat is handed to the network
    fence.answered(sequence)           when a primary answered it, and the routing in the answer has been taken over
    fence.is_open(now_ns)              before a target serves a read, or accepts, forwards or acknowledges an update

An answered heartbeat that was sent at `s` opens the fence until `s + T/2`. The manager takes a role away for silence
when it has heard nothing for T, counted from the arrival of the last heartbeat, which is not before it was sent. Both
count on monotonic clocks whose rates are wrong by at most `MAX_DRIFT`: in true time the fence ends at the latest T/2 /
0.99 after `s`, and the manager waits at least T / 1.01 from then on. So whoever believes that it serves still does.

The instant of the answer must not be used: an answer may have been under way for any time.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MS, format_duration

__all__ = ["MAX_DRIFT", "MAX_OUTSTANDING", "MIN_FAILURE_TIMEOUT_NS", "Fence", "fence_ns"]

MAX_DRIFT: Final = 0.01
"""Of a monotonic clock's rate against true time."""
MAX_OUTSTANDING: Final = 64
"""Heartbeats without an answer whose sending is remembered; the answers to older ones extend nothing."""
MIN_FAILURE_TIMEOUT_NS: Final = 20 * MS


def fence_ns(failure_timeout_ns: int) -> int:
    """How long a heartbeat opens the fence, of a cluster with this T. Raises `UsageError` if T is too short to be
    kept."""
    if failure_timeout_ns < MIN_FAILURE_TIMEOUT_NS:
        shortest = format_duration(MIN_FAILURE_TIMEOUT_NS)
        raise UsageError(f"failure timeout {format_duration(failure_timeout_ns)} is below the minimum {shortest}")
    return failure_timeout_ns // 2


class Fence:
    """One for each incarnation; closed until a heartbeat of it has been answered."""

    def __init__(self, failure_timeout_ns: int) -> None:
        self._fence_ns = fence_ns(failure_timeout_ns)
        self._sent: deque[tuple[int, int]] = deque(maxlen=MAX_OUTSTANDING)
        self._sequence = 0
        self._until_ns: int | None = None

    @property
    def until_ns(self) -> int | None:
        """The end of it on the node's clock; None if it was never open."""
        return self._until_ns

    def is_open(self, now_ns: int) -> bool:
        return self._until_ns is not None and now_ns < self._until_ns

    def sent(self, now_ns: int) -> int:
        """The sequence number of the heartbeat that is sent at, or after, this instant."""
        self._sequence += 1
        self._sent.append((self._sequence, now_ns))
        return self._sequence

    def answered(self, sequence: int) -> None:
        """A primary answered this heartbeat. Answers that come twice, late or to a stranger's heartbeat do no harm."""
        for known, sent_ns in self._sent:
            if known == sequence:
                until_ns = sent_ns + self._fence_ns
                self._until_ns = until_ns if self._until_ns is None else max(self._until_ns, until_ns)
        while self._sent and self._sent[0][0] <= sequence:
            self._sent.popleft()

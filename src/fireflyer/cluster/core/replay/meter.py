"""Node-time of a cluster: how much there was, how much of it was given to tasks, hour by hour and in all."""

from __future__ import annotations

from typing import Final

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.replay.life import Parts

__all__ = ["BUCKET_NS", "Bucket", "Meter", "Totals"]

BUCKET_NS: Final = 3600 * SECOND


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Node-nanoseconds, since the replay began or of a window. `healthy` counts nodes that are up."""

    healthy: int
    allocated: int
    parts: Parts
    """Of what is allocated; they add up to it."""

    def since(self, before: Totals) -> Totals:
        return Totals(
            healthy=self.healthy - before.healthy,
            allocated=self.allocated - before.allocated,
            parts=self.parts.plus(before.parts, -1),
        )


class Bucket:
    """One hour: node-nanoseconds, and tasks times nanoseconds that they waited."""

    __slots__ = ("allocated", "healthy", "waiting")

    def __init__(self) -> None:
        self.healthy = 0
        self.allocated = 0
        self.waiting = 0


class Meter:
    """Adds up what is constant between two events."""

    def __init__(self) -> None:
        self.at_ns = 0
        self.healthy = 0
        self.allocated = 0
        self.buckets: list[Bucket] = [Bucket()]

    def advance(self, now_ns: int, *, healthy: int, allocated: int, waiting: int) -> None:
        """So many nodes, and so many tasks that wait, from the last call until now."""
        passed_ns = now_ns - self.at_ns
        self.healthy += healthy * passed_ns
        self.allocated += allocated * passed_ns
        while self.at_ns < now_ns:
            number = self.at_ns // BUCKET_NS
            while number >= len(self.buckets):
                self.buckets.append(Bucket())
            bucket = self.buckets[number]
            part_ns = min(now_ns, (number + 1) * BUCKET_NS) - self.at_ns
            bucket.healthy += healthy * part_ns
            bucket.allocated += allocated * part_ns
            bucket.waiting += waiting * part_ns
            self.at_ns += part_ns

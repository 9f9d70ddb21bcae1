"""What a node of Slurm remembers of itself from one round of checks to the next: pure.

A record is of little use to any other node, and may be lost: whose drain it is stands in Slurm, and what has happened
is found again where the counters of the round were not kept either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from fireflyer.base.health_event import HealthEvent
from fireflyer.cluster.core.slurm.findings import Key, key_of, uncertain
from fireflyer.cluster.core.slurm.repair import RepairRecord

__all__ = ["DAY_S", "DrainRecord", "PendingEvent", "Suspicion"]

DAY_S: Final = 86_400
MAX_DRAINS: Final = 64
MAX_PENDING: Final = 64
MAX_SUSPICIONS: Final = 64
MAX_ROUNDS: Final = 16
MAX_REASON: Final = 256
_CLOCKS_S: Final = 60
"""By which a node's clock and that of slurmctld may differ."""
_SUSPECT_S: Final = 3600
"""Rounds within so long are counted together."""
_UnixTime = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Check = Annotated[str, msgspec.Meta(max_length=64)]


class PendingEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault that happened once and was not acted on: no further round finds it."""

    event: HealthEvent
    boot: Annotated[str, msgspec.Meta(max_length=64)]
    """Which start of the node it belongs to."""
    found_s: _UnixTime

    def told(self, boot: str, now_s: int) -> HealthEvent:
        """With its age for people, where it is not of this round."""
        minutes = max(0, now_s - self.found_s) // 60
        age = f"{minutes} min ago" if minutes < 120 else f"{minutes // 60} h ago"
        before = ", before the node was started again" if self.boot != boot else ""
        if not (minutes or before):
            return self.event
        words = f"{(self.event.words or self.event.cause)[:300]} ({age}{before})"
        return msgspec.structs.replace(self.event, words=words)


class Suspicion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault that rounds have found, whether or not their repetitions found it again."""

    check: _Check
    part: Annotated[str, msgspec.Meta(max_length=128)]
    cause: _Check
    at_s: Annotated[tuple[_UnixTime, ...], msgspec.Meta(max_length=MAX_ROUNDS)]


class DrainRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Methods give a changed copy."""

    at_s: Annotated[tuple[_UnixTime, ...], msgspec.Meta(max_length=MAX_DRAINS)] = ()
    """When it drained itself."""
    pending: Annotated[tuple[PendingEvent, ...], msgspec.Meta(max_length=MAX_PENDING)] = ()
    suspicions: Annotated[tuple[Suspicion, ...], msgspec.Meta(max_length=MAX_SUSPICIONS)] = ()
    failed: Annotated[tuple[_Check, ...], msgspec.Meta(max_length=MAX_PENDING)] = ()
    """Checks that have found a fault since the node drained itself: each of them has to pass before it serves again."""
    unsettled: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""
    """Reason of a drain after which it was not yet looked whether the breaker leaves room for it: the round that made
    it was cut off."""

    repair: RepairRecord = RepairRecord()

    def current(self, now_s: int) -> tuple[DrainRecord, tuple[HealthEvent, ...]]:
        """Without what is older than a day; and the events that are forgotten so. A clock that was set back makes
        nothing old."""
        kept = tuple(one for one in self.pending if now_s - one.found_s < DAY_S)
        suspicions = tuple(one for one in self.suspicions if abs(now_s - one.at_s[-1]) < _SUSPECT_S)
        forgotten = tuple(one.event for one in self.pending if one not in kept)
        return msgspec.structs.replace(self, pending=kept, suspicions=suspicions), forgotten

    def drained(self, now_s: int) -> DrainRecord:
        return msgspec.structs.replace(self, at_s=(*self.recent(now_s), now_s)[-MAX_DRAINS:])

    def settling(self, reason: str) -> DrainRecord:
        """Empty: it was looked."""
        return msgspec.structs.replace(self, unsettled=reason)

    def taken_back(self, since_s: int) -> DrainRecord:
        """The drain of that time was one too many: it says nothing of the node."""
        kept = tuple(at_s for at_s in self.at_s if at_s < since_s - _CLOCKS_S)
        return msgspec.structs.replace(self, at_s=kept)

    def recent(self, now_s: int) -> tuple[int, ...]:
        """Drains of the last day; a clock that was set back hides none."""
        return tuple(at_s for at_s in self.at_s if abs(now_s - at_s) < DAY_S)

    def with_events(self, faults: Sequence[HealthEvent], boot: str, now_s: int) -> DrainRecord:
        """With those that happened once, each kept once."""
        known = {(key_of(one.event), one.event.seen_ns) for one in self.pending}
        new = [
            PendingEvent(event, boot[:64], now_s)
            for event in dict.fromkeys(faults)
            if event.once and (key_of(event), event.seen_ns) not in known
        ]
        return msgspec.structs.replace(self, pending=(*self.pending, *new)[:MAX_PENDING])

    def acted(self) -> DrainRecord:
        """The node is out: Slurm has what had happened."""
        return msgspec.structs.replace(self, pending=())

    def serving(self) -> DrainRecord:
        return msgspec.structs.replace(self, failed=())

    def with_failed(self, faults: Sequence[HealthEvent]) -> DrainRecord:
        names = dict.fromkeys((*self.failed, *(event.check for event in faults)))
        return msgspec.structs.replace(self, failed=tuple(names)[:MAX_PENDING])

    def with_suspects(self, faults: Sequence[HealthEvent], now_s: int) -> DrainRecord:
        """Of one full round."""
        known = {(one.check, one.part, one.cause): one for one in self.suspicions}
        for key in dict.fromkeys(key_of(event) for event in uncertain(faults)):
            before = known.pop(key).at_s if key in known else ()
            times = tuple(at_s for at_s in before if abs(now_s - at_s) < _SUSPECT_S)
            known[key] = Suspicion(*key, at_s=(*times, now_s)[-MAX_ROUNDS:])
        return msgspec.structs.replace(self, suspicions=tuple(known.values())[-MAX_SUSPICIONS:])

    def coming_and_going(self, rounds: int) -> frozenset[Key]:
        """Faults that so many rounds within an hour have found."""
        return frozenset((one.check, one.part, one.cause) for one in self.suspicions if len(one.at_s) >= rounds)

"""Which blobs nobody needs any more, and what each owner is charged for. Pure.

A collection, beside which submissions go on
--------------------------------------------

    IDLE ──begin──> MARKING ──sweep──> SWEEPING ──end──> IDLE

A submission tells `Reservations` all blobs of its snapshot *before* it asks which are missing, and gives them back only
after its task's row, which names the snapshot, is committed. A collection begins with what is reserved, and only then
reads the rows; what is reserved while it goes on is marked, too (the write barrier of a concurrent mark and sweep). So
a snapshot that is named when the rows are read is marked by its row, and one that is named later was reserved at some
moment of this collection, and marked by that. What is not marked, and older than the grace age, may go. The age covers
what is not in this machine: reservations of a manager that was killed, and a manager that goes on for a moment after
another has its place.

An owner is charged for each distinct blob of their snapshots in full, whoever else has it. Charging the first one only
would move the charge to another owner when the first one's task ends, and would tell owners what others have.

A node's cache needs none of this: what leaves it can be fetched again (`choose_evicted`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from fireflyer.base.errors import Busy, InvariantViolation, NoSpace
from fireflyer.base.units import GIB, SECOND, format_bytes
from fireflyer.cluster.core.objects.blobs import StoredBlob

__all__ = [
    "GRACE_NS",
    "MAX_RESERVATIONS",
    "MAX_RESERVATIONS_OF_OWNER",
    "RESERVED_NS",
    "Accounts",
    "Collection",
    "Quota",
    "Reservation",
    "Reservations",
    "Usage",
    "choose_evicted",
]

RESERVED_NS: Final = 3600 * SECOND
"""Without a word of the client."""
GRACE_NS: Final = 24 * 3600 * SECOND
MAX_RESERVATIONS: Final = 4096
MAX_RESERVATIONS_OF_OWNER: Final = 64
MAX_RESERVED_BLOBS: Final = 2_000_000
MAX_RESERVED_BLOBS_OF_OWNER: Final = 500_000


class Quota(NamedTuple):
    """Of one owner."""

    size_bytes: int = 200 * GIB
    blobs: int = 1_000_000


class Usage(NamedTuple):
    size_bytes: int = 0
    blobs: int = 0
    snapshots: int = 0


@dataclass(slots=True)
class Reservation:
    owner: str
    snapshot: str
    blobs: Mapping[str, int]
    """All blobs of the snapshot, its manifest's too, with their sizes."""
    expires_ns: int
    owed: dict[str, int] = field(default_factory=dict)
    """What the client must still send: blobs that are missing, and those that only others have shown so far."""
    submissions: int = 0
    """That share it. A client that begins again, since it got no answer, counts twice: it then ends by its time."""


class Reservations:
    def __init__(self) -> None:
        self._all: dict[tuple[str, str], Reservation] = {}

    def reserve(self, now_ns: int, owner: str, snapshot: str, blobs: Mapping[str, int]) -> Reservation:
        """One that is there is shared. Raises `Busy`."""
        self._expire(now_ns)
        found = self._all.get((owner, snapshot))
        if found is None:
            of_owner = [len(one.blobs) for one in self._all.values() if one.owner == owner]
            if (
                len(of_owner) >= MAX_RESERVATIONS_OF_OWNER
                or len(self._all) >= MAX_RESERVATIONS
                or sum(of_owner) + len(blobs) > MAX_RESERVED_BLOBS_OF_OWNER
                or sum(len(one.blobs) for one in self._all.values()) + len(blobs) > MAX_RESERVED_BLOBS
            ):
                raise Busy(f"{len(of_owner)} submissions of {owner} are being sent; wait until they are complete")
            found = self._all[owner, snapshot] = Reservation(owner, snapshot, dict(blobs), 0, dict(blobs))
        found.submissions += 1
        found.expires_ns = now_ns + RESERVED_NS
        return found

    def find(self, now_ns: int, owner: str, snapshot: str) -> Reservation | None:
        """It is kept for longer from now on."""
        self._expire(now_ns)
        found = self._all.get((owner, snapshot))
        if found is not None:
            found.expires_ns = now_ns + RESERVED_NS
        return found

    def release(self, owner: str, snapshot: str) -> None:
        """Once for each `reserve`."""
        found = self._all.get((owner, snapshot))
        if found is not None:
            found.submissions -= 1
            if found.submissions == 0:
                del self._all[owner, snapshot]

    def current(self, now_ns: int) -> list[Reservation]:
        self._expire(now_ns)
        return list(self._all.values())

    def _expire(self, now_ns: int) -> None:
        for key, one in list(self._all.items()):
            if one.expires_ns <= now_ns:
                del self._all[key]


class _State(Enum):
    IDLE = "idle"
    MARKING = "marking"
    SWEEPING = "sweeping"


class Collection:
    """One at a time, see the module's text."""

    def __init__(self, grace_ns: int = GRACE_NS) -> None:
        self._grace_ns = grace_ns
        self._state = _State.IDLE
        self._marked: set[str] = set()
        self._before_ns = 0

    @property
    def before_ns(self) -> int:
        """Only what was renewed before may be removed."""
        return self._before_ns

    def begin(self, now_ns: int, reserved: Iterable[Iterable[str]]) -> None:
        """Raises `Busy` while another one goes on."""
        if self._state is not _State.IDLE:
            raise Busy("blobs are being collected; wait until that has ended")
        self._state = _State.MARKING
        self._before_ns = now_ns - self._grace_ns
        for blobs in reserved:
            self._marked.update(blobs)

    def mark(self, blobs: Iterable[str]) -> None:
        """What a row names that was read after `begin`, and what is reserved at any time."""
        if self._state is not _State.IDLE:
            self._marked.update(blobs)

    def sweep(self, found: Iterable[StoredBlob]) -> list[str]:
        """Those of `found` that nobody needs, to be removed before anything else is marked."""
        if self._state is _State.IDLE:
            raise InvariantViolation("blobs are swept that were not marked")
        self._state = _State.SWEEPING
        return [one.blob for one in found if one.renewed_ns < self._before_ns and one.blob not in self._marked]

    def end(self) -> None:
        self._state = _State.IDLE
        self._marked = set()


class Accounts:
    def __init__(self) -> None:
        self._snapshots: dict[str, dict[str, tuple[str, ...]]] = {}
        self._blobs: dict[str, dict[str, list[int]]] = {}
        """Of each owner, by name: by how many snapshots, and the size."""
        self._bytes: dict[str, int] = {}

    def add(self, owner: str, snapshot: str, blobs: Mapping[str, int]) -> None:
        """Nothing happens when the owner has that snapshot already."""
        snapshots = self._snapshots.setdefault(owner, {})
        if snapshot in snapshots:
            return
        snapshots[snapshot] = tuple(blobs)
        counted = self._blobs.setdefault(owner, {})
        for blob, size_bytes in blobs.items():
            entry = counted.setdefault(blob, [0, size_bytes])
            if entry[0] == 0:
                self._bytes[owner] = self._bytes.get(owner, 0) + size_bytes
            entry[0] += 1

    def keep_only(self, named: Iterable[tuple[str, str]]) -> None:
        """Of owners and snapshots: all others are no longer charged."""
        kept = frozenset(named)
        for owner, snapshots in list(self._snapshots.items()):
            for snapshot in [one for one in snapshots if (owner, one) not in kept]:
                self._remove(owner, snapshot)

    def has_snapshot(self, owner: str, snapshot: str) -> bool:
        return snapshot in self._snapshots.get(owner, ())

    def has(self, owner: str, blob: str) -> bool:
        return blob in self._blobs.get(owner, ())

    def usage(self, owner: str) -> Usage:
        return Usage(self._bytes.get(owner, 0), len(self._blobs.get(owner, ())), len(self._snapshots.get(owner, ())))

    def check(self, owner: str, more: Sequence[Mapping[str, int]], quota: Quota) -> None:
        """That the owner may have these snapshots as well. Raises `NoSpace`."""
        known = self._blobs.get(owner, {})
        added = {blob: size for blobs in more for blob, size in blobs.items() if blob not in known}
        size_bytes = self._bytes.get(owner, 0) + sum(added.values())
        if size_bytes > quota.size_bytes or len(known) + len(added) > quota.blobs:
            raise NoSpace(
                f"snapshots of {owner} would have {format_bytes(size_bytes)} in {len(known) + len(added)} files; "
                f"{format_bytes(quota.size_bytes)} and {quota.blobs} are allowed: ignore files in .ffignore, or ask "
                "for a larger quota"
            )

    def _remove(self, owner: str, snapshot: str) -> None:
        counted = self._blobs[owner]
        for blob in self._snapshots[owner].pop(snapshot):
            entry = counted[blob]
            entry[0] -= 1
            if entry[0] == 0:
                del counted[blob]
                self._bytes[owner] -= entry[1]
        if not self._snapshots[owner]:
            del self._snapshots[owner], self._blobs[owner]
            self._bytes.pop(owner, None)


def choose_evicted(
    cached: Iterable[StoredBlob], in_use: Container[str], needed_bytes: int, max_bytes: int
) -> list[str]:
    """Which blobs leave a node's cache: the least recently used ones that no run is being given, and so few that
    `needed_bytes` more fit. Raises `NoSpace` where what is in use does not leave the room.

    Ties go by name, so that the choice is always the same.
    """
    blobs = sorted(cached, key=lambda one: (one.renewed_ns, one.blob))
    used_bytes = sum(one.size_bytes for one in blobs)
    chosen: list[str] = []
    for one in blobs:
        if used_bytes + needed_bytes <= max_bytes:
            break
        if one.blob not in in_use:
            chosen.append(one.blob)
            used_bytes -= one.size_bytes
    if used_bytes + needed_bytes > max_bytes:
        raise NoSpace(
            f"the node's cache of snapshots may have {format_bytes(max_bytes)}; {format_bytes(used_bytes)} are in use "
            f"and {format_bytes(needed_bytes)} more are needed: make it larger, or the snapshot smaller"
        )
    return chosen

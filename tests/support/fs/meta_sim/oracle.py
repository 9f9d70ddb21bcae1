"""What clients were told about files and locks, and whether what is found can be.

A cell of a file is a register: what is read there is the value of some event (a write, a truncation, a hole) that had
begun, and that no other event has followed which was known to all before the reading began. A write is known to all
when the client was told that its report is in, or, in the end, when it was acknowledged at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.meta import LockKind, Window
from fireflyer.sim import World

__all__ = ["NEVER", "Event", "Files", "LockBook"]

NEVER: Final = 1 << 62
_END: Final = 1 << 40


@dataclass(slots=True)
class Event:
    """`value` into cells [first, end)."""

    what: str
    first: int
    end: int
    value: int
    begun_ns: int
    done_ns: int = NEVER
    """When its effect was certain."""
    known_ns: int = NEVER
    """When it was certain for all others too."""
    reach: int = 0
    """The file may be so long by it."""
    by: tuple[ClientId, int] = (0, 0)
    """Client and number of the request."""

    def covers(self, cell: int) -> bool:
        return self.first <= cell < self.end

    def done(self, now_ns: int) -> None:
        self.done_ns = min(self.done_ns, now_ns)
        self.known_ns = now_ns


@dataclass(slots=True)
class Files:
    world: World
    events: dict[int, list[Event]] = field(default_factory=dict)
    """By inode."""
    tags: int = 0
    reserved: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """First cell, end, and when it was asked for."""

    def reserve(self, inode: int, first: int, end: int, begun_ns: int) -> None:
        """Raises `AssertionError` for what somebody has been given already, if the file was not shorter since."""
        others = self.reserved.setdefault(inode, [])
        cuts = [one for one in self.events.get(inode, []) if one.what.startswith("truncat")]
        for other_first, other_end, other_ns in others:
            if first < other_end and other_first < end and not any(
                one.done_ns >= other_ns and one.first < other_end for one in cuts
            ):  # fmt: skip
                raise AssertionError(f"cells [{first}, {end}) of inode {inode} were reserved twice")
        others.append((first, end, begun_ns))

    def write(self, inode: int, first: int, count: int) -> Event:
        self.tags += 1
        event = Event("write", first, first + count, self.tags, self.world.now_ns, reach=first + count)
        return self._event(inode, event)

    def grow(self, inode: int, what: str, reach: int) -> Event:
        return self._event(inode, Event(what, 0, 0, 0, self.world.now_ns, reach=reach))

    def cut(self, inode: int, what: str, first: int, end: int = _END) -> Event:
        reach = first if end == _END else end
        return self._event(inode, Event(what, first, end, 0, self.world.now_ns, reach=reach))

    def cut_ended(self, client: ClientId, number: int) -> None:
        """What it has done it has done by now, though its client may not have heard of it."""
        for events in self.events.values():
            for one in events:
                if number and one.by == (client, number):
                    one.done_ns = min(one.done_ns, self.world.now_ns)

    def _event(self, inode: int, event: Event) -> Event:
        self.events.setdefault(inode, []).append(event)
        return event

    def check(self, inode: int, cell: int, value: int, begun_ns: int, ended_ns: int, *, final: bool = False) -> None:
        """Raises `AssertionError` when what was read in this time cannot be."""
        events = [one for one in self.events.get(inode, []) if one.covers(cell) and one.begun_ns <= ended_ns]
        sources = [one for one in events if one.value == value]
        if not value:
            sources.append(Event("nothing", cell, cell + 1, 0, -2, -1, -1))
        for source in sources:
            later = [one for one in events if (one.done_ns if final else one.known_ns) < begun_ns]
            if not any(one.begun_ns > source.done_ns for one in later):
                return
        raise AssertionError(f"cell {cell} of inode {inode} is {value} at {begun_ns}..{ended_ns}; events: {events}")

    def check_length(self, inode: int, cells: int, begun_ns: int, ended_ns: int) -> None:
        """Somebody has made it so long, and it was not cut since. That it is long enough is seen by what is in it."""
        events = [one for one in self.events.get(inode, []) if one.begun_ns <= ended_ns]
        cuts = [one for one in events if one.end == _END and one.first < cells and one.known_ns < begun_ns]
        for source in events:
            if source.reach >= cells and not any(one.begun_ns > source.done_ns for one in cuts):
                return
        assert cells == 0, f"inode {inode} has {cells} cells at {begun_ns}..{ended_ns}; events: {events}"


@dataclass(slots=True)
class _Hold:
    client: ClientId
    owner: int
    kind: LockKind
    start: int
    end: int


@dataclass(slots=True)
class LockBook:
    """Locks that clients surely have: from the answer until they ask for another one there, or their session ends."""

    holds: dict[tuple[int, Window], list[_Hold]] = field(default_factory=dict)
    granted: int = 0

    def asking(self, inode: int, window: Window, client: ClientId, owner: int, start: int, end: int) -> None:
        """From now on the client does not rely on what it has there."""
        holds = self.holds.setdefault((inode, window), [])
        kept: list[_Hold] = []
        for one in holds:
            if (one.client, one.owner) != (client, owner):
                kept.append(one)
            elif window is Window.RANGE:
                if one.start < start:
                    kept.append(_Hold(client, owner, one.kind, one.start, min(one.end, start)))
                if one.end > end:
                    kept.append(_Hold(client, owner, one.kind, max(one.start, end), one.end))
        holds[:] = kept

    def got(
        self, inode: int, window: Window, client: ClientId, owner: int, kind: LockKind, start: int, end: int
    ) -> None:
        for one in self.holds[inode, window]:
            if (one.client, one.owner) == (client, owner) or LockKind.WRITE not in (one.kind, kind):
                continue
            if one.start < end and start < one.end:
                raise AssertionError(f"both {client}/{owner} and {one} hold [{start}, {end}) of inode {inode}")
        self.granted += 1
        self.holds[inode, window].append(_Hold(client, owner, kind, start, end))

    def ended(self, client: ClientId) -> None:
        for holds in self.holds.values():
            holds[:] = [one for one in holds if one.client != client]

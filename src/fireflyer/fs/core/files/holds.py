"""Which open files the service is told of with each heartbeat: those that have been open for longer than one heartbeat.

    opened ──> young ──next heartbeat──> due ──named in the one after──> named ──closed──> named as closed ──> gone

A heartbeat that failed may have been heard, or may not: what it says is said again. So there are files of which is not
known whether the service believes them open; they count as named when they are closed, and as not named as long as
they are open.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fireflyer.fs.schema.inodes import InodeId
from fireflyer.fs.schema.meta import MAX_HELD, ClientHeartbeat

__all__ = ["HoldReporter"]


@dataclass(slots=True)
class HoldReporter:
    _open: dict[InodeId, int] = field(default_factory=dict)
    """How often."""
    _young: dict[InodeId, None] = field(default_factory=dict)
    """Opened since the last heartbeat."""
    _due: dict[InodeId, None] = field(default_factory=dict)
    """Open since before it, and not named yet."""
    _named: dict[InodeId, None] = field(default_factory=dict)
    _closed: dict[InodeId, None] = field(default_factory=dict)
    """Perhaps believed open, and not open any more."""
    _told: dict[InodeId, None] = field(default_factory=dict)
    """Perhaps believed open."""
    _unsure: dict[InodeId, None] = field(default_factory=dict)
    """... but not for certain."""
    _count: int = 0

    def opened(self, inode: InodeId, *, late: bool = False) -> None:
        """`late`: in a session that is over; it is to be named at once, as all that was open then."""
        self._open[inode] = self._open.get(inode, 0) + 1
        if inode in self._closed:
            del self._closed[inode]
            (self._due if inode in self._unsure else self._named)[inode] = None
        elif inode not in self._named and inode not in self._due:
            self._young[inode] = None
        if late and inode in self._young:
            del self._young[inode]
            self._due[inode] = None

    def closed(self, inode: InodeId) -> None:
        left = self._open.pop(inode, 0) - 1
        if left > 0:
            self._open[inode] = left
            return
        for some in (self._young, self._due, self._named):
            some.pop(inode, None)
        if inode in self._told:
            self._closed[inode] = None

    def heartbeat(self) -> ClientHeartbeat:
        """The next one. It has to reach the service before the one after it is asked for; else say `failed`."""
        held = list(self._due)[:MAX_HELD]
        closed = list(self._closed)[:MAX_HELD]
        for inode in held:
            del self._due[inode]
            self._named[inode] = self._told[inode] = None
        for inode in closed:
            del self._closed[inode]
            self._told.pop(inode, None)
        for inode in (*held, *closed):
            self._unsure.pop(inode, None)
        whole = not self._due and not self._closed
        if whole:
            self._due, self._young = self._young, {}
        self._count += 1
        return ClientHeartbeat(self._count, tuple(held), tuple(closed), whole)

    def failed(self, heartbeat: ClientHeartbeat) -> None:
        """The last one was perhaps not heard."""
        for inode in (*heartbeat.held, *heartbeat.closed):
            self._told[inode] = self._unsure[inode] = None
            self._named.pop(inode, None)
            self._young.pop(inode, None)
            (self._due if inode in self._open else self._closed)[inode] = None

    def another_session(self) -> None:
        """In it nothing was named yet, and all is to be named at once: it may have been let go with the last one."""
        self._due = dict.fromkeys(self._open)
        self._young, self._named, self._closed, self._told, self._unsure = {}, {}, {}, {}, {}

"""Which open files the service is told of with each beat: those that have been open for longer than one beat."""

from __future__ import annotations

from dataclasses import dataclass, field

from fireflyer.fs.schema.inodes import InodeId
from fireflyer.fs.schema.meta import MAX_HELD, Beat

__all__ = ["Holding"]


@dataclass(slots=True)
class Holding:
    _open: dict[InodeId, int] = field(default_factory=dict)
    """How often."""
    _young: dict[InodeId, None] = field(default_factory=dict)
    """Opened since the last beat."""
    _due: dict[InodeId, None] = field(default_factory=dict)
    """Open since before it, and not named yet."""
    _named: dict[InodeId, None] = field(default_factory=dict)
    _closed: dict[InodeId, None] = field(default_factory=dict)
    """Named, and not open any more."""
    _count: int = 0

    def opened(self, inode: InodeId) -> None:
        self._open[inode] = self._open.get(inode, 0) + 1
        if inode in self._closed:
            del self._closed[inode]
            self._named[inode] = None
        elif inode not in self._named and inode not in self._due:
            self._young[inode] = None

    def closed(self, inode: InodeId) -> None:
        left = self._open.pop(inode, 0) - 1
        if left > 0:
            self._open[inode] = left
            return
        self._young.pop(inode, None)
        self._due.pop(inode, None)
        if inode in self._named:
            del self._named[inode]
            self._closed[inode] = None

    def beat(self) -> Beat:
        """The next one. It has to reach the service before the one after it is asked for."""
        held = list(self._due)[:MAX_HELD]
        closed = list(self._closed)[:MAX_HELD]
        for inode in held:
            del self._due[inode]
            self._named[inode] = None
        for inode in closed:
            del self._closed[inode]
        whole = not self._due and not self._closed
        if whole:
            self._due, self._young = self._young, {}
        self._count += 1
        return Beat(self._count, tuple(held), tuple(closed), whole)

    def again(self) -> None:
        """In another session nothing was named yet."""
        self._due = {**self._named, **self._due}
        self._named, self._closed = {}, {}

"""Open directories: the kernel goes on from an offset, a file system behind a name.

Offset 1 is behind ".", 2 behind "..", and so on with each entry. Of a directory that is open we keep the page that was
listed last, and of each page before it the name that it began behind: so a large directory costs a name for each
thousand entries, and a program can go back. What changes meanwhile may be told or not, as POSIX allows; what stays is
told once.
"""

from __future__ import annotations

import stat

from fireflyer.fs.mount.operations import Attributes, Caller, Operations

__all__ = ["Directory"]


def _dot(inode: int) -> Attributes:
    return Attributes(inode, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 0, 0, 0, 0)


class Directory:
    """One that is open; asked by one thread of its program at a time."""

    def __init__(self, inode: int) -> None:
        self.inode = inode
        self._entries: list[tuple[bytes, Attributes]] = []
        self._begin = 0
        self._full = False
        self._known = False
        self._more = True
        self._pages: list[tuple[int, bytes]] = [(0, b"")]
        """Offset and name that each page began behind, in order."""

    async def entries_from(
        self, operations: Operations, caller: Caller, offset: int, *, attributes: bool
    ) -> tuple[list[tuple[bytes, Attributes]], int]:
        """Of a page, and the place in it of what is behind `offset`; at its end when there is no more."""
        if offset == 0:
            self._known = False
        if not self._known or offset < self._begin or (attributes and not self._full):
            await self._load(operations, caller, offset, attributes=attributes)
        while offset >= self._begin + len(self._entries) and self._more:
            self._pages.append((self._begin + len(self._entries), self._entries[-1][0]))
            await self._load(operations, caller, offset, attributes=attributes)
        return self._entries, min(offset - self._begin, len(self._entries))

    async def _load(self, operations: Operations, caller: Caller, offset: int, *, attributes: bool) -> None:
        """The page that holds the offset, or the last one before it that is known."""
        while len(self._pages) > 1 and self._pages[-1][0] > offset:
            self._pages.pop()
        begin, after = self._pages[-1]
        listing = await operations.list_directory(caller, self.inode, after, attributes=attributes)
        dots = [(b".", _dot(self.inode)), (b"..", _dot(listing.parent))] if begin == 0 else []
        self._entries = dots + listing.entries
        self._begin, self._more = begin, listing.more and bool(listing.entries)
        self._full, self._known = attributes, True

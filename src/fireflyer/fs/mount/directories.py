"""Open directories: the kernel goes on from an offset, a file system behind a name.

Each entry that we list gets an offset of its own, one more than the entry before it in its page; an offset means the
place behind one name as long as the directory is open, whatever is listed again meanwhile. So what changes may be told
or not, as POSIX allows, and what stays is told once, also when a program goes back (`seekdir`). Of the last pages we
know all names; of those before them the name that each began behind, and count from there. From offset 0 on everything
begins anew, as after `rewinddir`.

    offset 0 ── 1 "." ── 2 ".." ── 3 first name ...   |   page: begin, the name before it, its names

*Attributes* are told only out of a page that was asked for in the very request that is answered: the kernel takes them
for newer than all that it knew when it asked, and would shrink a file that was written after a page was read.

*Rights* are those of who opened it, and are looked at once, as POSIX has it: a program may give up its rights, or take
them from the directory, and goes on listing.
"""

from __future__ import annotations

import bisect
import stat
from dataclasses import dataclass
from typing import Final

from fireflyer.fs.mount.operations import MAX_LISTED, Attributes, Caller, Operations

__all__ = ["Directory", "DirectoryWindow"]

_KEPT_NAMES: Final = 4 * MAX_LISTED
"""Of the pages listed last, besides the last one."""
_DOTS: Final = 2
_LEAST_PLUS_BYTES: Final = 160
"""Of an entry with attributes in an answer to the kernel: no more entries of a page are of use to it."""
_Entry = tuple[bytes, Attributes]


def _dot(inode: int) -> Attributes:
    return Attributes(inode, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class DirectoryWindow:
    """What is told from place `first` of the entries on; the first of it has the offset `offset` + 1."""

    entries: list[_Entry]
    first: int
    offset: int


@dataclass(slots=True)
class _Page:
    """`begin`: the offset before its first entry. `names`: None when it is forgotten."""

    begin: int
    after: bytes
    count: int
    more: bool
    names: list[bytes] | None

    @property
    def end(self) -> int:
        return self.begin + self.count


class Directory:
    """One that is open; asked by one thread of its program at a time."""

    def __init__(self, inode: int, caller: Caller) -> None:
        """`caller`: who has opened it."""
        self.inode = inode
        self._caller = caller
        self._opened = False
        self._pages: list[_Page] = []
        self._last: list[_Entry] = []
        """Of the last page, until all of it was told."""

    async def entries_from(
        self, operations: Operations, offset: int, *, attributes: bool, size: int
    ) -> DirectoryWindow:
        """Behind `offset`; nothing at the end. `size`: bytes that the answer may have."""
        if offset == 0:
            self._pages, self._last = [], []
        page = self._page_of(offset)
        if offset and page is None:
            return DirectoryWindow([], 0, offset)  # nobody was told of this offset
        if page is not None and offset == page.end and not page.more:
            self._last = []
            return DirectoryWindow([], 0, offset)
        if page is not None and page is self._pages[-1] and self._last and not attributes and offset < page.end:
            return DirectoryWindow(self._last, offset - page.begin, offset)
        limit = max(1, min(MAX_LISTED, size // _LEAST_PLUS_BYTES)) if attributes else MAX_LISTED
        after, skipped = self._behind(page, offset)
        while True:
            page, entries = await self._load(operations, after, offset, limit, attributes=attributes)
            if skipped < len(entries) or not page.more:
                break
            skipped -= len(entries)
            after = entries[-1][0]
        skipped = min(skipped, len(entries))
        return DirectoryWindow(entries, skipped, page.begin + skipped)

    def _page_of(self, offset: int) -> _Page | None:
        """In which the entry with this offset was."""
        place = bisect.bisect_left(self._pages, offset, key=lambda page: page.begin) - 1
        if place < 0 or offset > self._pages[place].end:
            return None
        return self._pages[place]

    def _behind(self, page: _Page | None, offset: int) -> tuple[bytes, int]:
        """The name before the offset; or one further before it, and how many names to leave out then."""
        if page is None or (page.begin == 0 and offset <= _DOTS):
            return b"", 0
        if page.names is not None:
            return page.names[offset - page.begin - 1], 0
        return page.after, offset - page.begin - (_DOTS if page.begin == 0 else 0)

    async def _load(
        self, operations: Operations, after: bytes, offset: int, limit: int, *, attributes: bool
    ) -> tuple[_Page, list[_Entry]]:
        listing = await operations.list_directory(
            self._caller, self.inode, after, limit, attributes=attributes, opened=self._opened
        )
        self._opened = True
        entries = listing.entries
        if offset < _DOTS:
            entries = [(b".", _dot(self.inode)), (b"..", _dot(listing.parent))][offset:] + entries
        begin = self._pages[-1].end if self._pages else 0
        page = _Page(begin, after, len(entries), listing.more and bool(entries), [name for name, _ in entries])
        self._pages.append(page)
        self._last = entries
        self._forget()
        return page, entries

    def _forget(self) -> None:
        """Names of pages that were listed long ago."""
        kept = 0
        for page in reversed(self._pages[:-1]):
            if page.names is None:
                break
            kept += page.count
            if kept > _KEPT_NAMES:
                page.names = None

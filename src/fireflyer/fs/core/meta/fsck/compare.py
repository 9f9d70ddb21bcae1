"""What must be true of a file system that is at rest: names against inodes, chunks against files, both ways.

    Names     told of every directory with its entries; says then where they contradict the inodes
    chunks    `wrong_chunks` of one file: chunks that are where they do not belong, reach behind the file's end, or
              cannot be read; what is not there is a hole, and no fault
    unowned   what has chunks and is no file, which the caller finds

In memory are a few bits for each inode that has a name (`InodeSet`), what is known of files with several names, and the
entries of one directory.

Nothing here says what to do about it. A file system that is in use changes while it is looked at, so what is found once
may have been between two steps of somebody: only what is found again, unchanged, is a fault (`lasting`).
"""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from fireflyer.base.errors import InvariantViolation
from fireflyer.fs.core.meta.inodes.layout import chain_of, end_at, order_of
from fireflyer.fs.schema.chunks import ChunkEntry
from fireflyer.fs.schema.ids import ChainId
from fireflyer.fs.schema.inodes import DirectoryDetails, FileDetails, Inode, InodeId, Kind

__all__ = ["Fault", "FaultKind", "InodeSet", "Name", "NamespaceCheck", "lasting", "wrong_chunks"]

_BITS: Final = 16
_BITMAP_BYTES: Final = (1 << _BITS) // 8
_MOST_SORTED: Final = _BITMAP_BYTES // 2
"""With more of them a bitmap is smaller."""


class FaultKind(enum.StrEnum):
    TREE = "tree"
    """A directory has two names, or is in another one than it says."""
    LINKS = "links"
    COUNTS = "counts"
    """Of a directory: its entries or subdirectories."""
    AREA = "area"
    MISPLACED = "misplaced"
    """A chunk is on a chain on which the file's layout has no such chunk."""
    BEHIND = "behind"
    """Bytes behind the end of the file."""
    DAMAGED = "damaged"
    UNOWNED = "unowned"
    """Chunks of a file that there is not."""


class Fault(msgspec.Struct, frozen=True):
    kind: FaultKind
    inode: InodeId
    path: str
    text: str


class InodeSet:
    """Which of very many inode numbers there are: two bytes for each, and less where they are dense. It only grows.

    Numbers of files that live are given out one after the other, in batches; a Python set takes 60 to 90 bytes for
    each. Here numbers that agree in all but their last 16 bits share a block: a sorted array of those bits, which
    becomes a bitmap of 8 KiB when that is smaller.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, array[int] | bytearray] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: InodeId) -> bool:
        block, low = self._blocks.get(number >> _BITS), number & ((1 << _BITS) - 1)
        if block is None:
            return False
        if isinstance(block, bytearray):
            return bool(block[low >> 3] & (1 << (low & 7)))
        at = bisect_left(block, low)
        return at < len(block) and block[at] == low

    def add(self, number: InodeId) -> bool:
        """Whether it was not there."""
        if number in self:
            return False
        self._count += 1
        low = number & ((1 << _BITS) - 1)
        block = self._blocks.setdefault(number >> _BITS, array("H"))
        if isinstance(block, bytearray):
            block[low >> 3] |= 1 << (low & 7)
        elif len(block) < _MOST_SORTED:
            block.insert(bisect_left(block, low), low)
        else:
            self._blocks[number >> _BITS] = bitmap = bytearray(_BITMAP_BYTES)
            for one in (*block, low):
                bitmap[one >> 3] |= 1 << (one & 7)
        return True


class Name(msgspec.Struct, frozen=True):
    name: str
    inode: Inode


class NamespaceCheck:
    """`directory` once for each, the root first, a directory before those in it; then `faults`."""

    def __init__(self, root: Inode) -> None:
        self._links: Counter[InodeId] = Counter()
        self._counted: dict[InodeId, tuple[int, str]] = {}
        """Files with several names: how many the inode says, and one of the names."""
        self._unsure = InodeSet()
        self._faults: list[Fault] = []
        self._known = InodeSet()
        """Everything that has a name."""
        self._known.add(root.id)

    def directory(self, path: str, inode: Inode, entries: Sequence[Name], *, steady: bool = True) -> list[Name]:
        """`path`: as it is to be shown. Not `steady`: it changed while it was listed, so nothing is counted by it. The
        directories in it that are to be listed: one that has two names is listed once."""
        body = inode.body
        if not isinstance(body, DirectoryDetails):
            raise InvariantViolation(f"inode {inode.id} is not a directory, but was listed as one")
        below = sum(one.inode.kind is Kind.DIRECTORY for one in entries)
        if not steady:
            for one in entries:
                self._unsure.add(one.inode.id)
        elif (body.entries, body.subdirectories) != (len(entries), below):
            says = (
                f"counts {body.entries} names and {body.subdirectories} directories, contains {len(entries)} and "
                f"{below}"
            )
            self._fault(FaultKind.COUNTS, inode.id, path, says)
        return [one for one in entries if self._entry(path, inode, one)]

    def _entry(self, path: str, directory: Inode, one: Name) -> bool:
        inode, shown = one.inode, f"{path.rstrip('/')}/{one.name}"
        again = not self._known.add(inode.id)
        if inode.quota_tree not in (
            directory.quota_tree,
            inode.id if inode.kind is Kind.DIRECTORY else directory.quota_tree,
        ):
            text = f"belongs to quota tree {inode.quota_tree}, its directory to {directory.quota_tree}"
            self._fault(FaultKind.AREA, inode.id, shown, text)
        if isinstance(inode.body, DirectoryDetails):
            if again:
                self._fault(FaultKind.TREE, inode.id, shown, "has a second name in another directory")
            elif inode.body.parent != directory.id:
                text = f"has parent {inode.body.parent} in its inode, but is in directory {directory.id}"
                self._fault(FaultKind.TREE, inode.id, shown, text)
        if inode.links != 1 or (again and inode.kind is not Kind.DIRECTORY):
            # One that counts a single name is looked at only when it has another: nearly all have not.
            self._links[inode.id] += 1 if inode.links != 1 or inode.id in self._counted else 2
            self._counted.setdefault(inode.id, (inode.links, shown))
        return inode.kind is Kind.DIRECTORY and not again

    def _fault(self, kind: FaultKind, inode: InodeId, path: str, text: str) -> None:
        self._faults.append(Fault(kind, inode, path, text))

    def faults(self) -> list[Fault]:
        found = list(self._faults)
        for inode, (links, path) in self._counted.items():
            if self._links[inode] != links and inode not in self._unsure:
                found.append(
                    Fault(FaultKind.LINKS, inode, path, f"counts {links} links, has {self._links[inode]} names")
                )
        return found


def wrong_chunks(
    path: str, inode: Inode, chains: Sequence[ChainId], there: Mapping[ChainId, Iterable[ChunkEntry]]
) -> list[Fault]:
    """`chains`: of the layout's table, in its order. `there`: chunks of the file by the chain that they are on."""
    body = inode.body
    if not isinstance(body, FileDetails):
        raise InvariantViolation(f"inode {inode.id} is not a regular file, but its chunks were compared")
    order, found = order_of(body.layout, chains), []
    for chain, chunks in there.items():
        for one in chunks:
            index, held = one.chunk.index, one.held
            kind, text = None, ""
            if chain not in order or chain_of(order, index) != chain:
                kind, text = FaultKind.MISPLACED, f"chunk {index} is on chain {chain}, not {chain_of(order, index)}"
            elif held is None:
                kind, text = FaultKind.DAMAGED, f"chunk {index} on chain {chain} has no replica that can be read there"
            elif held.length > body.layout.chunk_bytes or end_at(body.layout, index, held.length) > body.length:
                end = end_at(body.layout, index, held.length)
                kind, text = (
                    FaultKind.BEHIND,
                    f"chunk {index} on chain {chain} ends at {end}, the file at {body.length}",
                )
            if kind is not None:
                found.append(Fault(kind, inode.id, path, text))
    return found


def lasting(before: Iterable[Fault], after: Iterable[Fault]) -> list[Fault]:
    """What both looks found, word by word."""
    seen = set(after)
    return [fault for fault in before if fault in seen]

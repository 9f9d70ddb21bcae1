"""Whether the rows of the namespace fit together; what would mend them (`repair`).

    Checker ──row(key, value) for every row of the store, in any order──> problems()

The names decide: they are what people see. What has a name is what the name says, is counted by its names, and lies in
the area of its directory; an area has the use that its inodes make. What no path from the root leads to, but should be
there, belongs into `/lost+found`. Rows of open files and of the service are not looked at: they go with their sessions.

The store must stand still meanwhile. All inodes are kept in memory, about 500 bytes of each.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from fireflyer.base.errors import DataCorruption
from fireflyer.fs.core.meta.tables import (
    AREA_ROWS,
    AREAS,
    ENTRIES,
    ENTRY_PREFIX_BYTES,
    INODES,
    UNLINKED,
    VALUES,
    QuotaTreeRow,
    decode_entry,
    decode_inode,
    number_key,
)
from fireflyer.fs.schema.inodes import (
    MAX_NAME_BYTES,
    ROOT,
    DirectoryDetails,
    FileDetails,
    InodeId,
    Kind,
    SymlinkDetails,
)

__all__ = ["Checker", "ClearRow", "Problem", "ProblemKind", "ReconnectOrphan", "Repair", "SetInode", "SetUse", "Unlink"]

_PAIR_KEY_BYTES: Final = 18


class ProblemKind(enum.Enum):
    UNREADABLE = "unreadable row"
    """Nothing is known to mend it with."""
    NO_ROOT = "no root"
    BAD_NAME = "invalid name"
    LOST = "orphan"
    LINKS = "wrong number of links"
    COUNTS = "wrong number of entries"
    PARENT = "wrong parent"
    AREA = "wrong quota tree"
    VALUES = "wrong size of extended attributes"
    USE = "wrong quota use"
    UNLINKED = "wrong list of unlinked inodes"
    REMAINS = "row of a missing inode"


class ClearRow(msgspec.Struct, frozen=True):
    key: bytes


class SetInode(msgspec.Struct, frozen=True):
    """None: stays."""

    id: InodeId
    links: int | None = None
    entries: int | None = None
    subdirectories: int | None = None
    parent: InodeId | None = None
    quota_tree: int | None = None
    xattr_bytes: int | None = None


class SetUse(msgspec.Struct, frozen=True):
    head: InodeId
    outer: int
    bytes: int
    inodes: int


class Unlink(msgspec.Struct, frozen=True):
    """It has no name, and is to be collected."""

    id: InodeId


class ReconnectOrphan(msgspec.Struct, frozen=True):
    """Into `/lost+found`, out of where it is."""

    id: InodeId
    key: bytes
    """Of its name; empty: it has none."""


Repair: TypeAlias = ClearRow | SetInode | SetUse | Unlink | ReconnectOrphan


class Problem(msgspec.Struct, frozen=True):
    kind: ProblemKind
    text: str
    repair: Repair | None = None


@dataclass(slots=True)
class _Seen:
    """What an inode says, and what names say of it."""

    kind: Kind
    links: int
    quota_tree: int
    length: int
    xattr_bytes: int
    found_value_bytes: int
    """Without what rows of attributes hold, which are counted when all rows were given."""
    parent: InodeId = 0
    entries: int = 0
    subdirectories: int = 0
    names: int = 0
    within: InodeId = 0
    """The directory that its name is in; of several, one."""
    key: bytes = b""
    """Of that name, where it is a directory's."""
    found_entries: int = 0
    found_subdirectories: int = 0
    below: list[InodeId] = field(default_factory=list)
    """Directories in it."""
    reached: bool = False
    found_area: int = 0


class Checker:
    def __init__(self) -> None:
        self._inodes: dict[InodeId, _Seen] = {}
        self._areas: dict[InodeId, QuotaTreeRow] = {}
        self._names: list[tuple[bytes, InodeId, Kind]] = []
        self._unlinked: dict[InodeId, int] = {}
        self._value_bytes: dict[InodeId, int] = {}
        self._others: list[tuple[InodeId, bytes]] = []
        self._problems: list[Problem] = []

    def row(self, key: bytes, value: bytes) -> None:
        """Of whatever table."""
        try:
            self._take(key, value)
        except DataCorruption as error:
            self._problems.append(Problem(ProblemKind.UNREADABLE, error.message))

    def _take(self, key: bytes, value: bytes) -> None:
        table = key[:2]
        if table == INODES:
            inode = decode_inode(key, value)
            body = inode.body
            length = body.length if isinstance(body, FileDetails) else 0
            target_bytes = len(body.target) if isinstance(body, SymlinkDetails) else 0
            seen = _Seen(inode.kind, inode.links, inode.quota_tree, length, inode.xattr_bytes, target_bytes)
            if isinstance(body, DirectoryDetails):
                seen.parent, seen.entries, seen.subdirectories = body.parent, body.entries, body.subdirectories
            self._inodes[inode.id] = seen
        elif table == ENTRIES:
            entry = decode_entry(key, value)
            self._names.append((key, entry.id, entry.kind))
        elif table == AREAS:
            quota_tree = AREA_ROWS.decode(key, value)
            self._areas[quota_tree.head] = quota_tree
        elif table == VALUES:
            inode_id = int.from_bytes(key[2:ENTRY_PREFIX_BYTES], "big")
            self._others.append((inode_id, key))
            self._value_bytes[inode_id] = (
                self._value_bytes.get(inode_id, 0) + len(key) - ENTRY_PREFIX_BYTES + len(value)
            )
        elif table == UNLINKED and len(key) == _PAIR_KEY_BYTES:
            inode_id = int.from_bytes(key[-8:], "big")
            self._unlinked[inode_id] = self._unlinked.get(inode_id, 0) + 1
            self._others.append((inode_id, key))

    def problems(self) -> list[Problem]:
        """Of all rows that were given. What hangs on what is found here is found when that is mended: check again."""
        found = self._problems
        root = self._inodes.get(ROOT)
        if root is None or root.kind is not Kind.DIRECTORY:
            return [*found, Problem(ProblemKind.NO_ROOT, "there is no root directory; restore the store from a backup")]
        root.names, root.within = 1, ROOT
        found += self._bad_names()
        self._reach(ROOT)
        found += self._lost()
        found += self._names_outside()
        found += self._wrong_inodes()
        found += self._wrong_values()
        found += self._wrong_use()
        found += self._remains()
        return found

    def _bad_names(self) -> Iterator[Problem]:
        for key, inode_id, kind in self._names:
            parent_id, name = int.from_bytes(key[2:ENTRY_PREFIX_BYTES], "big"), key[ENTRY_PREFIX_BYTES:]
            parent, seen = self._inodes.get(parent_id), self._inodes.get(inode_id)
            where = f"{name!r} in directory {parent_id}"
            if parent is None or parent.kind is not Kind.DIRECTORY:
                yield Problem(ProblemKind.BAD_NAME, f"{where}, a directory that does not exist", ClearRow(key))
            elif seen is None or seen.kind is not kind or inode_id == ROOT:
                yield Problem(
                    ProblemKind.BAD_NAME,
                    f"{where} names inode {inode_id}, which does not exist or is of another kind",
                    ClearRow(key),
                )
            elif not 0 < len(name) <= MAX_NAME_BYTES or b"/" in name or b"\0" in name or name in (b".", b".."):
                yield Problem(ProblemKind.BAD_NAME, f"{where} is not a valid name", ClearRow(key))
            elif kind is Kind.DIRECTORY and seen.names and seen.parent != parent_id:
                yield Problem(ProblemKind.BAD_NAME, f"{where} is a second name of directory {inode_id}", ClearRow(key))
            else:
                if kind is Kind.DIRECTORY and seen.names:
                    first = ClearRow(seen.key)
                    yield Problem(ProblemKind.BAD_NAME, f"directory {inode_id} has another name besides {where}", first)
                    self._forget(seen, inode_id)
                self._count(parent, parent_id, seen, inode_id, key)

    def _count(self, parent: _Seen, parent_id: InodeId, seen: _Seen, inode_id: InodeId, key: bytes) -> None:
        seen.names += 1
        seen.within = parent_id
        parent.found_entries += 1
        if seen.kind is Kind.DIRECTORY:
            seen.key = key
            parent.found_subdirectories += 1
            parent.below.append(inode_id)

    def _forget(self, seen: _Seen, inode_id: InodeId) -> None:
        before = self._inodes[seen.within]
        before.found_entries -= 1
        before.found_subdirectories -= 1
        before.below.remove(inode_id)
        seen.names = 0

    def _reach(self, top: InodeId) -> None:
        """With the area that each directory is in by where it is."""
        pending = [top]
        while pending:
            inode_id = pending.pop()
            seen = self._inodes[inode_id]
            seen.reached = True
            outer = self._inodes[seen.within].found_area if inode_id != ROOT else 0
            seen.found_area = inode_id if self._is_head(inode_id) else outer
            pending += [below for below in seen.below if not self._inodes[below].reached]

    def _is_head(self, inode_id: InodeId) -> bool:
        return inode_id in self._areas and not self._areas[inode_id].closed

    def _lost(self) -> Iterator[Problem]:
        for inode_id, seen in self._inodes.items():
            if not seen.names and (seen.links or seen.found_entries):
                text = f"inode {inode_id} counts {seen.links} links, has {seen.found_entries} entries and no name"
                yield Problem(ProblemKind.LOST, text, ReconnectOrphan(inode_id, b""))
            elif seen.kind is Kind.DIRECTORY and seen.names and not seen.reached and self._starts_cycle(inode_id):
                text = f"directory {inode_id} is inside itself"
                yield Problem(ProblemKind.LOST, text, ReconnectOrphan(inode_id, seen.key))

    def _names_outside(self) -> Iterator[Problem]:
        """Of the names of one file, those in another area than the last of them."""
        for key, inode_id, kind in self._names:
            home, seen = self._inodes.get(int.from_bytes(key[2:ENTRY_PREFIX_BYTES], "big")), self._inodes.get(inode_id)
            if kind is Kind.DIRECTORY or home is None or seen is None or seen.names < 2 or not home.reached:
                continue
            if home.found_area != self._inodes[seen.within].found_area:
                text = f"{key[ENTRY_PREFIX_BYTES:]!r} names inode {inode_id}, which is in another quota tree"
                yield Problem(ProblemKind.BAD_NAME, text, ClearRow(key))

    def _starts_cycle(self, inode_id: InodeId) -> bool:
        """Whether the way up from it leads back to it, and it has the least number of all on the way."""
        at = self._inodes[inode_id].within
        while at > inode_id and self._inodes[at].names:
            at = self._inodes[at].within
        return at == inode_id

    def _wrong_inodes(self) -> Iterator[Problem]:
        for inode_id, seen in self._inodes.items():
            if not seen.names:
                if not seen.links and not seen.found_entries and inode_id not in self._unlinked:
                    yield Problem(ProblemKind.UNLINKED, f"inode {inode_id} has no name", Unlink(inode_id))
                continue
            if seen.links != seen.names:
                text = f"inode {inode_id} counts {seen.links} links and has {seen.names} names"
                yield Problem(ProblemKind.LINKS, text, SetInode(inode_id, links=seen.names))
            if seen.kind is Kind.DIRECTORY:
                yield from self._wrong_directory(inode_id, seen)
            home = self._inodes[seen.within]
            quota_tree = seen.found_area if seen.kind is Kind.DIRECTORY else home.found_area
            if home.reached and seen.quota_tree != quota_tree:
                text = f"inode {inode_id} is in quota tree {quota_tree}, its row says {seen.quota_tree}"
                yield Problem(ProblemKind.AREA, text, SetInode(inode_id, quota_tree=quota_tree))

    def _wrong_directory(self, inode_id: InodeId, seen: _Seen) -> Iterator[Problem]:
        if (seen.entries, seen.subdirectories) != (seen.found_entries, seen.found_subdirectories):
            text = f"directory {inode_id} has {seen.found_entries} entries, {seen.found_subdirectories} directories"
            counts = SetInode(inode_id, entries=seen.found_entries, subdirectories=seen.found_subdirectories)
            yield Problem(ProblemKind.COUNTS, f"{text}; it counts {seen.entries}, {seen.subdirectories}", counts)
        if seen.parent != seen.within:
            text = f"directory {inode_id} is in directory {seen.within}, its row says {seen.parent}"
            yield Problem(ProblemKind.PARENT, text, SetInode(inode_id, parent=seen.within))

    def _wrong_values(self) -> Iterator[Problem]:
        for inode_id, seen in self._inodes.items():
            found = seen.found_value_bytes + self._value_bytes.get(inode_id, 0)
            if seen.xattr_bytes != found:
                text = (
                    f"inode {inode_id} has {found} bytes of extended attributes and link target, and counts "
                    f"{seen.xattr_bytes}"
                )
                yield Problem(ProblemKind.VALUES, text, SetInode(inode_id, xattr_bytes=found))

    def _wrong_use(self) -> Iterator[Problem]:
        """By what inodes say: where that is wrong, it is mended first."""
        used: dict[InodeId, tuple[int, int]] = dict.fromkeys(self._areas, (0, 0))
        outers = {head: self._outer(head) for head in self._areas}
        for inode_id, seen in self._inodes.items():
            quota_tree, steps = seen.quota_tree, 0
            if quota_tree and quota_tree not in self._areas:
                text = f"inode {inode_id} is in quota tree {quota_tree}, which does not exist"
                yield Problem(ProblemKind.AREA, text, SetInode(inode_id, quota_tree=0))
            while quota_tree in used and steps <= len(used):
                in_bytes, inodes = used[quota_tree]
                used[quota_tree] = (in_bytes + seen.length + seen.xattr_bytes, inodes + 1)
                quota_tree, steps = outers[quota_tree], steps + 1
        for head, area_row in self._areas.items():
            in_bytes, inodes = used[head]
            if (area_row.outer, area_row.bytes, area_row.inodes) != (outers[head], in_bytes, inodes) or not inodes:
                text = (
                    f"quota tree {head} has {in_bytes} bytes, {inodes} inodes; it counts {area_row.bytes}, "
                    f"{area_row.inodes}"
                )
                repair = SetUse(head, outers[head], in_bytes, inodes) if inodes else ClearRow(number_key(AREAS, head))
                yield Problem(ProblemKind.USE, text, repair)

    def _outer(self, head: InodeId) -> int:
        """By where the directory is; of one that is an area no more, as its row says."""
        row, seen = self._areas[head], self._inodes.get(head)
        if row.closed or seen is None or not seen.reached or head == ROOT:
            return row.outer if row.outer in self._areas and row.outer != head else 0
        return self._inodes[seen.within].found_area

    def _remains(self) -> Iterator[Problem]:
        for inode_id, key in self._others:
            seen = self._inodes.get(inode_id)
            if seen is None:
                yield Problem(
                    ProblemKind.REMAINS,
                    f"row {key.hex()} belongs to inode {inode_id}, which does not exist",
                    ClearRow(key),
                )
            elif key[:2] == UNLINKED and seen.names:
                text = f"inode {inode_id} has a name, and is listed for garbage collection"
                yield Problem(ProblemKind.UNLINKED, text, ClearRow(key))

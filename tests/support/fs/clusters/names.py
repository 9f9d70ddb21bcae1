"""The names of a file system over a store in memory, asked for one thing at a time as this or that user; and what must
be true of its store whatever was asked (`violations`)."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Self, TypeVar, cast

from fireflyer.fs.core.meta import tables
from fireflyer.fs.core.meta.context import SYSTEM, ClusterDefaults, Context, Requester
from fireflyer.fs.core.meta.dispatch import carry_out, make_root
from fireflyer.fs.core.meta.fsck.rows import Checker, Problem
from fireflyer.fs.core.meta.namespace import trash_expiry
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.inodes import ROOT, DirectoryDetails, Inode, Kind
from fireflyer.fs.schema.meta import Found, PathRef, Request, Stat
from fireflyer.kvstore import MemoryEngine, MemoryStore, Transaction
from fireflyer.kvstore.core.keys import EVERYTHING
from fireflyer.kvstore.timing import LoopTiming

__all__ = ["ADMINISTRATOR", "Names", "at", "problems", "user", "violations"]

A = TypeVar("A")
ADMINISTRATOR = Requester(1, 0, 0, (), unrestricted=True)
_FIRST_NS = 1_700_000_000_000_000_000


def user(uid: int, *groups: int) -> Requester:
    """The first group is the primary one; without any it has the user's number."""
    return Requester(1, uid, groups[0] if groups else uid, groups[1:])


def at(path: bytes | str, base: int = ROOT) -> PathRef:
    return PathRef(base, path if isinstance(path, bytes) else path.encode())


class _Frozen:
    """Time that does not pass within a transaction, however long this process does not get a processor."""

    def now_ns(self) -> int:
        return 0


class Names:
    def __init__(self, *, mode: int = 0o777, cluster: ClusterDefaults | None = None) -> None:
        self.store = MemoryStore()
        self.now_ns = _FIRST_NS
        self._engine = MemoryEngine(self.store, waits=LoopTiming(clock=_Frozen()))
        self._runner = asyncio.Runner()
        self._last_id = ROOT
        self._cluster = cluster or ClusterDefaults(capacity_bytes=1000, free_bytes=600)

        async def root(rows: Transaction) -> bool:
            return await make_root(rows, now_ns=self.now_ns, mode=mode)

        assert self._runner.run(self._engine.transact(root))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def context(self, rows: Transaction, requester: Requester = ADMINISTRATOR) -> Context:
        return Context(rows=rows, requester=requester, now_ns=self.now_ns, new_id=self._new_id, cluster=self._cluster)

    def run(self, body: Any, requester: Requester = ADMINISTRATOR) -> Any:
        """`body(context)` in a transaction of its own."""
        self.now_ns += 1000
        return self._runner.run(self._engine.transact(lambda rows: body(self.context(rows, requester))))

    def ask(self, request: Request, kind: type[A], requester: Requester = ADMINISTRATOR) -> A:
        answer = self.run(lambda context: carry_out(request, context), requester)
        assert isinstance(answer, kind), answer
        return answer

    def errno(self, request: Request, requester: Requester = ADMINISTRATOR) -> int:
        """0: it was carried out. What is refused must have changed nothing."""
        before = self.rows()
        try:
            self.ask(request, object, requester)
        except FileError as error:
            assert self.rows() == before
            return error.errno or -1
        return 0

    def do(self, *requests: Request, requester: Requester = ADMINISTRATOR) -> None:
        for request in requests:
            self.ask(request, object, requester)

    def stat(self, path: bytes | str, *, follow: bool = False) -> Inode:
        return self.ask(Stat(at(path), follow), Found).inode

    def directory(self, path: bytes | str) -> DirectoryDetails:
        body = self.stat(path).body
        assert isinstance(body, DirectoryDetails)
        return body

    def expire(self, limit: int = 100) -> bool:
        result = self.run(lambda context: trash_expiry.expire(context, context.now_ns, limit), SYSTEM)
        assert isinstance(result, bool)
        return result

    def lead(self, clock: trash_expiry.TrashClock, monotonic_ns: int) -> None:
        """What the leader does for the trash; its wall clock is `now_ns`."""
        names = self

        class _Ports:
            def now_ns(self) -> int:
                return monotonic_ns

            async def transact(self, body: Any) -> Any:
                return await names._engine.transact(lambda rows: body(names.context(rows, SYSTEM)))

        while self._runner.run(clock.step(cast("Any", _Ports()), 100)):
            pass

    def rows(self) -> list[tuple[bytes, bytes]]:
        page = self.store.scan(self.store.version, EVERYTHING)
        assert not page.more
        return page.items

    def check(self) -> None:
        assert violations(self.rows()) == []

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id


def problems(names: Names) -> list[Problem]:
    """As `ff fs fsck` finds them."""
    checker = Checker()
    for row in names.rows():
        checker.row(*row)
    return checker.problems()


def violations(items: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Of the namespace: that it is a tree, that links and entries are counted, that areas are exact. Rows of open files
    and of the service are not looked at, but that what has no name is in the table of what is unlinked."""
    rows: dict[bytes, dict[bytes, bytes]] = defaultdict(dict)
    for key, value in items:
        rows[key[:2]][key] = value
    inodes = {inode.id: inode for inode in (tables.decode_inode(*row) for row in rows[tables.INODES].items())}
    names = [(*_parent_and_name(key), tables.decode_entry(key, value)) for key, value in rows[tables.ENTRIES].items()]
    found = list(_wrong_names(inodes, names))
    if not found:
        found += _wrong_counts(inodes, names)
        found += _wrong_places(inodes, names)
        found += _wrong_areas(inodes, rows[tables.AREAS], _sizes(inodes, rows[tables.VALUES]))
    found += _wrong_others(inodes, rows)
    return found


_Names = list[tuple[int, bytes, tables.DentryRow]]


def _parent_and_name(key: bytes) -> tuple[int, bytes]:
    return int.from_bytes(key[2:10], "big"), key[10:]


def _wrong_names(inodes: dict[int, Inode], names: _Names) -> Iterable[str]:
    if ROOT not in inodes:
        yield "there is no root"
    for parent, name, entry in names:
        if parent not in inodes or inodes[parent].kind is not Kind.DIRECTORY or inodes[parent].links == 0:
            yield f"{name!r} is in {parent}, which is no directory that is there"
        if entry.id not in inodes or inodes[entry.id].kind is not entry.kind:
            yield f"{name!r} of {parent} names {entry}, which is not there"
        if not name or b"/" in name or name in (b".", b"..") or len(name) > 255:
            yield f"{name!r} of {parent} is no name"


def _wrong_counts(inodes: dict[int, Inode], names: _Names) -> Iterable[str]:
    links = Counter(entry.id for _, _, entry in names)
    links[ROOT] += 1
    entries = Counter(parent for parent, _, _ in names)
    directories = Counter(parent for parent, _, entry in names if entry.kind is Kind.DIRECTORY)
    for inode in inodes.values():
        if inode.links != links[inode.id] or (inode.kind is Kind.DIRECTORY and inode.links > 1):
            yield f"{inode.id} has {links[inode.id]} names and counts {inode.links}"
        body = inode.body
        if isinstance(body, DirectoryDetails) and body.entries != entries[inode.id]:
            yield f"directory {inode.id} has {entries[inode.id]} entries and counts {body.entries}"
        if isinstance(body, DirectoryDetails) and body.subdirectories != directories[inode.id]:
            yield f"directory {inode.id} has {directories[inode.id]} subdirectories and counts {body.subdirectories}"


def _wrong_places(inodes: dict[int, Inode], names: _Names) -> Iterable[str]:
    """Reached from the root, each directory from where it says that it is; and in the area that it is in."""
    below: dict[int, list[int]] = defaultdict(list)
    for parent, name, entry in names:
        below[parent].append(entry.id)
        inode = inodes[entry.id]
        if isinstance(inode.body, DirectoryDetails) and inode.body.parent != parent:
            yield f"directory {inode.id} is in {parent} and says {inode.body.parent}"
        if inode.quota_tree not in (inodes[parent].quota_tree, inode.id if inode.kind is Kind.DIRECTORY else 0):
            yield f"{name!r} ({inode.id}) is in area {inode.quota_tree}, its directory in {inodes[parent].quota_tree}"
    reached, pending = {ROOT}, [ROOT]
    while pending:
        for each in below[pending.pop()]:
            if each not in reached:
                reached.add(each)
                pending.append(each)
    for inode in inodes.values():
        if inode.links and inode.id not in reached:
            yield f"{inode.id} cannot be reached from the root"


def _sizes(inodes: dict[int, Inode], values: dict[bytes, bytes]) -> dict[int, int]:
    """What an area counts for each inode: contents of files, targets, names and values of attributes."""
    sizes = {inode.id: inode.length for inode in inodes.values()}
    for key, value in values.items():
        inode = int.from_bytes(key[2:10], "big")
        sizes[inode] = sizes.get(inode, 0) + len(key) - 10 + len(value)
    return sizes


def _wrong_areas(inodes: dict[int, Inode], rows: dict[bytes, bytes], sizes: dict[int, int]) -> Iterable[str]:
    areas = {row.head: row for row in (tables.AREA_ROWS.decode(*item) for item in rows.items())}
    counted: Counter[int] = Counter()
    lengths: Counter[int] = Counter()
    for inode in inodes.values():
        quota_tree, steps = inode.quota_tree, 0
        while quota_tree:
            if quota_tree not in areas or steps > len(areas):
                yield f"area {quota_tree}, of inode {inode.id} or around its area, has no row, or lies in itself"
                break
            counted[quota_tree] += 1
            lengths[quota_tree] += sizes[inode.id]
            quota_tree, steps = areas[quota_tree].outer, steps + 1
    for row in areas.values():
        if (row.inodes, row.bytes) != (counted[row.head], lengths[row.head]) or not row.inodes:
            yield f"area {row.head} has {counted[row.head]} inodes, {lengths[row.head]} bytes, and says {row}"
        if not row.closed and row.head in inodes and inodes[row.head].quota_tree != row.head:
            yield f"the head of area {row.head} is in area {inodes[row.head].quota_tree}"


def _wrong_others(inodes: dict[int, Inode], rows: dict[bytes, dict[bytes, bytes]]) -> Iterable[str]:
    unlinked = Counter(int.from_bytes(key[-8:], "big") for key in rows[tables.UNLINKED])
    for inode in inodes.values():
        if unlinked[inode.id] != (inode.links == 0):
            yield f"{inode.id} has {inode.links} links and is {unlinked[inode.id]} times among what is unlinked"
    for key in rows[tables.VALUES]:
        if int.from_bytes(key[2:10], "big") not in inodes:
            yield f"{key!r} is an extended attribute of nothing"

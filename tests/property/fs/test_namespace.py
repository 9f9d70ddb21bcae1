"""Random operations on names, in areas, with trash and with trees, against a small model; and after each of them the
store is a tree, all counted, areas exact."""

from __future__ import annotations

import contextlib
import errno
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fs.clusters.model import Model, Node, Refused
from tests.support.fs.clusters.names import Names, at, problems, violations

from fireflyer.base.units import SECOND
from fireflyer.fs.core.meta import quota_trees, tables
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.fsck.repair import repair
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.inodes import ROOT, Defaults, FileDetails, Inode, Kind
from fireflyer.fs.schema.meta import (
    Found,
    GetQuota,
    Link,
    ListDirectory,
    Listing,
    MakeDirectory,
    MakeNode,
    QuotaTree,
    Remove,
    Removed,
    RemoveDirectory,
    RemoveTree,
    RemoveXattr,
    Rename,
    RenameFlag,
    SetDefaults,
    SetQuota,
    SetXattr,
)

PATHS = st.sampled_from(["a", "b", "c", "a/a", "a/b", "b/a", "b/b", "a/a/a", "a/b/a", "b/a/b"]).map(
    lambda path: tuple(path.split("/"))
)
OPERATIONS = st.one_of(
    st.tuples(st.just("make_directory"), PATHS),
    st.tuples(st.just("make_directory"), PATHS),
    st.tuples(st.just("make_file"), PATHS),
    st.tuples(st.just("make_file"), PATHS),
    st.tuples(st.just("link"), PATHS, PATHS),
    st.tuples(st.just("unlink"), PATHS),
    st.tuples(st.just("rmdir"), PATHS),
    st.tuples(st.just("rename"), PATHS, PATHS, st.booleans()),
    st.tuples(st.just("rename"), PATHS, PATHS, st.booleans()),
    st.tuples(st.just("remove_tree"), PATHS, st.sampled_from([1, 2, 3, 100])),
    st.tuples(st.just("set_quota"), PATHS, st.booleans()),
    st.tuples(st.just("set_trash"), PATHS, st.sampled_from([0, 10])),
    st.tuples(st.just("set_xattr"), PATHS, st.sampled_from([b"user.a", b"user.bb"]), st.integers(0, 9)),
    st.tuples(st.just("set_xattr"), PATHS, st.sampled_from([b"user.a", b"user.bb"]), st.integers(0, 9)),
    st.tuples(st.just("remove_xattr"), PATHS),
    st.tuples(st.just("restore"), PATHS),
    st.tuples(st.just("expire"), st.sampled_from([1, 3, 15])),
    st.tuples(st.just("collect"), st.integers(0, 5)),
)


class Both:
    """Carries out each operation here and there, and compares."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.model = Model()

    def carry_out(self, name: str, *arguments: Any) -> None:
        found: int | None = 0
        try:
            getattr(self, name)(*arguments)
        except FileError as error:
            found = error.errno
        assert found == self._expected, (name, arguments, errno.errorcode.get(self._expected))
        self.names.check()

    _expected = 0

    def _model(self, operation: Any, *arguments: Any) -> None:
        self._expected = 0
        try:
            operation(*arguments)
        except Refused as refused:
            self._expected = refused.args[0]

    def make_directory(self, path: tuple[str, ...]) -> None:
        made = Node(0, {})
        self._model(self.model.make, path, made)
        made.id = self.names.ask(MakeDirectory(place(path)), Found).inode.id

    def make_file(self, path: tuple[str, ...]) -> None:
        made = Node(0, None)
        self._model(self.model.make, path, made)
        made.id = self.names.ask(MakeNode(place(path), Kind.FILE), Found).inode.id
        self._grow(made.id)

    def _grow(self, inode_id: int) -> None:
        """A file is as long as its number: a wrong one is not counted right by chance."""

        async def body(context: Context) -> None:
            inode = await context.known(inode_id)
            assert isinstance(inode.body, FileDetails)
            await quota_trees.charge(context, inode.quota_tree, inode_id, 0)
            context.put(msgspec.structs.replace(inode, body=FileDetails(inode.body.layout, inode_id)))

        self.names.run(body)

    def set_xattr(self, path: tuple[str, ...], name: bytes, size: int) -> None:
        """The model has none: what areas count is compared, by `check`."""
        with contextlib.suppress(FileError):
            self.names.do(SetXattr(place(path), name, bytes(size), follow=False))
        self._expected = 0

    def remove_xattr(self, path: tuple[str, ...]) -> None:
        with contextlib.suppress(FileError):
            self.names.do(RemoveXattr(place(path), b"user.a", follow=False))
        self._expected = 0

    def link(self, existing: tuple[str, ...], path: tuple[str, ...]) -> None:
        self._model(self.model.link, existing, path)
        self.names.do(Link(place(existing), place(path)))

    def unlink(self, path: tuple[str, ...]) -> None:
        self._model(self.model.unlink, path)
        self.names.do(Remove(place(path)))

    def rmdir(self, path: tuple[str, ...]) -> None:
        self._model(self.model.rmdir, path)
        self.names.do(RemoveDirectory(place(path)))

    def rename(self, source: tuple[str, ...], target: tuple[str, ...], exchange: bool) -> None:
        self._model(self.model.rename, source, target, exchange)
        self.names.do(Rename(place(source), place(target), RenameFlag.EXCHANGE if exchange else 0))

    def remove_tree(self, path: tuple[str, ...], limit: int) -> None:
        self._model(self.model.remove_tree, path)
        while self.names.ask(RemoveTree(place(path), limit), Removed).more:
            self.names.check()

    def set_quota(self, path: tuple[str, ...], on: bool) -> None:
        self._model(self.model.set_quota, path, on)
        self.names.do(SetQuota(place(path), 1 << 40 if on else None))

    def set_trash(self, path: tuple[str, ...], seconds: int) -> None:
        self._model(self.model.set_trash, path, seconds)
        self.names.do(SetDefaults(place(path), Defaults(trash_s=seconds)))

    def restore(self, path: tuple[str, ...]) -> None:
        """The first name of some trash."""
        kept = [found for found, _ in self.model.walk() if found[-3:-1] == (".trash", "0")]
        self._expected = 0
        if kept:
            self.rename(kept[0], path, exchange=False)

    def expire(self, seconds: int) -> None:
        self._expected = 0
        self.model.now_s += seconds
        self.names.now_ns += seconds * SECOND
        self.model.expire()
        while self.names.expire(2):
            self.names.check()

    def collect(self, number: int) -> None:
        """One of what is unlinked, as the collector does when its chunks are gone."""
        self._expected = 0
        gone = [key for key, _ in self.names.rows() if key[:2] == tables.UNLINKED]
        if not gone:
            return
        key = gone[number % len(gone)]

        async def body(context: Context) -> None:
            inode = await context.known(int.from_bytes(key[-8:], "big"))
            context.rows.clear(key)
            context.rows.clear(tables.inode_key(inode.id))
            context.rows.clear_range(
                tables.number_key(tables.VALUES, inode.id), tables.number_key(tables.VALUES, inode.id + 1)
            )
            await quota_trees.charge(context, inode.quota_tree, -inode.charged_bytes, -1)

        self.names.run(body)

    def compare(self) -> None:
        ours = dict(self._walk((), 1))
        theirs = {path: (node.id, node.names is None, self.model.links(node)) for path, node in self.model.walk()}
        made = {path for path in theirs if path[-1:] == (".trash",) or path[-2:] == (".trash", "0")}
        assert set(ours) == set(theirs)
        assert {path: ours[path] for path in ours if path not in made} == {
            path: theirs[path] for path in theirs if path not in made
        }
        for path, node in self.model.walk():
            if node.is_area:
                self._compare_area(path, node)

    def _compare_area(self, path: tuple[str, ...], node: Node) -> None:
        within = {found.id or -number for number, (_, found) in enumerate(self.model.walk(node))}
        unlinked = [key for key, _ in self.names.rows() if key[:2] == tables.UNLINKED]
        quota_tree = self.names.ask(GetQuota(place(path)), QuotaTree)
        assert len(within) <= quota_tree.inodes <= len(within) + len(unlinked)

    def _walk(self, path: tuple[str, ...], directory: int) -> Any:
        inode = self.names.stat("/" + "/".join(path))
        yield path, (inode.id, inode.kind is Kind.FILE, inode.links)
        if inode.kind is Kind.DIRECTORY:
            after, more = b"", True
            while more:
                listing = self.names.ask(ListDirectory(inode.id, after, 2), Listing)
                for entry in listing.entries:
                    yield from self._walk((*path, entry.name.decode()), entry.id)
                    after = entry.name
                more = listing.more


def place(path: tuple[str, ...]) -> Any:
    return at("/".join(path))


def go(operations: list[tuple[Any, ...]]) -> None:
    with Names() as names:
        both = Both(names)
        for operation in operations:
            both.carry_out(*operation)
        both.compare()
        assert problems(names) == []


@given(st.lists(OPERATIONS, max_size=40))
@settings(max_examples=60, deadline=None)
def test_names_areas_and_trash_do_as_the_model_does(operations: list[tuple[Any, ...]]) -> None:
    go(operations)


@pytest.mark.slow
@given(st.lists(OPERATIONS, min_size=20, max_size=120))
@settings(max_examples=150, deadline=None)
def test_many_operations_do_too(operations: list[tuple[Any, ...]]) -> None:
    go(operations)


@given(st.lists(OPERATIONS, min_size=10, max_size=40), st.lists(st.integers(0, 1 << 30), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_whatever_is_lost_of_a_store_the_rest_can_be_mended(
    operations: list[tuple[Any, ...]], damage: list[int]
) -> None:
    with Names() as names:
        both = Both(names)
        for operation in operations:
            both.carry_out(*operation)
        lose(names, damage)
        mend(names)
        assert violations(names.rows()) == []


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 150))])
def test_much_damage_to_a_full_store_can_be_mended(seed: int) -> None:
    rng = random.Random(seed)
    with Names() as names:
        both = Both(names)
        for _ in range(40):
            both.carry_out(*operation(rng))
        lose(names, [rng.randrange(1 << 30) for _ in range(rng.randrange(1, 8))])
        mend(names)
        assert violations(names.rows()) == []


def operation(rng: random.Random) -> tuple[Any, ...]:
    """More of them make something than Hypothesis likes to draw."""
    paths = ["a", "b", "c", "a/a", "a/b", "b/a", "b/b", "a/a/a", "a/b/a", "b/a/b"]
    one, other = (tuple(rng.choice(paths).split("/")) for _ in range(2))
    several = [("make_directory", one)] * 4 + [("make_file", one)] * 3
    return rng.choice(
        [
            *several,
            ("link", one, other),
            ("unlink", one),
            ("rename", one, other, rng.random() < 0.3),
            ("rename", one, other, False),
            ("set_quota", one, rng.random() < 0.8),
            ("set_trash", one, 10),
            ("remove_tree", one, 3),
        ]
    )


def lose(names: Names, damage: list[int]) -> None:
    """Rows are dropped, or get the value of another of their table, with its own number where it has one."""

    async def body(context: Context) -> None:
        for number in damage:
            rows = [row for row in names.rows() if row[0] != tables.inode_key(ROOT) and row[0][:2] != b"FG"]
            if not rows:
                return
            key, value = rows[number % len(rows)]
            others = [each for each in rows if each[0][:2] == key[:2]]
            other = others[number // 7 % len(others)][1]
            if number % 3 == 0:
                context.rows.clear(key)
            elif key[:2] == tables.INODES:
                inode = tables.decode_inode(key, value)
                changed = msgspec.msgpack.decode(other[1:], type=Inode)
                if number % 3 == 1 and changed.kind is inode.kind:
                    context.put(msgspec.structs.replace(changed, id=inode.id))
                else:
                    context.put(msgspec.structs.replace(inode, links=number % 4, quota_tree=number % 5))
            elif key[:2] == tables.AREAS:
                quota_tree = tables.AREA_ROWS.decode(key, value)
                context.rows.set(
                    key, tables.AREA_ROWS.encode(msgspec.structs.replace(quota_tree, bytes=5, outer=number % 9))
                )
            else:
                context.rows.set(key, other)

    names.run(body)


def mend(names: Names) -> None:
    for _ in range(10):
        found = problems(names)
        if not found:
            return
        assert names.run(lambda context, found=found: repair(found, context)) == len(found), found
    raise AssertionError(problems(names))

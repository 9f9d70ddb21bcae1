"""Quota areas: exact use, limits, areas in areas, becoming one and ceasing to be one."""

from __future__ import annotations

import errno

import msgspec
import pytest
from tests.support.fs.clusters.names import Names, at, problems, user

from fireflyer.fs.core.meta import quota_trees, tables
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.fsck.rows import ProblemKind
from fireflyer.fs.core.meta.open_files import garbage_collection
from fireflyer.fs.core.meta.tables import inode_key
from fireflyer.fs.schema.inodes import FileDetails, Inode, Kind
from fireflyer.fs.schema.meta import (
    GetQuota,
    GetSpace,
    Link,
    MakeDirectory,
    MakeNode,
    PathRef,
    QuotaTree,
    Remove,
    RemoveDirectory,
    RemoveXattr,
    Rename,
    SetQuota,
    SetXattr,
    Space,
    Symlink,
)


def make_file(names: Names, path: str, length: int = 0) -> None:
    names.do(MakeNode(at(path), Kind.FILE))
    if length:
        grow(names, path, length)


def grow(names: Names, path: str, length: int) -> None:
    """As a report of a writer does."""
    inode = names.stat(path)

    async def body(context: Context) -> None:
        assert isinstance(inode.body, FileDetails)
        await quota_trees.charge(context, inode.quota_tree, length - inode.body.length, 0)
        context.put(msgspec.structs.replace(inode, body=msgspec.structs.replace(inode.body, length=length)))

    names.run(body)


def collect(names: Names, inode: Inode) -> None:
    """As the collector does when the chunks are gone."""

    async def body(context: Context) -> None:
        context.rows.clear(inode_key(inode.id))
        for key, _ in names.rows():
            if key[:2] == b"FU" and key.endswith(inode.id.to_bytes(8, "big")):
                context.rows.clear(key)
        await quota_trees.charge(context, inode.quota_tree, -inode.charged_bytes, -1)

    names.run(body)
    names.check()


def use(names: Names, path: str) -> tuple[int, int]:
    quota_tree = names.ask(GetQuota(at(path)), QuotaTree)
    names.check()
    return quota_tree.bytes, quota_tree.inodes


def test_use_is_counted_to_the_area_and_to_all_around_it() -> None:
    with Names() as names:
        names.do(MakeDirectory(at("a")), SetQuota(at("a"), None, 100))
        names.do(MakeDirectory(at("a/b")), SetQuota(at("a/b"), 1000, None))
        make_file(names, "a/f", 10)
        make_file(names, "a/b/f", 500)
        names.do(Symlink(at("a/b/l"), b"f"), Link(at("a/b/f"), at("a/b/again")))
        assert use(names, "a/b") == (501, 3)
        assert use(names, "a") == (511, 5)


def test_what_would_go_over_a_limit_is_refused_and_what_takes_less_is_not() -> None:
    with Names() as names:
        names.do(
            MakeDirectory(at("a")), SetQuota(at("a"), 100, 3), MakeDirectory(at("a/b")), SetQuota(at("a/b"), 1000, 9)
        )
        make_file(names, "a/b/f", 60)
        for refused in (MakeDirectory(at("a/b/x")), MakeNode(at("a/x"), Kind.FIFO), Symlink(at("a/b/x"), b"t")):
            assert names.errno(refused) == errno.EDQUOT
        with pytest.raises(OSError, match="limited to 100 bytes, 60 are used, 41 more were requested"):
            grow(names, "a/b/f", 101)
        grow(names, "a/b/f", 100)
        names.do(SetQuota(at("a"), 50, 1))
        grow(names, "a/b/f", 70)
        with pytest.raises(OSError, match="disk quota exceeded: the directory with inode"):
            grow(names, "a/b/f", 71)
        names.do(Remove(at("a/b/f")), RemoveDirectory(at("a/b")))
        assert use(names, "a") == (70, 3)


def test_attributes_and_targets_count_as_bytes_do() -> None:
    with Names() as names:
        names.do(MakeDirectory(at("a")), SetQuota(at("a"), 1000), MakeDirectory(at("a/b")), SetQuota(at("a/b"), 2000))
        make_file(names, "a/b/f", 100)
        names.do(SetXattr(at("a/b/f"), b"user.x", bytes(94)), SetXattr(at("a/b"), b"user.x", bytes(4)))
        names.do(Symlink(at("a/b/l"), b"t" * 90))
        assert use(names, "a/b") == use(names, "a/b") == (300, 3)
        assert use(names, "a") == (300, 4)
        for refused in (SetXattr(at("a/b/f"), b"user.y", bytes(695)), Symlink(at("a/b/m"), b"t" * 701)):
            assert names.errno(refused) == errno.EDQUOT
        names.do(SetXattr(at("a/b/f"), b"user.x", bytes(794)))
        assert use(names, "a") == (1000, 4)
        names.do(SetQuota(at("a"), 10))
        names.do(SetXattr(at("a/b/f"), b"user.x", b""))
        assert use(names, "a") == (206, 4)
        names.do(RemoveXattr(at("a/b/f"), b"user.x"), RemoveXattr(at("a/b"), b"user.x"))
        assert names.errno(RemoveXattr(at("a/b"), b"user.x")) == errno.ENODATA
        assert use(names, "a/b") == (190, 3)
        names.do(SetQuota(at("a")), MakeDirectory(at("a/c")), SetXattr(at("a/c"), b"user.z", bytes(4)))
        names.do(SetQuota(at("a"), 900))
        assert use(names, "a") == (200, 5)


def test_attributes_of_what_is_open_without_a_name_count_until_it_is_collected() -> None:
    with Names() as names:
        names.do(MakeDirectory(at("a")), SetQuota(at("a"), 1000))
        make_file(names, "a/f", 100)
        inode = names.stat("a/f")
        names.do(SetXattr(at("a/f"), b"user.x", bytes(4)), Remove(at("a/f")))
        (key,) = [key for key, _ in names.rows() if key[:2] == tables.UNLINKED]
        names.do(SetXattr(PathRef(inode.id), b"user.x", bytes(40)))
        assert use(names, "a") == (146, 2)
        names.run(
            lambda context: garbage_collection._clear(context, key, inode)
        )  # as it was when its chunks were removed
        assert use(names, "a") == (0, 1)


def test_what_was_stored_before_attributes_counted_is_counted_when_it_changes() -> None:
    with Names() as names:
        names.do(MakeDirectory(at("a")), SetQuota(at("a"), 1000), MakeNode(at("a/f"), Kind.FILE))
        names.do(SetXattr(at("a/f"), b"user.x", bytes(4)))
        inode = names.stat("a/f")

        async def as_before(context: Context) -> None:
            context.put(msgspec.structs.replace(inode, xattr_bytes=0))
            await quota_trees.charge(context, inode.quota_tree, -inode.xattr_bytes, 0)

        names.run(as_before)
        assert [one.kind for one in problems(names)] == [ProblemKind.VALUES]
        names.do(RemoveXattr(at("a/f"), b"user.x"))
        assert use(names, "a") == (0, 2)
        assert problems(names) == []


def test_what_is_unlinked_counts_until_it_is_collected() -> None:
    with Names() as names:
        names.do(MakeDirectory(at("a")), SetQuota(at("a"), 100, 2))
        make_file(names, "a/f", 60)
        inode = names.stat("a/f")
        names.do(Remove(at("a/f")))
        assert use(names, "a") == (60, 2)
        assert names.errno(MakeNode(at("a/g"), Kind.FILE)) == errno.EDQUOT
        collect(names, inode)
        assert use(names, "a") == (0, 1)
        make_file(names, "a/g", 100)
        names.check()


def test_the_area_of_a_removed_directory_goes_with_its_last_inode() -> None:
    with Names() as names:
        names.do(MakeDirectory(at("a")), SetQuota(at("a"), 100), MakeDirectory(at("a/b")), SetQuota(at("a/b"), 100))
        make_file(names, "a/b/f", 60)
        head, file = names.stat("a/b"), names.stat("a/b/f")
        names.do(Remove(at("a/b/f")), RemoveDirectory(at("a/b")))
        assert use(names, "a") == (60, 3)
        collect(names, head)
        assert use(names, "a") == (60, 2)
        collect(names, file)
        assert use(names, "a") == (0, 1)
        assert len([key for key, _ in names.rows() if key[:2] == b"FA"]) == 1


def test_a_directory_with_entries_becomes_an_area_between_others() -> None:
    with Names() as names:
        names.do(MakeDirectory(at("a")), SetQuota(at("a"), 10_000))
        names.do(MakeDirectory(at("a/b")), MakeDirectory(at("a/b/c")), SetQuota(at("a/b/c"), 1000))
        make_file(names, "a/b/f", 7)
        make_file(names, "a/b/c/f", 20)
        names.do(Link(at("a/b/f"), at("a/b/again")))
        before = use(names, "a")
        quota_tree = names.ask(SetQuota(at("a/b"), 500, 50), QuotaTree)
        assert (quota_tree.bytes, quota_tree.inodes, quota_tree.limit_bytes, quota_tree.limit_inodes) == (
            27,
            4,
            500,
            50,
        )
        assert use(names, "a") == before
        grow(names, "a/b/c/f", 30)
        assert (use(names, "a/b/c"), use(names, "a/b"), use(names, "a")) == ((30, 2), (37, 4), (37, 5))
        names.do(SetQuota(at("a/b")))
        assert names.errno(GetQuota(at("a/b"))) == errno.ENODATA
        assert (use(names, "a/b/c"), use(names, "a")) == ((30, 2), (37, 5))
        make_file(names, "a/b/c/g", 5)
        assert (use(names, "a/b/c"), use(names, "a")) == ((35, 3), (42, 6))
        names.do(Rename(at("a/b/f"), at("a/f")))


def test_what_is_unlinked_stays_counted_when_its_area_ends_and_begins_again_elsewhere() -> None:
    with Names() as names:
        for path in ("a", "a/b", "a/b/c"):
            names.do(MakeDirectory(at(path)))
        names.do(SetQuota(at("a"), 10_000), SetQuota(at("a/b"), 1000), SetQuota(at("a/b/c"), 100))
        make_file(names, "a/b/c/f", 60)
        file = names.stat("a/b/c/f")
        names.do(Remove(at("a/b/c/f")))
        names.do(SetQuota(at("a/b/c")))
        names.check()
        names.do(SetQuota(at("a/b")))
        assert use(names, "a") == (60, 4)
        names.do(SetQuota(at("a/b/c"), 100))
        assert use(names, "a/b/c") == (60, 2)
        names.check()
        assert use(names, "a") == (60, 4)
        collect(names, file)
        assert (use(names, "a"), use(names, "a/b/c")) == ((0, 3), (0, 1))
        assert len([key for key, _ in names.rows() if key[:2] == b"FA"]) == 2


def test_a_large_directory_and_one_with_names_outside_cannot_become_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_trees, "MAX_COUNTED", 5)
    with Names() as names:
        names.do(MakeDirectory(at("a")))
        for number in range(5):
            make_file(names, f"a/{number}")
        names.do(Link(at("a/1"), at("out")))
        assert names.errno(SetQuota(at("a"), 1)) == errno.EXDEV
        names.do(Remove(at("out")), SetQuota(at("a"), 1), MakeDirectory(at("a/6")))
        assert names.errno(SetQuota(at("a"))) == errno.EFBIG
        names.do(SetQuota(at("a"), 2))  # changing limits counts nothing
        names.check()


def test_space_is_what_the_narrowest_area_leaves() -> None:
    with Names() as names:
        names.do(
            MakeDirectory(at("a")), SetQuota(at("a"), 500, 10), MakeDirectory(at("a/b")), SetQuota(at("a/b"), 800, 5)
        )
        make_file(names, "a/b/f", 100)
        make_file(names, "a/g", 300)
        root = names.ask(GetSpace(names.stat("/").id), Space)
        assert (root.capacity_bytes, root.free_bytes) == (1000, 600)
        inner = names.ask(GetSpace(names.stat("a/b/f").id), Space)
        assert inner == Space(500, 100, 2, 3)


def test_the_root_can_be_an_area() -> None:
    with Names() as names:
        names.do(MakeDirectory(at("a")), SetQuota(at("/"), 1000, 3))
        make_file(names, "a/f", 10)
        assert use(names, "/") == (10, 3)
        assert names.errno(MakeDirectory(at("b")), user(1000)) == errno.EDQUOT
        names.do(SetQuota(at("/")))
        names.check()

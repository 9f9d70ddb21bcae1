"""Trees are removed in bounded steps, with the rights that each name needs."""

from __future__ import annotations

import errno

import pytest
from tests.support.fs.clusters.names import ADMINISTRATOR, Names, at, user

from fireflyer.fs.core.meta.namespace import remove_tree
from fireflyer.fs.schema.inodes import Kind
from fireflyer.fs.schema.meta import Link, MakeDirectory, MakeNode, Removed, RemoveTree, SetAttributes, Stat, Symlink

ALICE, BOB = user(1001), user(1002)


def make(names: Names, *paths: str) -> None:
    for path in paths:
        if path.endswith("/"):
            names.do(MakeDirectory(at(path), 0o777))
        else:
            names.do(MakeNode(at(path), Kind.FILE))


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7, 100])
def test_a_tree_goes_in_steps_of_any_size(limit: int) -> None:
    with Names() as names:
        make(names, "t/", "t/a/", "t/a/x/", "t/a/x/f", "t/a/g", "t/b", "t/c/", "t/d/", "t/d/y/", "t/z", "keep")
        names.do(Link(at("t/b"), at("other")), Symlink(at("t/d/l"), b"/keep"))
        total = 0
        while True:
            removed = names.ask(RemoveTree(at("t"), limit), Removed)
            names.check()
            assert removed.names <= limit
            total += removed.names
            if not removed.more:
                break
        assert total == 11
        assert names.stat("other").links == 1
        assert names.stat("keep").links == 1
        assert names.errno(Stat(at("t"))) == errno.ENOENT


def test_a_large_directory_and_a_deep_one() -> None:
    with Names() as names:
        make(names, "t/")
        make(names, *(f"t/{number:04d}" for number in range(600)))
        path = "t"
        for _ in range(100):
            path += "/d"
            make(names, path + "/")
        steps = 0
        while names.ask(RemoveTree(at("t"), 200), Removed).more:
            names.check()
            steps += 1
        assert steps == 3
        names.check()


def test_names_of_one_file_in_one_directory_all_go() -> None:
    with Names() as names:
        make(names, "t/", "t/a")
        names.do(Link(at("t/a"), at("t/b")), Link(at("t/a"), at("t/c")))
        assert names.ask(RemoveTree(at("t")), Removed) == Removed(4, more=False)
        names.check()


def test_what_is_too_deep_is_left_with_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remove_tree, "_MAX_DEPTH", 3)
    with Names() as names:
        make(names, "t/", "t/a", "t/d/", "t/d/b", "t/d/d/", "t/d/d/c", "t/d/d/d/", "t/d/d/d/e", "t/z")
        assert names.ask(RemoveTree(at("t")), Removed) == Removed(3, more=True)
        names.check()
        assert names.errno(RemoveTree(at("t"))) == errno.ENAMETOOLONG
        names.do(RemoveTree(at("t/d/d")))
        assert names.ask(RemoveTree(at("t")), Removed) == Removed(3, more=False)
        names.check()


def test_what_may_not_be_removed_ends_it_after_what_may() -> None:
    with Names() as names:
        make(names, "t/", "t/a/", "t/a/f", "t/b/", "t/b/g", "t/c")
        names.do(SetAttributes(at("t"), mode=0o777, uid=1001), SetAttributes(at("t/b"), mode=0o755))
        names.do(SetAttributes(at("t/a"), mode=0o777))
        assert names.ask(RemoveTree(at("t")), Removed, BOB) == Removed(2, more=True)
        names.check()
        assert names.errno(Stat(at("t/a"))) == errno.ENOENT
        assert names.stat("t/b/g").links == 1
        assert names.errno(RemoveTree(at("t")), BOB) == errno.EACCES
        assert names.ask(RemoveTree(at("t")), Removed, ADMINISTRATOR) == Removed(4, more=False)
        names.check()


def test_each_directory_must_be_readable_and_sticky_ones_keep_what_is_others() -> None:
    with Names() as names:
        make(names, "t/", "t/f", "u/", "u/f")
        names.do(SetAttributes(at("t"), mode=0o333), SetAttributes(at("u"), mode=0o1777))
        assert names.errno(RemoveTree(at("t")), BOB) == errno.EACCES
        assert names.errno(RemoveTree(at("u")), BOB) == errno.EPERM
        names.do(SetAttributes(at("u"), uid=1002))
        names.do(RemoveTree(at("u")), requester=BOB)
        names.check()


def test_an_empty_directory_needs_no_rights_in_it() -> None:
    with Names() as names:
        make(names, "t/", "t/closed/")
        names.do(SetAttributes(at("t"), uid=1001), SetAttributes(at("t/closed"), mode=0))
        assert names.ask(RemoveTree(at("t")), Removed, ALICE) == Removed(2, more=False)
        names.check()

"""Directories lie in each other so deep and no deeper, and nobody climbs for ever."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
from tests.support.fs.clusters.names import Names, at, user

from fireflyer.fs.core.meta.context import Requester
from fireflyer.fs.core.meta.inodes import directories
from fireflyer.fs.schema.inodes import MAX_DEPTH, MAX_PATH_BYTES, ROOT, Defaults, Kind
from fireflyer.fs.schema.meta import (
    Found,
    ListDirectory,
    MakeDirectory,
    MakeNode,
    Remove,
    Removed,
    RemoveDirectory,
    RemoveTree,
    Rename,
    RenameFlag,
    SetDefaults,
)

DEPTH = 8
ANN = user(500)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    """With limits that are soon reached."""
    monkeypatch.setattr(directories, "MAX_DEPTH", DEPTH)
    monkeypatch.setattr(directories, "MAX_CLIMB", 2 * DEPTH)
    with Names() as made:
        yield made
        made.check()


def chain(names: Names, name: str, depth: int) -> list[int]:
    """Directories in each other; their numbers."""
    made, parent = [], ROOT
    for _ in range(depth):
        parent = names.ask(MakeDirectory(at(name, parent), 0o777), Found, ANN).inode.id
        made.append(parent)
    return made


def test_every_directory_that_a_path_can_name_can_be_made() -> None:
    assert 2 * MAX_DEPTH > MAX_PATH_BYTES
    assert directories.MAX_CLIMB >= 2 * MAX_DEPTH


def test_no_directory_is_made_or_moved_below_the_deepest(names: Names) -> None:
    *_, above, deepest = chain(names, "d", DEPTH)
    assert names.errno(MakeDirectory(at("x", deepest)), ANN) == errno.ENAMETOOLONG
    names.do(MakeNode(at("file", deepest), Kind.FILE), requester=ANN)
    names.do(MakeDirectory(at("e")), requester=ANN)
    assert names.errno(Rename(at("e"), at("e", deepest)), ANN) == errno.ENAMETOOLONG
    names.do(MakeNode(at("other"), Kind.FILE), MakeNode(at("more"), Kind.FILE), requester=ANN)
    names.do(Rename(at("other"), at("other", deepest)), requester=ANN)
    exchanged = Rename(at("e"), at("file", deepest), RenameFlag.EXCHANGE)
    assert names.errno(exchanged, ANN) == errno.ENAMETOOLONG
    names.do(Rename(at("e"), at("e", above)), requester=ANN)
    assert names.errno(MakeDirectory(at("x", names.stat(b"d/" * (DEPTH - 1) + b"e").id)), ANN) == errno.ENAMETOOLONG
    names.do(Rename(at("e", above), at("renamed", above)), requester=ANN)
    names.do(Rename(at("renamed", above), at("e")), MakeDirectory(at("e/x")), requester=ANN)


def test_what_moving_a_tree_has_brought_deeper_can_be_used_moved_up_and_removed(names: Names) -> None:
    first, second = chain(names, "a", DEPTH), chain(names, "b", DEPTH)
    names.do(MakeNode(at("file", second[-1]), Kind.FILE), requester=ANN)
    names.do(Rename(at("b"), at("b", first[-2])), requester=ANN)
    names.do(MakeNode(at("new", second[-1]), Kind.FILE), Remove(at("file", second[-1])), requester=ANN)
    names.do(Rename(at("b", second[-2]), at("up")), MakeDirectory(at("up/more")), requester=ANN)
    assert names.ask(RemoveTree(at("a")), Removed, ANN).more is False


def test_nobody_climbs_for_ever(names: Names) -> None:
    chains = [chain(names, f"c{number}", DEPTH) for number in range(3)]
    names.do(Rename(at("c1"), at("c1", chains[0][-2])), requester=ANN)
    chains[1][-1] = names.ask(MakeDirectory(at("last", chains[1][-3]), 0o777), Found, ANN).inode.id
    names.do(MakeDirectory(at("d")), requester=ANN)
    names.do(Rename(at("d"), at("d", chains[1][-2])), requester=ANN)
    names.do(Rename(at("c2"), at("c2", chains[1][-3])), requester=ANN)
    deep = chains[2][-2]
    names.do(MakeDirectory(at("e")), requester=ANN)
    assert names.errno(Rename(at("e"), at("e", deep)), ANN) == errno.ENAMETOOLONG
    eve = Requester(7, 1002, 1002, by_path=True)
    assert names.errno(ListDirectory(deep), eve) == errno.ENAMETOOLONG
    names.do(ListDirectory(deep), requester=Requester(7, 500, 500, by_path=True))


def test_the_trash_is_a_place_like_others(names: Names) -> None:
    (top, *_, deepest) = chain(names, "d", DEPTH)
    names.do(SetDefaults(at("", deepest), Defaults(trash_s=10)), MakeDirectory(at("t"), 0o777), requester=ANN)
    names.do(SetDefaults(at("t"), Defaults(trash_s=10)), requester=ANN)
    names.do(MakeDirectory(at("t/x")), MakeDirectory(at("t/x/y")), requester=ANN)
    assert names.ask(RemoveTree(at("t/x")), Removed, ANN).names == 1
    kept = next(iter(names.ask(ListDirectory(names.stat(".trash/500").id), object, ANN).entries))  # type: ignore[attr-defined]
    assert names.directory(b".trash/500/" + kept.name).depth == 3
    names.do(RemoveDirectory(at("t")), requester=ANN)
    assert top != deepest

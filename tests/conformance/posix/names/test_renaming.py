"""rename: what may take whose place, loops, and the two flags of Linux."""

from __future__ import annotations

import itertools
import stat
from errno import EACCES, EEXIST, EINVAL, EISDIR, ENOENT, ENOTDIR, ENOTEMPTY, EPERM

import pytest
from tests.support.posix.places import User, errno_of

NO_REPLACE = 1
EXCHANGE = 2


def make(user: User, kind: str, path: str) -> None:
    if kind == "file":
        user.create(path, kind.encode())
    elif kind in ("empty", "full"):
        user.mkdir(path)
        if kind == "full":
            user.create(f"{path}/inside")
    elif kind == "link":
        user.symlink("nowhere", path)
    elif kind == "fifo":
        user.mknod(path, stat.S_IFIFO | 0o600)
    else:
        assert kind == "none"


KINDS = ("file", "empty", "full", "link", "fifo", "none")
DIRECTORIES = ("empty", "full")


def expected(source: str, target: str) -> int:
    if source == "none":
        return ENOENT
    if target == "none":
        return 0
    if source in DIRECTORIES:
        return ENOTDIR if target not in DIRECTORIES else ENOTEMPTY if target == "full" else 0
    return EISDIR if target in DIRECTORIES else 0


@pytest.mark.parametrize("flags", [0, NO_REPLACE, EXCHANGE])
def test_everything_over_everything(alice: User, flags: int) -> None:
    for number, (source, target) in enumerate(itertools.product(KINDS, KINDS)):
        for name in (f"a{number}", f"b{number}"):
            alice.mkdir(name)
        old, new = f"a{number}/x", f"b{number}/y"
        make(alice, source, old)
        make(alice, target, new)
        if flags == NO_REPLACE:
            wanted = ENOENT if source == "none" else EEXIST if target != "none" else 0
        elif flags == EXCHANGE:
            wanted = ENOENT if "none" in (source, target) else 0
        else:
            wanted = expected(source, target)
        before = alice.lstat(old).inode if source != "none" else 0
        assert errno_of(alice.rename, old, new, flags) == wanted, (source, target)
        if wanted:
            assert alice.exists(old) == (source != "none")
            assert alice.exists(new) == (target != "none")
        else:
            assert alice.lstat(new).inode == before
            assert alice.exists(old) == (flags == EXCHANGE)
        for name in (f"a{number}", f"b{number}"):
            alice.stat(name)  # its count of links


def test_to_itself(alice: User) -> None:
    alice.create("file")
    alice.mkdir("d")
    alice.mkdir("d/e")
    for flags in (0, EXCHANGE):
        alice.rename("file", "file", flags)
        alice.rename("d", "d", flags)
        alice.rename("d/e", "d/../d/e", flags)
    assert errno_of(alice.rename, "file", "file", NO_REPLACE) == EEXIST
    assert errno_of(alice.rename, "none", "none") == ENOENT
    assert alice.listdir(".") == ["d", "file"]


def test_a_directory_is_not_moved_into_itself(alice: User) -> None:
    alice.mkdir("a")
    alice.mkdir("a/b")
    alice.mkdir("a/b/c")
    for target in ("a/x", "a/b/x", "a/b/c/x", "a/b/c"):
        for flags in (0, EXCHANGE) if target == "a/b/c" else (0, NO_REPLACE):
            assert errno_of(alice.rename, "a", target, flags) == EINVAL, target
    assert errno_of(alice.rename, "a/b/c", "a") == ENOTEMPTY
    assert errno_of(alice.rename, "a/b/c", "a/b") == ENOTEMPTY
    assert errno_of(alice.rename, "a/b/c", "a", EXCHANGE) == EINVAL
    alice.symlink("a/b", "way")
    assert errno_of(alice.rename, "a", "way/x") == EINVAL
    alice.rename("a/b/c", "c")
    alice.rename("a", "c/a")
    assert alice.listdir("c/a") == ["b"]
    assert alice.stat("c/a/..").inode == alice.stat("c").inode


def test_a_moved_directory_has_another_above_it(alice: User) -> None:
    for name in ("a", "b", "a/d", "a/d/e"):
        alice.mkdir(name)
    alice.create("b/file")
    alice.rename("a/d", "b/d")
    assert alice.stat("b/d/..").inode == alice.stat("b").inode
    assert alice.stat("b/d/e/../../file").kind == stat.S_IFREG
    assert (alice.stat("a").links, alice.stat("b").links) == (2, 3)
    alice.mkdir("a/f")
    alice.rename("a/f", "b/d", EXCHANGE)
    assert alice.listdir("a/f") == ["e"]
    assert alice.stat("a/f/..").inode == alice.stat("a").inode
    assert alice.stat("b/d/..").inode == alice.stat("b").inode


def test_exchange_of_a_file_and_a_directory(alice: User) -> None:
    alice.mkdir("a")
    alice.mkdir("b")
    alice.create("a/x", b"file")
    alice.mkdir("b/y")
    assert (alice.stat("a").links, alice.stat("b").links) == (2, 3)
    alice.rename("a/x", "b/y", EXCHANGE)
    assert (alice.stat("a").links, alice.stat("b").links) == (3, 2)
    assert alice.read("b/y") == b"file"
    assert alice.stat("a/x/..").inode == alice.stat("a").inode


def test_flags_that_exclude_each_other(alice: User) -> None:
    alice.create("a")
    alice.create("b")
    assert errno_of(alice.rename, "a", "b", NO_REPLACE | EXCHANGE) == EINVAL


def test_links_are_moved_and_not_followed(alice: User) -> None:
    alice.create("file", b"file")
    alice.symlink("file", "link")
    alice.rename("link", "moved")
    assert alice.readlink("moved") == "file"
    alice.create("new", b"new")
    alice.rename("new", "moved")
    assert alice.lstat("moved").kind == stat.S_IFREG
    assert alice.read("file") == b"file"


def test_the_old_file_is_replaced_by_the_new_one(alice: User) -> None:
    alice.create("a", b"new", mode=0o600)
    alice.create("b", b"old", mode=0o666)
    alice.rename("a", "b")
    assert alice.read("b") == b"new"
    assert alice.stat("b").permissions == 0o600
    assert alice.listdir(".") == ["b"]


def test_both_directories_must_be_writable(alice: User, bob: User) -> None:
    alice.mkdir("a", 0o755)
    alice.mkdir("b", 0o777)
    alice.create("a/file", mode=0o666)
    bob.create("b/mine")
    assert errno_of(bob.rename, "a/file", "b/file") == EACCES
    assert errno_of(bob.rename, "b/mine", "a/mine") == EACCES
    assert errno_of(bob.rename, "b/mine", "a/file", EXCHANGE) == EACCES
    alice.chmod("a", 0o777)
    bob.rename("b/mine", "a/mine")
    bob.rename("a/file", "b/file")


def test_a_directory_that_moves_must_be_writable_itself(alice: User, bob: User) -> None:
    """Its ".." changes."""
    alice.mkdir("a", 0o777)
    alice.mkdir("b", 0o777)
    alice.mkdir("a/hers", 0o755)
    alice.mkdir("a/open", 0o777)
    assert errno_of(bob.rename, "a/hers", "b/hers") == EACCES
    bob.rename("a/hers", "a/renamed")
    bob.rename("a/open", "b/open")
    assert errno_of(bob.rename, "b/open", "a/renamed", EXCHANGE) == EACCES
    bob.create("b/file")
    assert errno_of(bob.rename, "b/file", "a/renamed", EXCHANGE) == EACCES


def test_sticky_directories(root: User, alice: User, bob: User) -> None:
    root.mkdir("sticky")
    root.chmod("sticky", 0o1777)
    alice.create("sticky/hers", mode=0o666)
    bob.create("sticky/his")
    bob.create("outside")
    assert errno_of(bob.rename, "sticky/hers", "sticky/new") == EPERM
    assert errno_of(bob.rename, "sticky/hers", "new") == EPERM
    assert errno_of(bob.rename, "sticky/his", "sticky/hers") == EPERM
    assert errno_of(bob.rename, "outside", "sticky/hers") == EPERM
    assert errno_of(bob.rename, "sticky/his", "sticky/hers", EXCHANGE) == EPERM
    bob.rename("sticky/his", "sticky/new")
    bob.rename("outside", "sticky/new")
    root.rename("sticky/hers", "sticky/new")


def test_what_is_checked_first(alice: User, bob: User) -> None:
    alice.mkdir("a", 0o755)
    alice.create("a/file")
    alice.mkdir("a/d")
    assert errno_of(bob.rename, "a/none", "a/file") == ENOENT
    assert errno_of(bob.rename, "a/none", "none/x") == ENOENT
    assert errno_of(bob.rename, "a/file", "a/d") == EACCES
    assert errno_of(bob.rename, "a/d", "a/file") == EACCES
    assert errno_of(bob.rename, "a/file", "a/d", NO_REPLACE) == EEXIST
    assert errno_of(bob.rename, "a/d", "a/d/x") == EINVAL
    assert errno_of(alice.rename, "a/file/", "a/x") == ENOTDIR
    assert errno_of(alice.rename, "a/d", "a/file/") == ENOTDIR

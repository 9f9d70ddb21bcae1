"""Who may do what: each call by everybody, in directories and on files of every mode."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable
from errno import EACCES, EPERM
from typing import Final

import pytest
from tests.support.posix.places import ALICE, NOW, User, errno_of

READ, WRITE, SEARCH = 4, 2, 1
ALL: Final = 7


def shift(user: User) -> int:
    """Of the class that the user is in for what is Alice's and of her group."""
    if user.who.uid == ALICE.uid:
        return 6
    return 3 if ALICE.gid in (user.who.gid, *user.who.groups) else 0


def modes(user: User) -> list[tuple[int, int]]:
    """(mode, rights that it gives this user): every set of rights, and the other classes have all others."""
    if user.who.uid == 0:
        return [(0o000, ALL), (0o777, ALL)]
    mine = [(rights << shift(user), rights) for rights in range(8)]
    return [(bits | 0o777 & ~(ALL << shift(user)) & ~(rights * 0o111), rights) for bits, rights in mine]


@pytest.fixture
def everybody(root: User, alice: User, bob: User, carol: User) -> tuple[User, ...]:
    return root, alice, bob, carol


IN_DIRECTORY: dict[str, tuple[int, Callable[[User], object]]] = {
    "list": (READ, lambda user: user.listdir("d")),
    "stat": (SEARCH, lambda user: user.stat("d/file")),
    "read": (SEARCH, lambda user: user.close(user.open("d/file"))),
    "write": (SEARCH, lambda user: user.close(user.open("d/file", os.O_WRONLY))),
    "go on": (SEARCH, lambda user: user.stat("d/e/f")),
    "through a link": (SEARCH, lambda user: user.stat("d/link")),
    "read a link": (SEARCH, lambda user: user.readlink("d/link")),
    "create": (WRITE | SEARCH, lambda user: user.close(user.open("d/new", os.O_WRONLY | os.O_CREAT | os.O_EXCL))),
    "mkdir": (WRITE | SEARCH, lambda user: user.mkdir("d/new")),
    "mknod": (WRITE | SEARCH, lambda user: user.mknod("d/new", stat.S_IFIFO | 0o600)),
    "symlink": (WRITE | SEARCH, lambda user: user.symlink("x", "d/new")),
    "link": (WRITE | SEARCH, lambda user: user.link("own", "d/new")),
    "unlink": (WRITE | SEARCH, lambda user: user.unlink("d/file")),
    "rmdir": (WRITE | SEARCH, lambda user: user.rmdir("d/e/..//empty")),
    "rename in it": (WRITE | SEARCH, lambda user: user.rename("d/file", "d/other")),
    "rename out": (WRITE | SEARCH, lambda user: user.rename("d/file", "other")),
    "rename into": (WRITE | SEARCH, lambda user: user.rename("own", "d/own")),
}


@pytest.mark.parametrize("name", sorted(IN_DIRECTORY))
def test_in_directories_of_every_mode(name: str, root: User, everybody: tuple[User, ...]) -> None:
    needed, act = IN_DIRECTORY[name]
    tops = itertools.count(1)
    for user in everybody:
        top = ""
        for mode, rights in modes(user):
            if not top:
                top = f"case-{user.who.uid}-{next(tops)}"
                _furnish(root, top, user)
            root.chmod(f"{top}/d", mode)
            found = errno_of(_at(top, act), user)
            assert found == (0 if rights & needed == needed else EACCES), (user.who, oct(mode))
            if found == 0 and needed & WRITE:
                top = ""  # it has changed


def _furnish(root: User, top: str, user: User) -> None:
    root.mkdir(top)
    root.chmod(top, 0o777)
    for path in ("d", "d/e", "d/empty"):
        root.mkdir(f"{top}/{path}")
        root.chown(f"{top}/{path}", ALICE.uid, ALICE.gid)
    root.chmod(f"{top}/d/e", 0o777)
    for path in ("d/file", "d/e/f", "own"):
        root.mknod(f"{top}/{path}", stat.S_IFREG | 0o666)
    root.chown(f"{top}/own", user.who.uid, user.who.gid)
    root.symlink("e/f", f"{top}/d/link")


class _Below:
    """A user who gives paths below another directory."""

    def __init__(self, user: User, top: str) -> None:
        self._user = user
        self._top = top

    def __getattr__(self, name: str) -> Callable[..., object]:
        method = getattr(self._user, name)

        def call(*arguments: object) -> object:
            first = 1 if name == "symlink" else 0
            return method(*(self._placed(place, value) for place, value in enumerate(arguments, -first)))

        return call

    def _placed(self, place: int, value: object) -> object:
        return f"{self._top}/{value}" if isinstance(value, str) and place >= 0 else value


def _at(top: str, act: Callable[[User], object]) -> Callable[[User], object]:
    return lambda user: act(_Below(user, top))  # type: ignore[arg-type]


ON_FILE: dict[str, tuple[int, Callable[[User], object]]] = {
    "read": (READ, lambda user: user.close(user.open("file"))),
    "write": (WRITE, lambda user: user.close(user.open("file", os.O_WRONLY))),
    "append": (WRITE, lambda user: user.close(user.open("file", os.O_WRONLY | os.O_APPEND))),
    "both": (READ | WRITE, lambda user: user.close(user.open("file", os.O_RDWR))),
    "truncate": (WRITE, lambda user: user.truncate("file", 0)),
    "open truncating": (WRITE, lambda user: user.close(user.open("file", os.O_WRONLY | os.O_TRUNC))),
    "create it again": (WRITE, lambda user: user.close(user.open("file", os.O_WRONLY | os.O_CREAT))),
    "get attribute": (READ, lambda user: user.getxattr("file", "user.a")),
    "set attribute": (WRITE, lambda user: user.setxattr("file", "user.a", b"b")),
    "list attributes": (0, lambda user: user.listxattr("file")),
    "stat": (0, lambda user: user.stat("file")),
}


@pytest.mark.parametrize("name", sorted(ON_FILE))
def test_on_files_of_every_mode(name: str, alice: User, everybody: tuple[User, ...]) -> None:
    needed, act = ON_FILE[name]
    alice.create("file", b"abc")
    alice.setxattr("file", "user.a", b"a")
    for user in everybody:
        for mode, rights in modes(user):
            alice.chmod("file", mode)
            assert errno_of(act, user) == (0 if rights & needed == needed else EACCES), (user.who, oct(mode))


def test_times_of_files_of_every_mode(alice: User, everybody: tuple[User, ...]) -> None:
    alice.create("file")
    for user in everybody:
        owner = user.who.uid in (0, ALICE.uid)
        for mode, rights in modes(user):
            alice.chmod("file", mode)
            assert errno_of(user.utimens, "file", NOW, NOW) == (0 if owner or rights & WRITE else EACCES)
            for times in ((1, 2), (None, 2), (NOW, None), (1, NOW)):
                assert errno_of(user.utimens, "file", *times) == (0 if owner else EPERM)
            assert errno_of(user.utimens, "file", None, None) == 0


def test_the_class_that_fits_first_decides(alice: User, carol: User, bob: User, root: User) -> None:
    """Not the one that allows most."""
    alice.create("file", mode=0o077)
    assert errno_of(alice.open, "file") == EACCES
    carol.close(carol.open("file"))
    alice.chmod("file", 0o707)
    assert errno_of(carol.open, "file") == EACCES
    bob.close(bob.open("file"))


def test_sticky_directories(root: User, alice: User, bob: User, carol: User) -> None:
    root.mkdir("sticky")
    root.chown("sticky", ALICE.uid, -1)
    root.chmod("sticky", 0o1777)
    bob.create("sticky/his")
    bob.mkdir("sticky/directory")
    carol.create("sticky/hers", mode=0o666)
    assert errno_of(bob.unlink, "sticky/hers") == EPERM
    assert errno_of(carol.unlink, "sticky/his") == EPERM
    assert errno_of(carol.rmdir, "sticky/directory") == EPERM
    carol.unlink("sticky/hers")
    alice.unlink("sticky/his")  # the directory is hers
    bob.rmdir("sticky/directory")
    bob.create("sticky/his")
    root.unlink("sticky/his")
    bob.create("sticky/his")
    alice.chmod("sticky", 0o777)
    carol.unlink("sticky/his")


def test_every_directory_of_a_path_must_be_searched(alice: User, bob: User) -> None:
    for path in ("a", "a/b", "a/b/c"):
        alice.mkdir(path, 0o755)
    alice.create("a/b/c/file")
    for path in ("a", "a/b", "a/b/c"):
        alice.chmod(path, 0o744)
        assert errno_of(bob.stat, "a/b/c/file") == EACCES
        assert errno_of(bob.stat, "a/b/c/none") == EACCES
        alice.chmod(path, 0o711)
        bob.stat("a/b/c/file")
    alice.chmod("a/b", 0o700)
    alice.symlink("a/b/c/file", "link")
    assert errno_of(bob.stat, "link") == EACCES
    assert errno_of(bob.stat, "a/b/../b") == EACCES


def test_supplementary_groups(root: User, alice: User, bob: User, carol: User) -> None:
    alice.mkdir("group", 0o770)
    alice.create("group/file", mode=0o060)
    carol.create("group/new")
    carol.close(carol.open("group/file", os.O_RDWR))
    assert errno_of(bob.stat, "group/file") == EACCES
    assert errno_of(alice.open, "group/file") == EACCES

"""Extended attributes of users."""

from __future__ import annotations

import os
import stat
from errno import EACCES, EEXIST, ENODATA, EOPNOTSUPP, EPERM, ERANGE

from tests.support.posix.places import User, errno_of

CREATE, REPLACE = os.XATTR_CREATE, os.XATTR_REPLACE


def test_they_are_kept_and_removed(alice: User) -> None:
    alice.create("file")
    alice.mkdir("directory")
    for path in ("file", "directory"):
        assert alice.listxattr(path) == []
        alice.setxattr(path, "user.colour", b"red")
        alice.setxattr(path, "user.empty", b"")
        alice.setxattr(path, "user.bytes", bytes(range(256)))
        assert alice.listxattr(path) == ["user.bytes", "user.colour", "user.empty"]
        assert alice.getxattr(path, "user.colour") == b"red"
        assert alice.getxattr(path, "user.empty") == b""
        assert alice.getxattr(path, "user.bytes") == bytes(range(256))
        alice.setxattr(path, "user.colour", b"blue")
        assert alice.getxattr(path, "user.colour") == b"blue"
        alice.removexattr(path, "user.colour")
        assert errno_of(alice.getxattr, path, "user.colour") == ENODATA
        assert errno_of(alice.removexattr, path, "user.colour") == ENODATA
        assert alice.listxattr(path) == ["user.bytes", "user.empty"]


def test_create_and_replace(alice: User) -> None:
    alice.create("file")
    assert errno_of(alice.setxattr, "file", "user.a", b"1", REPLACE) == ENODATA
    alice.setxattr("file", "user.a", b"1", CREATE)
    assert errno_of(alice.setxattr, "file", "user.a", b"2", CREATE) == EEXIST
    assert alice.getxattr("file", "user.a") == b"1"
    alice.setxattr("file", "user.a", b"2", REPLACE)
    assert alice.getxattr("file", "user.a") == b"2"


def test_names(alice: User) -> None:
    alice.create("file")
    assert errno_of(alice.setxattr, "file", "user." + "n" * 251, b"") == ERANGE
    alice.setxattr("file", "user." + "n" * 250, b"long")
    assert alice.getxattr("file", "user." + "n" * 250) == b"long"
    assert errno_of(alice.getxattr, "file", "user." + "n" * 251) == ERANGE
    assert errno_of(alice.setxattr, "file", "", b"") == ERANGE
    assert errno_of(alice.setxattr, "file", "colour", b"") == EOPNOTSUPP
    assert errno_of(alice.getxattr, "file", "other.colour") == EOPNOTSUPP
    assert errno_of(alice.getxattr, "file", "user.none") == ENODATA


def test_they_are_the_files_and_not_the_names(alice: User) -> None:
    alice.create("file")
    alice.link("file", "other")
    alice.setxattr("other", "user.a", b"1")
    assert alice.getxattr("file", "user.a") == b"1"
    alice.rename("file", "renamed")
    alice.symlink("renamed", "link")
    assert alice.getxattr("link", "user.a") == b"1"
    assert alice.listxattr("link") == ["user.a"]
    assert alice.listxattr("link", follow=False) == []
    alice.unlink("other")
    alice.unlink("renamed")
    alice.create("renamed")
    assert alice.listxattr("renamed") == []


def test_only_files_and_directories_have_them(alice: User, root: User) -> None:
    alice.symlink("x", "link")
    alice.mknod("fifo", stat.S_IFIFO | 0o666)
    for user in (alice, root):
        assert errno_of(user.setxattr, "link", "user.a", b"", follow=False) == EPERM
        assert errno_of(user.setxattr, "fifo", "user.a", b"") == EPERM
        assert errno_of(user.getxattr, "link", "user.a", follow=False) == ENODATA
        assert errno_of(user.getxattr, "fifo", "user.a") == ENODATA


def test_rights(alice: User, bob: User) -> None:
    alice.create("file", mode=0o640)
    alice.setxattr("file", "user.a", b"1")
    assert errno_of(bob.getxattr, "file", "user.a") == EACCES
    assert errno_of(bob.setxattr, "file", "user.a", b"2") == EACCES
    assert errno_of(bob.removexattr, "file", "user.a") == EACCES
    assert bob.listxattr("file") == ["user.a"]
    alice.chmod("file", 0o644)
    assert bob.getxattr("file", "user.a") == b"1"
    assert errno_of(bob.setxattr, "file", "user.a", b"2") == EACCES


def test_in_a_sticky_directory_they_are_the_owners(alice: User, bob: User) -> None:
    alice.mkdir("sticky")
    alice.chmod("sticky", 0o1777)
    assert errno_of(bob.setxattr, "sticky", "user.a", b"1") == EPERM
    alice.setxattr("sticky", "user.a", b"1")

"""unlink and rmdir, and files that are open although they have no name."""

from __future__ import annotations

import os
import stat
from errno import EACCES, EISDIR, ENOENT, ENOTDIR, ENOTEMPTY

from tests.support.posix.places import User, errno_of


def test_unlink_takes_the_name_only(alice: User) -> None:
    alice.create("file", b"abc")
    alice.link("file", "other")
    alice.unlink("file")
    assert errno_of(alice.stat, "file") == ENOENT
    assert errno_of(alice.unlink, "file") == ENOENT
    assert alice.read("other") == b"abc"
    alice.symlink("other", "link")
    alice.unlink("link")
    assert alice.listdir(".") == ["other"]


def test_each_kind_in_its_own_way(alice: User) -> None:
    alice.mkdir("directory")
    alice.create("file")
    alice.symlink("directory", "way")
    alice.mknod("fifo", stat.S_IFIFO | 0o600)
    assert errno_of(alice.unlink, "directory") == EISDIR
    for name in ("file", "way", "fifo"):
        assert errno_of(alice.rmdir, name) == ENOTDIR
        alice.unlink(name)
    alice.rmdir("directory")
    assert alice.listdir(".") == []


def test_only_empty_directories_are_removed(alice: User) -> None:
    alice.mkdir("d")
    alice.mkdir("d/e")
    assert errno_of(alice.rmdir, "d") == ENOTEMPTY
    alice.create("d/e/file")
    assert errno_of(alice.rmdir, "d/e") == ENOTEMPTY
    alice.unlink("d/e/file")
    alice.rmdir("d/e")
    alice.symlink("nowhere", "d/link")
    assert errno_of(alice.rmdir, "d") == ENOTEMPTY
    alice.unlink("d/link")
    alice.rmdir("d")
    assert errno_of(alice.rmdir, "d") == ENOENT
    assert errno_of(alice.stat, "d") == ENOENT


def test_removing_needs_the_right_to_write_the_directory(alice: User, bob: User) -> None:
    alice.mkdir("d", 0o755)
    alice.create("d/file", mode=0o666)
    alice.mkdir("d/e", 0o777)
    assert errno_of(bob.unlink, "d/file") == EACCES
    assert errno_of(bob.rmdir, "d/e") == EACCES
    assert errno_of(bob.unlink, "d/none") == ENOENT
    assert errno_of(bob.unlink, "d/e") == EACCES
    assert errno_of(bob.rmdir, "d/file") == EACCES
    alice.chmod("d", 0o766)  # and to search it
    assert errno_of(bob.unlink, "d/file") == EACCES
    alice.chmod("d", 0o733)  # but not to read it
    bob.unlink("d/file")
    bob.rmdir("d/e")


def test_an_open_file_lives_until_it_is_closed(alice: User) -> None:
    alice.create("file", b"abc")
    number = alice.open("file", os.O_RDWR)
    reading = alice.open("file", os.O_RDONLY)
    alice.unlink("file")
    assert alice.fstat(number).links == 0
    assert alice.pread(number, 10, 0) == b"abc"
    assert alice.pwrite(number, b"defg", 2) == 4
    assert alice.pread(reading, 10, 0) == b"abdefg"
    alice.ftruncate(number, 4)
    assert alice.fstat(reading).size == 4
    alice.fchmod(number, 0o640)
    assert alice.fstat(reading).permissions == 0o640
    alice.futimens(number, 5, 6)
    assert (alice.fstat(number).atime_ns, alice.fstat(number).mtime_ns) == (5, 6)
    alice.close(number)
    assert alice.pread(reading, 10, 0) == b"abde"
    alice.close(reading)


def test_the_name_of_an_open_file_can_be_used_again(alice: User) -> None:
    alice.create("file", b"old")
    old = alice.open("file", os.O_RDWR)
    alice.unlink("file")
    alice.create("file", b"new")
    assert alice.read("file") == b"new"
    assert alice.pread(old, 10, 0) == b"old"
    assert alice.fstat(old).inode != alice.stat("file").inode
    alice.close(old)
    assert alice.read("file") == b"new"


def test_a_file_that_was_replaced_lives_until_it_is_closed(alice: User) -> None:
    alice.create("old", b"old")
    alice.create("new", b"new")
    old = alice.open("old", os.O_RDWR)
    alice.rename("new", "old")
    assert alice.fstat(old).links == 0
    assert alice.pread(old, 10, 0) == b"old"
    assert alice.read("old") == b"new"
    alice.close(old)


def test_an_open_directory_that_was_removed(alice: User) -> None:
    alice.mkdir("d")
    number = alice.open("d", os.O_RDONLY)
    alice.rmdir("d")
    assert alice.fstat(number).links == 0
    assert alice.fstat(number).kind == stat.S_IFDIR
    alice.close(number)

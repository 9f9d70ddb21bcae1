"""open: every flag, and each errno that POSIX names for it."""

from __future__ import annotations

import os
import stat
from errno import EACCES, EBADF, EEXIST, EINVAL, EISDIR, ELOOP, ENOENT, ENOTDIR

import pytest
from tests.support.posix.places import ALICE, User, errno_of

CREATE = os.O_WRONLY | os.O_CREAT
EXCLUSIVE = CREATE | os.O_EXCL


def test_a_new_file_is_empty_and_of_whoever_made_it(alice: User) -> None:
    number = alice.open("new", CREATE, 0o640)
    for found in (alice.stat("new"), alice.fstat(number)):
        assert (found.kind, found.permissions) == (stat.S_IFREG, 0o640)
        assert (found.uid, found.gid) == (ALICE.uid, ALICE.gid)
        assert (found.size, found.links, found.device) == (0, 1, 0)
    alice.close(number)


def test_what_is_there_is_opened_and_keeps_its_mode(alice: User) -> None:
    alice.create("file", b"abc", mode=0o600)
    number = alice.open("file", CREATE, 0o777)
    assert alice.fstat(number).permissions == 0o600
    assert alice.fstat(number).size == 3
    alice.close(number)


def test_without_create_it_must_be_there(alice: User) -> None:
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        assert errno_of(alice.open, "none", flags) == ENOENT
        assert errno_of(alice.open, "none/file", flags | os.O_CREAT) == ENOENT
    assert alice.listdir(".") == []


def test_exclusive_makes_it_or_fails(alice: User) -> None:
    alice.close(alice.open("file", EXCLUSIVE))
    assert errno_of(alice.open, "file", EXCLUSIVE) == EEXIST
    alice.mkdir("directory")
    assert errno_of(alice.open, "directory", EXCLUSIVE) == EEXIST


def test_exclusive_does_not_follow_a_link_even_one_to_nothing(alice: User) -> None:
    alice.symlink("nothing", "link")
    assert errno_of(alice.open, "link", EXCLUSIVE) == EEXIST
    assert alice.listdir(".") == ["link"]


def test_create_through_a_link_to_nothing_makes_its_target(alice: User) -> None:
    alice.mkdir("there")
    alice.symlink("there/target", "link")
    alice.close(alice.open("link", CREATE, 0o600))
    assert alice.lstat("there/target").kind == stat.S_IFREG
    assert alice.lstat("link").kind == stat.S_IFLNK
    alice.symlink("away/target", "lost")
    assert errno_of(alice.open, "lost", CREATE) == ENOENT


def test_no_follow(alice: User) -> None:
    alice.create("file")
    alice.mkdir("directory")
    alice.symlink("file", "link")
    alice.symlink("directory", "way")
    alice.create("directory/inside")
    assert errno_of(alice.open, "link", os.O_RDONLY | os.O_NOFOLLOW) == ELOOP
    assert errno_of(alice.open, "link", CREATE | os.O_NOFOLLOW) == ELOOP
    assert errno_of(alice.open, "way", os.O_RDONLY | os.O_NOFOLLOW) == ELOOP
    alice.close(alice.open("way/inside", os.O_RDONLY | os.O_NOFOLLOW))
    alice.close(alice.open("file", os.O_RDONLY | os.O_NOFOLLOW))


def test_directories_are_opened_for_reading_only(alice: User) -> None:
    alice.mkdir("directory")
    for flags in (os.O_WRONLY, os.O_RDWR, CREATE, os.O_RDONLY | os.O_CREAT, os.O_WRONLY | os.O_TRUNC):
        assert errno_of(alice.open, "directory", flags) == EISDIR
    number = alice.open("directory", os.O_RDONLY)
    assert alice.fstat(number).kind == stat.S_IFDIR
    assert errno_of(alice.pread, number, 10, 0) == EISDIR
    alice.close(number)


def test_directory_wanted(alice: User) -> None:
    alice.mkdir("directory")
    alice.create("file")
    alice.symlink("directory", "way")
    alice.symlink("file", "link")
    alice.close(alice.open("directory", os.O_DIRECTORY))
    alice.close(alice.open("way", os.O_DIRECTORY))
    assert errno_of(alice.open, "file", os.O_DIRECTORY) == ENOTDIR
    assert errno_of(alice.open, "link", os.O_DIRECTORY) == ENOTDIR
    assert errno_of(alice.open, "way", os.O_DIRECTORY | os.O_NOFOLLOW) == ENOTDIR
    assert errno_of(alice.open, "none", os.O_DIRECTORY) == ENOENT


def test_a_file_is_no_directory_of_a_path(alice: User) -> None:
    alice.create("file")
    for flags in (os.O_RDONLY, CREATE):
        assert errno_of(alice.open, "file/below", flags) == ENOTDIR
    assert errno_of(alice.open, "file/", os.O_RDONLY) == ENOTDIR
    assert errno_of(alice.open, "new/", CREATE) == EISDIR


def test_truncate_at_opening(alice: User) -> None:
    alice.create("file", b"0123456789")
    number = alice.open("file", os.O_WRONLY | os.O_TRUNC)
    assert alice.fstat(number).size == 0
    alice.close(number)
    assert alice.read("file") == b""


def test_truncate_at_opening_needs_the_right_to_write(alice: User, bob: User) -> None:
    alice.create("file", b"0123456789", mode=0o644)
    assert errno_of(bob.open, "file", os.O_WRONLY | os.O_TRUNC) == EACCES
    assert errno_of(bob.open, "file", os.O_RDWR | os.O_TRUNC) == EACCES
    assert alice.stat("file").size == 10


@pytest.mark.parametrize("mode", [0o000, 0o400, 0o200])
def test_who_creates_a_file_has_it_open_as_asked_whatever_its_mode(alice: User, mode: int) -> None:
    number = alice.open("file", os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    assert alice.pwrite(number, b"abc", 0) == 3
    assert alice.pread(number, 10, 0) == b"abc"
    alice.close(number)
    assert errno_of(alice.open, "file", os.O_RDWR) == EACCES


def test_what_was_not_asked_for_cannot_be_done(alice: User) -> None:
    alice.create("file", b"abc")
    reading = alice.open("file", os.O_RDONLY)
    assert errno_of(alice.pwrite, reading, b"x", 0) == EBADF
    assert errno_of(alice.ftruncate, reading, 0) == EINVAL
    assert errno_of(alice.fallocate, reading, 0, 0, 1) == EBADF
    writing = alice.open("file", os.O_WRONLY)
    assert errno_of(alice.pread, writing, 1, 0) == EBADF
    alice.close(reading)
    alice.close(writing)


def test_an_open_file_stays_open_when_its_rights_go(alice: User) -> None:
    alice.create("file", b"abc")
    number = alice.open("file", os.O_RDWR)
    alice.chmod("file", 0)
    assert alice.pread(number, 3, 0) == b"abc"
    assert alice.pwrite(number, b"x", 0) == 1
    alice.ftruncate(number, 2)
    assert alice.fstat(number).size == 2
    alice.close(number)
    assert errno_of(alice.open, "file", os.O_RDONLY) == EACCES


def test_reading_is_enough_for_creating_nothing_new(alice: User, bob: User) -> None:
    """O_CREAT on a file that is there does not ask for the directory to be writable."""
    alice.mkdir("directory", 0o755)
    alice.create("directory/file", b"abc", mode=0o644)
    bob.close(bob.open("directory/file", os.O_RDONLY | os.O_CREAT))
    assert errno_of(bob.open, "directory/other", os.O_RDONLY | os.O_CREAT) == EACCES
    assert errno_of(bob.open, "directory/file", EXCLUSIVE) == EEXIST

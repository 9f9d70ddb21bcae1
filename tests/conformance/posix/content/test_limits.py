"""What is too large, out of range, or somebody else's although it is open."""

from __future__ import annotations

import os
import stat
from errno import E2BIG, EACCES, EBADF, EFBIG, EINVAL, EOPNOTSUPP, EPERM, ERANGE

import pytest
from tests.support.posix.places import NOW, User, errno_of

END = (1 << 63) - 1


def test_an_open_file_is_still_its_owners(alice: User, bob: User, root: User) -> None:
    alice.create("file", b"abc", mode=0o666)
    number = bob.open("file", os.O_RDWR)
    assert errno_of(bob.fchmod, number, 0o777) == EPERM
    assert errno_of(bob.fchown, number, bob.who.uid, -1) == EPERM
    assert errno_of(bob.fchown, number, -1, bob.who.gid) == EPERM
    assert errno_of(bob.futimens, number, 1, 2) == EPERM
    assert errno_of(bob.futimens, number, None, NOW) == EPERM
    bob.futimens(number, NOW, NOW)  # who may write may say that it is now
    alice.chmod("file", 0o644)
    assert errno_of(bob.futimens, number, NOW, NOW) == EACCES
    bob.close(number)
    root.chown("file", bob.who.uid, -1)
    number = alice.open("file")
    assert errno_of(alice.fchmod, number, 0o777) == EPERM
    alice.close(number)


def test_places_where_no_byte_can_be(alice: User) -> None:
    alice.create("file", b"abc")
    number = alice.open("file", os.O_RDWR)
    assert errno_of(alice.pwrite, number, b"x", -1) == EINVAL
    assert errno_of(alice.pread, number, 1, -1) == EINVAL
    assert errno_of(alice.ftruncate, number, -1) == EINVAL
    assert errno_of(alice.ftruncate, number, END) == EFBIG
    assert errno_of(alice.pwrite, number, b"x", 1 << 62) == EFBIG
    assert errno_of(alice.fallocate, number, 0, 1 << 62, 1) == EFBIG
    assert errno_of(alice.fallocate, number, 0, END, 1) == EFBIG
    assert alice.fstat(number).size == 3
    alice.close(number)


def test_what_is_not_open_for_writing_is_not_written_in_any_way(alice: User) -> None:
    alice.create("file", b"abc")
    number = alice.open("file", os.O_RDONLY | os.O_APPEND)
    assert errno_of(alice.write, number, b"x") == EBADF
    assert errno_of(alice.pwrite, number, b"x", 0) == EBADF
    for mode in (0, 1, 3, 16):
        assert errno_of(alice.fallocate, number, mode, 0, 1) == EBADF
    alice.fsync(number)
    alice.close(number)
    assert alice.read("file") == b"abc"


def test_values_and_names_of_values_have_bounds(alice: User) -> None:
    alice.create("file")
    assert errno_of(alice.setxattr, "file", "user.a", bytes(65_537)) == E2BIG
    assert errno_of(alice.setxattr, "file", "user.", b"") == EINVAL
    assert errno_of(alice.removexattr, "file", "user." + "n" * 251) == ERANGE
    assert errno_of(alice.removexattr, "file", "") == ERANGE
    assert errno_of(alice.removexattr, "file", "colour") == EOPNOTSUPP
    assert alice.listxattr("file") == []


def test_ranges_that_cannot_be_locked(alice: User) -> None:
    alice.create("file")
    number = alice.open("file", os.O_RDWR)
    assert errno_of(alice.lock, number, "write", -1, 1) == EINVAL
    assert errno_of(alice.lock, number, "write", 5, -6) == EINVAL
    alice.lock(number, "write", END - 1, 1)
    alice.close(number)


@pytest.mark.parametrize("kind", [stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK])
def test_only_root_gives_away_and_only_owners_change_what_is_special(alice: User, bob: User, kind: int) -> None:
    alice.mknod("node", kind | 0o666)
    assert errno_of(bob.chmod, "node", 0o600) == EPERM
    assert errno_of(alice.chown, "node", bob.who.uid, -1) == EPERM
    assert errno_of(bob.utimens, "node", 1, 2) == EPERM
    bob.utimens("node", NOW, NOW)
    alice.chmod("node", 0o600)
    assert errno_of(bob.utimens, "node", NOW, NOW) == EACCES
    assert errno_of(bob.access, "node", os.R_OK) == EACCES

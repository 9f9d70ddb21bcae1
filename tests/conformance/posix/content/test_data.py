"""What is in a file: lengths, holes, appending, and what fallocate does."""

from __future__ import annotations

import os
import stat
from errno import EBADF, EFBIG, EINVAL, EISDIR, ENODEV, EOPNOTSUPP

import pytest
from tests.support.posix.places import User, errno_of

KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 3, 16
APPEND = os.O_WRONLY | os.O_APPEND


def test_reading_ends_with_the_file(alice: User) -> None:
    alice.create("file", b"0123456789")
    number = alice.open("file")
    assert alice.pread(number, 100, 0) == b"0123456789"
    assert alice.pread(number, 3, 8) == b"89"
    assert alice.pread(number, 3, 10) == b""
    assert alice.pread(number, 3, 1 << 40) == b""
    assert alice.pread(number, 0, 0) == b""
    assert errno_of(alice.pread, number, 1, -1) == EINVAL
    alice.close(number)


def test_writing_behind_the_end_leaves_a_hole(alice: User) -> None:
    alice.create("file", b"abc")
    number = alice.open("file", os.O_RDWR)
    assert alice.pwrite(number, b"x", 1_000_000) == 1
    assert alice.fstat(number).size == 1_000_001
    assert alice.pread(number, 5, 0) == b"abc\0\0"
    assert alice.pread(number, 5, 999_997) == b"\0\0\0x"
    assert alice.pwrite(number, b"", 5_000_000) == 0
    assert alice.fstat(number).size == 1_000_001
    alice.close(number)
    assert alice.stat("file").size == 1_000_001


def test_truncation(alice: User) -> None:
    alice.create("file", b"0123456789")
    alice.truncate("file", 4)
    assert alice.read("file") == b"0123"
    alice.truncate("file", 8)
    assert alice.read("file") == b"0123\0\0\0\0"
    alice.truncate("file", 8)
    alice.truncate("file", 0)
    assert alice.stat("file").size == 0
    alice.truncate("file", 1 << 40)
    assert alice.stat("file").size == 1 << 40
    alice.truncate("file", 2)
    assert alice.read("file") == b"\0\0"
    assert errno_of(alice.truncate, "file", -1) == EINVAL
    assert errno_of(alice.truncate, "file", (1 << 63) - 1) == EFBIG


def test_what_is_not_truncated(alice: User) -> None:
    alice.mkdir("directory")
    alice.mknod("fifo", stat.S_IFIFO | 0o666)
    alice.symlink("directory", "way")
    assert errno_of(alice.truncate, "directory", 0) == EISDIR
    assert errno_of(alice.truncate, "way", 0) == EISDIR
    assert errno_of(alice.truncate, "fifo", 0) == EINVAL
    number = alice.open("directory")
    assert errno_of(alice.ftruncate, number, 0) == EINVAL
    alice.close(number)


@pytest.mark.usefixtures("coherent")
def test_all_descriptors_see_one_length(alice: User, bob: User) -> None:
    alice.create("file", b"abc", mode=0o666)
    hers, his = alice.open("file", os.O_RDWR), bob.open("file", os.O_RDWR)
    alice.pwrite(hers, b"defg", 3)
    alice.fsync(hers)
    assert bob.fstat(his).size == 7
    assert bob.pread(his, 10, 0) == b"abcdefg"
    bob.ftruncate(his, 2)
    assert alice.fstat(hers).size == 2
    assert alice.pread(hers, 10, 0) == b"ab"
    alice.pwrite(hers, b"z", 4)
    alice.close(hers)
    assert bob.pread(his, 10, 0) == b"ab\0\0z"
    bob.close(his)


def test_appending(alice: User, bob: User) -> None:
    alice.create("file", b"abc", mode=0o666)
    hers, his = alice.open("file", APPEND), bob.open("file", APPEND)
    for turn in range(3):
        assert alice.write(hers, b"a%d" % turn) == 2
        assert bob.write(his, b"b%d" % turn) == 2
    alice.close(hers)
    bob.close(his)
    assert alice.read("file") == b"abca0b0a1b1a2b2"
    number = alice.open("file", APPEND)
    alice.ftruncate(number, 2)
    alice.write(number, b"x")
    alice.close(number)
    assert alice.read("file") == b"abx"


def test_allocating_makes_it_longer(alice: User) -> None:
    alice.create("file", b"abc")
    number = alice.open("file", os.O_RDWR)
    alice.fallocate(number, 0, 2, 100)
    assert alice.fstat(number).size == 102
    assert alice.pread(number, 200, 0) == b"abc" + bytes(99)
    alice.fallocate(number, 0, 0, 10)
    alice.fallocate(number, KEEP_SIZE, 50, 1000)
    assert alice.fstat(number).size == 102
    alice.close(number)


def test_punching_holes(alice: User) -> None:
    data = bytes(range(1, 251)) * 400
    alice.create("file", data)
    number = alice.open("file", os.O_RDWR)
    alice.fallocate(number, PUNCH_HOLE, 10, 80_000)
    assert alice.pread(number, len(data), 0) == data[:10] + bytes(80_000) + data[80_010:]
    alice.fallocate(number, PUNCH_HOLE, 99_990, 1 << 30)
    assert alice.fstat(number).size == 100_000
    assert alice.pread(number, 20, 99_985) == data[99_985:99_990] + bytes(10)
    alice.fallocate(number, ZERO_RANGE, 99_980, 40)
    assert alice.fstat(number).size == 100_020
    assert alice.pread(number, 60, 99_975) == data[99_975:99_980] + bytes(40)
    alice.fallocate(number, ZERO_RANGE | KEEP_SIZE, 99_970, 1 << 30)
    assert alice.fstat(number).size == 100_020
    assert alice.pread(number, 60, 99_965) == data[99_965:99_970] + bytes(50)
    alice.close(number)


def test_what_cannot_be_allocated(alice: User) -> None:
    alice.create("file", b"abc")
    number = alice.open("file", os.O_RDWR)
    for offset, size in ((0, 0), (-1, 1), (0, -1)):
        assert errno_of(alice.fallocate, number, 0, offset, size) == EINVAL
    assert errno_of(alice.fallocate, number, 0, (1 << 63) - 1, 1) == EFBIG
    assert errno_of(alice.fallocate, number, 2, 0, 1) == EOPNOTSUPP  # a hole does not change the length
    alice.close(number)
    alice.mkdir("directory")
    number = alice.open("directory")
    assert errno_of(alice.fallocate, number, 0, 0, 1) in (EBADF, ENODEV)
    alice.close(number)


def test_what_was_cut_off_does_not_come_back(alice: User) -> None:
    alice.create("file", b"x" * 10_000)
    alice.truncate("file", 10)
    alice.truncate("file", 20_000)
    assert alice.read("file") == b"x" * 10 + bytes(19_990)
    number = alice.open("file", os.O_RDWR)
    alice.pwrite(number, b"y" * 10, 9_000)
    alice.close(number)
    assert alice.read("file") == b"x" * 10 + bytes(8_990) + b"y" * 10 + bytes(10_990)

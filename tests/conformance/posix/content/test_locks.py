"""Advisory locks: of whole files (flock) and of ranges (fcntl)."""

from __future__ import annotations

import fcntl
import os
from errno import EAGAIN, EBADF

import pytest
from tests.support.posix.places import User, errno_of

SHARED, EXCLUSIVE, UNLOCK = (kind | fcntl.LOCK_NB for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN))


@pytest.fixture
def file(alice: User) -> str:
    alice.create("file", b"0123456789", mode=0o666)
    return "file"


def test_whole_files(alice: User, bob: User, file: str) -> None:
    first, second, third = alice.open(file, os.O_RDWR), alice.open(file), bob.open(file)
    alice.flock(first, SHARED)
    alice.flock(second, SHARED)
    bob.flock(third, SHARED)
    assert errno_of(alice.flock, first, EXCLUSIVE) == EAGAIN
    alice.flock(second, UNLOCK)
    bob.close(third)
    alice.flock(first, EXCLUSIVE)
    assert errno_of(alice.flock, second, SHARED) == EAGAIN
    assert errno_of(alice.flock, second, EXCLUSIVE) == EAGAIN
    alice.flock(second, UNLOCK)
    alice.flock(first, SHARED)
    alice.flock(second, SHARED)
    alice.close(first)
    alice.flock(second, EXCLUSIVE)
    alice.close(second)


def test_ranges(alice: User, bob: User, file: str) -> None:
    hers, his = alice.open(file, os.O_RDWR), bob.open(file, os.O_RDWR)
    alice.lock(hers, "write", 2, 3)
    assert errno_of(bob.lock, his, "write", 4, 1) == EAGAIN
    assert errno_of(bob.lock, his, "read", 0, 3) == EAGAIN
    bob.lock(his, "write", 0, 2)
    bob.lock(his, "write", 5, 0)
    assert errno_of(alice.lock, hers, "read", 1 << 40, 1) == EAGAIN
    assert bob.get_lock(his, "read", 0, 0) == ("write", 2, 3)
    assert alice.get_lock(hers, "read", 3, 0) == ("write", 5, 0)
    assert alice.get_lock(hers, "write", 2, 3) is None  # her own is in nobody's way
    alice.lock(hers, "none", 0, 0)
    assert bob.get_lock(his, "write", 0, 0) is None
    bob.lock(his, "write", 0, 0)
    bob.close(his)
    alice.lock(hers, "write", 0, 0)
    alice.close(hers)


def test_ranges_are_joined_and_cut(alice: User, bob: User, file: str) -> None:
    hers, his = alice.open(file, os.O_RDWR), bob.open(file, os.O_RDWR)
    alice.lock(hers, "read", 0, 10)
    alice.lock(hers, "none", 4, 2)
    assert bob.get_lock(his, "write", 0, 0) == ("read", 0, 4)
    assert bob.get_lock(his, "write", 4, 2) is None
    assert bob.get_lock(his, "write", 4, 0) == ("read", 6, 4)
    alice.lock(hers, "read", 4, 2)
    assert bob.get_lock(his, "write", 4, 0) == ("read", 0, 10)
    alice.lock(hers, "write", 3, 3)
    assert bob.get_lock(his, "read", 0, 0) == ("write", 3, 3)
    assert bob.get_lock(his, "write", 0, 0) == ("read", 0, 3)
    bob.lock(his, "read", 6, 0)
    assert errno_of(alice.lock, hers, "write", 0, 0) == EAGAIN
    alice.close(hers)
    bob.close(his)


def test_a_process_loses_its_ranges_when_it_closes_any_descriptor(alice: User, bob: User, file: str) -> None:
    first, second, his = alice.open(file, os.O_RDWR), alice.open(file), bob.open(file, os.O_RDWR)
    alice.lock(first, "write", 0, 0)
    assert errno_of(bob.lock, his, "write", 0, 0) == EAGAIN
    alice.close(second)
    bob.lock(his, "write", 0, 0)
    bob.close(his)
    alice.close(first)


def test_the_two_families_do_not_see_each_other(alice: User, bob: User, file: str) -> None:
    hers, his = alice.open(file, os.O_RDWR), bob.open(file, os.O_RDWR)
    alice.flock(hers, EXCLUSIVE)
    bob.lock(his, "write", 0, 0)
    assert bob.get_lock(his, "write", 0, 0) is None
    alice.close(hers)
    bob.close(his)


def test_a_range_needs_a_descriptor_that_could(alice: User, file: str) -> None:
    reading, writing = alice.open(file), alice.open(file, os.O_WRONLY)
    assert errno_of(alice.lock, reading, "write", 0, 0) == EBADF
    assert errno_of(alice.lock, writing, "read", 0, 0) == EBADF
    alice.lock(reading, "read", 0, 0)
    alice.flock(reading, EXCLUSIVE)
    alice.close(reading)
    alice.close(writing)

"""Which times change with what, and how they are set."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

import pytest
from tests.support.posix.places import NOW, TEAM, Place, User, errno_of

YEAR_2001_NS = 10**18
NEITHER: frozenset[str] = frozenset()
STATUS = frozenset({"status"})
CONTENT = frozenset({"content", "status"})


@pytest.fixture
def changed(place: Place, root: User) -> Callable[..., dict[str, frozenset[str]]]:
    """Which times of these paths an act changes: of content, of status. They must be there before and after."""

    def look(act: Callable[[], object], *paths: str) -> dict[str, frozenset[str]]:
        before = [root.lstat(path) for path in paths]
        place.tick()
        act()
        after = [root.lstat(path) for path in paths]
        found = {}
        for path, old, new in zip(paths, before, after, strict=True):
            assert new.ctime_ns >= old.ctime_ns
            times = {"content": (old.mtime_ns, new.mtime_ns), "status": (old.ctime_ns, new.ctime_ns)}
            found[path] = frozenset(name for name, (a, b) in times.items() if a != b)
        return found

    return look


Changed = Callable[..., dict[str, frozenset[str]]]


def test_making_something_changes_its_directory(alice: User, changed: Changed) -> None:
    alice.mkdir("d")
    alice.create("file")
    acts: list[Callable[[], object]] = [
        lambda: alice.create("d/file"),
        lambda: alice.mkdir("d/directory"),
        lambda: alice.symlink("x", "d/link"),
        lambda: alice.mknod("d/fifo", stat.S_IFIFO | 0o600),
        lambda: alice.rename("d/fifo", "d/renamed"),
        lambda: alice.unlink("d/link"),
        lambda: alice.rmdir("d/directory"),
    ]
    for act in acts:
        assert changed(act, "d", ".") == {"d": CONTENT, ".": NEITHER}
    assert changed(lambda: alice.link("file", "d/hard"), "d", "file") == {"d": CONTENT, "file": STATUS}
    assert changed(lambda: alice.unlink("d/hard"), "d", "file") == {"d": CONTENT, "file": STATUS}


def test_what_is_new_has_the_time_of_its_making(alice: User, place: Place) -> None:
    alice.create("before")
    place.tick()
    alice.mkdir("d")
    found = alice.stat("d")
    assert found.mtime_ns == found.ctime_ns == found.atime_ns > alice.stat("before").ctime_ns


def test_writing(alice: User, changed: Changed) -> None:
    alice.create("file", b"0123456789")
    number = alice.open("file", os.O_RDWR)

    def write() -> None:
        alice.pwrite(number, b"x", 0)
        alice.fsync(number)

    assert changed(write, "file", ".") == {"file": CONTENT, ".": NEITHER}
    assert changed(lambda: alice.pread(number, 10, 0), "file") == {"file": NEITHER}
    assert changed(lambda: alice.ftruncate(number, 5), "file") == {"file": CONTENT}
    assert changed(lambda: alice.ftruncate(number, 5), "file") == {"file": CONTENT}
    assert changed(lambda: alice.truncate("file", 100), "file") == {"file": CONTENT}
    assert changed(lambda: alice.fallocate(number, 0, 0, 200), "file") == {"file": CONTENT}
    assert changed(lambda: alice.fallocate(number, 3, 0, 50), "file") == {"file": CONTENT}
    assert changed(lambda: alice.close(number), "file") == {"file": NEITHER}
    assert changed(lambda: alice.close(alice.open("file", os.O_RDWR)), "file") == {"file": NEITHER}


def test_opening_with_truncation(alice: User, changed: Changed) -> None:
    alice.create("file", b"abc")
    truncate = os.O_WRONLY | os.O_TRUNC
    assert changed(lambda: alice.close(alice.open("file", truncate)), "file") == {"file": CONTENT}
    assert changed(lambda: alice.close(alice.open("file", truncate)), "file") == {"file": CONTENT}
    create = os.O_WRONLY | os.O_CREAT
    assert changed(lambda: alice.close(alice.open("file", create)), "file", ".") == {"file": NEITHER, ".": NEITHER}


def test_changes_of_status(alice: User, carol: User, changed: Changed) -> None:
    alice.create("file")
    carol.create("hers")
    assert changed(lambda: alice.chmod("file", 0o600), "file", ".") == {"file": STATUS, ".": NEITHER}
    assert changed(lambda: alice.chmod("file", 0o600), "file") == {"file": STATUS}
    assert changed(lambda: carol.chown("hers", -1, TEAM), "hers") == {"hers": STATUS}
    assert changed(lambda: carol.chown("hers", -1, TEAM), "hers") == {"hers": STATUS}
    assert changed(lambda: alice.setxattr("file", "user.a", b"b"), "file") == {"file": STATUS}
    assert changed(lambda: alice.removexattr("file", "user.a"), "file") == {"file": STATUS}
    assert changed(lambda: alice.access("file", os.R_OK), "file") == {"file": NEITHER}


def test_renaming(alice: User, changed: Changed) -> None:
    for name in ("a", "b"):
        alice.mkdir(name)
    alice.create("a/x")
    alice.create("b/y")
    assert changed(lambda: alice.rename("a/x", "b/x"), "a", "b") == {"a": CONTENT, "b": CONTENT}
    assert changed(lambda: alice.link("b/x", "b/z"), "b/x") == {"b/x": STATUS}
    assert changed(lambda: alice.rename("b/x", "b/z"), "b", "b/x") == {"b": NEITHER, "b/x": NEITHER}
    assert changed(lambda: alice.rename("b/x", "b/y"), "b", "b/z") == {"b": CONTENT, "b/z": STATUS}
    alice.mkdir("a/d")
    assert changed(lambda: alice.rename("a/d", "b/d"), "a", "b") == {"a": CONTENT, "b": CONTENT}
    alice.create("a/e")
    assert changed(lambda: alice.rename("a/e", "b/d", 2), "a", "b") == {"a": CONTENT, "b": CONTENT}


def test_what_is_renamed_has_a_new_status(alice: User, place: Place) -> None:
    alice.create("file")
    alice.mkdir("directory")
    for name in ("file", "directory"):
        before = alice.stat(name)
        place.tick()
        alice.rename(name, "new-" + name)
        after = alice.stat("new-" + name)
        assert after.ctime_ns > before.ctime_ns
        assert after.mtime_ns == before.mtime_ns


def test_failures_change_nothing(alice: User, bob: User, changed: Changed) -> None:
    alice.mkdir("d", 0o755)
    alice.create("d/file", b"abc", mode=0o644)
    acts: list[Callable[[], object]] = [
        lambda: errno_of(bob.unlink, "d/file"),
        lambda: errno_of(bob.mkdir, "d/new"),
        lambda: errno_of(bob.truncate, "d/file", 0),
        lambda: errno_of(bob.chmod, "d/file", 0),
        lambda: errno_of(bob.utimens, "d/file", NOW, NOW),
        lambda: errno_of(alice.mkdir, "d/file"),
        lambda: errno_of(alice.rmdir, "d"),
        lambda: errno_of(alice.rename, "d/none", "d/file"),
        lambda: errno_of(alice.rename, "d", "d/file"),
        lambda: errno_of(alice.link, "d/file", "d/file"),
    ]
    for act in acts:
        assert changed(act, "d", "d/file", ".") == {"d": NEITHER, "d/file": NEITHER, ".": NEITHER}


def test_setting_times(alice: User, changed: Changed) -> None:
    alice.create("file")
    alice.utimens("file", 123_456_789, YEAR_2001_NS + 1)
    found = alice.stat("file")
    assert (found.atime_ns, found.mtime_ns) == (123_456_789, YEAR_2001_NS + 1)
    alice.utimens("file", None, 7)
    assert (alice.stat("file").atime_ns, alice.stat("file").mtime_ns) == (123_456_789, 7)
    alice.utimens("file", 8, None)
    assert (alice.stat("file").atime_ns, alice.stat("file").mtime_ns) == (8, 7)
    assert changed(lambda: alice.utimens("file", None, None), "file") == {"file": NEITHER}
    assert changed(lambda: alice.utimens("file", 9, None), "file") == {"file": STATUS}
    alice.utimens("file", 9, NOW)
    found = alice.stat("file")
    assert found.atime_ns == 9
    assert found.mtime_ns == found.ctime_ns


def test_times_before_1970(alice: User) -> None:
    alice.create("file")
    alice.utimens("file", -1, -(10**18) - 1)
    assert (alice.stat("file").atime_ns, alice.stat("file").mtime_ns) == (-1, -(10**18) - 1)


def test_times_of_a_link(alice: User) -> None:
    alice.create("file")
    alice.symlink("file", "link")
    alice.utimens("link", 1, 2, follow=False)
    alice.utimens("link", 3, 4)
    assert alice.stat("file").mtime_ns == 4
    assert alice.lstat("link").mtime_ns == 2


def test_times_of_what_is_open(alice: User) -> None:
    alice.create("file", b"abc")
    number = alice.open("file", os.O_RDWR)
    alice.pwrite(number, b"xyz", 0)
    alice.futimens(number, 5, 6)
    alice.close(number)
    assert (alice.stat("file").atime_ns, alice.stat("file").mtime_ns) == (5, 6)
    assert alice.read("file") == b"xyz"

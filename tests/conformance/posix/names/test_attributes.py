"""chmod, chown, access: who may, and what falls with it."""

from __future__ import annotations

import itertools
import os
import stat
from errno import EACCES, ENOENT, EPERM

import pytest
from tests.support.posix.places import ALICE, BOB, CAROL, TEAM, User, errno_of


def test_only_the_owner_and_root_change_the_mode(root: User, alice: User, bob: User) -> None:
    alice.create("file", mode=0o666)
    alice.mkdir("directory", 0o777)
    for path in ("file", "directory"):
        assert errno_of(bob.chmod, path, 0o600) == EPERM
        alice.chmod(path, 0o640)
        assert alice.stat(path).permissions == 0o640
        root.chmod(path, 0o7777)
        assert alice.stat(path).permissions == 0o7777
        alice.chmod(path, 0)
        assert alice.stat(path).permissions == 0
        alice.chmod(path, 0o755)


def test_chmod_follows_links(alice: User) -> None:
    alice.create("file", mode=0o644)
    alice.symlink("file", "link")
    alice.chmod("link", 0o600)
    assert alice.stat("file").permissions == 0o600
    assert alice.lstat("link").permissions == 0o777
    alice.symlink("none", "lost")
    assert errno_of(alice.chmod, "lost", 0o600) == ENOENT


def test_set_group_id_is_for_members(root: User, alice: User, carol: User) -> None:
    for user, who in ((alice, ALICE), (carol, CAROL)):
        path = f"file-{who.uid}"
        user.create(path)
        root.chown(path, who.uid, TEAM)
        user.chmod(path, 0o2755)
        assert root.stat(path).permissions == (0o2755 if who is CAROL else 0o755)
        root.chmod(path, 0o2755)
        assert root.stat(path).permissions == 0o2755
        user.chmod(path, 0o6711)
        assert root.stat(path).permissions == (0o6711 if who is CAROL else 0o4711)


def test_who_changes_owner_and_group(root: User, alice: User, bob: User, carol: User) -> None:
    carol.create("file")
    for user in (alice, carol):
        assert errno_of(user.chown, "file", BOB.uid, -1) == EPERM
        assert errno_of(user.chown, "file", -1, BOB.gid) == EPERM
    carol.chown("file", -1, TEAM)  # her own groups are hers to give
    assert carol.stat("file").gid == TEAM
    carol.chown("file", CAROL.uid, CAROL.gid)
    assert carol.stat("file").gid == CAROL.gid
    assert errno_of(alice.chown, "file", -1, ALICE.gid) == EPERM
    assert errno_of(alice.chown, "file", -1, CAROL.gid) == EPERM
    root.chown("file", BOB.uid, BOB.gid)
    assert (bob.stat("file").uid, bob.stat("file").gid) == (BOB.uid, BOB.gid)
    assert errno_of(carol.chown, "file", CAROL.uid, -1) == EPERM
    root.chown("file", -1, 7)
    assert (bob.stat("file").uid, bob.stat("file").gid) == (BOB.uid, 7)
    bob.chown("file", BOB.uid, 7)  # what it has already


def test_chown_of_a_link(root: User, alice: User) -> None:
    alice.create("file")
    alice.symlink("file", "link")
    root.chown("link", BOB.uid, BOB.gid, follow=False)
    assert alice.lstat("link").uid == BOB.uid
    assert alice.stat("link").uid == ALICE.uid
    root.chown("link", CAROL.uid, CAROL.gid)
    assert alice.lstat("link").uid == BOB.uid
    assert alice.stat("file").uid == CAROL.uid


@pytest.mark.parametrize("mode", [0o6755, 0o6711, 0o6644, 0o2745, 0o4755, 0o1777])
def test_set_id_bits_fall_when_the_owner_changes(root: User, carol: User, mode: int) -> None:
    """The set-group-id bit of a file that its group cannot execute is for mandatory locks, and stays on Linux."""
    kept = mode & ~0o4000 if not mode & 0o010 else mode & ~0o6000
    carol.create("file")
    carol.chmod("file", mode)
    carol.chown("file", -1, TEAM)
    assert carol.stat("file").permissions == kept
    root.chmod("file", mode)
    root.chown("file", ALICE.uid, -1)
    assert carol.stat("file").permissions == kept
    carol.mkdir("directory")
    carol.chmod("directory", mode)
    carol.chown("directory", -1, TEAM)
    assert carol.stat("directory").permissions == mode


@pytest.mark.parametrize("mode", [0o6777, 0o6767, 0o4666])
def test_set_id_bits_fall_when_somebody_writes(root: User, alice: User, bob: User, mode: int) -> None:
    kept = mode & ~0o4000 if not mode & 0o010 else mode & ~0o6000

    def renewed() -> None:
        alice.chmod("file", mode)
        assert alice.stat("file").permissions == mode

    alice.create("file", b"0123456789")
    # Of what the group cannot execute, newer kernels take the bit from a writer of another group, older ones do not.
    for user in (alice, bob) if mode & 0o010 or not mode & 0o2000 else (alice,):
        renewed()
        number = user.open("file", os.O_WRONLY)
        assert alice.stat("file").permissions == mode
        user.pwrite(number, b"x", 0)
        user.close(number)
        assert alice.stat("file").permissions == kept
        renewed()
        user.truncate("file", 5)
        assert alice.stat("file").permissions == kept
        renewed()
        user.close(user.open("file", os.O_WRONLY | os.O_TRUNC))
        assert alice.stat("file").permissions == kept
    renewed()
    number = root.open("file", os.O_WRONLY)
    root.pwrite(number, b"x", 0)
    root.close(number)
    assert alice.stat("file").permissions == mode


MASKS = (os.F_OK, os.R_OK, os.W_OK, os.X_OK, os.R_OK | os.W_OK, os.R_OK | os.X_OK, os.R_OK | os.W_OK | os.X_OK)


def allowed(user: User, mode: int, mask: int) -> bool:
    """Of a file of Alice's in her group."""
    who = user.who
    if who.uid == 0:
        return not mask & os.X_OK or bool(mode & 0o111)
    shift = 6 if who.uid == ALICE.uid else 3 if ALICE.gid in (who.gid, *who.groups) else 0
    return (mode >> shift) & mask == mask


def test_access_of_everybody_to_every_mode(root: User, alice: User, bob: User, carol: User) -> None:
    alice.create("file")
    for owner, group, other in itertools.product((0, 4, 2, 1, 7), (0, 4, 2, 1, 7), (0, 4, 2, 1, 7)):
        mode = owner << 6 | group << 3 | other
        alice.chmod("file", mode)
        for user in (root, alice, bob, carol):
            for mask in (os.R_OK, os.W_OK, os.X_OK) if mode % 3 else MASKS:
                wanted = 0 if allowed(user, mode, mask) else EACCES
                assert errno_of(user.access, "file", mask) == wanted, (user.who, oct(mode), mask)


def test_root_searches_everything_and_executes_only_what_somebody_can(root: User, alice: User) -> None:
    alice.mkdir("closed", 0o000)
    root.create("closed/file", mode=0o000)
    assert root.listdir("closed") == ["file"]
    root.access("closed", os.R_OK | os.W_OK | os.X_OK)
    root.access("closed/file", os.R_OK | os.W_OK)
    assert errno_of(root.access, "closed/file", os.X_OK) == EACCES
    number = root.open("closed/file", os.O_RDWR)
    assert root.pwrite(number, b"abc", 0) == 3
    root.close(number)
    root.chmod("closed/file", 0o001)
    root.access("closed/file", os.X_OK)


def test_stat_needs_no_right_to_the_file_itself(alice: User, bob: User) -> None:
    alice.create("file", b"abc", mode=0)
    alice.mkdir("d", 0)
    assert bob.stat("file").size == 3
    assert bob.stat("d").kind == stat.S_IFDIR
    bob.access("file", os.F_OK)

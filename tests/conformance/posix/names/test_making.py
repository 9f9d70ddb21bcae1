"""mkdir, mknod, symlink, link and readdir: what they make, and the counts of links."""

from __future__ import annotations

import os
import stat
from errno import EACCES, EEXIST, EINVAL, ENOENT, ENOTDIR, EPERM

import pytest
from tests.support.posix.places import ALICE, TEAM, User, errno_of


def test_a_directory_has_a_link_more_for_each_directory_in_it(alice: User) -> None:
    alice.mkdir("d", 0o751)
    found = alice.stat("d")
    assert (found.kind, found.permissions, found.links) == (stat.S_IFDIR, 0o751, 2)
    assert (found.uid, found.gid) == (ALICE.uid, ALICE.gid)
    above = alice.stat(".").links
    for number in range(3):
        alice.mkdir(f"d/{number}")
        assert alice.stat("d").links == 3 + number
    alice.create("d/file")
    alice.symlink(".", "d/link")
    assert alice.stat("d").links == 5
    alice.rename("d/0", "0")
    assert alice.stat("d").links == 4
    assert alice.stat(".").links == above + 1
    alice.rename("0", "d/1")
    assert alice.stat("d").links == 4
    assert alice.stat(".").links == above
    alice.rmdir("d/1")
    alice.rmdir("d/2")
    assert alice.stat("d").links == 2


def test_hard_links_are_counted(alice: User) -> None:
    alice.create("a", b"abc")
    alice.mkdir("d")
    for number, name in enumerate(("b", "c", "d/e"), 2):
        alice.link("a", name)
        assert alice.stat("a").links == alice.stat(name).links == number
        assert alice.stat(name).inode == alice.stat("a").inode
    assert alice.read("d/e") == b"abc"
    alice.unlink("a")
    assert alice.stat("b").links == 3
    alice.rename("b", "c")  # two names of one file: nothing happens
    assert alice.stat("b").links == 3
    alice.create("f")
    alice.rename("f", "c")
    assert alice.stat("b").links == 2
    assert alice.stat("c").links == 1
    alice.unlink("b")
    assert alice.stat("d/e").links == 1


def test_anything_but_a_directory_can_have_two_names(alice: User, root: User) -> None:
    alice.mkdir("directory")
    assert errno_of(alice.link, "directory", "other") == EPERM
    assert errno_of(root.link, "directory", "other") == EPERM
    alice.mknod("fifo", stat.S_IFIFO | 0o600)
    alice.link("fifo", "other")
    assert alice.stat("other").links == 2
    alice.symlink("nothing", "symbolic")
    root.link("symbolic", "second")
    assert root.lstat("second").links == 2
    assert root.readlink("second") == "nothing"


def test_a_link_through_a_link(alice: User) -> None:
    alice.create("file")
    alice.symlink("file", "symbolic")
    alice.link("symbolic", "hard", follow=True)
    assert alice.lstat("hard").inode == alice.lstat("file").inode
    alice.link("symbolic", "same", follow=False)
    assert alice.lstat("same").kind == stat.S_IFLNK
    alice.symlink("none", "lost")
    assert errno_of(alice.link, "lost", "new", follow=True) == ENOENT


def test_no_second_name_over_another_or_for_what_is_gone(alice: User) -> None:
    alice.create("a")
    alice.create("b")
    assert errno_of(alice.link, "a", "b") == EEXIST
    assert errno_of(alice.link, "a", "a") == EEXIST
    assert errno_of(alice.link, "none", "b") == ENOENT
    assert errno_of(alice.link, "none", "c") == ENOENT
    assert errno_of(alice.link, "a", "none/c") == ENOENT
    assert errno_of(alice.link, "a", "b/c") == ENOTDIR
    assert alice.stat("a").links == 1


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG, 0])
def test_special_files(alice: User, kind: int) -> None:
    alice.mknod("node", kind | 0o640)
    found = alice.lstat("node")
    assert (found.kind, found.permissions) == (kind or stat.S_IFREG, 0o640)
    assert (found.size, found.links, found.device) == (0, 1, 0)
    assert (found.uid, found.gid) == (ALICE.uid, ALICE.gid)
    assert errno_of(alice.mknod, "node", kind | 0o640) == EEXIST
    assert alice.scandir(".") == [("node", kind or stat.S_IFREG)]
    alice.unlink("node")


@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK])
def test_devices_are_made_by_root(alice: User, root: User, kind: int) -> None:
    device = os.makedev(7, 300)
    assert errno_of(alice.mknod, "node", kind | 0o660, device) == EPERM
    root.mknod("node", kind | 0o660, device)
    found = root.lstat("node")
    assert (found.kind, found.permissions, found.device) == (kind, 0o660, device)
    root.chown("node", ALICE.uid, ALICE.gid)
    alice.chmod("node", 0o600)
    alice.rename("node", "other")
    assert alice.lstat("other").device == device


def test_kinds_that_cannot_be_made(alice: User, root: User) -> None:
    for user in (alice, root):
        assert errno_of(user.mknod, "node", stat.S_IFDIR | 0o755) == EPERM
        assert errno_of(user.mknod, "node", stat.S_IFLNK | 0o755) == EINVAL


def test_symbolic_links(alice: User) -> None:
    alice.symlink("anything at all//../", "link")
    found = alice.lstat("link")
    assert (found.kind, found.permissions, found.links) == (stat.S_IFLNK, 0o777, 1)
    assert found.size == len("anything at all//../")
    assert alice.readlink("link") == "anything at all//../"
    assert errno_of(alice.symlink, "a", "link") == EEXIST
    alice.create("file")
    alice.mkdir("directory")
    assert errno_of(alice.readlink, "file") == EINVAL
    assert errno_of(alice.readlink, "directory") == EINVAL


def test_listing_a_directory(alice: User, bob: User) -> None:
    alice.mkdir("d")
    assert alice.listdir("d") == []
    names = [f"name-{number:04}" for number in range(300)]
    for name in names:
        alice.mknod(f"d/{name}", stat.S_IFREG | 0o644)
    assert alice.listdir("d") == names
    alice.unlink("d/name-0100")
    alice.rename("d/name-0200", "d/zzz")
    assert alice.listdir("d") == [name for name in names if name not in ("name-0100", "name-0200")] + ["zzz"]
    alice.chmod("d", 0o711)
    assert errno_of(bob.listdir, "d") == EACCES
    assert bob.stat("d/zzz").kind == stat.S_IFREG
    alice.create("file")
    assert errno_of(alice.listdir, "file") == ENOTDIR


def test_kinds_in_a_listing(root: User) -> None:
    root.create("file")
    root.mkdir("directory")
    root.symlink("x", "link")
    root.mknod("fifo", stat.S_IFIFO | 0o600)
    root.mknod("socket", stat.S_IFSOCK | 0o600)
    root.mknod("character", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    root.mknod("block", stat.S_IFBLK | 0o600, os.makedev(7, 0))
    assert root.scandir(".") == [
        ("block", stat.S_IFBLK),
        ("character", stat.S_IFCHR),
        ("directory", stat.S_IFDIR),
        ("fifo", stat.S_IFIFO),
        ("file", stat.S_IFREG),
        ("link", stat.S_IFLNK),
        ("socket", stat.S_IFSOCK),
    ]


def test_modes_are_taken_as_they_are(alice: User, root: User) -> None:
    for mode in (0o0, 0o777, 0o1777, 0o7777, 0o4711, 0o2755):
        alice.close(alice.open(f"file-{mode:o}", os.O_WRONLY | os.O_CREAT, mode))
        assert alice.stat(f"file-{mode:o}").permissions == mode
        alice.mkdir(f"directory-{mode:o}", mode)
        assert alice.stat(f"directory-{mode:o}").permissions == mode & 0o1777  # mkdir takes no set-id bits


def test_the_group_comes_from_a_directory_with_its_set_group_id_bit(root: User, alice: User) -> None:
    root.mkdir("shared")
    root.chown("shared", 0, TEAM)
    root.chmod("shared", 0o2777)
    alice.create("shared/file")
    alice.mkdir("shared/directory", 0o755)
    alice.symlink("x", "shared/link")
    alice.mknod("shared/fifo", stat.S_IFIFO | 0o600)
    for name in ("file", "directory", "link", "fifo"):
        assert alice.lstat(f"shared/{name}").gid == TEAM
        assert alice.lstat(f"shared/{name}").uid == ALICE.uid
    assert alice.stat("shared/directory").permissions == 0o2755
    assert alice.stat("shared/file").permissions == 0o644
    alice.mkdir("shared/directory/deeper")
    assert (alice.stat("shared/directory/deeper").gid, alice.stat("shared/directory/deeper").permissions) == (
        TEAM,
        0o2755,
    )


def test_set_group_id_of_a_new_file_in_a_foreign_group_falls(root: User, alice: User, carol: User) -> None:
    root.mkdir("shared")
    root.chown("shared", 0, TEAM)
    root.chmod("shared", 0o2777)
    alice.close(alice.open("shared/alice", os.O_WRONLY | os.O_CREAT, 0o2775))
    assert alice.stat("shared/alice").permissions == 0o775
    carol.close(carol.open("shared/carol", os.O_WRONLY | os.O_CREAT, 0o2775))
    assert carol.stat("shared/carol").permissions == 0o2775

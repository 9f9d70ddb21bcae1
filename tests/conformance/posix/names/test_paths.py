"""How a path leads to something: names, dots, slashes, symbolic links, and where it does not lead."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from errno import EACCES, EBUSY, EEXIST, EINVAL, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, ENOTEMPTY

import pytest
from tests.support.posix.places import NOW, Place, User, errno_of

LONGEST_NAME = "n" * 255
CREATE = os.O_WRONLY | os.O_CREAT

CALLS: dict[str, Callable[[User, str], object]] = {
    "stat": lambda user, path: user.stat(path),
    "lstat": lambda user, path: user.lstat(path),
    "open": lambda user, path: user.open(path),
    "create": lambda user, path: user.open(path, CREATE),
    "mkdir": lambda user, path: user.mkdir(path),
    "mknod": lambda user, path: user.mknod(path, stat.S_IFIFO | 0o644),
    "symlink": lambda user, path: user.symlink("target", path),
    "readlink": lambda user, path: user.readlink(path),
    "link from": lambda user, path: user.link(path, "linked"),
    "link to": lambda user, path: user.link("file", path),
    "unlink": lambda user, path: user.unlink(path),
    "rmdir": lambda user, path: user.rmdir(path),
    "rename from": lambda user, path: user.rename(path, "renamed"),
    "rename to": lambda user, path: user.rename("file", path),
    "truncate": lambda user, path: user.truncate(path, 0),
    "chmod": lambda user, path: user.chmod(path, 0o600),
    "chown": lambda user, path: user.chown(path, -1, -1),
    "lchown": lambda user, path: user.chown(path, -1, -1, follow=False),
    "utimens": lambda user, path: user.utimens(path, NOW, NOW),
    "access": lambda user, path: user.access(path, os.R_OK),
    "listdir": lambda user, path: user.listdir(path),
    "statvfs": lambda user, path: user.name_max(path),
    "setxattr": lambda user, path: user.setxattr(path, "user.a", b"b"),
    "getxattr": lambda user, path: user.getxattr(path, "user.a"),
    "listxattr": lambda user, path: user.listxattr(path),
    "removexattr": lambda user, path: user.removexattr(path, "user.a"),
}


@pytest.fixture(params=sorted(CALLS))
def call(request: pytest.FixtureRequest) -> Callable[[User, str], object]:
    return CALLS[request.param]


def test_every_call_says_what_is_wrong_with_a_path(
    call: Callable[[User, str], object], root: User, alice: User, bob: User
) -> None:
    alice.create("file")
    alice.mkdir("closed", 0o700)
    alice.create("closed/file")
    alice.mkdir("empty")
    alice.symlink("loop", "loop")
    alice.symlink("b", "a")
    alice.symlink("a", "b")
    assert errno_of(call, alice, "") == ENOENT
    assert errno_of(call, alice, "none/below") == ENOENT
    assert errno_of(call, alice, "file/below") == ENOTDIR
    assert errno_of(call, alice, "file/../file") == ENOTDIR
    assert errno_of(call, alice, "loop/below") == ELOOP
    assert errno_of(call, alice, "a/below") == ELOOP
    assert errno_of(call, alice, LONGEST_NAME + "n") == ENAMETOOLONG
    assert errno_of(call, alice, LONGEST_NAME + "n/below") == ENAMETOOLONG
    assert errno_of(call, alice, "./" * 2048) == ENAMETOOLONG
    assert errno_of(call, bob, "closed/file") == EACCES
    assert errno_of(call, bob, "closed/none") == EACCES
    assert errno_of(call, bob, "closed/../file") == EACCES
    assert alice.listdir(".") == ["a", "b", "closed", "empty", "file", "loop"]


MISSING = ["stat", "lstat", "open", "readlink", "link from", "unlink", "rmdir", "rename from", "truncate", "chmod"]
MISSING += [
    "statvfs",
    "chown",
    "lchown",
    "utimens",
    "access",
    "listdir",
    "setxattr",
    "getxattr",
    "listxattr",
    "removexattr",
]


@pytest.mark.parametrize("name", MISSING)
def test_what_is_not_there(name: str, alice: User) -> None:
    assert errno_of(CALLS[name], alice, "none") == ENOENT
    alice.symlink("none", "link")
    follows = name not in ("lstat", "readlink", "link from", "unlink", "rmdir", "rename from", "lchown")
    assert errno_of(CALLS[name], alice, "link") == (ENOENT if follows else ENOTDIR if name == "rmdir" else 0)


@pytest.mark.parametrize("name", ["mkdir", "mknod", "symlink", "link to"])
def test_what_is_there_already(name: str, alice: User) -> None:
    alice.create("file")
    alice.create("other")
    alice.mkdir("directory")
    alice.symlink("none", "link")
    for path in ("other", "directory", "link", "directory/.", "directory/..", ".", "..", "/"):
        assert errno_of(CALLS[name], alice, path) == EEXIST, path
    assert alice.listdir(".") == ["directory", "file", "link", "other"]


FOLLOWING = [
    "stat",
    "statvfs",
    "open",
    "truncate",
    "chmod",
    "chown",
    "utimens",
    "access",
    "listdir",
    "setxattr",
    "listxattr",
]


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_link_that_leads_to_itself(name: str, alice: User) -> None:
    alice.symlink("loop", "loop")
    assert errno_of(CALLS[name], alice, "loop") == ELOOP
    assert errno_of(alice.open, "loop", CREATE) == ELOOP
    assert alice.lstat("loop").kind == stat.S_IFLNK
    assert alice.readlink("loop") == "loop"


def test_forty_links_and_no_more(alice: User) -> None:
    alice.create("link-0")
    for number in range(1, 42):
        alice.symlink(f"link-{number - 1}", f"link-{number}")
    assert alice.stat("link-40").kind == stat.S_IFREG
    assert errno_of(alice.stat, "link-41") == ELOOP
    alice.symlink(".", "here")
    assert alice.stat("here/" * 39 + "here").kind == stat.S_IFDIR
    assert errno_of(alice.stat, "here/" * 40 + "here") == ELOOP
    assert alice.lstat("here/" * 40 + "link-0").kind == stat.S_IFREG


def test_the_longest_name(alice: User) -> None:
    alice.create(LONGEST_NAME)
    assert alice.listdir(".") == [LONGEST_NAME]
    alice.mkdir("directory")
    alice.rename(LONGEST_NAME, f"directory/{LONGEST_NAME}")
    alice.symlink(f"directory/{LONGEST_NAME}", "link")
    assert alice.stat("link").kind == stat.S_IFREG
    alice.unlink(f"directory/{LONGEST_NAME}")
    assert alice.name_max(".") == 255


def test_a_name_is_counted_in_bytes(alice: User) -> None:
    name = "ü" * 127
    alice.create(name)
    alice.create(name + "x")
    assert errno_of(alice.mkdir, name + "xy") == ENAMETOOLONG
    assert alice.listdir(".") == sorted([name, name + "x"])


def test_names_are_bytes(alice: User) -> None:
    names = [" ", "\n", "\\", "*", "-", "...", "\udcff\udcfe", "a\u0301", "\u00e1", "A", "a"]
    for name in names:
        alice.create(name)
    assert alice.listdir(".") == sorted(names, key=os.fsencode)


@pytest.mark.usefixtures("relative")
def test_the_longest_path(alice: User) -> None:
    assert alice.stat("./" * 2047 + ".").kind == stat.S_IFDIR  # 4095 bytes
    assert errno_of(alice.stat, "./" * 2048) == ENAMETOOLONG
    target = "./" * 2047 + "x"
    alice.symlink(target, "link")
    assert alice.readlink("link") == target
    assert alice.lstat("link").size == 4095
    assert errno_of(alice.symlink, target + "y", "longer") == ENAMETOOLONG
    assert errno_of(alice.symlink, "", "empty") == ENOENT
    alice.create("x")
    assert alice.stat("link").kind == stat.S_IFREG


def test_dots_and_slashes(alice: User) -> None:
    alice.mkdir("a")
    alice.mkdir("a/b")
    alice.create("a/b/file")
    inode = alice.stat("a/b/file").inode
    for path in ("a//b///file", "./a/./b/./file", "a/b/../b/file", "a/b/../../a/b/file", "a/../a/b/file"):
        assert alice.stat(path).inode == inode
    assert alice.stat("a/b/..").inode == alice.stat("a").inode == alice.stat("a/").inode == alice.stat("a/.").inode


def test_above_the_root_is_the_root(alice: User, place: Place) -> None:
    top = alice.stat(".").inode
    for path in (place.top, f"/..{place.top}", f"/../..//..{place.top}/.", f"..{place.top}"):
        assert alice.stat(path).inode == top


def test_links_from_the_root_and_from_where_they_are(alice: User, place: Place) -> None:
    alice.mkdir("a")
    alice.mkdir("a/b")
    alice.create("a/file")
    alice.symlink("../file", "a/b/relative")
    alice.symlink(f"{place.top}/a/file", "a/b/absolute")
    alice.symlink("..", "a/b/up")
    inode = alice.stat("a/file").inode
    for path in ("a/b/relative", "a/b/absolute", "a/b/up/file", "a/b/up/b/up/file"):
        assert alice.stat(path).inode == inode
    # ".." behind a link is above where it leads to.
    alice.symlink("a/b", "shortcut")
    assert alice.stat("shortcut/..").inode == alice.stat("a").inode


def test_a_slash_at_the_end_wants_a_directory(alice: User) -> None:
    alice.create("file")
    alice.mkdir("directory")
    alice.symlink("file", "link")
    alice.symlink("directory", "way")
    alice.symlink("none", "lost")
    for name in ("stat", "lstat", "open", "truncate", "chmod", "chown", "lchown", "utimens", "access", "link from"):
        assert errno_of(CALLS[name], alice, "file/") == ENOTDIR, name
        assert errno_of(CALLS[name], alice, "link/") == ENOTDIR, name
    for name in ("unlink", "rmdir", "rename from", "readlink", "listxattr"):
        assert errno_of(CALLS[name], alice, "file/") == ENOTDIR, name
    assert alice.lstat("way/").kind == stat.S_IFDIR
    assert errno_of(alice.lstat, "lost/") == ENOENT
    assert errno_of(alice.readlink, "way/") == EINVAL
    assert errno_of(alice.unlink, "way/") == ENOTDIR
    assert errno_of(alice.rmdir, "way/") == ENOTDIR
    assert errno_of(alice.unlink, "directory/") == EISDIR
    assert errno_of(alice.open, "file/", CREATE) == EISDIR
    assert errno_of(alice.open, "lost/", CREATE) == EISDIR


def test_a_slash_at_the_end_of_what_is_made(alice: User) -> None:
    alice.create("file")
    alice.mkdir("directory/")
    assert alice.lstat("directory").kind == stat.S_IFDIR
    for name in ("mknod", "symlink", "link to"):
        assert errno_of(CALLS[name], alice, "new/") == ENOENT, name
        assert errno_of(CALLS[name], alice, "directory/") == EEXIST, name
    assert errno_of(alice.rename, "file", "new/") == ENOTDIR
    assert errno_of(alice.rename, "file", "directory/") == ENOTDIR
    alice.rename("directory/", "renamed/")
    alice.rmdir("renamed/")
    assert alice.listdir(".") == ["file"]


def test_a_directory_is_not_made_through_a_link(alice: User) -> None:
    alice.symlink("none", "lost")
    assert errno_of(alice.mkdir, "lost") == EEXIST
    assert errno_of(alice.mkdir, "lost/") == EEXIST
    assert alice.listdir(".") == ["lost"]


def test_dots_are_not_removed_or_renamed(alice: User) -> None:
    alice.mkdir("a")
    alice.mkdir("a/b")
    alice.mkdir("c")
    assert errno_of(alice.rmdir, "a/b/.") == EINVAL
    assert errno_of(alice.rmdir, "a/b/..") == ENOTEMPTY
    assert errno_of(alice.rmdir, ".") == EINVAL
    for path in ("a/.", "a/b/.."):
        assert errno_of(alice.rename, path, "new") == EBUSY
        assert errno_of(alice.rename, "c", path) == EBUSY
    assert errno_of(alice.unlink, "a/.") == EISDIR
    assert errno_of(alice.unlink, "a/b/..") == EISDIR


def test_the_root_is_not_removed_or_renamed(root: User) -> None:
    root.mkdir("directory")
    assert errno_of(root.rmdir, "/") == EBUSY
    assert errno_of(root.unlink, "/") == EISDIR
    assert errno_of(root.rename, "/", "new") == EBUSY
    assert errno_of(root.rename, "directory", "/") == EBUSY

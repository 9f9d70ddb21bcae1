"""The same random operations on names, by several users, here and on the machine's own file system: the same errno for
each, the same answers, the same tree in the end."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.fs.clusters.names import Names, at
from tests.support.posix import linux_names

from fireflyer.fs.core.meta.context import Requester
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.inodes import DeviceDetails, DirectoryDetails, Inode, Kind, SymlinkDetails
from fireflyer.fs.schema.meta import (
    Found,
    GetXattr,
    Link,
    ListDirectory,
    Listing,
    ListXattrs,
    MakeDirectory,
    MakeNode,
    Now,
    Open,
    OpenFlag,
    ReadLink,
    Remove,
    RemoveDirectory,
    RemoveXattr,
    Rename,
    Request,
    SetAttributes,
    SetXattr,
    Stat,
    Symlink,
    Target,
    XattrFlag,
    XattrValue,
)
from fireflyer.fs.schema.meta import XattrNames as ValueNames

OPERATIONS = 300
USERS = [(0, [0]), (1001, [1001, 500]), (1002, [1002, 500]), (1003, [500])]
MODES = [0o777, 0o777, 0o775, 0o755, 0o700, 0o555, 0o770, 0o077, 0o2775, 0o2770, 0o4755, 0o2644, 0o6711, 0o644, 0]
STICKY_MODES = [0o1775, 0o1770, 0o3775]
NAMES = ["a", "b", "c", "d"]
KINDS = {
    Kind.FILE: stat.S_IFREG,
    Kind.DIRECTORY: stat.S_IFDIR,
    Kind.SYMLINK: stat.S_IFLNK,
    Kind.FIFO: stat.S_IFIFO,
    Kind.SOCKET: stat.S_IFSOCK,
    Kind.CHARACTER: stat.S_IFCHR,
    Kind.BLOCK: stat.S_IFBLK,
}
OF_MODE = {kind: of for of, kind in KINDS.items()}
FLAGS = {
    os.O_CREAT: OpenFlag.CREATE,
    os.O_EXCL: OpenFlag.EXCLUSIVE,
    os.O_DIRECTORY: OpenFlag.DIRECTORY,
}


class Chance:
    """Operations as `linux_names` takes them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._sticky = seed % 2 == 1
        self._users = USERS if seed % 3 else USERS[:1] * 12 + USERS
        self._modes = MODES + STICKY_MODES * 2 * self._sticky

    def operation(self) -> list[Any]:
        pick = self._random.choice
        who = pick(self._users)
        name = pick([*["open"] * 3, *["mkdir"] * 4, "rename", *linux_names.OPERATIONS])
        return [*who, name, *getattr(self, name)()]

    def path(self) -> str:
        pick, number = self._random.choice, self._random.random()
        path = "/".join(pick(NAMES) for _ in range(pick([1, 1, 1, 2, 2, 2, 3, 4])))
        if number < 0.12:
            path += pick(["/", "//", "/."])
        elif number < 0.2:
            path = pick(["/", ".", "..", path + "/..", "../" + path, "./" + path, path + "/../a", "//" + path, "/a/.."])
        elif number < 0.23:
            path = pick(
                [path + "/" + "n" * 255, path + "/" + "n" * 256, "n" * 256 + "/a", "a/" * 2100, "a/" * 2047 + "a"]
            )
        return path

    def open(self) -> list[Any]:
        pick = self._random.choice
        flags = pick([os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
        # Who creates in a sticky directory is protected from files of others there, above file systems.
        create = [os.O_CREAT | os.O_EXCL] if self._sticky else [os.O_CREAT, os.O_CREAT, os.O_CREAT | os.O_EXCL]
        flags |= pick([0, *create]) | pick([0, 0, os.O_NOFOLLOW])
        return [self.path(), flags | (pick([0, 0, os.O_DIRECTORY]) if not flags & os.O_CREAT else 0), pick(self._modes)]

    def mkdir(self) -> list[Any]:
        return [self.path(), self._random.choice(self._modes)]

    def mknod(self) -> list[Any]:
        kind = self._random.choice([stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG, stat.S_IFDIR])
        return [self.path(), self._random.choice(self._modes) | kind]

    def symlink(self) -> list[Any]:
        pick = self._random.choice
        target = pick([self.path(), *NAMES, "a/b", "c/", "./d", "t" * 5000 if pick(range(9)) == 0 else ""])
        return [target, self.path()]

    def link(self) -> list[Any]:
        return [self.path(), self.path(), self._random.random() < 0.3]

    def unlink(self) -> list[Any]:
        return [self.path()]

    rmdir = listdir = readlink = listxattr = unlink

    def rename(self) -> list[Any]:
        return [self.path(), self.path(), self._random.choice([0, 0, 0, 0, 1, 2, 2, 3])]

    def chmod(self) -> list[Any]:
        return [self.path(), self._random.choice(self._modes)]

    def chown(self) -> list[Any]:
        pick = self._random.choice
        uid, gid = pick([(0, -1), (1001, -1), (1002, 500), (-1, 500), (-1, 1001), (1003, 500), (-1, 1002)])
        return [self.path(), uid, gid, pick([True, False])]

    def utime(self) -> list[Any]:
        return [self.path(), self._random.random() < 0.5, self._random.random() < 0.5]

    def stat(self) -> list[Any]:
        return [self.path(), self._random.random() < 0.5]

    def setxattr(self) -> list[Any]:
        pick = self._random.choice
        return [self.path(), self._xattr_name(), pick(["", "x", "y" * 50]), pick([0, 0, 1, 2])]

    def getxattr(self) -> list[Any]:
        return [self.path(), self._xattr_name()]

    removexattr = getxattr

    def _xattr_name(self) -> str:
        pick = self._random.choice
        return str(pick([*["user.x", "user.y", "trusted.x"] * 2, "user.", "other.x", "user." + "n" * 251, "x"]))


class Ours:
    """The same operations on `XattrNames`, with answers as `linux_names` gives them."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def carry_out(self, uid: int, groups: list[int], name: str, *arguments: Any) -> list[Any]:
        requester = Requester(1, uid, groups[0], tuple(groups[1:]), unrestricted=uid == 0)
        try:
            return [0, getattr(self, name)(requester, *arguments)]
        except FileError as error:
            return [error.errno, None]

    def _ask(self, request: Request, requester: Requester) -> Any:
        return self._names.ask(request, object, requester)

    def open(self, requester: Requester, path: str, flags: int, mode: int) -> None:
        wanted = 0 if flags & os.O_NOFOLLOW else OpenFlag.FOLLOW
        access = flags & os.O_ACCMODE
        wanted |= OpenFlag.READ if access in (os.O_RDONLY, os.O_RDWR) else 0
        for flag, ours in FLAGS.items():
            wanted |= ours if flags & flag == flag else 0
        if access != os.O_RDONLY:
            # What `lengths` does for writers is not looked at here.
            wanted |= OpenFlag.WRITE
        try:
            self._ask(Open(at(path), wanted, self._names.now_ns, mode), requester)
        except FileError as error:
            if error.errno != errno.ENXIO:
                raise

    def mkdir(self, requester: Requester, path: str, mode: int) -> None:
        self._ask(MakeDirectory(at(path), mode), requester)

    def mknod(self, requester: Requester, path: str, mode: int) -> None:
        self._ask(MakeNode(at(path), OF_MODE[stat.S_IFMT(mode)], stat.S_IMODE(mode)), requester)

    def symlink(self, requester: Requester, target: str, path: str) -> None:
        self._ask(Symlink(at(path), target.encode()), requester)

    def link(self, requester: Requester, existing: str, path: str, follow: bool) -> int:
        self._ask(Link(at(existing), at(path), follow), requester)
        return 0

    def unlink(self, requester: Requester, path: str) -> None:
        self._ask(Remove(at(path)), requester)

    def rmdir(self, requester: Requester, path: str) -> None:
        self._ask(RemoveDirectory(at(path)), requester)

    def rename(self, requester: Requester, source: str, target: str, flags: int) -> None:
        self._ask(Rename(at(source), at(target), flags), requester)

    def chmod(self, requester: Requester, path: str, mode: int) -> None:
        self._ask(SetAttributes(at(path), mode=mode), requester)

    def chown(self, requester: Requester, path: str, uid: int, gid: int, follow: bool) -> None:
        ids = [None if each < 0 else each for each in (uid, gid)]
        self._ask(SetAttributes(at(path), follow, uid=ids[0], gid=ids[1]), requester)

    def utime(self, requester: Requester, path: str, now: bool, follow: bool) -> None:
        times = {"now": Now.ATIME | Now.MTIME} if now else {"atime_ns": 1, "mtime_ns": 2}
        self._ask(SetAttributes(at(path), follow, **times), requester)

    def stat(self, requester: Requester, path: str, follow: bool) -> list[Any]:
        return _shown(self._ask(Stat(at(path), follow), requester).inode)

    def listdir(self, requester: Requester, path: str) -> list[str]:
        inode = self._ask(Stat(at(path)), requester).inode
        return [entry.name.decode() for entry in self._ask(ListDirectory(inode.id), requester).entries]

    def readlink(self, requester: Requester, path: str) -> str:
        answer = self._ask(ReadLink(at(path)), requester)
        assert isinstance(answer, Target)
        return answer.path.decode()

    def setxattr(self, requester: Requester, path: str, name: str, value: str, flags: int) -> None:
        self._ask(SetXattr(at(path), name.encode(), value.encode(), XattrFlag(flags), follow=False), requester)

    def getxattr(self, requester: Requester, path: str, name: str) -> str:
        answer = self._ask(GetXattr(at(path), name.encode(), follow=False), requester)
        assert isinstance(answer, XattrValue)
        return answer.value.decode()

    def removexattr(self, requester: Requester, path: str, name: str) -> None:
        self._ask(RemoveXattr(at(path), name.encode(), follow=False), requester)

    def listxattr(self, requester: Requester, path: str) -> list[str]:
        answer = self._ask(ListXattrs(at(path), follow=False), requester)
        assert isinstance(answer, ValueNames)
        return sorted(name.decode() for name in answer.names)

    def tree(self, top: str = ".") -> dict[str, Any]:
        found: dict[str, Any] = {}
        listing = self._names.ask(ListDirectory(self._names.stat(top).id, b"", 1000, inodes=True), Listing)
        for entry in listing.entries:
            path = f"{top}/{entry.name.decode()}"
            inode = entry.inode
            assert inode is not None
            found[path] = [*_shown(inode), inode.body.target.decode() if isinstance(inode.body, SymlinkDetails) else ""]
            if inode.kind is Kind.DIRECTORY:
                found.update(self.tree(path))
        return found


def _shown(inode: Inode) -> list[Any]:
    body = inode.body
    links = 2 + body.subdirectories if isinstance(body, DirectoryDetails) else inode.links
    device = body.device if isinstance(body, DeviceDetails) else 0
    return [KINDS[inode.kind], inode.mode, inode.uid, inode.gid, links, device]


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_on_names_end_as_on_the_file_system_of_this_machine(seed: int, tmp_path: Path) -> None:
    compare(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 124))
def test_many_more_random_operations_end_there_too(seed: int, tmp_path: Path) -> None:
    compare(seed, tmp_path)


def need_ext4_as_root(directory: Path) -> None:
    """Others differ in what they count and refuse; who is root in name only may not do what root does."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [str(path) for path in (directory, *directory.parents)]
    kind = max(
        (above.index(point) * -1, number, kind) for number, (point, kind) in enumerate(mounts) if point in above
    )[2]
    if os.geteuid() or kind != "ext4":
        pytest.skip(f"compares with ext4 as root, and this is {kind} as user {os.geteuid()}")
    try:
        os.setxattr(directory, "trusted.fireflyer", b"")
        os.chown(directory, 1001, 1001)
        os.chown(directory, 0, 0)
    except OSError as error:
        pytest.skip(f"compares with ext4 as root, whose rights are not all there: {error}")


def compare(seed: int, tmp_path: Path) -> None:
    need_ext4_as_root(tmp_path)
    rng = Chance(seed)
    operations = [rng.operation() for _ in range(OPERATIONS)]
    place = tmp_path / "root"
    place.mkdir()
    place.chmod(0o777)
    script = [sys.executable, "-I", "-S", linux_names.__file__, str(place)]
    done = subprocess.run(script, input=json.dumps(operations), capture_output=True, text=True, check=True)
    *results, tree = json.loads(done.stdout)
    with Names() as names:
        ours = Ours(names)
        for number, (operation, result) in enumerate(zip(operations, results, strict=True)):
            if result[1] == linux_names.SKIPPED:
                continue
            assert ours.carry_out(*operation) == result, (number, operation, errno.errorcode.get(result[0]))
            names.check()
        assert ours.tree() == tree


def test_what_opens_says_enxio_only_for_what_the_kernel_opens() -> None:
    with Names() as names:
        names.do(MakeNode(at("f"), Kind.FIFO))
        assert names.errno(Open(at("f"), OpenFlag.READ)) == errno.ENXIO
        assert names.ask(Stat(at("f")), Found).inode.kind is Kind.FIFO

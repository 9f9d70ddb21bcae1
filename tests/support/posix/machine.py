"""The same random calls on two places, by several users and processes, and the same tree in the end.

Few names, so that they meet; every kind of file, links that lead around, modes that shut people out. `Both` compares
each call; `teardown` walks the whole tree.

Not asked, because Linux decides it before any file system does and differently on each machine: hard links to what
somebody else owns (`protected_hardlinks`), directories that are sticky and open to others (`protected_symlinks`,
`protected_regular`). FIFOs and devices are not opened: they are the kernel's.
"""

from __future__ import annotations

import fcntl
import os
import stat
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, multiple, rule
from tests.support.posix.both import Both
from tests.support.posix.places import ALICE, BOB, CAROL, NOW, ROOT, TEAM, Stat, User, errno_of

__all__ = ["FileMachine"]

NAMES: Final = ("a", "b", "c", "d")
WORKING: Final = "w"
MODES: Final = (0o777, 0o755, 0o775, 0o750, 0o700, 0o644, 0o666, 0o600, 0o000, 0o1755, 0o2775, 0o6755, 0o311, 0o444)
OFFSETS: Final = (0, 1, 100, 65_535, 65_536, 65_537, 200_000)
SIZES: Final = (0, 1, 100, 70_000)
OPENINGS: Final = (
    0,
    os.O_CREAT,
    os.O_CREAT | os.O_EXCL,
    os.O_TRUNC,
    os.O_CREAT | os.O_TRUNC,
    os.O_CREAT | os.O_APPEND,
    os.O_NOFOLLOW,
    os.O_DIRECTORY,
)
PLACES: Final = {"allocate": 0, "keep": 1, "punch": 3, "zero": 16}
BIG: Final = 1 << 20

users = st.sampled_from([ROOT, ALICE, ALICE, ALICE._replace(process=1), BOB, CAROL])
names = st.sampled_from(NAMES)
modes = st.sampled_from(MODES)
offsets = st.sampled_from(OFFSETS)
sizes = st.sampled_from(SIZES)
acts = st.sampled_from(["pread", "pwrite", "pwrite", "ftruncate", "fstat", *PLACES])
owners = st.sampled_from([-1, ALICE.uid, BOB.uid, CAROL.uid])
groups = st.sampled_from([-1, ALICE.gid, BOB.gid, TEAM])
times = st.sampled_from([None, NOW, 0, 5, 10**18 + 7])
relative = st.one_of(
    names,
    names,
    st.tuples(names, names).map("/".join),
    st.tuples(names, names, names).map("/".join),
    st.tuples(names, st.sampled_from(["..", "."]), names).map("/".join),
    names.map(lambda name: name + "/"),
)
paths = relative.map(lambda path: f"{WORKING}/{path}")
targets = st.one_of(names, relative, st.sampled_from([".", "none", "./a/b"]))
flags = st.builds(
    lambda kind, extra: kind | extra,
    st.sampled_from([os.O_RDONLY, os.O_WRONLY, os.O_RDWR]),
    st.sampled_from(OPENINGS),
)


class FileMachine(RuleBasedStateMachine):
    opened = Bundle("opened")

    def __init__(self, place: Both, top: str, *, close_to_open: bool = False) -> None:
        """`close_to_open`: users are clients of their own, so no file stays open while another one works."""
        super().__init__()
        self._place = place
        self._close_to_open = close_to_open
        place.renew(top)
        self._root = User(place, ROOT)
        self._root.mkdir(WORKING)
        self._root.chmod(WORKING, 0o777)
        self._written = 0
        self._left: dict[int, User] = {}

    # --- names ---

    @rule(who=users, path=paths, mode=modes)
    def mkdir(self, who: Any, path: str, mode: int) -> None:
        self._call(who, "mkdir", path, mode)

    @rule(who=users, path=paths, mode=modes)
    def mkfifo(self, who: Any, path: str, mode: int) -> None:
        self._call(who, "mknod", path, stat.S_IFIFO | mode)

    @rule(who=users, content=targets, path=paths)
    def symlink(self, who: Any, content: str, path: str) -> None:
        self._call(who, "symlink", content, path)

    @rule(who=users, source=paths, new=paths, follow=st.booleans())
    def link(self, who: Any, source: str, new: str, follow: bool) -> None:
        if who != ROOT and self._kind(source, follow=follow)[1] != who.uid:
            return
        user = User(self._place, who)
        errno_of(user.link, source, new, follow=follow)
        self._look(new)

    @rule(who=users, path=paths)
    def unlink(self, who: Any, path: str) -> None:
        self._call(who, "unlink", path)

    @rule(who=users, path=paths)
    def rmdir(self, who: Any, path: str) -> None:
        self._call(who, "rmdir", path)

    @rule(who=users, source=paths, new=paths, flag=st.sampled_from([0, 0, 0, 1, 2]))
    def rename(self, who: Any, source: str, new: str, flag: int) -> None:
        self._call(who, "rename", source, new, flag)
        self._look(new)

    @rule(who=users, path=paths)
    def look_around(self, who: Any, path: str) -> None:
        user = User(self._place, who)
        for look in (user.stat, user.lstat, user.readlink, user.scandir, user.listxattr):
            errno_of(look, path)
        for mask in (0, 1, 2, 4):
            errno_of(user.access, path, mask)

    # --- attributes ---

    @rule(who=users, path=paths, mode=modes)
    def chmod(self, who: Any, path: str, mode: int) -> None:
        self._call(who, "chmod", path, mode)

    @rule(who=users, path=paths, uid=owners, gid=groups, follow=st.booleans())
    def chown(self, who: Any, path: str, uid: int, gid: int, follow: bool) -> None:
        if (uid, gid) != (-1, -1):  # a client has nothing to say then
            errno_of(User(self._place, who).chown, path, uid, gid, follow=follow)
            self._look(path)

    @rule(who=users, path=paths, atime=times, mtime=times, follow=st.booleans())
    def utimens(self, who: Any, path: str, atime: Any, mtime: Any, follow: bool) -> None:
        if (atime, mtime) != (None, None):
            errno_of(User(self._place, who).utimens, path, atime, mtime, follow=follow)
            self._look(path)

    @rule(who=users, path=paths, name=names, value=st.binary(max_size=4), flag=st.sampled_from([0, 1, 2]))
    def setxattr(self, who: Any, path: str, name: str, value: bytes, flag: int) -> None:
        self._call(who, "setxattr", path, f"user.{name}", value, flag)

    @rule(who=users, path=paths, name=names)
    def removexattr(self, who: Any, path: str, name: str) -> None:
        self._call(who, "getxattr", path, f"user.{name}")
        self._call(who, "removexattr", path, f"user.{name}")

    @rule(who=users, path=paths, size=offsets)
    def truncate(self, who: Any, path: str, size: int) -> None:
        self._call(who, "truncate", path, size)

    # --- what is open ---

    @rule(target=opened, who=users, path=paths, how=flags, mode=modes)
    def open(self, who: Any, path: str, how: int, mode: int) -> Any:
        if self._kind(path, follow=not how & os.O_NOFOLLOW)[0] in (stat.S_IFIFO, stat.S_IFSOCK):
            return multiple()
        user = User(self._place, who)
        try:
            number = user.open(path, how, mode)
        except OSError:
            return multiple()
        finally:
            self._look(path)
        if self._close_to_open:
            user.close(number)
            return multiple()
        self._left[number] = user
        return user, number, how

    @rule(who=users, path=paths, how=flags, acts=st.lists(st.tuples(acts, offsets, sizes), min_size=1, max_size=6))
    def use(self, who: Any, path: str, how: int, acts: list[tuple[str, int, int]]) -> None:
        """From open to close."""
        if self._kind(path, follow=not how & os.O_NOFOLLOW)[0] in (stat.S_IFIFO, stat.S_IFSOCK):
            return
        user = User(self._place, who)
        try:
            number = user.open(path, how)
        except OSError:
            return
        file = user, number, how
        for act, offset, size in acts:
            if act == "pread":
                errno_of(user.pread, number, size, offset)
            elif act == "pwrite" and not how & os.O_APPEND:
                errno_of(user.pwrite, number, self._data(size), offset)
            elif act == "ftruncate":
                errno_of(user.ftruncate, number, offset)
            elif act in PLACES:
                self._allocate(file, PLACES[act], offset, size)
            else:
                user.fstat(number)
        user.close(number)
        self._look(path)

    def _data(self, size: int) -> bytes:
        self._written += 1
        return bytes([1 + self._written % 255]) * size

    def _allocate(self, file: Any, mode: int, offset: int, size: int) -> None:
        user, number, how = file
        if how & os.O_ACCMODE != os.O_RDONLY:
            errno_of(user.fallocate, number, mode, offset, size)

    @rule(file=consumes(opened))
    def close(self, file: Any) -> None:
        user, number, _ = file
        user.close(number)
        del self._left[number]

    @rule(file=opened, offset=offsets, size=sizes)
    def pread(self, file: Any, offset: int, size: int) -> None:
        user, number, _ = file
        errno_of(user.pread, number, size, offset)
        user.fstat(number)

    @rule(file=opened, offset=offsets, size=sizes)
    def write(self, file: Any, offset: int, size: int) -> None:
        user, number, how = file
        data = self._data(size)
        if not how & os.O_APPEND:
            errno_of(user.pwrite, number, data, offset)
        elif data and how & os.O_ACCMODE != os.O_RDONLY:
            user.write(number, data)
        errno_of(user.fsync, number)
        user.fstat(number)

    @rule(file=opened, size=offsets)
    def ftruncate(self, file: Any, size: int) -> None:
        user, number, _ = file
        errno_of(user.ftruncate, number, size)
        user.fstat(number)

    @rule(file=opened, mode=st.sampled_from([0, 1, 3, 16]), offset=offsets, size=sizes)
    def fallocate(self, file: Any, mode: int, offset: int, size: int) -> None:
        user, number, _ = file
        self._allocate(file, mode, offset, size)
        user.fstat(number)

    @rule(file=opened, mode=modes)
    def fchmod(self, file: Any, mode: int) -> None:
        user, number, _ = file
        errno_of(user.fchmod, number, mode)
        user.fstat(number)

    @rule(file=opened, atime=times, mtime=times)
    def futimens(self, file: Any, atime: Any, mtime: Any) -> None:
        user, number, _ = file
        if (atime, mtime) != (None, None):
            errno_of(user.futimens, number, atime, mtime)
        user.fstat(number)

    @rule(file=opened, kind=st.sampled_from([fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN]))
    def flock(self, file: Any, kind: int) -> None:
        user, number, _ = file
        if self._may_lock(file):
            errno_of(user.flock, number, kind | fcntl.LOCK_NB)

    @rule(file=opened, kind=st.sampled_from(["read", "write", "none"]), start=offsets, size=sizes)
    def lock(self, file: Any, kind: str, start: int, size: int) -> None:
        user, number, _ = file
        if self._may_lock(file):
            errno_of(user.lock, number, kind, start, size)

    def _may_lock(self, file: Any) -> bool:
        """The service does not know of who only reads, so it asks whether they may: also of a file that was opened
        before that was taken from them, or made with no rights. Linux asks nobody."""
        user, number, how = file
        found, who = user.fstat(number), user.who
        shift = 6 if who.uid == found.uid else 3 if found.gid in (who.gid, *who.groups) else 0
        may = who.uid == 0 or found.mode >> shift & 6 or how & os.O_ACCMODE != os.O_RDONLY
        return stat.S_ISREG(found.mode) and bool(may)

    # --- comparing ---

    def teardown(self) -> None:
        self._walk(".")
        for number, user in self._left.items():
            errno_of(user.pread, number, BIG, 0)
            user.fstat(number)
            user.close(number)

    def _call(self, who: Any, name: str, *arguments: Any) -> None:
        errno_of(getattr(User(self._place, who), name), *arguments)
        self._look(next(argument for argument in arguments if isinstance(argument, str) and WORKING in argument))

    def _look(self, path: str) -> None:
        errno_of(self._root.lstat, path)

    def _kind(self, path: str, *, follow: bool) -> tuple[int, int]:
        try:
            found: Stat = (self._root.stat if follow else self._root.lstat)(path)
        except OSError:
            return 0, -1
        return found.kind, found.uid

    def _walk(self, directory: str) -> None:
        for name, kind in self._root.scandir(directory):
            path = f"{directory}/{name}"
            self._root.lstat(path)
            if kind == stat.S_IFDIR:
                self._walk(path)
            elif kind == stat.S_IFLNK:
                self._root.readlink(path)
            elif kind == stat.S_IFREG:
                self._root.read(path)
            if kind in (stat.S_IFDIR, stat.S_IFREG):
                for value in self._root.listxattr(path):
                    self._root.getxattr(path, value)

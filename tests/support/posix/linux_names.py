"""What the machine's own file system answers to operations on names: `python -I -S linux_names.py DIRECTORY`.

From stdin a JSON list of [uid, [gid, groups...], operation, arguments...]; to stdout a JSON list of [errno, result],
and at the end the tree. For root: the directory becomes the root of this process, so that paths may go up and begin at
"/". Nothing but the standard library is imported: it starts in no time.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import sys
from collections.abc import Callable
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
SKIPPED = -1
AT_FDCWD = -100
AT_SYMLINK_FOLLOW = 0x400


def main() -> None:
    operations = json.loads(sys.stdin.read())
    os.umask(0)
    os.chdir(sys.argv[1])
    os.chroot(".")
    results = [carry_out(*operation) for operation in operations]
    print(json.dumps([*results, tree(".")]))


def carry_out(uid: int, groups: list[int], name: str, *arguments: Any) -> tuple[int, Any]:
    os.setgroups(groups[1:])
    os.setegid(groups[0])
    os.seteuid(uid)
    try:
        return 0, OPERATIONS[name](*arguments)
    except OSError as error:
        return error.errno or 0, None
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups([])


def open_file(path: str, flags: int, mode: int) -> None:
    """That nobody is at the other end of a fifo is no matter of names."""
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK, mode))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise


def link(existing: str, path: str, follow: bool) -> int:
    """Linux protects files of others from links (`protected_hardlinks`), which is above file systems."""
    try:
        if os.geteuid() not in (0, os.stat(existing, follow_symlinks=follow).st_uid):
            return SKIPPED
    except OSError:
        pass
    # `os.link` of Python 3.11 never follows.
    if LIBC.linkat(AT_FDCWD, existing.encode(), AT_FDCWD, path.encode(), AT_SYMLINK_FOLLOW if follow else 0):
        raise OSError(ctypes.get_errno(), "linkat")
    return 0


def rename(source: str, target: str, flags: int) -> None:
    if LIBC.renameat2(AT_FDCWD, source.encode(), AT_FDCWD, target.encode(), flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def utime(path: str, now: bool, follow: bool) -> None:
    os.utime(path, None if now else (1, 2), follow_symlinks=follow)


def stat_of(path: str, follow: bool) -> list[Any]:
    found = os.stat(path, follow_symlinks=follow)
    kind = stat.S_IFMT(found.st_mode)
    links = found.st_nlink
    return [kind, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, links, found.st_rdev]


def tree(top: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for directory, directories, files in os.walk(top):
        for name in [*directories, *files]:
            path = os.path.join(directory, name)
            target = os.readlink(path) if os.path.islink(path) else ""
            found[path] = [*stat_of(path, False), target]
    return found


OPERATIONS: dict[str, Callable[..., Any]] = {
    "open": open_file,
    "mkdir": os.mkdir,
    "mknod": os.mknod,
    "symlink": os.symlink,
    "link": link,
    "unlink": os.unlink,
    "rmdir": os.rmdir,
    "rename": rename,
    "chmod": os.chmod,
    "chown": lambda path, uid, gid, follow: os.chown(path, uid, gid, follow_symlinks=follow),
    "utime": utime,
    "stat": stat_of,
    "listdir": lambda path: sorted(os.listdir(path)),
    "readlink": os.readlink,
    "setxattr": lambda path, name, value, flags: os.setxattr(path, name, value.encode(), flags, follow_symlinks=False),
    "getxattr": lambda path, name: os.getxattr(path, name, follow_symlinks=False).decode(),
    "removexattr": lambda path, name: os.removexattr(path, name, follow_symlinks=False),
    "listxattr": lambda path: sorted(os.listxattr(path, follow_symlinks=False)),
}

if __name__ == "__main__":
    main()

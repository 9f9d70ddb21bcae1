"""Calls that the kernel has a part in, each with what became of it: `python kernel_calls.py WHAT DIRECTORY OTHER`.

The same program runs in a directory of a local file system and of a mount, and prints {name: errno or result} as JSON.
OTHER is on another file system. Only the standard library.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

__all__: list[str] = []

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _AT_FOLLOW = -100, 0x400
_LOCK = struct.Struct("hhqqi4x")
_OFD_SETLK = 37
_SETLKW = 7
_found: dict[str, Any] = {}


def told(name: str, act: Callable[[], object], *, value: bool = False) -> None:
    """What it says, or only whether it went well."""
    assert name not in _found, name
    try:
        result = act()
    except OSError as error:
        _found[name] = errno.errorcode[error.errno or 0]
    else:
        _found[name] = result if value else "ok"


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def lock(fd: int, command: int, kind: int, start: int, size: int) -> object:
    return fcntl.fcntl(fd, command, _LOCK.pack(kind, os.SEEK_SET, start, size, 0))


def make(path: str, data: bytes = b"0123456789") -> str:
    with open(path, "wb") as file:
        file.write(data)
    return path


def with_descriptors() -> None:
    make("file")
    on: dict[str, Callable[[int], object]] = {
        "read": lambda fd: os.read(fd, 1),
        "pread": lambda fd: os.pread(fd, 1, 0),
        "write": lambda fd: os.write(fd, b"x"),
        "pwrite": lambda fd: os.pwrite(fd, b"x", 0),
        "fsync": os.fsync,
        "fdatasync": os.fdatasync,
        "fstat": os.fstat,
        "ftruncate": lambda fd: os.ftruncate(fd, 1),
        "fchmod": lambda fd: os.fchmod(fd, 0o644),
        "fchown": lambda fd: os.fchown(fd, -1, -1),
        "futimens": lambda fd: os.utime(fd, ns=(1, 2)),
        "fallocate": lambda fd: os.posix_fallocate(fd, 0, 1),
        "flock": lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB),
        "lock": lambda fd: lock(fd, fcntl.F_SETLK, fcntl.F_WRLCK, 0, 0),
        "lseek": lambda fd: os.lseek(fd, 0, os.SEEK_END),
        "lseek before": lambda fd: os.lseek(fd, -11, os.SEEK_END),
        "listdir": os.listdir,
        "getxattr": lambda fd: os.getxattr(fd, "user.none"),
        "setxattr": lambda fd: os.setxattr(fd, "user.some", b"value"),
        "fstatvfs": lambda fd: os.fstatvfs(fd).f_namemax,
        "close": os.close,
    }
    os.mkdir("directory")
    os.mkfifo("fifo")
    opened: dict[str, Callable[[], int]] = {
        "closed": lambda: os.open("file", os.O_RDWR),
        "path": lambda: os.open("file", os.O_PATH),
        "reading": lambda: os.open("file", os.O_RDONLY),
        "writing": lambda: os.open("file", os.O_WRONLY),
        "directory": lambda: os.open("directory", os.O_RDONLY),
        "fifo": lambda: os.open("fifo", os.O_RDWR | os.O_NONBLOCK),
    }
    for kind, open_ in opened.items():
        for name, act in on.items():
            if (kind, name) == ("directory", "lseek before"):
                continue  # places in directories are each file system's own
            fd = open_()
            if kind == "closed":
                os.close(fd)
            told(f"{name} of {kind}", lambda act=act, fd=fd: act(fd))  # type: ignore[misc]
            if kind != "closed" and name != "close":
                os.close(fd)


def with_memory() -> None:
    make("mapped", bytes(10_000))
    fd = os.open("mapped", os.O_RDONLY)
    told("map for writing what is open for reading", lambda: mmap.mmap(fd, 100, mmap.MAP_SHARED))
    told("map privately", lambda: mmap.mmap(fd, 100, mmap.MAP_PRIVATE))
    directory = os.open(".", os.O_RDONLY)
    told("map a directory", lambda: mmap.mmap(directory, 100, mmap.MAP_SHARED, mmap.PROT_READ))
    fd = os.open("mapped", os.O_WRONLY)
    told("map what is open for writing", lambda: mmap.mmap(fd, 100, mmap.MAP_SHARED, mmap.PROT_READ))
    fd = os.open("mapped", os.O_RDWR)
    with mmap.mmap(fd, 10_000) as memory:
        memory[9_990:] = b"in memory."
        told("read what was mapped", lambda: os.pread(fd, 20, 9_985).decode(), value=True)
        os.pwrite(fd, b"by a call", 100)
        told("see in memory what was written", lambda: memory[100:109].decode(), value=True)
        memory.flush()
        os.unlink("mapped")
        memory[0:4] = b"gone"
        told("read what was unlinked", lambda: os.pread(fd, 4, 0).decode(), value=True)


def with_programs() -> None:
    shutil.copy(os.path.realpath("/bin/sleep"), "program")
    fd = os.open("program", os.O_WRONLY)
    told("execute what is open for writing", lambda: subprocess.run(["./program", "0"], check=True))
    os.close(fd)
    process = subprocess.Popen(["./program", "100"])
    told("write what is executed", lambda: os.open("program", os.O_WRONLY))
    told("truncate what is executed", lambda: os.truncate("program", 1))
    told("unlink what is executed", lambda: os.unlink("program"))
    process.kill()
    process.wait()
    make("script", b"#!/bin/sh\nexit 0\n")
    told("execute without the right", lambda: subprocess.run(["./script"], check=True))
    os.chmod("script", 0o700)
    told("execute a script", lambda: subprocess.run(["./script"], check=True))


def with_special_files(other: str) -> None:
    os.mkfifo("pipe")
    told("write to a pipe that nobody reads", lambda: os.open("pipe", os.O_WRONLY | os.O_NONBLOCK))
    reading = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    told("write to a pipe", lambda: os.write(os.open("pipe", os.O_WRONLY | os.O_NONBLOCK), b"x"), value=True)
    told("read from a pipe", lambda: os.read(reading, 10).decode(), value=True)
    told("read a place of a pipe", lambda: os.pread(reading, 1, 0))
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        told("bind", lambda: server.bind("socket"))
        told("bind again", lambda: client.bind("socket"))
        told("is a socket", lambda: stat.S_ISSOCK(os.stat("socket").st_mode), value=True)
        told("open a socket", lambda: os.open("socket", os.O_RDWR))
        server.listen()
        told("connect", lambda: client.connect("socket"))
    make("file of ours")
    told("rename elsewhere", lambda: os.rename("file of ours", f"{other}/x"))
    told("link elsewhere", lambda: os.link("file of ours", f"{other}/x"))


def with_limits() -> None:
    fd = os.open(make("large"), os.O_RDWR)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    told("write over the limit", lambda: os.pwrite(fd, b"x", 1000))
    told("write up to the limit", lambda: os.pwrite(fd, bytes(100), 950), value=True)
    told("truncate over the limit", lambda: os.ftruncate(fd, 1001))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told("size", lambda: os.fstat(fd).st_size, value=True)
    told("ask for what is no right", lambda: checked(_libc.access(b"large", 8)))
    told("copy within", lambda: os.copy_file_range(fd, os.open("copied", os.O_RDWR | os.O_CREAT), 500, 0), value=True)
    told("send", lambda: os.sendfile(os.open("sent", os.O_RDWR | os.O_CREAT), fd, 0, 300), value=True)
    told("copied and sent", lambda: [os.stat(name).st_size for name in ("copied", "sent")], value=True)
    told("write at once", lambda: os.write(os.open("sync", os.O_RDWR | os.O_CREAT | os.O_SYNC), b"x"), value=True)


def with_what_was_removed() -> None:
    os.mkdir("gone")
    inside = os.open("gone", os.O_RDONLY)
    os.chdir("gone")
    os.rmdir("../gone")
    told("make in what was removed", lambda: os.open("x", os.O_RDWR | os.O_CREAT))
    told("mkdir in what was removed", lambda: os.mkdir("x"))
    told("symlink in what was removed", lambda: os.symlink("x", "x"))
    told("rename in what was removed", lambda: os.rename("x", "y"))
    told("rename into what was removed", lambda: os.rename("../file", "y"))
    told("list what was removed", lambda: os.listdir("."), value=True)
    told("links of what was removed", lambda: os.stat(".").st_nlink, value=True)
    told("make in it by its descriptor", lambda: os.open("x", os.O_RDWR | os.O_CREAT, dir_fd=inside))
    os.chdir("..")
    fd = os.open(make("unlinked"), os.O_RDWR)
    os.unlink("unlinked")
    again = f"/proc/self/fd/{fd}"
    told("open again what was unlinked", lambda: os.read(os.open(again, os.O_RDONLY), 4).decode(), value=True)
    told("link of unlinked", lambda: checked(
        _libc.linkat(_AT_FDCWD, again.encode(), _AT_FDCWD, b"back", _AT_FOLLOW)))  # fmt: skip
    told("attribute of unlinked", lambda: os.setxattr(fd, "user.a", b"b"))
    told("chmod of unlinked", lambda: os.fchmod(fd, 0o600))
    told("truncate unlinked", lambda: os.ftruncate(fd, 5))
    told("its size", lambda: os.fstat(fd).st_size, value=True)


def with_locks() -> None:
    one, two = (os.open(make("locked"), os.O_RDWR) for _ in range(2))
    told("a lock of an open file", lambda: lock(one, _OFD_SETLK, fcntl.F_WRLCK, 0, 5))
    told("another open file's", lambda: lock(two, _OFD_SETLK, fcntl.F_WRLCK, 4, 5))
    told("beside it", lambda: lock(two, _OFD_SETLK, fcntl.F_WRLCK, 5, 5))
    os.close(one)
    told("after the first was closed", lambda: lock(two, _OFD_SETLK, fcntl.F_WRLCK, 0, 5))
    os.close(two)
    fd = os.open("locked", os.O_RDWR)
    for start, size in ((-1, 1), (0, -1), (10, -5), (1 << 62, 1 << 62)):
        told(f"lock {start} {size}", lambda start=start, size=size: lock(fd, fcntl.F_SETLK, fcntl.F_WRLCK, start, size))  # type: ignore[misc]
        told(f"is locked {start} {size}", lambda: _locked_for_others(9, 1), value=True)
        lock(fd, fcntl.F_SETLK, fcntl.F_UNLCK, 0, 0)
    told("a circle of two who wait", _circle, value=True)


def _in_the_way(start: int, size: int) -> bool:
    """Of this process."""
    fd = os.open("locked", os.O_RDWR)
    asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, size, 0)
    found: int = _LOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))[0]
    return found != fcntl.F_UNLCK


def _locked_for_others(start: int, size: int) -> bool:
    child = os.fork()
    if not child:
        os._exit(_in_the_way(start, size))
    return os.waitpid(child, 0)[1] != 0


def _circle() -> list[str]:
    """Each has one byte and waits for the other's."""
    reading, writing = os.pipe()
    children = []
    for own in range(2):
        child = os.fork()
        if not child:
            fd = os.open("locked", os.O_RDWR)
            lock(fd, fcntl.F_SETLK, fcntl.F_WRLCK, own, 1)
            os.write(writing, b"x")
            while not _in_the_way(1 - own, 1):
                time.sleep(0.001)
            try:
                lock(fd, _SETLKW, fcntl.F_WRLCK, 1 - own, 1)
            except OSError as error:
                os._exit(error.errno or 255)
            os._exit(0)
        children.append(child)
    assert len(os.read(reading, 2)) >= 1
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return sorted(errno.errorcode.get(code, "ok") for code in codes)


def read_only() -> None:
    """Where `write_all` has been."""
    acts: dict[str, Callable[[], object]] = {
        "open to write": lambda: os.open("file", os.O_WRONLY),
        "open for both": lambda: os.open("file", os.O_RDWR),
        "open to truncate": lambda: os.open("file", os.O_RDONLY | os.O_TRUNC),
        "create": lambda: os.open("new", os.O_RDONLY | os.O_CREAT),
        "create what is there": lambda: os.open("file", os.O_RDONLY | os.O_CREAT),
        "create exclusively what is there": lambda: os.open("file", os.O_RDONLY | os.O_CREAT | os.O_EXCL),
        "mkdir": lambda: os.mkdir("new"),
        "mkdir of what is there": lambda: os.mkdir("directory"),
        "mknod": lambda: os.mkfifo("new"),
        "symlink": lambda: os.symlink("x", "new"),
        "link": lambda: os.link("file", "new"),
        "unlink": lambda: os.unlink("file"),
        "unlink of nothing": lambda: os.unlink("none"),
        "rmdir": lambda: os.rmdir("directory"),
        "rename": lambda: os.rename("file", "new"),
        "truncate": lambda: os.truncate("file", 1),
        "chmod": lambda: os.chmod("file", 0o600),
        "chown": lambda: os.chown("file", 5, 5),
        "utimens": lambda: os.utime("file"),
        "setxattr": lambda: os.setxattr("file", "user.a", b"b"),
        "removexattr": lambda: os.removexattr("file", "user.kept"),
        "access to write": lambda: checked(_libc.access(b"file", os.W_OK)),
        "access to read": lambda: checked(_libc.access(b"file", os.R_OK)),
        "write to a pipe": lambda: os.open("fifo", os.O_RDWR | os.O_NONBLOCK),
        "stat": lambda: os.stat("file"),
        "read": lambda: os.read(os.open("file", os.O_RDONLY), 10),
        "listdir": lambda: os.listdir("."),
        "readlink": lambda: os.readlink("link"),
        "getxattr": lambda: os.getxattr("file", "user.kept"),
        "lock": lambda: fcntl.flock(os.open("file", os.O_RDONLY), fcntl.LOCK_SH),
        "fsync": lambda: os.fsync(os.open("file", os.O_RDONLY)),
    }
    for name, act in acts.items():
        told(name, act)


def to_be_read() -> None:
    os.setxattr(make("file"), "user.kept", b"value")
    os.mkdir("directory")
    os.mkfifo("fifo")
    os.symlink("file", "link")


def main() -> None:
    what, directory, other = sys.argv[1:]
    os.umask(0o022)
    os.chdir(directory)
    if what == "read only":
        read_only()
    elif what == "to be read":
        to_be_read()
    else:
        with_descriptors()
        with_memory()
        with_programs()
        with_special_files(other)
        with_limits()
        with_what_was_removed()
        with_locks()
    print(json.dumps(_found))


if __name__ == "__main__":
    main()

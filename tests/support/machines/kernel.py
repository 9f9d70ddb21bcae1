"""System calls that Python 3.11 has no functions for. All raise `OSError`.

Standard library only: the programs of a machine start without site-packages.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

__all__ = [
    "BIND",
    "ISOLATED",
    "RECURSIVE",
    "bind",
    "change_root",
    "die_with_parent",
    "enter",
    "make_read_only",
    "mount",
    "unmount",
    "unshare",
]

BIND: Final = 0x1000
RECURSIVE: Final = 0x4000
_DETACH: Final = 0x2
_NEW_MOUNTS, _NEW_HOSTNAME, _NEW_IPC, _NEW_PIDS, _NEW_NETWORK = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
ISOLATED: Final = _NEW_MOUNTS | _NEW_HOSTNAME | _NEW_IPC | _NEW_PIDS | _NEW_NETWORK
"""The namespaces that a machine has for itself. Users and control groups are those of the host."""
_PDEATHSIG: Final = 1
_MOUNT_SETATTR: Final = 442
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_READ_ONLY: Final = 0x1

_libc: Final = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    """struct mount_attr of mount_setattr(2)."""

    _fields_ = (
        ("to_set", ctypes.c_uint64),
        ("to_clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    )


def unshare(flags: int) -> None:
    """Moves this process into new namespaces; of processes, its children from now on."""
    _check(_libc.unshare(flags), "unshare")


def enter(pid: int) -> None:
    """Moves this process into the namespaces of a machine, given one of its processes; of processes, its children."""
    fd = os.pidfd_open(pid)
    try:
        _check(_libc.setns(fd, ISOLATED), f"enter the namespaces of process {pid}")
    finally:
        os.close(fd)


def die_with_parent() -> None:
    """Asks for SIGKILL when the thread that started this process ends. A change of user takes it back."""
    _check(_libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def mount(source: str, target: str, kind: str | None, flags: int = 0, options: str | None = None) -> None:
    words = [word if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    _check(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {source} on {target}")


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """With all that is mounted below `source`. `target` exists."""
    mount(source, target, None, BIND | RECURSIVE)
    if read_only:
        make_read_only(target)


def make_read_only(path: str, *, recursive: bool = True) -> None:
    """A mount, and all below it."""
    wanted = _MountAttributes(to_set=_READ_ONLY)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    how = ctypes.c_uint(_AT_RECURSIVE if recursive else 0)
    arguments = (ctypes.c_int(_AT_FDCWD), os.fsencode(path), how, ctypes.byref(wanted), size)
    _check(_libc.syscall(ctypes.c_long(_MOUNT_SETATTR), *arguments), f"make the mount {path} read-only")


def unmount(path: str) -> None:
    """At once; the kernel releases it when nobody uses it any more."""
    _check(_libc.umount2(os.fsencode(path), _DETACH), f"unmount {path}")


def change_root(path: str) -> None:
    """To a mount; the old root and all mounts in it are gone for this process and its children."""
    os.chdir(path)
    _check(_libc.pivot_root(b".", b"."), f"make {path} the root")
    unmount(".")
    os.chdir("/")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")

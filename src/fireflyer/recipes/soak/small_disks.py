"""Small file systems for directories of services, so that a disk can be full without filling that of the machine.

Each is ext4 in a sparse file beside the directory: storage nodes reserve space in large pieces, which would be memory
on a tmpfs. They are mounted in a mount namespace of this process and those that it starts: nobody else sees them, and
they are gone with these processes. That needs root and a loop device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from typing import Final

from fireflyer.base.errors import PermanentError
from fireflyer.base.units import MIB

__all__ = ["SmallDisk", "own_mounts"]

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS: Final = 0x20000
_FILLER: Final = "filler"
_LEAST: Final = 4096
_NEVER: Final = 1 << 50
"""Bytes; no disk of a soak is larger."""


def own_mounts(directory: str) -> str:
    """From now on mounts of this process are seen by it and its children only. What keeps it from mounting small file
    systems; empty: nothing. One is tried below `directory`. For the thread that starts everything."""
    try:
        if _LIBC.unshare(_CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        _run("mount", "--make-rprivate", "/")
        tried = os.path.join(directory, "small-disk")
        os.makedirs(tried, exist_ok=True)
        SmallDisk(tried, 16 * MIB).close()
        shutil.rmtree(tried)
    except (OSError, PermanentError) as error:
        return f"small file systems cannot be mounted: {error}; run as root"
    return ""


class SmallDisk:
    """`directory` on a file system of `size_bytes` of its own, with what is in it. Whoever uses it must not run."""

    def __init__(self, directory: str, size_bytes: int) -> None:
        self.directory = directory
        self._below = f"{directory}.below"
        self._image = f"{directory}.image"
        self._filler = os.path.join(directory, _FILLER)
        for leftover in (self._below, self._image):  # of one that was killed
            shutil.rmtree(leftover) if os.path.isdir(leftover) else _unlink(leftover)
        with open(self._image, "wb") as image:
            image.truncate(size_bytes)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", self._image)
        os.rename(directory, self._below)
        os.mkdir(directory, 0o700)
        _run("mount", "-o", "loop", self._image, directory)
        os.chmod(directory, 0o700)
        shutil.copytree(self._below, directory, dirs_exist_ok=True, ignore=_not_files)

    def fill(self) -> int:
        """Until nothing fits any more; how many bytes that took."""
        size, piece = 0, _NEVER
        fd = os.open(self._filler, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while piece >= _LEAST:
                try:
                    os.posix_fallocate(fd, size, piece)
                    size += piece
                except OSError:
                    piece //= 2
        finally:
            os.close(fd)
        return size

    def empty(self) -> None:
        """Takes `fill` back."""
        _unlink(self._filler)

    def close(self) -> None:
        """What is in it lies in `directory` afterwards, as on the disk of the machine. Whoever used it has ended."""
        self.empty()
        shutil.rmtree(self._below)
        shutil.copytree(self.directory, self._below, ignore=_not_files)
        _run("umount", "--lazy", self.directory)
        os.rmdir(self.directory)
        os.rename(self._below, self.directory)
        _unlink(self._image)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _not_files(directory: str, names: list[str]) -> list[str]:
    """Sockets and other things that cannot be copied, and what mkfs makes."""
    paths = {name: os.path.join(directory, name) for name in names}
    return [name for name, path in paths.items() if name == "lost+found" or not _is_plain(path)]


def _is_plain(path: str) -> bool:
    return os.path.isfile(path) or os.path.isdir(path)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PermanentError(f"there is no {command[0]}") from None
    if done.returncode:
        raise PermanentError(f"{' '.join(command[:1])} failed: {done.stderr.strip()}")

"""What the service says of files, as Python knows it: like `os.stat_result`, `os.DirEntry`, `os.statvfs_result`."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from fireflyer.fs.schema.inodes import DeviceDetails, DirectoryDetails, FileDetails, Inode, InodeId, Kind

__all__ = ["Attributes", "ChildPath", "DirEntry", "Statvfs", "text_of"]

_TYPE: Final = {
    Kind.FILE: stat.S_IFREG,
    Kind.DIRECTORY: stat.S_IFDIR,
    Kind.SYMLINK: stat.S_IFLNK,
    Kind.FIFO: stat.S_IFIFO,
    Kind.SOCKET: stat.S_IFSOCK,
    Kind.CHARACTER: stat.S_IFCHR,
    Kind.BLOCK: stat.S_IFBLK,
}
_BLOCK: Final = 512
_SECOND: Final = 1_000_000_000


class Attributes:
    """Fields as `os.stat_result` has them; `st_dev` is 0. `inode`: all that the service knows."""

    __slots__ = ("inode", "st_size")

    def __init__(self, inode: Inode, length: int | None = None) -> None:
        """`length`: where the client knows of more than the service."""
        self.inode = inode
        self.st_size = inode.length if length is None else length

    @property
    def st_mode(self) -> int:
        return _TYPE[self.inode.kind] | self.inode.mode

    @property
    def st_ino(self) -> int:
        return self.inode.id

    @property
    def st_dev(self) -> int:
        return 0

    @property
    def st_nlink(self) -> int:
        body = self.inode.body
        return 2 + body.subdirectories if isinstance(body, DirectoryDetails) and self.inode.links else self.inode.links

    @property
    def st_uid(self) -> int:
        return self.inode.uid

    @property
    def st_gid(self) -> int:
        return self.inode.gid

    @property
    def st_rdev(self) -> int:
        return self.inode.body.device if isinstance(self.inode.body, DeviceDetails) else 0

    @property
    def st_blksize(self) -> int:
        return self.inode.body.layout.chunk_bytes if isinstance(self.inode.body, FileDetails) else 4096

    @property
    def st_blocks(self) -> int:
        """As if there were no holes."""
        return -(-self.st_size // _BLOCK) if self.inode.kind is Kind.FILE else 0

    @property
    def st_atime_ns(self) -> int:
        return self.inode.atime_ns

    @property
    def st_mtime_ns(self) -> int:
        return self.inode.mtime_ns

    @property
    def st_ctime_ns(self) -> int:
        return self.inode.ctime_ns

    @property
    def st_atime(self) -> float:
        return self.inode.atime_ns / _SECOND

    @property
    def st_mtime(self) -> float:
        return self.inode.mtime_ns / _SECOND

    @property
    def st_ctime(self) -> float:
        return self.inode.ctime_ns / _SECOND

    def is_dir(self) -> bool:
        return self.inode.kind is Kind.DIRECTORY

    def is_file(self) -> bool:
        return self.inode.kind is Kind.FILE

    def is_symlink(self) -> bool:
        return self.inode.kind is Kind.SYMLINK

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attributes) and self.inode == other.inode and self.st_size == other.st_size

    def __hash__(self) -> int:
        return hash((self.inode.id, self.inode.ctime_ns, self.st_size))

    def __repr__(self) -> str:
        return f"Attributes({stat.filemode(self.st_mode)} inode={self.st_ino} size={self.st_size})"


@dataclass(frozen=True)
class DirEntry:
    """Of a directory that was listed with its inodes. `attributes`: its own, not of what a symbolic link leads to."""

    name: str
    path: str
    attributes: Attributes

    @cached_property
    def kind(self) -> Kind:
        return self.attributes.inode.kind

    def inode(self) -> int:
        return self.attributes.st_ino

    def is_dir(self) -> bool:
        return self.kind is Kind.DIRECTORY

    def is_file(self) -> bool:
        return self.kind is Kind.FILE

    def is_symlink(self) -> bool:
        return self.kind is Kind.SYMLINK

    def stat(self) -> Attributes:
        return self.attributes

    def __fspath__(self) -> str:
        return self.path


@dataclass(frozen=True)
class ChildPath:
    """A name in a directory that is named by its inode, where a path is wanted: whoever renames what is above the
    directory, or puts a symbolic link there, changes nothing."""

    directory: InodeId
    name: str
    """Empty: the directory itself."""
    shown: str
    """In errors."""

    def __fspath__(self) -> str:
        return self.shown


class Statvfs(NamedTuple):
    """As `os.statvfs` says it."""

    f_bsize: int
    f_frsize: int
    f_blocks: int
    f_bfree: int
    f_bavail: int
    f_files: int
    f_ffree: int
    f_favail: int
    f_flag: int
    f_namemax: int


def text_of(name: bytes) -> str:
    """As `os.fsdecode` in a UTF-8 locale, wherever this runs."""
    return name.decode("utf-8", "surrogateescape")


def path_bytes(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> bytes:
    found = os.fspath(path)
    return found.encode("utf-8", "surrogateescape") if isinstance(found, str) else found

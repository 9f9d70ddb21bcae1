"""From a place to an inode, as Linux walks a path.

    Walker(place) ──parent()──> Spot: the directory that the last name is in, searched, and that name
          ^                       │
          └──────enter(link)──────┘   where the last name is a symbolic link that is to be followed

At each name, in this order: is it a directory (ENOTDIR), may it be searched (EACCES), is the name too long, is it
there. That also goes for "." and "..". A slash behind the last name wants a directory, and follows a symbolic link.

A link may name another one after two thousand times ".", so the names that links add are counted, not links only.
"""

from __future__ import annotations

import enum
import errno
from dataclasses import dataclass
from typing import Final

from fireflyer.fs.core.meta.context import REST_MASK, Context
from fireflyer.fs.core.meta.inodes.directories import parent_of, require_reach
from fireflyer.fs.core.meta.inodes.permissions import EXECUTE, permits
from fireflyer.fs.core.meta.tables import DentryRow, corrupt, decode_entry, entry_key, inode_key
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.inodes import (
    MAX_NAME_BYTES,
    MAX_PATH_BYTES,
    MAX_SYMLINKS,
    ROOT,
    Inode,
    Kind,
    SymlinkDetails,
)
from fireflyer.fs.schema.meta import PathRef

__all__ = ["LastComponent", "LastType", "Walker", "find", "look_up"]

MAX_NAMES: Final = 4096
"""Of a path with all links on its way: twice what a path has at most."""


class LastType(enum.Enum):
    NAME = enum.auto()
    DOT = enum.auto()
    DOT_DOT = enum.auto()
    NOTHING = enum.auto()
    """The path is "/" or empty: where it begins is where it ends."""


_DOTS = {b".": LastType.DOT, b"..": LastType.DOT_DOT}


@dataclass(slots=True)
class LastComponent:
    directory: Inode
    """Searched; with `LastType.NOTHING` what the path names, whatever its kind."""
    name: bytes
    last: LastType
    slash: bool
    """Behind the name."""


class Walker:
    __slots__ = ("_context", "_directory", "_links", "_names", "_pending", "_place", "_slash")

    def __init__(self, context: Context, place: PathRef) -> None:
        """Raises ENAMETOOLONG, EINVAL."""
        path = place.path
        if len(path) > MAX_PATH_BYTES:
            raise file_error(errno.ENAMETOOLONG)
        if b"\0" in path:
            raise file_error(errno.EINVAL, "the path contains a zero byte")
        self._context = context
        self._place = place
        self._directory: Inode | None = None
        self._links = 0
        self._names = 0
        self._slash = False
        self._pending: list[bytes] = []
        if b"/" in path:
            self._push(path)
        elif path:
            self._pending.append(path)

    async def parent(self) -> LastComponent:
        """Raises ENOTDIR, EACCES, ENOENT, ENAMETOOLONG, ELOOP; ESTALE where the place's base is gone."""
        context, pending = self._context, self._pending
        directory = self._directory or await self._start()
        while pending:
            if directory.kind is not Kind.DIRECTORY:
                raise file_error(errno.ENOTDIR)
            if not permits(context.requester, directory, EXECUTE):
                raise file_error(errno.EACCES)
            name = pending.pop()
            context.steps += 1
            if not context.steps & REST_MASK:
                await context.rest()
            if not pending:
                self._directory = directory
                return LastComponent(directory, name, _DOTS.get(name, LastType.NAME), self._slash)
            if name == b".":
                continue
            if name == b"..":
                directory = await parent_of(context, directory)
                continue
            entry = await look_up(context, directory, name)
            if entry is None:
                raise file_error(errno.ENOENT)
            inode = await context.known(entry.id)
            if isinstance(inode.body, SymlinkDetails):
                directory = await self._jump(directory, inode.body.target)
            else:
                directory = inode
        self._directory = directory
        return LastComponent(directory, b"", LastType.NOTHING, self._slash)

    async def enter(self, link: SymlinkDetails) -> None:
        """The last name was this link: `parent` then goes on behind it. Raises ELOOP."""
        if self._directory is not None:
            self._slash = self._slash or link.target.endswith(b"/")
            self._directory = await self._jump(self._directory, link.target)

    async def _start(self) -> Inode:
        base = ROOT if self._place.path.startswith(b"/") else self._place.base
        inode = await self._context.inode(base)
        if inode is None:
            if base == ROOT:
                raise corrupt(inode_key(ROOT), "is missing: the file system has no root directory")
            raise file_error(errno.ESTALE, "the directory at which the path begins was removed")
        if base != ROOT and self._context.requester.by_path:
            await require_reach(self._context, inode)
        return inode

    async def _jump(self, directory: Inode, target: bytes) -> Inode:
        self._links += 1
        if self._links > MAX_SYMLINKS:
            raise file_error(errno.ELOOP)
        slash = self._slash
        self._push(target)
        self._slash = slash
        return await self._context.known(ROOT) if target.startswith(b"/") else directory

    def _push(self, path: bytes) -> None:
        parts = [part for part in path.split(b"/") if part]
        self._names += len(parts)
        if self._names > MAX_NAMES:
            raise file_error(errno.ELOOP, f"the symbolic links on the path have more than {MAX_NAMES} components")
        parts.reverse()
        self._pending.extend(parts)
        self._slash = path.endswith(b"/")


async def look_up(context: Context, directory: Inode, name: bytes) -> DentryRow | None:
    """A name in a directory that was searched. Raises ENAMETOOLONG."""
    if len(name) > MAX_NAME_BYTES:
        raise file_error(errno.ENAMETOOLONG)
    key = entry_key(directory.id, name)
    value = await context.rows.get(key)
    return None if value is None else decode_entry(key, value)


async def find(context: Context, place: PathRef, *, follow: bool = True) -> Inode:
    """What is there; a symbolic link at the end is followed or found. An empty path is the base itself.
    Raises the errors of a path."""
    walker = Walker(context, place)
    while True:
        spot = await walker.parent()
        if spot.last is LastType.DOT_DOT:
            return await parent_of(context, spot.directory)
        if spot.last is not LastType.NAME:
            return spot.directory
        entry = await look_up(context, spot.directory, spot.name)
        if entry is None:
            raise file_error(errno.ENOENT)
        inode = await context.known(entry.id)
        if isinstance(inode.body, SymlinkDetails) and (follow or spot.slash):
            await walker.enter(inode.body)
            continue
        if spot.slash and inode.kind is not Kind.DIRECTORY:
            raise file_error(errno.ENOTDIR)
        return inode

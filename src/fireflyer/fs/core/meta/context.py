"""What a body of the meta service is given: a transaction, who asks, the time, new ids, the defaults of the cluster.

A body may run several times and must have no effect but through `Context.rows`. It raises `FileError` for what it
refuses, and then nothing of it happens: whoever runs it drops what it has written.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from fireflyer.fs.core.meta.tables import corrupt, decode_inode, encode_inode, inode_key
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.ids import MAX_CHUNK_BYTES, ClientId, TableId
from fireflyer.fs.schema.inodes import Inode, InodeId

__all__ = ["MAX_STEPS", "REST_MASK", "SYSTEM", "ClusterDefaults", "Context", "Page", "Requester", "Rows"]

MAX_STEPS: Final = 1 << 17
"""Names and directories that one request may be led over: 1024 paths of 128 names."""
REST_MASK: Final = 0xFF
"""Whoever counts a step calls `Context.rest` when these bits of the sum are 0."""


class Page(Protocol):
    @property
    def items(self) -> Sequence[tuple[bytes, bytes]]: ...

    @property
    def more(self) -> bool:
        """There may be rows behind the last one."""


class Rows(Protocol):
    """A transaction of the store; `fireflyer.kvstore.Transaction` is one."""

    async def get(self, key: bytes) -> bytes | None: ...

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    async def get_range(self, begin: bytes, end: bytes | None, *, limit: int) -> Page: ...

    def set(self, key: bytes, value: bytes) -> None: ...

    def clear(self, key: bytes) -> None: ...

    def clear_range(self, begin: bytes, end: bytes | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Requester:
    """Who asks. `unrestricted`: as the superuser of POSIX."""

    client: ClientId
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    unrestricted: bool = False
    by_path: bool = False
    """Names things by paths: numbers of inodes prove nothing, since they can be guessed. Trusted mounts have walked the
    path to a number before they use it."""

    def has_group(self, gid: int) -> bool:
        return gid == self.gid or gid in self.groups


SYSTEM: Final = Requester(0, 0, 0, (), unrestricted=True)
"""The service itself."""


class ClusterDefaults(msgspec.Struct, frozen=True):
    """What new files get where their directory says nothing, and what there is in all."""

    table: TableId = 1
    chains: int = 1
    """Of that table."""
    chunk_bytes: int = MAX_CHUNK_BYTES // 16
    stripe: int = 1
    capacity_bytes: int = 0
    """Of files: less by the number of replicas."""
    free_bytes: int = 0
    inodes: int = 0
    """About how many there are."""


class Context:
    __slots__ = (
        "_yield_to_loop", "cluster", "digest", "new_id", "now_ns", "number", "owner", "requester", "rows", "steps",
    )  # fmt: skip

    def __init__(
        self, *, rows: Rows, requester: Requester, now_ns: int, new_id: Callable[[], InodeId], cluster: ClusterDefaults,
        number: int = 0, owner: ClientId = 0, yield_to_loop: Callable[[], Awaitable[None]] | None = None,
        digest: bytes = b"",
    ) -> None:  # fmt: skip
        self.rows = rows
        self.requester = requester
        self.now_ns = now_ns
        """Unix time."""
        self.new_id = new_id
        self.cluster = cluster
        self.number = number
        """Of the request; 0: it has none."""
        self.owner = owner
        """The session by which chunks will be changed for what this transaction begins; 0: it must not begin that, and
        raises `ports.NotAtOnce`."""
        self.digest = digest
        """Of the request: see `replies`."""
        self.steps = 0
        """Names and directories that it was led over."""
        self._yield_to_loop = yield_to_loop

    async def yield_to_loop(self) -> None:
        """Lets others of the process go on: reads that find all in memory never wait."""
        if self._yield_to_loop is not None:
            await self._yield_to_loop()

    async def rest(self) -> None:
        """After some steps. Raises ELOOP for a request that goes on for too long."""
        await self.yield_to_loop()
        if self.steps > MAX_STEPS:
            raise file_error(
                errno.ELOOP, f"the paths of one request have more than {MAX_STEPS} components; split the request"
            )

    async def inode(self, inode_id: InodeId) -> Inode | None:
        """Raises `DataCorruption`."""
        key = inode_key(inode_id)
        value = await self.rows.get(key)
        return None if value is None else decode_inode(key, value)

    async def known(self, inode_id: InodeId) -> Inode:
        """The inode that another row names. Raises `DataCorruption` also when it is not there."""
        key = inode_key(inode_id)
        value = await self.rows.get(key)
        if value is None:
            raise corrupt(key, "is missing, but a name refers to it")
        return decode_inode(key, value)

    def put(self, inode: Inode) -> None:
        self.rows.set(inode_key(inode.id), encode_inode(inode))

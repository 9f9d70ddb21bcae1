"""What operations need that are more than one transaction: the chunk store, time, and each step as a transaction.

`dispatch.carry_out` is tried first for every request. It raises `NotAtOnce` where the request needs chunks changed or
looked at, or has to wait; nothing of it has happened then, and `procedures.carry_out_long` goes on with these ports.
The service and the simulation hand in their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from fireflyer.base.errors import DataCorruption, PermanentError, UsageError
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.schema.ids import ChainId, ClientId, TableId
from fireflyer.fs.schema.inodes import InodeId
from fireflyer.fs.schema.meta import Answer

__all__ = ["LASTING", "Answered", "ChunkPort", "NotAtOnce", "Ports", "Stored"]

T = TypeVar("T")
LASTING: Final = (PermanentError, DataCorruption, UsageError)
"""Errors of one row or file: the same work again would meet them again, other work goes on."""
Stored: TypeAlias = tuple[int, int]
"""A chunk that is there: its index, and how many bytes it has."""


class NotAtOnce(Exception):
    """Not in one transaction: run `procedures.carry_out_long`."""

    def __init__(self, inode: InodeId, reason: str) -> None:
        super().__init__(f"inode {inode}: {reason}")
        self.inode = inode


class Answered(Exception):
    """Out of `Ports.transact`: the request has its answer already."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(type(answer).__name__)
        self.answer = answer


class ChunkPort(Protocol):
    """The chunk store, by the session `Ports.session`. Raises errors of `fireflyer.base.errors`; then it is not known
    what was done. Updates of one chunk are done in their order: once a later one is answered, an earlier one that had
    failed was before it, or never will be.

    An update has the `session` that alone may send it: the one that the row of the cut names. A service that is taken
    for dead gets another session, and what it had not sent would go on under that one while somebody else has ended the
    cut, and cut off what was written since. Under another session it is refused with `StaleVersion`, at the moment of
    sending. 0: whichever there is."""

    def chains(self, table: TableId) -> Sequence[ChainId]:
        """Of the table, in its order. Raises `NotFound`."""

    async def last(self, file: InodeId, chains: Sequence[ChainId]) -> Sequence[Stored | None]:
        """The last chunk of the file on each of these chains."""

    async def list(self, chain: ChainId, file: InodeId, start: int, limit: int) -> Sequence[Stored]:
        """Its chunks from index `start` on, ascending."""

    async def remove(self, file: InodeId, chunks: Sequence[tuple[ChainId, int]], *, session: ClientId) -> None:
        """Also of chunks that are not there."""

    async def truncate(self, file: InodeId, chain: ChainId, index: int, length: int, *, session: ClientId) -> None:
        """Of a chunk that is longer."""

    async def write_zeros(
        self, file: InodeId, chain: ChainId, index: int, offset: int, size: int, *, session: ClientId
    ) -> None:
        """Into bytes that the chunk has."""


class Ports(Protocol):
    """Of one request, or of the service's own work."""

    @property
    def session(self) -> ClientId:
        """By which `chunks` changes chunks at present."""

    @property
    def settle_ns(self) -> int:
        """So long after the end of a session nothing of it reaches a chunk any more: the storage nodes know of the end,
        or are fenced off."""

    @property
    def chunks(self) -> ChunkPort: ...

    async def transact(self, body: Callable[[Context], Awaitable[T]]) -> T:
        """A serializable transaction, repeated upon conflicts and where its commit is unknown: a body must find out
        what it has done. Raises `Answered` where the request has an answer, `FileError` when its session is over; what
        the body raises."""

    async def together(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """All of it, side by side where that is possible. None of it raises."""

    async def pause(self, delay_ns: int, inode: InodeId) -> None:
        """Or less, when something about the inode has changed."""

    def now_ns(self) -> int:
        """Of a clock that only goes on."""

    def claim(self, inode: InodeId) -> bool:
        """Nobody else in this process changes chunks for an interrupted or running cut of the inode, until `release`.
        False: somebody does."""

    def release(self, inode: InodeId) -> None: ...

    def inodes_in_doubt(self) -> Sequence[InodeId]:
        """Inodes with `in_doubt`."""

    def in_doubt(self, inode: InodeId) -> dict[Any, Any]:
        """What `open_files.truncate` remembers in this process of updates of the inode's chunks whose outcome it does
        not know. The
        same dictionary each time."""

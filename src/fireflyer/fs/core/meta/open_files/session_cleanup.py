"""What clients leave whose sessions are over: files open for writing, holds, locks, waits, answers.

Every client is enrolled (`holds.enrol`), so those whose session has gone are found by comparing two short tables. From
then on no transaction is done for them. What they had sent to chunks may still arrive until `settle_ns` have passed;
then one *sweep* goes through the tables, a page in each step, for all clients that are due:

    seen to be over ──settle_ns──> sweep: locks, waits, holds, writers ──> swept ──KEPT_NS──> answers and enrolment go

A writer that died has reported nothing of its last bytes: the length becomes what the chains have. Where a file cannot
be looked at now (a chain is away, a cut is under way) its writer stays, and the next sweep comes back to it. Since
each may have to wait for its chains, `AT_ONCE` are looked at side by side, and a step ends after `STEP_NS` where it is.
A row that is damaged is left to people.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from fireflyer.base.errors import TransientError
from fireflyer.fs.core.meta import replies
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.open_files import locks, truncate
from fireflyer.fs.core.meta.open_files.lengths import ChunkEnd, drop_writer, file_of, grown, writer_row
from fireflyer.fs.core.meta.open_rows import CLIENTS, LOCKS_ROWS, PAGE_ROWS, WAITS, lives, next_key, pair_of
from fireflyer.fs.core.meta.ports import LASTING, NotAtOnce, Ports
from fireflyer.fs.core.meta.tables import HOLDS, LOCKS, WRITERS, number_key, pair_key, prefix_end
from fireflyer.fs.core.rows import SESSIONS
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import InodeId

__all__ = ["KEPT_NS", "SessionCleaner", "end_writer"]

KEPT_NS: Final = 600_000_000_000
"""Answers of a client whose session is over: it may ask once more what became of its last requests."""
AT_ONCE: Final = 16
"""Rows of dead clients that are ended side by side."""
STEP_NS: Final = 10_000_000_000
_TABLES: Final = (LOCKS, WAITS, HOLDS, WRITERS)


class SessionCleaner:
    """What one process knows of sessions that are over. Another begins anew, which costs only time."""

    def __init__(self) -> None:
        self._seen_ns: dict[ClientId, int] = {}
        self._swept: dict[ClientId, None] = {}
        self._sweeping: tuple[ClientId, ...] = ()
        self._tables: list[bytes] = []
        self._after = b""
        self._left_over: dict[ClientId, None] = {}
        self._failed: TransientError | None = None
        """Of the store: the step is to be repeated."""
        self._noted = ""
        self.last_error = ""
        """Why a file could not be looked at in the last sweep; empty where all could."""

    async def step(self, ports: Ports) -> bool:
        """True: there is more to do at once."""
        if not self._sweeping:
            await self._look(ports)
            due_ns = ports.now_ns() - ports.settle_ns
            due = [one for one, seen_ns in self._seen_ns.items() if seen_ns <= due_ns and one not in self._swept]
            self._sweeping, self._tables, self._after = tuple(due), list(_TABLES), b""
            self._left_over.clear()
            self._noted = ""
        if self._sweeping:
            await self._sweep_page(ports)
        return bool(self._sweeping)

    async def _look(self, ports: Ports) -> None:
        over = await ports.transact(_over)
        now_ns = ports.now_ns()
        self._seen_ns = {one: self._seen_ns.get(one, now_ns) for one in over}
        self._swept = {one: None for one in self._swept if one in self._seen_ns}
        for client in [one for one in self._swept if self._seen_ns[one] <= now_ns - KEPT_NS]:

            async def forget(context: Context, client: ClientId = client) -> None:
                replies.forget_client(context.rows, client)
                context.rows.clear(number_key(CLIENTS, client))

            await ports.transact(forget)

    async def _sweep_page(self, ports: Ports) -> None:
        table = self._tables[0]
        begin = next_key(self._after) if self._after else table

        async def read(context: Context) -> tuple[list[tuple[bytes, bytes]], bool]:
            page = await context.rows.get_range(begin, prefix_end(table), limit=PAGE_ROWS)
            return list(page.items), page.more

        items, more = await ports.transact(read)
        rows = [(key, value) for key, value in items if self._concerns(table, key)]
        until_ns = ports.now_ns() + STEP_NS
        for at in range(0, len(rows), AT_ONCE):
            some = rows[at : at + AT_ONCE]
            self._failed = None
            await ports.together([self._ending(table, key, value, ports) for key, value in some])
            if self._failed is not None:
                raise self._failed
            if at + AT_ONCE < len(rows) and ports.now_ns() > until_ns:
                self._after = some[-1][0]
                return
        if more:
            self._after = items[-1][0]
            return
        self._tables, self._after = self._tables[1:], b""
        if not self._tables:
            self._swept.update((one, None) for one in self._sweeping if one not in self._left_over)
            self._sweeping = ()
            self.last_error = self._noted

    def _ending(self, table: bytes, key: bytes, value: bytes, ports: Ports) -> Callable[[], Awaitable[None]]:
        async def end() -> None:
            try:
                await self._end(table, key, value, ports)
            except TransientError as error:
                self._failed = error
            except LASTING as error:
                self._note(f"row {key.hex()}: {error}")

        return end

    def _note(self, last_error: str) -> None:
        self._noted = self.last_error = last_error

    async def _end(self, table: bytes, key: bytes, value: bytes, ports: Ports) -> None:
        """What there is in this row of those that are over."""
        if table == LOCKS:
            inode_id = int.from_bytes(key[2:], "big")
            held = {lock.client: None for lock in LOCKS_ROWS.decode(key, value).held}
            for client in [one for one in held if one in self._sweeping]:
                await ports.transact(_releasing(inode_id, client))
        elif table in (WAITS, HOLDS):
            await ports.transact(_clearing(key))
        else:
            await self._end_writer(*pair_of(key), ports)

    def _concerns(self, table: bytes, key: bytes) -> bool:
        """Whether a row of one client is of one that is over; locks are of many."""
        if len(key) != 10 if table == LOCKS else len(key) < 18:
            self._note(f"row {key.hex()} has a key of another length")
            return False
        if table == LOCKS:
            return True
        return int.from_bytes(key[2:10] if table == WAITS else key[10:], "big") in self._sweeping

    async def _end_writer(self, inode_id: InodeId, client: ClientId, ports: Ports) -> None:
        try:
            if await end_writer(inode_id, client, ports):
                return
            self._note(f"inode {inode_id} is being truncated by another meta service")
        except (TransientError, *LASTING) as error:
            self._note(f"inode {inode_id}: {error}")
        self._left_over[client] = None


async def end_writer(inode_id: InodeId, client: ClientId, ports: Ports) -> bool:
    """Ends what a client with no session has open for writing. False: not now, a cut is under way."""
    measured: ChunkEnd | None = None
    while True:

        async def body(context: Context, measured: ChunkEnd | None = measured) -> None:
            row = await writer_row(context, inode_id, client)
            if row is None or await lives(context.rows, client):
                return
            inode = await context.inode(inode_id)
            if inode is None:
                context.rows.clear(pair_key(WRITERS, inode_id, client))
                return
            excess = row.excess
            if inode.links:
                before, file = file_of(inode)
                if file.cutting is not None or measured is None or measured.cut != file.cut:
                    raise NotAtOnce(inode_id, "its length must be read from its chunks")
                inode, refused = await grown(context, before, measured.end)
                excess = excess or refused is not None
                if inode is not before:
                    context.put(inode)
            await drop_writer(context, inode, client, excess=excess)

        try:
            await ports.transact(body)
            return True
        except NotAtOnce:
            measured = await truncate.measure(inode_id, ports, patient=False)
            if measured is None:
                return False


async def _over(context: Context) -> list[ClientId]:
    """Clients that are enrolled and have no session."""
    enrolled = await _numbers(context, CLIENTS, prefix_end(CLIENTS))
    living = dict.fromkeys(await _numbers(context, SESSIONS.prefix, SESSIONS.end)) if enrolled else {}
    return [one for one in enrolled if one not in living]


async def _numbers(context: Context, begin: bytes, end: bytes) -> list[int]:
    """The last eight bytes of all keys."""
    found: list[int] = []
    while True:
        page = await context.rows.get_range(begin, end, limit=PAGE_ROWS)
        found += [int.from_bytes(key[-8:], "big") for key, _ in page.items]
        if not page.more:
            return found
        begin = next_key(page.items[-1][0])


def _releasing(inode_id: InodeId, client: ClientId) -> Callable[[Context], Awaitable[None]]:
    async def body(context: Context) -> None:
        await locks.release_all(context, inode_id, client)

    return body


def _clearing(key: bytes) -> Callable[[Context], Awaitable[None]]:
    async def body(context: Context) -> None:
        context.rows.clear(key)

    return body

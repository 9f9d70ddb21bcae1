"""Removes what was unlinked and is open nowhere any more: chunks first, then the inode with its use of the area.

    unlinked in generation g ──mark: raise the generation, then note each client's heartbeats──> waiting
        ──each of them has sent three since, or is over──> ripe
        ──no writer, no hold, no cut──> doomed: `cutting` 0 and no links, so that nobody opens it for writing
        ──chunks removed──> inode, values and locks cleared, area charged, in one transaction

Why the heartbeats tell it is said in `holds`. A client that keeps its session and sends no heartbeats would stop all
collecting: after `EVICT_NS` of silence it is *evicted*. Its row says so, and nothing is done for it any more
(`replies`) until it has another session. Silence is counted only while this process could look, so that an outage
evicts nobody.

What cannot be removed now (a chain is away, a row is damaged) is left out for a while, which grows with each failure:
the others go on. A crash anywhere begins again with what the rows say; marks are memory, and
are made again. Two that collect at the same time do no harm: chunks of a doomed inode are written by nobody, and what
its area is charged is in the transaction that clears it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.errors import TransientError
from fireflyer.fs.core.meta import quota_trees
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.inodes.layout import order_of
from fireflyer.fs.core.meta.open_files.holds import HEARTBEATS_AFTER, client_row, generation, put_client, set_generation
from fireflyer.fs.core.meta.open_files.truncate import remove_all
from fireflyer.fs.core.meta.open_rows import (
    CLIENT_ROWS,
    CLIENTS,
    PAGE_ROWS,
    UNLINKED_ROWS,
    any_in,
    holds_of,
    next_key,
    pair_of,
    truncation_of,
)
from fireflyer.fs.core.meta.ports import LASTING, Ports
from fireflyer.fs.core.meta.tables import (
    LOCKS,
    UNLINKED,
    VALUES,
    WRITERS,
    corrupt,
    inode_key,
    number_key,
    pair_key,
    prefix_end,
)
from fireflyer.fs.core.rows import SESSIONS
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import FileDetails, Inode, InodeId
from fireflyer.fs.schema.manager import COUNTED

__all__ = ["AT_ONCE", "BACKLOG_ROWS", "Backlog", "GarbageCollector", "backlog"]

AT_ONCE: Final = 64
"""Inodes of one step."""
MAX_MARKS: Final = 8
"""That wait. What is unlinked meanwhile waits for the next one."""
MARK_EVERY_NS: Final = 1_000_000_000
EVICT_NS: Final = 180_000_000_000
"""Longer than any request that could keep a heartbeat from being sent."""
MAX_LOOK_NS: Final = 2_000_000_000
"""Of silence, between two looks."""
FIRST_PAUSE_NS: Final = 1_000_000_000
MAX_PAUSE_NS: Final = 300_000_000_000
MAX_FAILED: Final = 1 << 16
"""Inodes that are left out for a while."""
BACKLOG_ROWS: Final = COUNTED
"""That are counted; there may be more."""


class Backlog(NamedTuple):
    """What is unlinked and not collected."""

    inodes: int
    bytes: int
    """Of files, as long as they were when they were unlinked."""
    whole: bool
    """False: there are more than these."""


@dataclass(slots=True)
class _Mark:
    generation: int
    waits_for: dict[ClientId, int]
    """Beats that the client must have had."""


@dataclass(slots=True)
class _Silence:
    heartbeats: int
    """That the client has had all the time."""
    ns: int = 0


@dataclass(slots=True)
class _Failure:
    until_ns: int
    pause_ns: int
    reason: str


class GarbageCollector:
    """What one process knows. Another begins anew."""

    def __init__(self) -> None:
        self._marks: deque[_Mark] = deque()
        self._marked_ns = -MARK_EVERY_NS
        self._marked = -1
        self._ripe = -1
        """Generations up to this one can be collected."""
        self._after = b""
        self._looked_ns = 0
        self._busy = False
        """It was told to be called again at once."""
        self._silent: dict[ClientId, _Silence] = {}
        self._failed: dict[InodeId, _Failure] = {}
        self.evicted = 0
        """Clients, by this process."""

    @property
    def last_error(self) -> str:
        """What is not collected, and why: one of them; empty where all is well."""
        if self._failed:
            inode_id, failure = next(reversed(self._failed.items()))
            return f"inode {inode_id}: {failure.reason}"
        client, silence = max(self._silent.items(), key=lambda one: one[1].ns, default=(0, _Silence(0)))
        if silence.ns > EVICT_NS // 3:
            return f"client {client} sent no heartbeat for {silence.ns // 1_000_000_000} s and will be evicted"
        return ""

    @property
    def waits_for(self) -> tuple[ClientId, ...]:
        """Clients whose heartbeats are waited for."""
        return tuple(self._marks[0].waits_for) if self._marks else ()

    async def step(self, ports: Ports) -> bool:
        """True: there is more to do at once."""
        await self._mark(ports)
        if not self._busy or ports.now_ns() - self._looked_ns >= MARK_EVERY_NS:  # it reads two rows of each client
            await self._advance_marks(ports)
        self._busy = self._ripe >= 0 and await self._collect(ports)
        return self._busy

    # --- when ---

    async def _mark(self, ports: Ports) -> None:
        now_ns = ports.now_ns()
        if len(self._marks) == MAX_MARKS or now_ns - self._marked_ns < MARK_EVERY_NS:
            return
        raised = await ports.transact(self._raise_generation)
        if raised is not None:
            # Read after the generation is raised: whoever has more heartbeats by then has to have more still.
            self._marks.append(_Mark(raised, await ports.transact(_heartbeats_to_come)))
            self._marked, self._marked_ns = raised, now_ns

    async def _raise_generation(self, context: Context) -> int | None:
        number = await generation(context.rows)
        begin = pair_key(UNLINKED, self._marked + 1, 0)
        if not await any_in(context.rows, begin, prefix_end(UNLINKED)):
            return None
        set_generation(context.rows, number + 1)
        return number

    async def _advance_marks(self, ports: Ports) -> None:
        while self._marks:
            mark = self._marks[0]

            async def look(context: Context, mark: _Mark = mark) -> dict[ClientId, int]:
                return await _have_not_told(context, mark.waits_for)

            silent = await ports.transact(look)
            await self._evict(silent, ports)
            if silent:
                mark.waits_for = {one: mark.waits_for[one] for one in silent}
                return
            self._ripe = self._marks.popleft().generation

    async def _evict(self, silent: dict[ClientId, int], ports: Ports) -> None:
        """Those that have had no heartbeat for too long, of these with as many heartbeats."""
        now_ns = ports.now_ns()
        passed_ns, self._looked_ns = min(now_ns - self._looked_ns, MAX_LOOK_NS), now_ns
        before, self._silent = self._silent, {}
        for client, heartbeats in silent.items():
            silence = before.get(client)
            if silence is None or silence.heartbeats != heartbeats:
                silence = _Silence(heartbeats)
            else:
                silence.ns += passed_ns
            self._silent[client] = silence
        for client in [one for one, silence in self._silent.items() if silence.ns >= EVICT_NS]:
            await ports.transact(_evicting(client, silent[client]))
            self.evicted += 1

    # --- what ---

    async def _collect(self, ports: Ports) -> bool:
        begin = next_key(self._after) if self._after else UNLINKED
        end = pair_key(UNLINKED, self._ripe + 1, 0)
        now_ns = ports.now_ns()

        async def choose(context: Context) -> tuple[list[tuple[bytes, Inode]], list[tuple[bytes, str]], bytes]:
            page = await context.rows.get_range(begin, end, limit=AT_ONCE)
            keys = [key for key, _ in page.items if not self._left_out(key, now_ns)]
            await context.rows.get_many([inode_key(pair_of(key)[1]) for key in keys])  # known then, in one question
            chosen: list[tuple[bytes, Inode]] = []
            damaged: list[tuple[bytes, str]] = []
            for key in keys:
                try:
                    inode = await _doomed(context, key)
                except LASTING as error:
                    damaged.append((key, str(error)))
                else:
                    if inode is not None:
                        chosen.append((key, inode))
            return chosen, damaged, page.items[-1][0] if page.more else b""

        chosen, damaged, self._after = await ports.transact(choose)
        for key, reason in damaged:
            self._fail(key, reason, ports)
        emptied: list[tuple[bytes, Inode]] = []
        await ports.together([self._emptying(key, inode, emptied, ports) for key, inode in chosen])
        emptied.sort(key=lambda one: one[0])
        if emptied:
            try:
                await ports.transact(_clearing(emptied))
            except LASTING:
                await self._clear_each(emptied, ports)
            for key, _ in emptied:
                self._failed.pop(pair_of(key)[1], None)
        if not self._after:  # what another service has collected meanwhile is not met again
            long_ago_ns = now_ns - 2 * MAX_PAUSE_NS
            self._failed = {one: failure for one, failure in self._failed.items() if failure.until_ns > long_ago_ns}
        return bool(self._after)

    async def _clear_each(self, emptied: list[tuple[bytes, Inode]], ports: Ports) -> None:
        """What can be cleared of them; the others stay in the list no longer."""
        for one in list(emptied):
            try:
                await ports.transact(_clearing([one]))
            except LASTING as error:
                emptied.remove(one)
                self._fail(one[0], str(error), ports)

    def _left_out(self, key: bytes, now_ns: int) -> bool:
        failure = self._failed.get(pair_of(key)[1])
        return failure is not None and failure.until_ns > now_ns

    def _fail(self, key: bytes, reason: str, ports: Ports) -> None:
        inode_id = pair_of(key)[1]
        before = self._failed.pop(inode_id, None)
        pause_ns = FIRST_PAUSE_NS if before is None else min(2 * before.pause_ns, MAX_PAUSE_NS)
        if len(self._failed) >= MAX_FAILED:
            del self._failed[next(iter(self._failed))]
        self._failed[inode_id] = _Failure(ports.now_ns() + pause_ns, pause_ns, reason)

    def _emptying(
        self, key: bytes, inode: Inode, emptied: list[tuple[bytes, Inode]], ports: Ports
    ) -> Callable[[], Awaitable[None]]:
        async def empty() -> None:
            try:
                if isinstance(inode.body, FileDetails):
                    layout = inode.body.layout
                    await remove_all(inode.id, order_of(layout, ports.chunks.chains(layout.table)), ports)
                emptied.append((key, inode))
            except (TransientError, *LASTING) as error:
                self._fail(key, str(error), ports)  # it stays, and a later round comes back to it

        return empty


async def backlog(context: Context) -> Backlog:
    inodes = total = 0
    begin = UNLINKED
    while inodes < BACKLOG_ROWS:
        page = await context.rows.get_range(begin, prefix_end(UNLINKED), limit=PAGE_ROWS)
        inodes += len(page.items)
        total += sum(UNLINKED_ROWS.decode(key, value).bytes for key, value in page.items)
        if not page.more:
            return Backlog(inodes, total, whole=True)
        begin = next_key(page.items[-1][0])
    return Backlog(inodes, total, whole=False)


async def _heartbeats_to_come(context: Context) -> dict[ClientId, int]:
    wanted: dict[ClientId, int] = {}
    begin = CLIENTS
    while True:
        page = await context.rows.get_range(begin, prefix_end(CLIENTS), limit=PAGE_ROWS)
        for key, value in page.items:
            client = int.from_bytes(key[2:], "big")
            row = CLIENT_ROWS.decode(key, value)
            if not row.evicted:
                wanted[client] = row.heartbeats + HEARTBEATS_AFTER
        if not page.more:
            return wanted
        begin = next_key(page.items[-1][0])


async def _have_not_told(context: Context, waits_for: dict[ClientId, int]) -> dict[ClientId, int]:
    """Those that are still to send one, with the heartbeats that they have had."""
    silent: dict[ClientId, int] = {}
    clients = list(waits_for)
    for at in range(0, len(clients), PAGE_ROWS):
        some = clients[at : at + PAGE_ROWS]
        keys = [number_key(CLIENTS, one) for one in some]
        waiting: dict[ClientId, int] = {}
        for client, key, value in zip(some, keys, await context.rows.get_many(keys), strict=True):
            row = None if value is None else CLIENT_ROWS.decode(key, value)
            if row is not None and row.heartbeats < waits_for[client] and not row.evicted:
                waiting[client] = row.heartbeats
        sessions = await context.rows.get_many([SESSIONS.key(one) for one in waiting])
        silent.update(one for one, session in zip(waiting.items(), sessions, strict=True) if session is not None)
    return silent


def _evicting(client: ClientId, heartbeats: int) -> Callable[[Context], Awaitable[None]]:
    async def body(context: Context) -> None:
        row = await client_row(context.rows, client)
        if row is not None and row.heartbeats == heartbeats:
            put_client(context, client, msgspec.structs.replace(row, evicted=True))

    return body


def _clearing(emptied: Sequence[tuple[bytes, Inode]]) -> Callable[[Context], Awaitable[None]]:
    async def body(context: Context) -> None:
        await context.rows.get_many([inode_key(inode.id) for _, inode in emptied])  # known then, in one question
        for key, inode in emptied:
            await _clear(context, key, inode)

    return body


async def _doomed(context: Context, key: bytes) -> Inode | None:
    """The inode of this row, if it can go."""
    inode_id = pair_of(key)[1]
    inode = await context.inode(inode_id)
    if inode is None or inode.links:
        raise corrupt(key, "names an inode that has links, or does not exist")
    used = await any_in(context.rows, number_key(WRITERS, inode_id), number_key(WRITERS, inode_id + 1))
    if used or await holds_of(context, inode_id) or await truncation_of(context, inode_id) is not None:
        return None
    if isinstance(inode.body, FileDetails) and inode.body.cutting is None:
        inode = msgspec.structs.replace(inode, body=msgspec.structs.replace(inode.body, cutting=0))
        context.put(inode)
    return inode


async def _clear(context: Context, key: bytes, inode: Inode) -> None:
    if await context.rows.get(key) is None:
        return  # done, by another or by a commit that was not known
    inode = await context.known(inode.id)  # its attributes may be others than when its chunks were removed
    context.rows.clear(key)
    context.rows.clear(inode_key(inode.id))
    context.rows.clear(number_key(LOCKS, inode.id))
    context.rows.clear_range(number_key(VALUES, inode.id), number_key(VALUES, inode.id + 1))
    await quota_trees.charge(context, inode.quota_tree, -inode.charged_bytes, -1)

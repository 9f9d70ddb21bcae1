"""Removes what was unlinked and is open nowhere any more: chunks first, then the inode with its use of the area.

    unlinked in generation g ──mark: raise the generation, then note each client's beats──> waiting
        ──each of them has beaten three times since, or is over──> ripe
        ──no writer, no hold, no cut──> doomed: `cutting` 0 and no links, so that nobody opens it for writing
        ──chunks removed──> inode, values and locks cleared, area charged, in one transaction

Why the beats tell it is said in `holds`. A crash anywhere begins again with what the rows say; marks are memory, and
are made again. Two that collect at the same time do no harm: chunks of a doomed inode are written by nobody, and what
its area is charged is in the transaction that clears it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.errors import PermanentError, TransientError
from fireflyer.fs.core.meta import areas
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.cutting import remove_all
from fireflyer.fs.core.meta.holds import BEATS_AFTER, client_row, generation, set_generation
from fireflyer.fs.core.meta.layout import order_of
from fireflyer.fs.core.meta.open_rows import (
    CLIENT_ROWS,
    CLIENTS,
    PAGE_ROWS,
    UNLINKED_ROWS,
    any_in,
    cut_of,
    holds_of,
    lives,
    next_key,
    pair_of,
)
from fireflyer.fs.core.meta.ports import Ports
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
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import FileBody, Inode

__all__ = ["AT_ONCE", "BACKLOG_ROWS", "Backlog", "Collector", "backlog"]

AT_ONCE: Final = 64
"""Inodes of one step."""
MAX_MARKS: Final = 8
"""That wait. What is unlinked meanwhile waits for the next one."""
MARK_EVERY_NS: Final = 1_000_000_000
BACKLOG_ROWS: Final = 20_000
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


class Collector:
    """What one process knows. Another begins anew."""

    def __init__(self) -> None:
        self._marks: deque[_Mark] = deque()
        self._marked_ns = -MARK_EVERY_NS
        self._marked = -1
        self._ripe = -1
        """Generations up to this one can be collected."""
        self._after = b""
        self.trouble = ""
        """Why the chunks of an inode could not be removed last."""

    @property
    def waits_for(self) -> tuple[ClientId, ...]:
        """Clients whose beats are waited for."""
        return tuple(self._marks[0].waits_for) if self._marks else ()

    async def step(self, ports: Ports) -> bool:
        """True: there is more to do at once."""
        await self._mark(ports)
        await self._ripen(ports)
        return await self._collect(ports) if self._ripe >= 0 else False

    # --- when ---

    async def _mark(self, ports: Ports) -> None:
        now_ns = ports.now_ns()
        if len(self._marks) == MAX_MARKS or now_ns - self._marked_ns < MARK_EVERY_NS:
            return
        raised = await ports.transact(self._raise_generation)
        if raised is not None:
            # Read after the generation is raised: whoever has more beats by then has to have more still.
            self._marks.append(_Mark(raised, await ports.transact(_beats_to_be)))
            self._marked, self._marked_ns = raised, now_ns

    async def _raise_generation(self, context: Context) -> int | None:
        number = await generation(context.rows)
        begin = pair_key(UNLINKED, self._marked + 1, 0)
        if not await any_in(context.rows, begin, prefix_end(UNLINKED)):
            return None
        set_generation(context.rows, number + 1)
        return number

    async def _ripen(self, ports: Ports) -> None:
        while self._marks:
            mark = self._marks[0]

            async def look(context: Context, mark: _Mark = mark) -> list[ClientId]:
                return [one for one, beats in mark.waits_for.items() if await _has_told(context, one, beats)]

            for client in await ports.transact(look):
                del mark.waits_for[client]
            if mark.waits_for:
                return
            self._ripe = self._marks.popleft().generation

    # --- what ---

    async def _collect(self, ports: Ports) -> bool:
        begin = next_key(self._after) if self._after else UNLINKED
        end = pair_key(UNLINKED, self._ripe + 1, 0)

        async def choose(context: Context) -> tuple[list[tuple[bytes, Inode]], bytes]:
            page = await context.rows.get_range(begin, end, limit=AT_ONCE)
            chosen = [(key, await _doomed(context, key)) for key, _ in page.items]
            last = page.items[-1][0] if page.more else b""
            return [(key, inode) for key, inode in chosen if inode is not None], last

        chosen, self._after = await ports.transact(choose)
        emptied: list[tuple[bytes, Inode]] = []
        await ports.together([self._emptying(key, inode, emptied, ports) for key, inode in chosen])

        async def clear(context: Context) -> None:
            for key, inode in sorted(emptied, key=lambda one: one[0]):
                await _clear(context, key, inode)

        if emptied:
            await ports.transact(clear)
        return bool(self._after)

    def _emptying(
        self, key: bytes, inode: Inode, emptied: list[tuple[bytes, Inode]], ports: Ports
    ) -> Callable[[], Awaitable[None]]:
        async def empty() -> None:
            try:
                if isinstance(inode.body, FileBody):
                    layout = inode.body.layout
                    await remove_all(inode.id, order_of(layout, ports.chunks.chains(layout.table)), ports)
                emptied.append((key, inode))
            except (TransientError, PermanentError) as error:
                self.trouble = f"inode {inode.id}: {error}"  # it stays, and the next round comes back to it

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


async def _beats_to_be(context: Context) -> dict[ClientId, int]:
    wanted: dict[ClientId, int] = {}
    begin = CLIENTS
    while True:
        page = await context.rows.get_range(begin, prefix_end(CLIENTS), limit=PAGE_ROWS)
        for key, value in page.items:
            client = int.from_bytes(key[2:], "big")
            wanted[client] = CLIENT_ROWS.decode(key, value).beats + BEATS_AFTER
        if not page.more:
            return wanted
        begin = next_key(page.items[-1][0])


async def _has_told(context: Context, client: ClientId, beats: int) -> bool:
    row = await client_row(context.rows, client)
    return row is None or row.beats >= beats or not await lives(context.rows, client)


async def _doomed(context: Context, key: bytes) -> Inode | None:
    """The inode of this row, if it can go."""
    inode_id = pair_of(key)[1]
    inode = await context.inode(inode_id)
    if inode is None or inode.links:
        raise corrupt(key, "names an inode that has links, or is not there")
    used = await any_in(context.rows, number_key(WRITERS, inode_id), number_key(WRITERS, inode_id + 1))
    if used or await holds_of(context, inode_id) or await cut_of(context, inode_id) is not None:
        return None
    if isinstance(inode.body, FileBody) and inode.body.cutting is None:
        inode = msgspec.structs.replace(inode, body=msgspec.structs.replace(inode.body, cutting=0))
        context.put(inode)
    return inode


async def _clear(context: Context, key: bytes, inode: Inode) -> None:
    if await context.rows.get(key) is None:
        return  # done, by another or by a commit that was not known
    context.rows.clear(key)
    context.rows.clear(inode_key(inode.id))
    context.rows.clear(number_key(LOCKS, inode.id))
    context.rows.clear_range(number_key(VALUES, inode.id), number_key(VALUES, inode.id + 1))
    length = inode.body.length if isinstance(inode.body, FileBody) else 0
    await areas.charge(context, inode.area, -length, -1)

"""Surveys files that users with tokens could write to, when nothing can be written by them any more (see
`write_grants`).

    the file is there      its chains are asked for its length, as for a writer who has died: what was not told is
                           charged, or cut off where it is over the quota
    it is there no more    what was written since it was collected is removed
    it is still open       the same, and it is noted again: nobody has to close a file, or to report

What cannot be looked at now (a chain is away, a cut is under way) is put off: its row goes to a later minute.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from fireflyer.base.errors import TransientError
from fireflyer.base.units import SECOND
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.inodes.layout import order_of
from fireflyer.fs.core.meta.open_files import truncate
from fireflyer.fs.core.meta.open_files.lengths import ChunkEnd, file_of, found_excess, grown
from fireflyer.fs.core.meta.open_files.write_grants import GRANT_ROWS, GRANTS, due_end, put_grant, put_off
from fireflyer.fs.core.meta.open_rows import is_being_collected, next_key, pair_of, truncation_of, writers_of
from fireflyer.fs.core.meta.ports import LASTING, NotAtOnce, Ports
from fireflyer.fs.schema.inodes import FileDetails, InodeId, Layout

__all__ = ["PUT_OFF_NS", "Surveyor"]

LOOK_EVERY_NS: Final = 5 * SECOND
AT_ONCE: Final = 16
"""Files that are surveyed side by side; four times as many in a step."""
PUT_OFF_NS: Final = 300 * SECOND
MAX_FAILED: Final = 1024


class Surveyor:
    """What one process knows. Another begins anew."""

    def __init__(self) -> None:
        self._after = b""
        self._looked_ns: int | None = None
        self._failed: dict[InodeId, str] = {}
        self._store_failed: TransientError | None = None

    @property
    def last_error(self) -> str:
        """A file that could not be looked at when its time had come, and why; empty where all could."""
        for inode_id, reason in self._failed.items():
            return f"inode {inode_id}: {reason}"
        return ""

    async def step(self, ports: Ports) -> bool:
        """True: there is more to do at once."""
        now_ns = ports.now_ns()
        if not self._after and self._looked_ns is not None and now_ns - self._looked_ns < LOOK_EVERY_NS:
            return False
        self._looked_ns = now_ns
        begin = next_key(self._after) if self._after else GRANTS

        async def due(context: Context) -> tuple[list[tuple[bytes, bytes]], bool]:
            page = await context.rows.get_range(begin, due_end(context), limit=4 * AT_ONCE)
            return list(page.items), page.more

        items, more = await ports.transact(due)
        self._store_failed = None
        for at in range(0, len(items), AT_ONCE):
            await ports.together([self._surveying(key, value, ports) for key, value in items[at : at + AT_ONCE]])
        if self._store_failed is not None:
            raise self._store_failed
        self._after = items[-1][0] if more else b""
        return more

    def _surveying(self, key: bytes, value: bytes, ports: Ports) -> Callable[[], Awaitable[None]]:
        async def survey() -> None:
            inode_id = int.from_bytes(key[-8:], "big")
            try:
                await _survey(key, GRANT_ROWS.decode(key, value), ports)
                self._failed.pop(inode_id, None)
            except (TransientError, NotAtOnce, *LASTING) as error:
                self._failed[inode_id] = str(error)
                while len(self._failed) > MAX_FAILED:
                    del self._failed[next(iter(self._failed))]
                await self._put_off(key, value, ports)

        return survey

    async def _put_off(self, key: bytes, value: bytes, ports: Ports) -> None:
        async def body(context: Context) -> None:
            if await context.rows.get(key) is not None:
                context.rows.clear(key)
                put_off(context, int.from_bytes(key[-8:], "big"), value, PUT_OFF_NS)

        try:
            await ports.transact(body)
        except TransientError as error:
            self._store_failed = error


async def _survey(key: bytes, layout: Layout, ports: Ports) -> None:
    inode_id = pair_of(key)[1]

    async def look(context: Context) -> bool | None:
        """Whether it is to be measured; None: it is gone."""
        inode = await context.inode(inode_id)
        return (
            None
            if inode is None
            else isinstance(inode.body, FileDetails) and not await is_being_collected(context, inode)
        )

    measurable = await ports.transact(look)
    if measurable is None:
        await truncate.remove_all(inode_id, order_of(layout, ports.chunks.chains(layout.table)), ports)
    measured: ChunkEnd | None = None
    while True:

        async def body(context: Context, measured: ChunkEnd | None = measured) -> None:
            if await context.rows.get(key) is not None:
                context.rows.clear(key)
                if measurable:
                    await _compare(context, inode_id, measured)

        try:
            await ports.transact(body)
            return
        except NotAtOnce as obstacle:
            measured = await truncate.measure(inode_id, ports, patient=False)
            if measured is None:
                raise obstacle


async def _compare(context: Context, inode_id: InodeId, measured: ChunkEnd | None) -> None:
    """Nothing where it has been collected meanwhile: that was after all that could be written to it."""
    inode = await context.inode(inode_id)
    if inode is None or await is_being_collected(context, inode):
        return
    before, body = file_of(inode)
    if (
        measured is None
        or measured.cut != body.cut
        or body.cutting is not None
        or await truncation_of(context, inode_id)
    ):
        raise NotAtOnce(inode_id, "its length must be read from its chunks")
    inode, refused = await grown(context, before, measured.end)
    if inode is not before:
        context.put(inode)
    if any(row.handles for _, row in await writers_of(context, inode_id)):
        put_grant(context, inode_id, body.layout)
    if refused is not None:
        await found_excess(context, inode)

"""The service's own work: cuts that nobody goes on with, clients that are over, what was unlinked, the trash.

Each service finishes the cuts that it owns. All else is done by one of them, the holder of a *lease*: a row that it
changes once in `RENEW_NS`. Who sees it unchanged for `LEASE_NS` by his own clock takes it. Nothing depends on there
being only one (every step is right by itself); it saves work, and keeps what has been seen in one memory.
"""

from __future__ import annotations

from typing import Final

from fireflyer.base.errors import PermanentError, TransientError
from fireflyer.fs.core.meta import cutting, expiring
from fireflyer.fs.core.meta.collecting import Collector
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.open_rows import CUT_ROWS, CUTS, LEASE_KEY, LEASE_ROWS, PAGE_ROWS, LeaseRow, lives
from fireflyer.fs.core.meta.ports import Ports
from fireflyer.fs.core.meta.reaping import Reaper
from fireflyer.fs.core.meta.tables import prefix_end
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import InodeId

__all__ = ["LEASE_NS", "RENEW_NS", "Keeper"]

RENEW_NS: Final = 1_000_000_000
LEASE_NS: Final = 5_000_000_000
EXPIRE_EVERY_NS: Final = 5_000_000_000
EXPIRED_AT_ONCE: Final = 256


class Keeper:
    """Of one service process. `holder`: a name that no other process has, or had."""

    def __init__(self, holder: str) -> None:
        self._holder = holder
        self.collector = Collector()
        self.reaper = Reaper()
        self.leads = False
        self._seen: LeaseRow | None = None
        self._seen_ns = 0
        self._expired_ns: int | None = None
        self._over_ns: dict[ClientId, int] = {}
        """Owners of cuts that are over, and since when that is known."""

    async def step(self, ports: Ports) -> bool:
        """True: call it again at once; else in a second. `ports`: the service's own. Raises errors of the key-value
        store, after which it may be called again."""
        await self._lead(ports)
        await self._go_on_with_cuts(ports)
        if not self.leads:
            return False
        more = await self.reaper.step(ports)
        more = await self.collector.step(ports) or more
        return await self._expire(ports) or more

    async def _lead(self, ports: Ports) -> None:
        now_ns = ports.now_ns()
        if self.leads and now_ns - self._seen_ns < RENEW_NS:
            return
        may_take = self._seen is None or self._seen.holder == self._holder or now_ns - self._seen_ns >= LEASE_NS
        seen = self._seen

        async def body(context: Context) -> LeaseRow:
            value = await context.rows.get(LEASE_KEY)
            row = None if value is None else LEASE_ROWS.decode(LEASE_KEY, value)
            if row is None or row.holder == self._holder or (may_take and row == seen):
                row = LeaseRow(self._holder, 0 if row is None else row.beat + 1)
                context.rows.set(LEASE_KEY, LEASE_ROWS.encode(row))
            return row

        row = await ports.transact(body)
        if row != self._seen:
            self._seen, self._seen_ns = row, now_ns
        self.leads = row.holder == self._holder

    async def _go_on_with_cuts(self, ports: Ports) -> None:
        """Those whose requests were given up, were of a service that is no more, or of nobody."""
        session = ports.session

        async def read(context: Context) -> list[tuple[InodeId, ClientId, bool]]:
            page = await context.rows.get_range(CUTS, prefix_end(CUTS), limit=PAGE_ROWS)
            found = [(int.from_bytes(key[2:], "big"), CUT_ROWS.decode(key, value).owner) for key, value in page.items]
            return [(one, owner, owner == 0 or await lives(context.rows, owner)) for one, owner in found]

        cuts = await ports.transact(read)
        now_ns = ports.now_ns()
        over = dict.fromkeys(owner for _, owner, living in cuts if not living and owner != session)
        self._over_ns = {one: self._over_ns.get(one, now_ns) for one in over}
        for inode_id, owner, living in cuts:
            mine = owner == session
            settled = not living and self._over_ns.get(owner, now_ns) <= now_ns - ports.settle_ns
            if mine or (self.leads and (owner == 0 or settled)):
                try:
                    await cutting.go_on(inode_id, ports, patient=False, settled=owner)
                except (TransientError, PermanentError) as error:
                    self.reaper.trouble = f"inode {inode_id}: {error}"

    async def _expire(self, ports: Ports) -> bool:
        now_ns = ports.now_ns()
        if self._expired_ns is not None and now_ns - self._expired_ns < EXPIRE_EVERY_NS:
            return False

        async def body(context: Context) -> bool:
            return await expiring.expire(context, EXPIRED_AT_ONCE)

        more = await ports.transact(body)
        self._expired_ns = None if more else now_ns
        return more

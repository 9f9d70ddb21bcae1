"""The service's own work: cuts that nobody goes on with, clients that are over, what was unlinked, what users may have
written without saying so, the trash.

Each service finishes the cuts that it owns. All else is done by one of them, the holder of a *lease*: a row that it
changes once in `RENEW_NS`. Who sees it unchanged for `LEASE_NS` by its own clock takes it. Nothing depends on there
being only one (every step is right by itself); it saves work, and keeps what has been seen in one memory.

Whoever runs it runs `lead`, `cut`, `reap`, `collect`, `survey` and `expire` side by side, each again and again: one
that waits for a chain does not stop the others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from fireflyer.base.errors import DataCorruption, TransientError
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.namespace.trash_expiry import TrashClock
from fireflyer.fs.core.meta.open_files import truncate
from fireflyer.fs.core.meta.open_files.garbage_collection import GarbageCollector
from fireflyer.fs.core.meta.open_files.session_cleanup import SessionCleaner
from fireflyer.fs.core.meta.open_files.write_survey import Surveyor
from fireflyer.fs.core.meta.open_rows import CUT_ROWS, CUTS, LEASE_KEY, LEASE_ROWS, PAGE_ROWS, LeaseRow, lives, next_key
from fireflyer.fs.core.meta.ports import LASTING, Ports
from fireflyer.fs.core.meta.tables import prefix_end
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import InodeId

__all__ = ["LEASE_NS", "RENEW_NS", "BackgroundTasks"]

RENEW_NS: Final = 1_000_000_000
LEASE_NS: Final = 5_000_000_000
EXPIRE_EVERY_NS: Final = 5_000_000_000
EXPIRED_AT_ONCE: Final = 256
CUTS_AT_ONCE: Final = 16


class BackgroundTasks:
    """Of one service process. `holder`: a name that no other process has, or had."""

    def __init__(self, holder: str) -> None:
        self._holder = holder
        self.collector = GarbageCollector()
        self.reaper = SessionCleaner()
        self.surveyor = Surveyor()
        self._trash = TrashClock()
        self.leads = False
        self._seen: LeaseRow | None = None
        self._seen_ns = 0
        self._expired_ns: int | None = None
        self._over_ns: dict[ClientId, int] = {}
        """Owners of cuts that are over, and since when that is known."""
        self._cuts_after = b""
        self._not_cut: dict[InodeId, str] = {}
        """In the last round through the cuts, and in this one."""
        self._not_cut_now: dict[InodeId, str] = {}

    @property
    def last_error(self) -> str:
        """What could not be done last, and why; empty where all is well."""
        if self._not_cut:
            inode_id, reason = next(iter(self._not_cut.items()))
            return f"inode {inode_id}: {reason}"
        if not self.leads:
            return ""
        return self.collector.last_error or self.reaper.last_error or self.surveyor.last_error

    async def step(self, ports: Ports) -> bool:
        """All of it once, one after the other. True: call it again at once; else in a second. `ports`: the service's
        own. Raises errors of the key-value store, after which it may be called again, as each of the parts may."""
        await self.lead(ports)
        more = await self.cut(ports)
        more = await self.reap(ports) or more
        more = await self.collect(ports) or more
        more = await self.survey(ports) or more
        return await self.expire(ports) or more

    async def reap(self, ports: Ports) -> bool:
        return self.leads and await self.reaper.step(ports)

    async def collect(self, ports: Ports) -> bool:
        return self.leads and await self.collector.step(ports)

    async def survey(self, ports: Ports) -> bool:
        return self.leads and await self.surveyor.step(ports)

    async def lead(self, ports: Ports) -> bool:
        now_ns = ports.now_ns()
        if self.leads and now_ns - self._seen_ns < RENEW_NS:
            return False
        may_take = self._seen is None or self._seen.holder == self._holder or now_ns - self._seen_ns >= LEASE_NS
        seen = self._seen

        async def body(context: Context) -> LeaseRow:
            value = await context.rows.get(LEASE_KEY)
            row = None if value is None else LEASE_ROWS.decode(LEASE_KEY, value)
            if row is None or row.holder == self._holder or (may_take and row == seen):
                row = LeaseRow(self._holder, 0 if row is None else row.renewals + 1)
                context.rows.set(LEASE_KEY, LEASE_ROWS.encode(row))
            return row

        row = await ports.transact(body)
        if row != self._seen:
            self._seen, self._seen_ns = row, now_ns
        self.leads = row.holder == self._holder
        return False

    async def cut(self, ports: Ports) -> bool:
        """A page of cuts whose requests were given up, were of a service that is no more, or of nobody."""
        session = ports.session

        begin = next_key(self._cuts_after) if self._cuts_after else CUTS

        async def read(context: Context) -> tuple[list[tuple[InodeId, ClientId, bool]], list[bytes], bytes]:
            page = await context.rows.get_range(begin, prefix_end(CUTS), limit=PAGE_ROWS)
            found, damaged = [], []
            for key, value in page.items:
                try:
                    found.append((int.from_bytes(key[2:], "big"), CUT_ROWS.decode(key, value).owner))
                except DataCorruption:
                    damaged.append(key)
            living = {
                owner: owner == 0 or await lives(context.rows, owner) for owner in dict.fromkeys(o for _, o in found)
            }
            after = page.items[-1][0] if page.more else b""
            return [(one, owner, living[owner]) for one, owner in found], damaged, after

        if not self._cuts_after:
            self._not_cut = dict(self._not_cut_now)
            self._not_cut_now = {}
        cuts, damaged, self._cuts_after = await ports.transact(read)
        self._not_cut_now.update((int.from_bytes(key[2:], "big"), "its row is damaged") for key in damaged)
        now_ns = ports.now_ns()
        over = dict.fromkeys(owner for _, owner, living in cuts if not living and owner != session)
        if begin == CUTS and not self._cuts_after:  # these are all
            self._over_ns = {one: since_ns for one, since_ns in self._over_ns.items() if one in over}
        self._over_ns = dict.fromkeys(over, now_ns) | self._over_ns
        works = []
        for inode_id, owner, living in cuts:
            mine = owner == session
            settled = not living and self._over_ns.get(owner, now_ns) <= now_ns - ports.settle_ns
            if mine or (self.leads and (owner == 0 or settled)):
                works.append(self._cutting(inode_id, owner, ports))
        for at in range(0, len(works), CUTS_AT_ONCE):
            await ports.together(works[at : at + CUTS_AT_ONCE])
        if not self._cuts_after:
            for inode_id in ports.inodes_in_doubt()[:PAGE_ROWS]:
                await truncate.forget_in_doubt(inode_id, ports)
        return bool(self._cuts_after)

    def _cutting(self, inode_id: InodeId, owner: ClientId, ports: Ports) -> Callable[[], Awaitable[None]]:
        async def cut() -> None:
            try:
                await truncate.go_on(inode_id, ports, patient=False, settled=owner)
            except (TransientError, *LASTING) as error:
                self._not_cut_now[inode_id] = str(error)

        return cut

    async def expire(self, ports: Ports) -> bool:
        now_ns = ports.now_ns()
        if not self.leads:
            return False
        if self._expired_ns is not None and now_ns - self._expired_ns < EXPIRE_EVERY_NS:
            return False
        more = await self._trash.step(ports, EXPIRED_AT_ONCE)
        self._expired_ns = None if more else now_ns
        return more

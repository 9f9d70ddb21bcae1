"""Which services live, as one process sees rows that change."""

from __future__ import annotations

import pytest
from tests.support.loops import on_loop

from fireflyer.base.errors import DataCorruption
from fireflyer.fs.service.meta.registry import LiveServices, Registration, ServiceRow
from fireflyer.kvstore import MemoryEngine, Transaction


@on_loop
async def test_who_does_not_change_his_row_is_dead_after_a_while_and_then_forgotten() -> None:
    now_ns = 0
    async with MemoryEngine() as kv:
        one = Registration(kv, "one", "a:1", manager=True)
        other = Registration(kv, "other", "b:2", manager=False)
        await one.heartbeat()
        await other.heartbeat()
        heard = LiveServices(kv, lambda: now_ns)
        assert [row.address for row in await heard.services()] == ["a:1", "b:2"]
        for _ in range(6):
            now_ns += 1_000_000_000
            await one.heartbeat()
            await heard.services()
        found = await heard.services()
        assert [(row.address, row.manager) for row in found] == [("a:1", True)]
        await other.heartbeat()  # it had only been slow
        assert [row.address for row in await heard.services()] == ["a:1", "b:2"]
        for _ in range(3):
            now_ns += 30_000_000_000
            await one.heartbeat()
            await heard.services()
        assert len((await kv.read(lambda tx: tx.get_range(b"FXms", b"FXmt"))).items) == 1


@on_loop
async def test_a_process_that_starts_counts_all_rows_as_alive_and_damaged_ones_are_told() -> None:
    async with MemoryEngine() as kv:
        await Registration(kv, "one", "a:1", manager=False).heartbeat()
        assert await LiveServices(kv).services() == [ServiceRow("a:1", 1, False)]

        async def damage(tx: Transaction) -> None:
            tx.set(b"FXmsx", b"\x01\xc1")

        await kv.transact(damage)
        with pytest.raises(DataCorruption):
            await LiveServices(kv).services()

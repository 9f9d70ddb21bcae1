"""The service's own work goes on beside clients that say nothing, chains that are away and rows that are damaged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

import pytest
from tests.support.fs.clusters.meta_service import FakeChunks, MetaRig, expect
from tests.support.fs.clusters.names import at
from tests.support.loops import on_loop

from fireflyer.base.errors import Unreachable
from fireflyer.base.units import SECOND
from fireflyer.fs.core.meta.background_tasks import LEASE_NS, BackgroundTasks
from fireflyer.fs.core.meta.open_files import garbage_collection, truncate
from fireflyer.fs.core.meta.open_files.garbage_collection import EVICT_NS, GarbageCollector
from fireflyer.fs.core.meta.open_files.holds import HEARTBEATS_AFTER
from fireflyer.fs.core.meta.open_files.lengths import start_truncation
from fireflyer.fs.core.meta.open_files.session_cleanup import SessionCleaner
from fireflyer.fs.core.meta.open_rows import CLIENTS, CUTS, TruncationKind, TruncationRow
from fireflyer.fs.core.meta.ports import Ports
from fireflyer.fs.core.meta.replies import SESSION_EVICTED, SESSION_OVER, STEP, forget_client, rows_of
from fireflyer.fs.core.meta.tables import HOLDS, LOCKS, UNLINKED, WRITERS, number_key, prefix_end
from fireflyer.fs.schema.inodes import Inode
from fireflyer.fs.schema.meta import (
    ClientHeartbeat,
    Close,
    Done,
    ErrorReply,
    Found,
    Lock,
    LockKind,
    MakeDirectory,
    Open,
    Opened,
    OpenFlag,
    Remove,
    Window,
)
from fireflyer.fs.service.meta.requests import RequestPorts
from fireflyer.kvstore import MemoryEngine, Transaction

CREATE = OpenFlag.WRITE | OpenFlag.CREATE


class _Ports(RequestPorts):
    """With a clock that the test moves."""

    def __init__(self, rig: MetaRig) -> None:
        super().__init__(rig.service.service_context)
        self.clock_ns = SECOND

    def now_ns(self) -> int:
        return self.clock_ns


class _AwayChunks(FakeChunks):
    """One chain is away."""

    away = 0

    async def last(self, file: int, chains: Sequence[int]) -> Sequence[tuple[int, int] | None]:
        if self.away in chains:
            raise Unreachable(f"chain {self.away} is away")
        return await super().last(file, chains)


class _Rig(MetaRig):
    """What the service does by itself is done by the test."""

    async def __aenter__(self) -> Self:
        async def nothing(part: object) -> None: ...

        self.service._keep = nothing  # type: ignore[method-assign]
        await super().__aenter__()
        return self


async def rows(rig: MetaRig, prefix: bytes) -> list[bytes]:
    page = await rig.engine.read(lambda reader: reader.get_range(prefix, prefix_end(prefix)))
    return [key for key, _ in page.items]


async def damage(rig: MetaRig, key: bytes) -> None:
    async def body(tx: Transaction) -> None:
        tx.set(key, b"\x01\xc1")

    await rig.engine.transact(body)


async def sent_heartbeats(rig: MetaRig, client: int) -> None:
    for _ in range(HEARTBEATS_AFTER):
        assert await rig.ask(client, ClientHeartbeat(1)) == Done()


async def made(rig: MetaRig, client: int, name: str, handle: int, *, close: bool = True) -> Opened:
    opened = expect(await rig.ask(client, Open(at(name), CREATE, handle)), Opened)
    if close:
        await rig.ask(client, Close(opened.inode.id, handle, 0, 0))
    return opened


@on_loop
async def test_a_client_without_heartbeats_is_evicted_and_waited_for_no_longer() -> None:
    async with _Rig(MemoryEngine()) as rig:
        for client in (5, 6):
            await rig.open_session(client)
        await rig.ask(6, MakeDirectory(at("d")))
        await made(rig, 5, "f", 1)
        assert await rig.ask(5, Remove(at("f"))) == Done()
        ports, collector = _Ports(rig), GarbageCollector()
        await collector.step(ports)
        await sent_heartbeats(rig, 5)
        for _ in range(EVICT_NS // SECOND):
            ports.clock_ns += SECOND
            await collector.step(ports)
            assert await rows(rig, UNLINKED)
        assert "client 6" in collector.last_error
        for _ in range(3):
            ports.clock_ns += SECOND
            await collector.step(ports)
        assert collector.evicted == 1
        assert not await rows(rig, UNLINKED)
        assert collector.last_error == ""
        for request in (MakeDirectory(at("e")), ClientHeartbeat(1), Open(at("d"), OpenFlag.READ)):
            assert expect(await rig.ask(6, request), ErrorReply).code == SESSION_EVICTED
        expect(await rig.ask(5, MakeDirectory(at("e"))), Found)
        rig.service._enrolled.clear()  # as in a service that has just started
        assert expect(await rig.ask(6, MakeDirectory(at("e"))), ErrorReply).code == SESSION_EVICTED
        await rig.end_session(6)
        assert expect(await rig.ask(6, ClientHeartbeat(1)), ErrorReply).code == SESSION_OVER


@on_loop
async def test_nobody_is_evicted_for_time_in_which_nobody_looked() -> None:
    async with _Rig(MemoryEngine()) as rig:
        await rig.open_session(5)
        await made(rig, 5, "f", 1)
        await rig.ask(5, Remove(at("f")))
        ports, collector = _Ports(rig), GarbageCollector()
        for _ in range(3):
            await collector.step(ports)
            ports.clock_ns += 10 * EVICT_NS
        assert collector.evicted == 0
        await sent_heartbeats(rig, 5)
        await collector.step(ports)
        assert not await rows(rig, UNLINKED)


@on_loop
async def test_files_on_a_chain_that_is_away_and_damaged_ones_do_not_stop_collecting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks = _AwayChunks(1000)
    async with _Rig(MemoryEngine(), chunks=chunks) as rig:
        await rig.open_session(5)
        for number in range(8):
            await made(rig, 5, f"f{number}", number + 1)
            await rig.ask(5, Remove(at(f"f{number}")))
        (damaged, *_) = await rows(rig, UNLINKED)
        await damage(rig, b"FI" + damaged[10:])
        ports, collector = _Ports(rig), GarbageCollector()
        await collector.step(ports)
        await sent_heartbeats(rig, 5)
        chunks.away = 1
        looked: list[int] = []

        async def remove_all(inode_id: int, order: Sequence[int], given: Ports) -> None:
            """Half of the files have nothing on the chain."""
            looked.append(inode_id)
            await truncate.remove_all(inode_id, order if inode_id % 2 else [one for one in order if one != 1], given)

        monkeypatch.setattr(garbage_collection, "remove_all", remove_all)
        for _ in range(4):
            ports.clock_ns += SECOND // 10
            await collector.step(ports)
        left = await rows(rig, UNLINKED)
        assert damaged in left
        assert 1 < len(left) < 8
        assert collector.last_error
        assert len(looked) == 7  # those that failed wait for a while
        chunks.away = 0
        ports.clock_ns += 10 * SECOND
        await collector.step(ports)
        assert await rows(rig, UNLINKED) == [damaged]
        assert collector.last_error


@on_loop
async def test_what_a_dead_client_has_on_a_chain_that_is_away_does_not_keep_the_rest() -> None:
    chunks = _AwayChunks(1000)
    async with _Rig(MemoryEngine(), chunks=chunks) as rig:
        for client in (5, 6):
            await rig.open_session(client)
        for number in range(4):
            await made(rig, 5, f"a{number}", number + 1, close=False)
            opened = await made(rig, 6, f"b{number}", number + 1, close=False)
            whole = Lock(opened.inode.id, Window.RANGE, 1, LockKind.WRITE, 0, 10)
            assert await rig.ask(6, whole) == Done()
            assert await rig.ask(6, ClientHeartbeat(1, held=(opened.inode.id,))) == Done()
        locks = await rows(rig, LOCKS)
        await damage(rig, locks[0])
        await rig.end_session(6)
        chunks.away = 1
        ports, reaper = _Ports(rig), SessionCleaner()
        await reaper.step(ports)
        ports.clock_ns += ports.settle_ns
        while await reaper.step(ports):
            pass
        assert await rows(rig, LOCKS) == locks[:1]
        assert not await rows(rig, HOLDS)
        assert len(await rows(rig, WRITERS)) == 8
        assert "away" in reaper.last_error
        chunks.away = 0
        while await reaper.step(ports):
            pass
        assert len(await rows(rig, WRITERS)) == 4
        assert locks[0].hex() in reaper.last_error


@on_loop
async def test_each_part_goes_on_while_another_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    door = asyncio.Event()

    async def waits(*_: object) -> bool:
        await door.wait()
        return False

    monkeypatch.setattr(SessionCleaner, "step", waits)
    monkeypatch.setattr(BackgroundTasks, "cut", waits)
    monkeypatch.setattr("fireflyer.fs.service.meta.service.REST_S", 0.001)
    async with MetaRig(MemoryEngine()) as rig:
        await rig.open_session(5)
        await made(rig, 5, "f", 1)
        await rig.ask(5, Remove(at("f")))
        while await rows(rig, UNLINKED):
            await rig.ask(5, ClientHeartbeat(1))
        door.set()


async def begun(rig: MetaRig, inode: Inode, client: int, number: int, owner: int) -> TruncationRow:
    """A truncation to nothing, of a request whose service has gone."""
    row = TruncationRow(TruncationKind.TRUNCATE, 0, 0, 0, owner, client, number)

    async def body(tx: Transaction) -> None:
        start_truncation(rig.service.service_context.context(tx), inode, row)

    await rig.engine.transact(body)
    return row


@on_loop
async def test_an_answer_that_nobody_can_ask_for_is_not_kept() -> None:
    async with _Rig(MemoryEngine()) as rig:
        for client in (5, 6):
            await rig.open_session(client)
        opened = [await made(rig, client, f"f{client}", 1) for client in (5, 6)]
        for _ in range(2 * STEP):
            await rig.ask(5, ClientHeartbeat(1))
        numbers = (3, 3 * STEP)  # of the first it has said that it has the answer
        ports = _Ports(rig)
        background_tasks = BackgroundTasks("k")
        await background_tasks.lead(ports)
        for number in numbers:
            await begun(rig, opened[0].inode, 5, number, 0)
            await background_tasks.cut(ports)
        await begun(rig, opened[1].inode, 6, 9, 0)

        async def forget(tx: Transaction) -> None:
            tx.clear(number_key(CLIENTS, 6))
            forget_client(tx, 6)

        await rig.engine.transact(forget)
        await background_tasks.cut(ports)
        assert not await rows(rig, CUTS)
        kept = await rows(rig, b"FR")
        assert [rows_of(5, number)[1] in kept for number in numbers] == [False, True]
        assert not [key for key in kept if key.startswith(rows_of(6, 9)[0])]


@on_loop
async def test_doubts_about_a_cut_that_another_process_has_ended_are_forgotten() -> None:
    async with _Rig(MemoryEngine()) as rig:
        await rig.open_session(5)
        ended, under_way = [(await made(rig, 5, name, 1)).inode for name in ("a", "b")]
        ports, background_tasks, service_context = _Ports(rig), BackgroundTasks("k"), rig.service.service_context
        await rig.open_session(77)
        row = await begun(rig, under_way, 5, 9, 77)  # another's, who lives
        service_context.in_doubt[ended.id] = {(row, 1, 0): None}
        service_context.in_doubt[under_way.id] = {(row, 1, 0): None}
        service_context.in_doubt[9999] = {(row, 1, 0): None}
        assert ports.claim(9999)
        await background_tasks.cut(ports)
        assert list(service_context.in_doubt) == [under_way.id, 9999]


@on_loop
async def test_trouble_of_one_who_leads_no_more_is_not_told() -> None:
    async with _Rig(MemoryEngine()) as rig:
        ports, first, second = _Ports(rig), BackgroundTasks("first"), BackgroundTasks("second")
        await first.lead(ports)
        first.reaper.last_error = "inode 7: chain 1 is away"
        assert "inode 7" in first.last_error
        await second.lead(ports)
        ports.clock_ns += LEASE_NS
        await second.lead(ports)
        await first.lead(ports)
        assert second.leads
        assert not first.leads
        assert first.last_error == ""

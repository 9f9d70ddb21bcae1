"""What users with tokens store is charged, or goes, whatever they say about it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from tests.support.fs.clusters.meta_service import CHAINS, FakeChunks, MetaRig, expect, user
from tests.support.loops import on_loop

from fireflyer.base.errors import Unreachable
from fireflyer.base.units import SECOND
from fireflyer.fs.core.capability import LIFETIME_S
from fireflyer.fs.core.meta.background_tasks import BackgroundTasks
from fireflyer.fs.core.meta.inodes.layout import chain_of, order_of
from fireflyer.fs.core.meta.open_files.garbage_collection import GarbageCollector
from fireflyer.fs.core.meta.open_files.holds import HEARTBEATS_AFTER
from fireflyer.fs.core.meta.open_files.write_grants import GRANTS, MINUTE_NS
from fireflyer.fs.core.meta.open_files.write_survey import PUT_OFF_NS, Surveyor
from fireflyer.fs.core.meta.tables import pair_key, prefix_end
from fireflyer.fs.schema.inodes import ROOT, FileDetails, Inode
from fireflyer.fs.schema.meta import (
    ClientHeartbeat,
    Close,
    Done,
    Found,
    GetQuota,
    MakeDirectory,
    Open,
    Opened,
    OpenFlag,
    PathRef,
    QuotaTree,
    Remove,
    SetAttributes,
    SetQuota,
    Stat,
    Truncate,
)
from fireflyer.fs.service.meta.requests import RequestPorts
from fireflyer.identity import Account
from fireflyer.kvstore import MemoryEngine, Transaction

CREATE = OpenFlag.WRITE | OpenFlag.CREATE
EVE = user("eve")
MIB = 1 << 20


class _AwayChunks(FakeChunks):
    away = False

    async def last(self, file: int, chains: Sequence[int]) -> Sequence[tuple[int, int] | None]:
        if self.away:
            raise Unreachable("chain 1 is away")
        return await super().last(file, chains)


class _MeanwhileChunks(FakeChunks):
    """When it has been asked for last chunks, and before that is told, something else happens: once."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def last(self, file: int, chains: Sequence[int]) -> Sequence[tuple[int, int] | None]:
        found = await super().last(file, chains)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return found


class _Ports(RequestPorts):
    """With a clock that the test moves."""

    clock_ns = 0

    def now_ns(self) -> int:
        return self.clock_ns


class _Rig(MetaRig):
    """With a user, client 7, and a directory of theirs. What the service does by itself is done by the test."""

    def __init__(self, chunks: FakeChunks | None = None) -> None:
        super().__init__(MemoryEngine(), accounts=(Account("eve", 1001, 1001, ()),), chunks=chunks)

        async def nothing(part: object) -> None: ...

        self.service._keep = nothing  # type: ignore[method-assign]
        self.surveyor = Surveyor()
        self.ports = _Ports(self.service.service_context)

    async def begin(self) -> None:
        await self.open_session(5)
        await self.open_session(7, "eve")
        made = expect(await self.ask(5, MakeDirectory(at("d"))), Found)
        expect(await self.ask(5, SetAttributes(PathRef(made.inode.id), uid=1001)), Found)

    async def opened(self, handle: int = 1) -> Inode:
        return expect(await self.ask(7, Open(at("d/f"), CREATE, handle), EVE), Opened).inode

    def write(self, inode: Inode, chunk: int, length: int = MIB) -> None:
        assert isinstance(inode.body, FileDetails)
        chain = chain_of(order_of(inode.body.layout, CHAINS), chunk)
        self.chunks.lengths[inode.id, chain, chunk] = length

    async def grants(self) -> list[bytes]:
        page = await self.engine.read(lambda reader: reader.get_range(GRANTS, prefix_end(GRANTS)))
        return [key for key, _ in page.items]

    async def survey_later(self) -> None:
        """When no capability counts any more that was given by now."""

        async def body(tx: Transaction) -> None:
            for key, value in (await tx.get_range(GRANTS, prefix_end(GRANTS))).items:
                tx.clear(key)
                tx.set(pair_key(GRANTS, 1, int.from_bytes(key[-8:], "big")), value)

        await self.engine.transact(body)
        self.ports.clock_ns += MINUTE_NS
        while await self.surveyor.step(self.ports):
            pass


def at(name: str) -> PathRef:
    return PathRef(ROOT, name.encode())


@on_loop
async def test_what_was_written_behind_an_end_told_too_low_is_charged() -> None:
    async with _Rig() as rig:
        await rig.begin()
        expect(await rig.ask(5, SetQuota(at("d"), bytes=100 * MIB)), QuotaTree)
        file = await rig.opened()
        expect(await rig.ask(7, Close(file.id, 1, 0, 0), EVE), Found)
        for chunk in range(8):  # by the capability, which counts for some minutes more
            rig.write(file, chunk)
        await rig.survey_later()
        assert expect(await rig.ask(5, Stat(at("d/f"))), Found).inode.length == 8 * MIB
        assert expect(await rig.ask(5, GetQuota(at("d"))), QuotaTree).bytes == 8 * MIB
        assert not await rig.grants()


@on_loop
async def test_what_was_written_over_the_quota_without_a_word_is_cut_off() -> None:
    async with _Rig() as rig:
        await rig.begin()
        expect(await rig.ask(5, SetQuota(at("d"), bytes=4 * MIB)), QuotaTree)
        file = await rig.opened()
        rig.write(file, 0)
        expect(await rig.ask(7, Close(file.id, 1, MIB, 0), EVE), Found)
        rig.write(file, 9)
        await rig.survey_later()
        background_tasks = BackgroundTasks("k")
        await background_tasks.lead(rig.ports)
        await background_tasks.cut(rig.ports)
        assert [key[2] for key in rig.chunks.lengths] == [0]
        assert expect(await rig.ask(5, GetQuota(at("d"))), QuotaTree).bytes == MIB


@on_loop
async def test_a_file_that_is_never_closed_is_charged_now_and_then() -> None:
    async with _Rig() as rig:
        await rig.begin()
        expect(await rig.ask(5, SetQuota(at("d"), bytes=100 * MIB)), QuotaTree)
        file = await rig.opened()
        for chunk in (3, 6):
            rig.write(file, chunk)
            await rig.survey_later()
            assert expect(await rig.ask(5, GetQuota(at("d"))), QuotaTree).bytes == (chunk + 1) * MIB
            assert len(await rig.grants()) == 1
        expect(await rig.ask(5, SetQuota(at("d"), bytes=8 * MIB)), QuotaTree)
        rig.write(file, 20)
        await rig.survey_later()
        assert expect(await rig.ask(7, Close(file.id, 1, 0, 0), EVE), Found).inode.length == 7 * MIB
        background_tasks = BackgroundTasks("k")
        await background_tasks.lead(rig.ports)
        await background_tasks.cut(rig.ports)
        assert sorted(key[2] for key in rig.chunks.lengths) == [3, 6]


@on_loop
async def test_a_file_that_is_truncated_while_its_chains_are_asked_is_asked_for_again() -> None:
    """Played by hand, since chance hardly meets it: what was measured under the cut before is gone."""
    chunks = _MeanwhileChunks(1000)
    async with _Rig(chunks) as rig:
        await rig.begin()
        expect(await rig.ask(5, SetQuota(at("d"), bytes=100 * MIB)), QuotaTree)
        file = await rig.opened()
        rig.write(file, 7)

        ends = []

        async def truncate() -> None:
            assert expect(await rig.ask(7, Truncate(PathRef(file.id), 0, 1), EVE), Found).inode.length == 0
            ends.append(list(chunks.lengths))
            rig.write(file, 0)

        chunks.meanwhile = truncate
        await rig.survey_later()
        assert ends == [[]]
        assert expect(await rig.ask(5, Stat(at("d/f"))), Found).inode.length == MIB
        assert expect(await rig.ask(5, GetQuota(at("d"))), QuotaTree).bytes == MIB


@on_loop
async def test_chunks_written_to_a_file_that_was_collected_are_removed() -> None:
    async with _Rig() as rig:
        await rig.begin()
        file = await rig.opened()
        rig.write(file, 0)
        expect(await rig.ask(7, Close(file.id, 1, MIB, 0), EVE), Found)
        expect(await rig.ask(7, Remove(at("d/f")), EVE), Done)
        collector = GarbageCollector()
        await collector.step(rig.ports)
        for client, caller in ((5, None), (7, EVE)):
            for _ in range(HEARTBEATS_AFTER):
                await (
                    rig.ask(client, ClientHeartbeat(1))
                    if caller is None
                    else rig.ask(client, ClientHeartbeat(1), caller)
                )
        await collector.step(rig.ports)
        assert not rig.chunks.lengths
        rig.write(file, 0)
        rig.write(file, 700)
        await rig.survey_later()
        assert not rig.chunks.lengths
        assert not await rig.grants()


@on_loop
async def test_what_cannot_be_looked_at_is_put_off_and_said() -> None:
    chunks = _AwayChunks(1000)
    async with _Rig(chunks) as rig:
        await rig.begin()
        file = await rig.opened()
        expect(await rig.ask(7, Close(file.id, 1, 0, 0), EVE), Found)
        rig.write(file, 0)
        chunks.away = True
        await rig.survey_later()
        (later,) = await rig.grants()
        assert int.from_bytes(later[2:10], "big") > PUT_OFF_NS // MINUTE_NS
        assert "away" in rig.surveyor.last_error
        chunks.away = False
        await rig.survey_later()
        assert not rig.surveyor.last_error
        assert expect(await rig.ask(5, Stat(at("d/f"))), Found).inode.length == MIB


@on_loop
async def test_one_row_for_a_file_in_a_minute_and_none_for_services() -> None:
    async with _Rig() as rig:
        await rig.begin()
        began_ns = time.time_ns()
        for handle in range(1, 30):
            file = await rig.opened(handle)
            expect(await rig.ask(7, Close(file.id, handle, 0, 0), EVE), Found)
        assert len(await rig.grants()) <= time.time_ns() // MINUTE_NS - began_ns // MINUTE_NS + 1
        before = await rig.grants()
        for handle in range(1, 4):
            opened = expect(await rig.ask(5, Open(at("g"), CREATE, handle)), Opened)
            expect(await rig.ask(5, Close(opened.inode.id, handle, 0, 0)), Found)
        assert await rig.grants() == before


@on_loop
async def test_a_close_is_noted_as_long_after_the_opening_as_it_may_be() -> None:
    async with _Rig() as rig:
        await rig.begin()
        file = await rig.opened()
        await rig.survey_later()
        for key in await rig.grants():
            await _clear(rig, key)
        began_ns = time.time_ns()
        expect(await rig.ask(7, Close(file.id, 1, 0, 0), EVE), Found)
        (key,) = await rig.grants()
        assert int.from_bytes(key[2:10], "big") * MINUTE_NS >= began_ns + LIFETIME_S * SECOND


async def _clear(rig: MetaRig, key: bytes) -> None:
    async def body(tx: Transaction) -> None:
        tx.clear(key)

    await rig.engine.transact(body)

"""What is prefetched for requests: over a store that is far away, transaction functions find what they read."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tests.support.fs.clusters.meta_service import MetaRig, expect
from tests.support.fs.clusters.names import at
from tests.support.loops import on_loop

from fireflyer.fs.core.meta.context import Requester
from fireflyer.fs.core.meta.dispatch import carry_out
from fireflyer.fs.core.meta.tables import entry_key
from fireflyer.fs.schema.inodes import ROOT, Kind
from fireflyer.fs.schema.meta import (
    Answer,
    Close,
    ErrorReply,
    Found,
    FoundMany,
    MakeDirectory,
    MakeNode,
    Open,
    Opened,
    OpenFlag,
    Remove,
    Rename,
    Report,
    Request,
    Reserve,
    Stat,
    StatMany,
    Symlink,
)
from fireflyer.fs.service.meta.prefetch import prefetch
from fireflyer.kvstore import MemoryEngine, MemoryStore, Reader, Transaction, TransactionBatch


class _Counting:
    """A reader that counts its questions."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.single = self.many = 0

    async def get(self, key: bytes) -> bytes | None:
        self.single += 1
        return await self._reader.get(key)

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.many += 1
        return await self._reader.get_many(keys)

    get_range = property(lambda self: self._reader.get_range)


@on_loop
async def test_paths_are_read_a_step_at_a_time_for_all_requests_together() -> None:
    async with MetaRig(MemoryEngine()) as rig:
        await rig.open_session(5)
        for path in ("a", "a/b", "a/b/c", "x"):
            expect(await rig.ask(5, MakeDirectory(at(path))), Found)
        requests: list[Request] = [Stat(at("a/b/c")), Stat(at("a/b/none")), StatMany((at("x"), at("y/z"), at("/a")))]

        async def look(reader: Reader) -> None:
            counting = _Counting(reader)
            transaction_batch = TransactionBatch(counting)
            await prefetch(transaction_batch, [(5, 0, one) for one in requests])
            assert counting.many == 4
            for one in requests:
                try:
                    await carry_out(one, rig.service.service_context.context(transaction_batch.savepoint()))
                except OSError:
                    pass
            assert counting.single == 0

        await rig.engine.read(look)


@on_loop
async def test_the_row_of_a_writer_is_foreseen_for_its_reports_and_its_close() -> None:
    async with MetaRig(MemoryEngine()) as rig:
        await rig.open_session(5)
        flags = OpenFlag.WRITE | OpenFlag.CREATE
        file = expect(await rig.ask(5, Open(at("f"), flags, 1)), Opened).inode.id

        async def look(transaction: Transaction) -> None:
            for request in (Report(file, 1, 7, 0), Reserve(file, 1, 5), Close(file, 1, 9, 0)):
                counting = _Counting(transaction)
                transaction_batch = TransactionBatch(counting)
                await prefetch(transaction_batch, [(5, 0, request)])
                await carry_out(
                    request, rig.service.service_context.context(transaction_batch.savepoint(), Requester(5, 0, 0))
                )
                assert counting.single == 0

        await rig.engine.transact(look)


@on_loop
async def test_a_damaged_name_is_told_to_who_reads_it_and_to_nobody_else() -> None:
    async with MetaRig(MemoryEngine(), shared_store=True) as rig:
        await rig.open_session(5)
        for path in ("a", "b"):
            expect(await rig.ask(5, MakeDirectory(at(path))), Found)

        async def damage(tx: Transaction) -> None:
            tx.set(entry_key(ROOT, b"a"), b"\x01\xc1")

        await rig.engine.transact(damage)
        answers = await rig.ask_all(5, [Stat(at("a")), Stat(at("b"))])
        assert isinstance(answers[0], ErrorReply)
        assert answers[0].code == "data_corruption"
        expect(answers[1], Found)


@pytest.mark.parametrize("seed", range(3))
@on_loop
async def test_answers_are_the_same_with_and_without(seed: int) -> None:
    rng = random.Random(seed)
    paths = ["a", "b", "a/b", "a/b/c", "b/a", "l", "l/b", "a/../b", "./a", "a/b/", "", "/a"]
    async with MetaRig(MemoryEngine(MemoryStore())) as near, MetaRig(MemoryEngine(), shared_store=True) as far:
        for rig in (near, far):
            await rig.open_session(5)
        for _ in range(60):
            requests = [_request(rng, paths) for _ in range(4)]
            # One at a time: queues of a database take no order between each other.
            found = [[_seen(await rig.ask(5, one)) for one in requests] for rig in (near, far)]
            assert found[0] == found[1]


def _request(rng: random.Random, paths: list[str]) -> Request:
    one, other = at(rng.choice(paths)), at(rng.choice(paths))
    possible: list[Request] = [
        MakeDirectory(one),
        MakeNode(one, Kind.FIFO),
        Symlink(one, other.path or b"x"),
        Remove(one),
        Rename(one, other),
        Stat(one),
        StatMany((one, other)),
    ]
    return rng.choice(possible)


def _seen(answer: Answer) -> object:
    """Without times and numbers of inodes."""
    if isinstance(answer, ErrorReply):
        return answer.errno
    if isinstance(answer, Found):
        return answer.inode.kind, answer.inode.links
    if isinstance(answer, FoundMany):
        return [one if isinstance(one, int) else (one.kind, one.links) for one in answer.inodes]
    return answer

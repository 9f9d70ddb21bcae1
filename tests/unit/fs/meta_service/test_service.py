"""The meta service at its door: who may ask what, and that again is once."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence

import msgspec
import pytest
from tests.support.fs.clusters.meta_service import (
    ADA,
    CREATE,
    EVE,
    SERVICE,
    FakeChunks,
    MetaRig,
    expect,
    two_users,
    user,
)
from tests.support.fs.clusters.names import at
from tests.support.loops import on_loop

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MS
from fireflyer.fs.core.capability import Rights
from fireflyer.fs.core.meta.context import MAX_STEPS, REST_MASK
from fireflyer.fs.core.meta.inodes.layout import order_of
from fireflyer.fs.core.meta.open_rows import WAITS
from fireflyer.fs.core.meta.replies import SESSION_FORGOTTEN, SESSION_OVER
from fireflyer.fs.core.meta.tables import encode_inode, inode_key
from fireflyer.fs.core.rows import TABLES
from fireflyer.fs.schema.inodes import ROOT, FileDetails, Kind
from fireflyer.fs.schema.meta import (
    MAX_NUMBERS,
    Actor,
    Call,
    Calls,
    ClientHeartbeat,
    Close,
    Done,
    ErrorReply,
    Found,
    FoundMany,
    ListDirectory,
    Listing,
    Lock,
    LockKind,
    MakeDirectory,
    MakeNode,
    Open,
    Opened,
    OpenFlag,
    PathRef,
    Remove,
    Rename,
    Renew,
    Report,
    Request,
    Stat,
    StatMany,
    Symlink,
    Truncate,
    Window,
)
from fireflyer.fs.schema.routing import ChainTable
from fireflyer.fs.service.meta.config import MetaSettings
from fireflyer.fs.service.meta.requests import commit_queue_key, is_changing
from fireflyer.kvstore import Attempted, CommitFault, MemoryEngine, MemoryStore, Transaction
from fireflyer.kvstore.core.rows import encode_row

# --- again is once ---


@on_loop
async def test_the_root_is_made_once() -> None:
    store = MemoryStore()
    async with MetaRig(MemoryEngine(store), MetaSettings(root_uid=7, root_gid=8, root_mode=0o711)) as first:
        await first.open_session(5)
        root = expect(await first.ask(5, Stat(PathRef(ROOT))), Found).inode
        assert (root.kind, root.uid, root.gid, root.mode) == (Kind.DIRECTORY, 7, 8, 0o711)
    async with MetaRig(MemoryEngine(store), MetaSettings(root_uid=1)) as second:
        assert expect(await second.ask(5, Stat(PathRef(ROOT))), Found).inode == root


@on_loop
async def test_a_request_that_comes_again_is_done_once_also_at_another_service_and_to_refusals() -> None:
    store = MemoryStore()
    async with MetaRig(MemoryEngine(store)) as one, MetaRig(MemoryEngine(store), shared_store=True) as other:
        await one.open_session(5)
        made = await one.ask(5, MakeDirectory(at("d")), number=1)
        expect(made, Found)
        refused = await one.ask(5, MakeDirectory(at("d")), number=2)
        assert expect(refused, ErrorReply).errno == errno.EEXIST
        assert await one.ask(5, Rename(at("d"), at("e")), number=3) == Done()
        for rig in (one, other):
            assert await rig.ask(5, MakeDirectory(at("d")), number=1) == made
            assert await rig.ask(5, MakeDirectory(at("d")), number=2) == refused
            assert await rig.ask(5, Rename(at("d"), at("e")), number=3) == Done()
        names = [one.name for one in expect(await one.ask(5, ListDirectory(ROOT)), Listing).entries]
        assert names == [b"e"]


@on_loop
async def test_requests_in_flight_twice_at_two_services_are_done_once() -> None:
    store = MemoryStore()
    async with MetaRig(MemoryEngine(store)) as one, MetaRig(MemoryEngine(store)) as other:
        await one.open_session(5)
        for number in range(1, 20):
            request = MakeNode(at(f"f{number}"), Kind.FILE)
            answers = await asyncio.gather(*(rig.ask(5, request, number=number) for rig in (one, other, one)))
            expect(answers[0], Found)
            assert answers == [answers[0]] * 3


@on_loop
async def test_commits_of_unknown_outcome_are_repeated_and_done_once() -> None:
    faults = [CommitFault.NONE, CommitFault.UNKNOWN_DONE, CommitFault.UNKNOWN_LOST, CommitFault.CONFLICT]
    turn = iter(faults * 100)
    armed = False
    async with MetaRig(MemoryEngine(faults=lambda: next(turn) if armed else CommitFault.NONE)) as rig:
        await rig.open_session(5)
        armed = True
        for number in range(20):
            expect(await rig.ask(5, MakeDirectory(at(f"d{number}"))), Found)
        armed = False
        root = expect(await rig.ask(5, Stat(PathRef(ROOT))), Found).inode
        assert root.body.subdirectories == 20  # type: ignore[union-attr]


@on_loop
async def test_numbers_outside_the_window_are_refused() -> None:
    async with MetaRig(MemoryEngine()) as rig:
        await rig.open_session(5)
        for number, done_below in ((0, 0), (4, 5), (5 + MAX_NUMBERS, 5)):
            calls = Calls(5, done_below, (Call(MakeDirectory(at("d")), number),))
            (answer,) = (await rig.service.serve(calls, SERVICE)).answers
            assert expect(answer, ErrorReply).errno == errno.EINVAL
        assert expect(await rig.ask(5, Stat(at("d"))), ErrorReply).errno == errno.ENOENT


@on_loop
async def test_nothing_is_done_for_a_session_that_is_over_and_each_answer_says_so() -> None:
    async with MetaRig(MemoryEngine()) as rig:
        await rig.open_session(5)
        made = await rig.ask(5, MakeDirectory(at("d")), number=1)
        await rig.end_session(5)
        assert await rig.ask(5, MakeDirectory(at("d")), number=1) == made
        for request in (MakeDirectory(at("e")), Open(at("d"), OpenFlag.READ), Renew(2, 1), ClientHeartbeat(1)):
            answer = expect(await rig.ask(5, request, number=2), ErrorReply)
            assert (answer.errno, answer.code) == (errno.ESTALE, SESSION_OVER)
        assert expect(await rig.ask(99, Open(at("d"), OpenFlag.READ)), ErrorReply).code == SESSION_FORGOTTEN


@on_loop
async def test_after_the_end_of_a_session_its_user_hears_what_he_had_done_and_nobody_else() -> None:
    async with MetaRig(MemoryEngine(), accounts=(ADA, EVE)) as rig:
        await two_users(rig)
        assert await rig.ask(7, Rename(at("a/f"), at("a/g")), user("ada"), number=70) == Done()
        await rig.end_session(7)
        assert await rig.ask(7, Rename(at("a/f"), at("a/g")), user("ada"), number=70) == Done()
        told = await rig.ask(7, Rename(at("a/f"), at("a/g")), user("eve"), number=70)
        assert expect(told, ErrorReply).errno == errno.EPERM
        told = await rig.ask(7, Rename(at("a/g"), at("a/h")), user("ada"), number=71)
        assert expect(told, ErrorReply).code == SESSION_OVER


@on_loop
async def test_of_many_requests_at_once_each_gets_its_own_answer() -> None:
    async with MetaRig(MemoryEngine()) as rig:
        await rig.open_session(5)
        requests: list[Request] = [MakeDirectory(at(name)) for name in ("a", "b", "a", "c/d", "c")]
        answers = await rig.ask_all(5, [*requests, Stat(PathRef(ROOT)), Stat(at("nothing"))])
        assert [one.errno if isinstance(one, ErrorReply) else 0 for one in answers] == [
            0, 0, errno.EEXIST, errno.ENOENT, 0, 0, errno.ENOENT,
        ]  # fmt: skip
        root = expect(await rig.ask(5, Stat(PathRef(ROOT))), Found).inode
        assert root.body.entries == 3  # type: ignore[union-attr]
        many = await rig.ask(5, StatMany(tuple(at(name) for name in "abxc")))
        assert [one if isinstance(one, int) else one.kind for one in expect(many, FoundMany).inodes] == [
            Kind.DIRECTORY, Kind.DIRECTORY, errno.ENOENT, Kind.DIRECTORY,
        ]  # fmt: skip


@on_loop
async def test_no_file_is_made_before_there_is_a_chain_table() -> None:
    store = MemoryStore()
    async with MetaRig(MemoryEngine(store), MetaSettings(trusted_root=True, table=2)) as rig:
        await rig.open_session(5)
        for request in (Open(at("f"), CREATE, 1), MakeNode(at("f"), Kind.FILE)):
            answer = expect(await rig.ask(5, request), ErrorReply)
            assert (answer.errno, answer.code) == (0, "busy")
        expect(await rig.ask(5, MakeDirectory(at("d"))), Found)

        async def add(tx: Transaction) -> None:
            tx.set(TABLES.key(2), encode_row(ChainTable(2, (3, 4))))

        await rig.engine.transact(add)
        made = expect(await rig.ask(5, MakeNode(at("f"), Kind.FILE)), Found).inode
        assert made.body.layout.stripe == 2  # type: ignore[union-attr]


@on_loop
async def test_one_message_may_not_ask_for_more_than_an_answer_holds() -> None:
    async with MetaRig(MemoryEngine()) as rig:
        await rig.open_session(5)
        with pytest.raises(UsageError, match="inodes"):
            await rig.ask_all(5, [ListDirectory(ROOT)] * 17)


@on_loop
async def test_links_lead_over_a_bounded_number_of_names_and_others_go_on_meanwhile() -> None:
    async with MetaRig(MemoryEngine()) as rig:
        await rig.open_session(5)
        await rig.ask(5, MakeDirectory(at("d")))
        for number in range(3):
            expect(await rig.ask(5, Symlink(at(f"l{number}"), b"./" * 1200 + b"l%d" % (number + 1))), Found)
        expect(await rig.ask(5, MakeDirectory(at("l3"))), Found)
        for link, answered in (("l2", 0), ("l1", 0), ("l0", 0), ("long", errno.ELOOP)):
            if link == "long":
                await rig.ask(5, Symlink(at("long"), b"./" * 1200 + b"l0"))
            answer = await rig.ask(5, Stat(at(link)))
            assert (answer.errno if isinstance(answer, ErrorReply) else 0) == answered, link
        turns = 0
        asked = asyncio.ensure_future(rig.ask(5, StatMany((at("l0"),) * 500)))
        while not asked.done():
            turns += 1
            await asyncio.sleep(0)
        found = expect(await asked, FoundMany).inodes
        within = [one for one in found if not isinstance(one, int)]
        assert MAX_STEPS // 3700 <= len(within) <= MAX_STEPS // 3600 + 1
        assert set(found) - set(within) == {errno.ELOOP}
        assert turns > MAX_STEPS // (REST_MASK + 1)


@on_loop
async def test_another_request_under_a_number_that_was_used_does_not_get_the_answer_to_the_first_one() -> None:
    async with MetaRig(MemoryEngine(), accounts=(ADA, EVE)) as rig:
        await two_users(rig)
        made = await rig.ask(5, MakeDirectory(at("d")), number=90, actor=Actor(12, 13))
        expect(made, Found)
        for request, actor in (
            (MakeDirectory(at("e")), Actor(12, 13)),
            (MakeDirectory(at("d")), Actor(12, 14)),
            (MakeDirectory(at("d")), None),
            (Open(at("d"), OpenFlag.WRITE, 1), Actor(12, 13)),
        ):
            told = expect(await rig.ask(5, request, number=90, actor=actor), ErrorReply)
            assert (told.errno, "different request" in told.message) == (errno.EINVAL, True)
        assert await rig.ask(5, MakeDirectory(at("d")), number=90, actor=Actor(12, 13)) == made
        assert expect(await rig.ask(5, Stat(at("e"))), ErrorReply).errno == errno.ENOENT


# --- what takes several transactions ---


@on_loop
async def test_who_waits_for_a_lock_writes_that_once_and_leaves_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fireflyer.fs.core.meta.open_files.locks.LOCK_PAUSE_NS", 1_000_000)
    monkeypatch.setattr("fireflyer.fs.core.meta.open_files.locks.MAX_LOCK_PAUSE_NS", 1_000_000)
    committed: list[Attempted] = []
    async with MetaRig(MemoryEngine(MemoryStore(attempts=committed.append)), accounts=(ADA, EVE)) as rig:
        rig.service._lock_waits._most = 8
        await two_users(rig)
        file = expect(await rig.ask(7, Stat(at("a/f")), user("ada")), Found).inode.id

        def lock(kind: LockKind, owner: int, wait_ns: int = 0) -> Lock:
            return Lock(file, Window.RANGE, owner, kind, 0, 10, wait_ns)

        assert await rig.ask(5, lock(LockKind.WRITE, 1)) == Done()
        for _ in range(3):
            committed.clear()
            waiting = [
                asyncio.ensure_future(rig.ask(7, lock(LockKind.WRITE, 10 + one, 10**10), user("ada")))
                for one in range(3)
            ]
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            told = expect(done.pop().result(), ErrorReply)  # a quarter of all is Ada's
            assert told.code == "busy"
            while len(committed) < 30:
                expect(await rig.ask(5, Stat(PathRef(ROOT))), Found)
            assert sum(any(key[:2] == WAITS for key, _ in one.mutations.writes) for one in committed) <= 2
            assert await rig.ask(5, lock(LockKind.NONE, 1)) == Done()
            while not all(one.done() for one in waiting):
                for owner in (10, 11, 12):
                    await rig.ask(7, lock(LockKind.NONE, owner), user("ada"))
            assert sum(one.result() == Done() for one in waiting) == 2
            for owner in (10, 11, 12):
                await rig.ask(7, lock(LockKind.NONE, owner), user("ada"))
            assert await rig.ask(5, lock(LockKind.WRITE, 1)) == Done()


@on_loop
async def test_a_file_that_is_being_collected_is_lost_to_who_had_it_open() -> None:
    async with MetaRig(MemoryEngine()) as rig:
        await rig.open_session(5)
        file = expect(await rig.ask(5, Open(at("f"), CREATE, 1)), Opened).inode
        assert await rig.ask(5, Remove(at("f"))) == Done()
        expect(await rig.ask(5, Stat(PathRef(file.id))), Found)
        assert isinstance(file.body, FileDetails)
        doomed = msgspec.structs.replace(file, links=0, body=msgspec.structs.replace(file.body, cutting=0))

        async def doom(tx: Transaction) -> None:
            tx.set(inode_key(file.id), encode_inode(doomed))

        await rig.engine.transact(doom)
        for request in (Stat(PathRef(file.id)), Renew(file.id, Rights.READ)):
            assert expect(await rig.ask(5, request), ErrorReply).errno == errno.ESTALE


@on_loop
async def test_a_lock_that_waits_is_had_when_the_other_one_lets_go() -> None:
    async with MetaRig(MemoryEngine()) as rig:
        for client in (5, 6):
            await rig.open_session(client)
        file = expect(await rig.ask(5, MakeNode(at("f"), Kind.FILE)), Found).inode.id
        lock = Lock(file, Window.WHOLE, 1, LockKind.WRITE, wait_ns=10_000_000_000)
        assert await rig.ask(5, lock) == Done()
        waiting = [asyncio.ensure_future(rig.ask(6, lock, number=1)) for _ in range(2)]
        expect(await rig.ask(5, Stat(at("f"))), Found)
        assert not waiting[0].done()
        assert await rig.ask(5, Lock(file, Window.WHOLE, 1, LockKind.NONE)) == Done()
        assert await asyncio.gather(*waiting) == [Done(), Done()]


@on_loop
async def test_a_truncation_removes_the_chunks_behind_and_is_answered_again_alike() -> None:
    async with MetaRig(MemoryEngine(), MetaSettings(trusted_root=True, chunk_bytes=1 << 16, stripe=1)) as rig:
        await rig.open_session(5)
        opened = expect(await rig.ask(5, Open(at("f"), CREATE, 1)), Opened).inode
        layout = opened.body.layout  # type: ignore[union-attr]
        from fireflyer.fs.core.meta.inodes.layout import order_of

        (chain,) = order_of(layout, rig.chunks.chains(1))
        for index in range(3):
            rig.chunks.lengths[opened.id, chain, index] = 1 << 16
        assert expect(await rig.ask(5, Report(opened.id, 1, 3 << 16, 0)), Found).inode.length == 3 << 16
        cut = await rig.ask(5, Truncate(at("f"), 70_000), number=9)
        assert expect(cut, Found).inode.length == 70_000
        assert rig.chunks.lengths == {(opened.id, chain, 0): 1 << 16, (opened.id, chain, 1): 70_000 - (1 << 16)}
        assert await rig.ask(5, Truncate(at("f"), 70_000), number=9) == cut


@on_loop
async def test_a_service_that_was_taken_for_dead_cuts_nothing_more_under_its_next_session() -> None:
    engine, reached, goes_on = MemoryEngine(), asyncio.Event(), asyncio.Event()

    class SlowChunks(FakeChunks):
        async def remove(self, file: int, chunks: Sequence[tuple[int, int]], *, session: int) -> None:
            reached.set()
            await goes_on.wait()
            await super().remove(file, chunks, session=session)

    slow, quick = SlowChunks(1000), FakeChunks(2000)
    quick.lengths = slow.lengths
    async with (
        MetaRig(engine, accounts=(ADA,), chunks=slow) as first,
        MetaRig(engine, accounts=(ADA,), chunks=quick, secret=first.secret) as second,
    ):
        await two_users(first)
        inode = expect(await first.ask(7, Stat(at("a/f")), user("ada")), Found).inode
        assert isinstance(inode.body, FileDetails)
        layout, size = inode.body.layout, inode.body.layout.chunk_bytes
        order = order_of(layout, slow.chains(1))
        chunks = {(inode.id, order[index % len(order)], index): size for index in range(3)}
        slow.lengths.update(chunks)
        await first.ask(7, Report(inode.id, 1, 3 * size, 0), user("ada"))
        second.service.service_context.settle_ns = MS
        truncate = Truncate(PathRef(inode.id), 0, 1)
        asked = asyncio.create_task(first.ask(7, truncate, user("ada"), number=200))
        await reached.wait()
        await first.end_session(1000)
        done = expect(await second.ask(7, truncate, user("ada"), number=200), Found).inode
        assert isinstance(done.body, FileDetails)
        slow.lengths.update(chunks)  # written since
        expect(await second.ask(7, Report(inode.id, 1, 3 * size, done.body.cut), user("ada"), number=201), Found)
        await first.open_session(1001)
        slow.session = 1001
        goes_on.set()
        await asked
        assert slow.lengths == chunks


@on_loop
async def test_a_small_file_is_emptied_without_asking_one_chain_after_the_other() -> None:
    asked: list[str] = []

    class Counted(FakeChunks):
        async def last(self, file: int, chains: Sequence[int]) -> Sequence[tuple[int, int] | None]:
            asked.append("last")
            return await super().last(file, chains)

        async def list(self, chain: int, file: int, start: int, limit: int) -> Sequence[tuple[int, int]]:
            asked.append("list")
            return await super().list(chain, file, start, limit)

        async def remove(self, file: int, chunks: Sequence[tuple[int, int]], *, session: int) -> None:
            asked.append("remove")
            await super().remove(file, chunks, session=session)

    chunks = Counted(1000)
    async with MetaRig(MemoryEngine(), accounts=(ADA,), chunks=chunks) as rig:
        await two_users(rig)
        inode = expect(await rig.ask(7, Stat(at("a/f")), user("ada")), Found).inode
        assert isinstance(inode.body, FileDetails)
        order = order_of(inode.body.layout, chunks.chains(1))
        chunks.lengths.update({(inode.id, order[index % len(order)], index): 5 for index in (0, 1, 9)})
        await rig.ask(7, Report(inode.id, 1, 5, 0), user("ada"))
        flags = OpenFlag.WRITE | OpenFlag.TRUNCATE
        expect(await rig.ask(7, Open(at("a/f"), flags, 2), user("ada")), Opened)
        assert not chunks.lengths
        assert asked == ["last", "remove", "last"]


def test_which_requests_are_numbered_and_in_which_lane_they_wait() -> None:
    assert not is_changing(Stat(at("a")))
    assert not is_changing(Renew(3, 1))
    assert not is_changing(Open(at("a"), OpenFlag.READ | OpenFlag.FOLLOW))
    assert all(is_changing(Open(at("a"), flag)) for flag in (OpenFlag.WRITE, OpenFlag.CREATE, OpenFlag.TRUNCATE))
    assert is_changing(Remove(at("a")))
    assert (
        commit_queue_key(Remove(at("d/a")), 5)
        == commit_queue_key(MakeDirectory(at("d/b")), 6)
        == commit_queue_key(Rename(at("d/c"), at("x")), 7)
    )
    assert commit_queue_key(Remove(at("a", 9)), 5) == commit_queue_key(Close(9, 1, 0, 0), 5)

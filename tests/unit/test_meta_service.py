"""The meta service at its door: who may ask what, and that again is once."""

from __future__ import annotations

import asyncio
import errno
import time

import pytest
from tests.support.fs_meta import SERVICE, MetaRig, expect, user
from tests.support.loops import on_loop

from fireflyer.base.errors import PermissionDenied, UsageError
from fireflyer.fs.core.capability import Capability, Rights, derive_key, verify
from fireflyer.fs.core.meta.replies import SESSION_OVER
from fireflyer.fs.core.rows import TABLES, encode_row
from fireflyer.fs.schema.inodes import ROOT, Kind
from fireflyer.fs.schema.meta import (
    MAX_UNDER_WAY,
    Actor,
    Beat,
    Call,
    Calls,
    Close,
    Done,
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
    Place,
    Refused,
    Remove,
    Rename,
    Renew,
    Report,
    Request,
    Reserve,
    SetAttributes,
    Stat,
    StatMany,
    Truncate,
    Window,
)
from fireflyer.fs.schema.routing import ChainTable
from fireflyer.fs.service.meta_config import NOBODY, MetaSettings
from fireflyer.fs.service.meta_requests import is_changing, lane_of
from fireflyer.identity import Account
from fireflyer.kvstore import CommitFault, MemoryEngine, MemoryStore, Transaction

ADA = Account("ada", 1001, 1001, (50,))
EVE = Account("eve", 1002, 1002)
CREATE = OpenFlag.WRITE | OpenFlag.READ | OpenFlag.CREATE


def at(path: str, base: int = ROOT) -> Place:
    return Place(base, path.encode())


async def two_users(rig: MetaRig) -> None:
    """Client 7 is Ada's, 8 Eve's, 5 a service's. "/a" is Ada's own, with file "f", which handle 1 has open."""
    await rig.open_session(5)
    await rig.open_session(7, "ada")
    await rig.open_session(8, "eve")
    await rig.ask(5, SetAttributes(Place(ROOT), mode=0o777))
    expect(await rig.ask(7, MakeDirectory(at("a"), 0o700), user("ada")), Found)
    expect(await rig.ask(7, Open(at("a/f"), CREATE, 1, 0o600), user("ada")), Opened)


# --- again is once ---


@on_loop
async def test_the_root_is_made_once() -> None:
    store = MemoryStore()
    async with MetaRig(MemoryEngine(store), MetaSettings(root_uid=7, root_gid=8, root_mode=0o711)) as first:
        await first.open_session(5)
        root = expect(await first.ask(5, Stat(Place(ROOT))), Found).inode
        assert (root.kind, root.uid, root.gid, root.mode) == (Kind.DIRECTORY, 7, 8, 0o711)
    async with MetaRig(MemoryEngine(store), MetaSettings(root_uid=1)) as second:
        assert expect(await second.ask(5, Stat(Place(ROOT))), Found).inode == root


@on_loop
async def test_a_request_that_comes_again_is_done_once_also_at_another_service_and_to_refusals() -> None:
    store = MemoryStore()
    async with MetaRig(MemoryEngine(store)) as one, MetaRig(MemoryEngine(store), shared_store=True) as other:
        await one.open_session(5)
        made = await one.ask(5, MakeDirectory(at("d")), number=1)
        expect(made, Found)
        refused = await one.ask(5, MakeDirectory(at("d")), number=2)
        assert expect(refused, Refused).errno == errno.EEXIST
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
        root = expect(await rig.ask(5, Stat(Place(ROOT))), Found).inode
        assert root.body.subdirectories == 20  # type: ignore[union-attr]


@on_loop
async def test_numbers_outside_the_window_are_refused() -> None:
    async with MetaRig(MemoryEngine()) as rig:
        await rig.open_session(5)
        for number, done_below in ((0, 0), (4, 5), (5 + MAX_UNDER_WAY, 5)):
            calls = Calls(5, done_below, (Call(MakeDirectory(at("d")), number),))
            (answer,) = (await rig.service.serve(calls, SERVICE)).answers
            assert expect(answer, Refused).errno == errno.EINVAL
        assert expect(await rig.ask(5, Stat(at("d"))), Refused).errno == errno.ENOENT


@on_loop
async def test_nothing_is_done_for_a_session_that_is_over_and_each_answer_says_so() -> None:
    async with MetaRig(MemoryEngine()) as rig:
        await rig.open_session(5)
        made = await rig.ask(5, MakeDirectory(at("d")), number=1)
        await rig.end_session(5)
        assert await rig.ask(5, MakeDirectory(at("d")), number=1) == made
        for request in (MakeDirectory(at("e")), Open(at("d"), OpenFlag.READ), Renew(2, 1), Beat(1)):
            answer = expect(await rig.ask(5, request, number=2), Refused)
            assert (answer.errno, answer.code) == (errno.ESTALE, SESSION_OVER)
        assert expect(await rig.ask(99, Open(at("d"), OpenFlag.READ)), Refused).code == SESSION_OVER


@on_loop
async def test_of_many_requests_at_once_each_gets_its_own_answer() -> None:
    async with MetaRig(MemoryEngine()) as rig:
        await rig.open_session(5)
        requests: list[Request] = [MakeDirectory(at(name)) for name in ("a", "b", "a", "c/d", "c")]
        answers = await rig.ask_all(5, [*requests, Stat(Place(ROOT)), Stat(at("nothing"))])
        assert [one.errno if isinstance(one, Refused) else 0 for one in answers] == [
            0, 0, errno.EEXIST, errno.ENOENT, 0, 0, errno.ENOENT,
        ]  # fmt: skip
        root = expect(await rig.ask(5, Stat(Place(ROOT))), Found).inode
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
            answer = expect(await rig.ask(5, request), Refused)
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


# --- who asks ---


@on_loop
async def test_users_act_as_themselves_and_may_not_say_otherwise() -> None:
    async with MetaRig(MemoryEngine(), accounts=(ADA, EVE)) as rig:
        await two_users(rig)
        made = expect(await rig.ask(7, Stat(at("a/f")), user("ada")), Found).inode
        assert (made.uid, made.gid) == (ADA.uid, ADA.gid)
        for actor in (Actor(0, 0), Actor(ADA.uid, ADA.gid), Actor(EVE.uid, EVE.gid)):
            for request in (Stat(at("a/f")), MakeDirectory(at("e")), Remove(at("a/f"))):
                answer = expect(await rig.ask(8, request, user("eve"), actor=actor), Refused)
                assert answer.errno == errno.EPERM
        with pytest.raises(PermissionDenied, match="not known any more"):
            await rig.ask(7, Stat(at("a")), user("nobody"))


@on_loop
async def test_a_user_reaches_nothing_of_another_one() -> None:
    async with MetaRig(MemoryEngine(), accounts=(ADA, EVE)) as rig:
        await two_users(rig)
        file = expect(await rig.ask(7, Stat(at("a/f")), user("ada")), Found).inode
        directory = expect(await rig.ask(7, Stat(at("a")), user("ada")), Found).inode
        attempts: list[Request] = [
            Stat(at("a/f")),
            ListDirectory(directory.id),
            Open(at("a/f"), OpenFlag.READ),
            Open(Place(file.id), OpenFlag.READ),
            Open(Place(file.id), OpenFlag.WRITE, 1),
            Open(at("g", directory.id), CREATE, 2),
            MakeDirectory(at("a/d")),
            Remove(at("f", directory.id)),
            Rename(at("f", directory.id), at("mine")),
            Rename(at("a/f"), at("mine")),
            SetAttributes(Place(file.id), mode=0o777),
            SetAttributes(Place(file.id), uid=EVE.uid),
            Truncate(Place(file.id), 0),
            Renew(file.id, Rights.READ),
        ]
        for request in attempts:
            answer = expect(await rig.ask(8, request, user("eve")), Refused)
            assert answer.errno in (errno.EACCES, errno.EPERM), (request, answer)
        assert expect(await rig.ask(7, Stat(at("a/f")), user("ada")), Found).inode == file


@on_loop
async def test_handles_of_others_are_of_no_use() -> None:
    async with MetaRig(MemoryEngine(), accounts=(ADA, EVE)) as rig:
        await two_users(rig)
        file = expect(await rig.ask(7, Stat(at("a/f")), user("ada")), Found).inode
        for request in (
            Report(file.id, 1, 100, 0),
            Close(file.id, 1, 100, 0),
            Reserve(file.id, 1, 100),
            Truncate(Place(file.id), 0, 1),
            Renew(file.id, Rights.WRITE, 1),
        ):
            answer = expect(await rig.ask(8, request, user("eve")), Refused)
            # By number she gets at nothing that lies where she may not go.
            expected = errno.EACCES if isinstance(request, Truncate) else errno.EBADF
            assert answer.errno == expected, (request, answer)
        closed = expect(await rig.ask(7, Close(file.id, 1, 5, 0), user("ada")), Found)
        assert closed.inode.length == 5


@on_loop
async def test_the_session_of_another_user_is_of_no_use() -> None:
    async with MetaRig(MemoryEngine(), accounts=(ADA, EVE)) as rig:
        await two_users(rig)
        answered = await rig.ask(7, MakeDirectory(at("a/d")), user("ada"), number=50)
        file = expect(await rig.ask(7, Stat(at("a/f")), user("ada")), Found).inode
        for request in (
            MakeDirectory(at("e")),
            Open(at("e"), CREATE, 9),
            Open(at("a"), OpenFlag.READ),
            Report(file.id, 1, 100, 0),
            Beat(1, closed=(file.id,)),
        ):
            answer = expect(await rig.ask(7, request, user("eve"), number=51), Refused)
            assert answer.errno == errno.EPERM, (request, answer)
        replayed = await rig.ask(7, MakeDirectory(at("a/d")), user("eve"), number=50)
        assert expect(replayed, Refused).errno == errno.EPERM
        assert await rig.ask(7, MakeDirectory(at("a/d")), user("ada"), number=50) == answered


@on_loop
async def test_a_mount_speaks_for_its_users_and_for_root_only_where_that_is_said() -> None:
    store = MemoryStore()
    async with MetaRig(MemoryEngine(store), MetaSettings(trusted_root=True)) as trusting:
        await trusting.open_session(5)
        await trusting.ask(5, SetAttributes(Place(ROOT), mode=0o777))
        made = await trusting.ask(5, MakeDirectory(at("r")), actor=Actor(0, 0, (0,)))
        assert expect(made, Found).inode.uid == 0
        made = await trusting.ask(5, MakeDirectory(at("u")), actor=Actor(12, 13))
        assert (expect(made, Found).inode.uid, expect(made, Found).inode.gid) == (12, 13)
    async with MetaRig(MemoryEngine(store), MetaSettings(trusted_root=False)) as careful:
        await careful.open_session(6)
        made = await careful.ask(6, MakeDirectory(at("s")), actor=Actor(0, 0))
        assert (expect(made, Found).inode.uid, expect(made, Found).inode.gid) == (NOBODY, NOBODY)
        made = await careful.ask(6, MakeDirectory(at("t")))
        assert expect(made, Found).inode.uid == NOBODY
        assert expect(await careful.ask(6, SetAttributes(at("u"), mode=0)), Refused).errno == errno.EPERM
        made = await careful.ask(6, SetAttributes(at("u"), mode=0o700), actor=Actor(12, 13))
        assert expect(made, Found).inode.mode == 0o700


@on_loop
async def test_administrators_are_root() -> None:
    async with MetaRig(MemoryEngine(), MetaSettings(), accounts=(ADA, EVE)) as rig:
        await rig.open_session(9, "admin")
        made = expect(await rig.ask(9, MakeDirectory(at("d"), 0o700), user("admin")), Found).inode
        assert made.uid == 0
        changed = await rig.ask(9, SetAttributes(Place(made.id), uid=ADA.uid), user("admin"))
        assert expect(changed, Found).inode.uid == ADA.uid


# --- capabilities ---


@on_loop
async def test_opening_gives_users_the_right_to_what_they_opened_and_nothing_else() -> None:
    async with MetaRig(MemoryEngine(), accounts=(ADA, EVE)) as rig:
        await two_users(rig)
        keys = {1: derive_key(rig.secret.reveal(), 1)}

        def right(answer: object) -> Capability:
            opened = expect(answer, Opened)  # type: ignore[arg-type]
            assert time.time() < opened.expires_unix_s
            return verify(opened.capability, keys, "ada", time.time())

        file = expect(await rig.ask(7, Stat(at("a/f")), user("ada")), Found).inode
        for flags, handle, rights in (
            (OpenFlag.READ, 0, Rights.READ),
            (OpenFlag.WRITE, 2, Rights.WRITE),
            (OpenFlag.READ | OpenFlag.WRITE, 3, Rights.READ | Rights.WRITE),
        ):
            found = right(await rig.ask(7, Open(at("a/f"), flags, handle), user("ada")))
            assert (found.client, found.first_file, found.last_file, found.rights) == (7, file.id, file.id, rights)
        again = right(await rig.ask(7, Renew(file.id, Rights.READ | Rights.WRITE, 3), user("ada")))
        assert again.rights == Rights.READ | Rights.WRITE
        assert expect(await rig.ask(7, Renew(file.id, Rights.WRITE, 4), user("ada")), Refused).errno == errno.EBADF
        directory = expect(await rig.ask(7, Open(at("a"), OpenFlag.READ), user("ada")), Opened)
        assert not directory.capability
        by_service = expect(await rig.ask(5, Open(at("a/f"), OpenFlag.READ)), Opened)
        assert not by_service.capability


@on_loop
async def test_an_answer_that_is_told_again_has_a_capability_too() -> None:
    async with MetaRig(MemoryEngine(), accounts=(ADA, EVE)) as rig:
        await two_users(rig)
        request = Open(at("a/g"), CREATE, 2, 0o600)
        for _ in range(2):
            opened = expect(await rig.ask(7, request, user("ada"), number=9), Opened)
            assert opened.created
            right = verify(opened.capability, {1: derive_key(rig.secret.reveal(), 1)}, "ada", time.time())
            assert right.first_file == opened.inode.id


@on_loop
async def test_under_the_number_of_another_request_nobody_gets_more_than_that_one_was_granted() -> None:
    """Opening for nothing is allowed to anybody; its stored answer is no way to the right to read."""
    async with MetaRig(MemoryEngine(), accounts=(ADA, EVE)) as rig:
        await two_users(rig)
        closed = expect(await rig.ask(7, Open(at("closed"), CREATE, 2, 0o600), user("ada")), Opened).inode
        theirs = Open(Place(closed.id), OpenFlag.READ | OpenFlag.WRITE, 3)
        assert expect(await rig.ask(8, theirs, user("eve")), Refused).errno == errno.EACCES
        for number, request in ((40, theirs), (41, Open(at("closed"), OpenFlag.READ | OpenFlag.WRITE, 3))):
            nothing = expect(await rig.ask(8, Open(at("closed"), OpenFlag.CREATE), user("eve"), number=number), Opened)
            assert not nothing.rights
            again = expect(await rig.ask(8, request, user("eve"), number=number), Opened)
            assert not again.capability
            assert not again.rights


# --- what takes several transactions ---


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
        from fireflyer.fs.core.meta.layout import order_of

        (chain,) = order_of(layout, rig.chunks.chains(1))
        for index in range(3):
            rig.chunks.lengths[opened.id, chain, index] = 1 << 16
        assert expect(await rig.ask(5, Report(opened.id, 1, 3 << 16, 0)), Found).inode.length == 3 << 16
        cut = await rig.ask(5, Truncate(at("f"), 70_000), number=9)
        assert expect(cut, Found).inode.length == 70_000
        assert rig.chunks.lengths == {(opened.id, chain, 0): 1 << 16, (opened.id, chain, 1): 70_000 - (1 << 16)}
        assert await rig.ask(5, Truncate(at("f"), 70_000), number=9) == cut


def test_which_requests_are_numbered_and_in_which_lane_they_wait() -> None:
    assert not is_changing(Stat(at("a")))
    assert not is_changing(Renew(3, 1))
    assert not is_changing(Open(at("a"), OpenFlag.READ | OpenFlag.FOLLOW))
    assert all(is_changing(Open(at("a"), flag)) for flag in (OpenFlag.WRITE, OpenFlag.CREATE, OpenFlag.TRUNCATE))
    assert is_changing(Remove(at("a")))
    assert (
        lane_of(Remove(at("d/a")), 5) == lane_of(MakeDirectory(at("d/b")), 6) == lane_of(Rename(at("d/c"), at("x")), 7)
    )
    assert lane_of(Remove(at("a", 9)), 5) == lane_of(Close(9, 1, 0, 0), 5)

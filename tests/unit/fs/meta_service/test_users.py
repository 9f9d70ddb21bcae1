"""Who may ask what of the meta service, and the capabilities that its answers carry."""

from __future__ import annotations

import asyncio
import errno
import time

import pytest
from tests.support.fs.clusters.meta_service import ADA, CREATE, EVE, MetaRig, expect, two_users, user
from tests.support.fs.clusters.names import at
from tests.support.loops import on_loop

from fireflyer.base.errors import Busy, PermissionDenied
from fireflyer.fs.core.capability import Capability, Rights, derive_key, verify
from fireflyer.fs.core.meta.open_rows import pair_of
from fireflyer.fs.core.meta.tables import HOLDS, prefix_end
from fireflyer.fs.schema.inodes import ROOT
from fireflyer.fs.schema.meta import (
    Actor,
    ClientHeartbeat,
    Close,
    Done,
    ErrorReply,
    Found,
    ListDirectory,
    MakeDirectory,
    Open,
    Opened,
    OpenFlag,
    PathRef,
    Remove,
    Rename,
    Renew,
    Report,
    Request,
    Reserve,
    SetAttributes,
    Stat,
    Truncate,
)
from fireflyer.fs.service.meta.config import NOBODY, MetaSettings
from fireflyer.kvstore import MemoryEngine, MemoryStore


@on_loop
async def test_users_act_as_themselves_and_may_not_say_otherwise() -> None:
    async with MetaRig(MemoryEngine(), accounts=(ADA, EVE)) as rig:
        await two_users(rig)
        made = expect(await rig.ask(7, Stat(at("a/f")), user("ada")), Found).inode
        assert (made.uid, made.gid) == (ADA.uid, ADA.gid)
        for actor in (Actor(0, 0), Actor(ADA.uid, ADA.gid), Actor(EVE.uid, EVE.gid)):
            for request in (Stat(at("a/f")), MakeDirectory(at("e")), Remove(at("a/f"))):
                answer = expect(await rig.ask(8, request, user("eve"), actor=actor), ErrorReply)
                assert answer.errno == errno.EPERM
        with pytest.raises(PermissionDenied, match="has no account in this file system"):
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
            Open(PathRef(file.id), OpenFlag.READ),
            Open(PathRef(file.id), OpenFlag.WRITE, 1),
            Open(at("g", directory.id), CREATE, 2),
            MakeDirectory(at("a/d")),
            Remove(at("f", directory.id)),
            Rename(at("f", directory.id), at("mine")),
            Rename(at("a/f"), at("mine")),
            SetAttributes(PathRef(file.id), mode=0o777),
            SetAttributes(PathRef(file.id), uid=EVE.uid),
            Truncate(PathRef(file.id), 0),
            Renew(file.id, Rights.READ),
        ]
        for request in attempts:
            answer = expect(await rig.ask(8, request, user("eve")), ErrorReply)
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
            Truncate(PathRef(file.id), 0, 1),
            Renew(file.id, Rights.WRITE, 1),
        ):
            answer = expect(await rig.ask(8, request, user("eve")), ErrorReply)
            # By number they reach nothing that lies where they may not go.
            expected = errno.EACCES if isinstance(request, Truncate) else errno.EBADF
            assert answer.errno == expected, (request, answer)
        closed = expect(await rig.ask(7, Close(file.id, 1, 5, 0), user("ada")), Found)
        assert closed.inode.length == 5


@on_loop
async def test_a_user_holds_only_what_he_may_open_or_owns_and_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fireflyer.fs.core.meta.open_files.holds.MAX_HOLDS", 3)

    async def held(client: int) -> list[int]:
        page = await rig.engine.read(lambda reader: reader.get_range(HOLDS, prefix_end(HOLDS)))
        return [pair_of(key)[0] for key, _ in page.items if pair_of(key)[1] == client]

    async with MetaRig(MemoryEngine(), accounts=(ADA, EVE)) as rig:
        await two_users(rig)
        hidden = expect(await rig.ask(7, Open(at("a/g"), CREATE, 2, 0o666), user("ada")), Opened).inode.id
        closed = expect(await rig.ask(7, Open(at("h"), CREATE, 3, 0o600), user("ada")), Opened).inode.id
        public = expect(await rig.ask(7, Open(at("i"), CREATE, 4, 0o604), user("ada")), Opened).inode.id
        own = [expect(await rig.ask(8, Open(at(f"e{n}"), CREATE, n + 1, 0), user("eve")), Opened) for n in range(4)]
        owned = [one.inode.id for one in own]
        assert await rig.ask(8, ClientHeartbeat(1, held=(hidden, closed, public, 10**6)), user("eve")) == Done()
        assert await held(8) == [public]
        assert await rig.ask(8, ClientHeartbeat(2, held=(public, *owned)), user("eve")) == Done()
        assert await held(8) == [public, *owned[:2]]
        assert await rig.ask(8, ClientHeartbeat(3, held=(owned[3],), closed=(public,)), user("eve")) == Done()
        assert await held(8) == [owned[0], owned[1], owned[3]]
        assert await rig.ask(7, ClientHeartbeat(1, held=(hidden, closed)), user("ada")) == Done()
        assert await held(7) == [hidden, closed]
        await rig.ask(5, ClientHeartbeat(1, held=(hidden, closed, public, *owned)))
        assert len(await held(5)) == 7


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
            ClientHeartbeat(1, closed=(file.id,)),
        ):
            answer = expect(await rig.ask(7, request, user("eve"), number=51), ErrorReply)
            assert answer.errno == errno.EPERM, (request, answer)
        replayed = await rig.ask(7, MakeDirectory(at("a/d")), user("eve"), number=50)
        assert expect(replayed, ErrorReply).errno == errno.EPERM
        assert await rig.ask(7, MakeDirectory(at("a/d")), user("ada"), number=50) == answered


@on_loop
async def test_a_mount_speaks_for_its_users_and_for_root_only_where_that_is_said() -> None:
    store = MemoryStore()
    async with MetaRig(MemoryEngine(store), MetaSettings(trusted_root=True)) as trusting:
        await trusting.open_session(5)
        await trusting.ask(5, SetAttributes(PathRef(ROOT), mode=0o777))
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
        assert expect(await careful.ask(6, SetAttributes(at("u"), mode=0)), ErrorReply).errno == errno.EPERM
        made = await careful.ask(6, SetAttributes(at("u"), mode=0o700), actor=Actor(12, 13))
        assert expect(made, Found).inode.mode == 0o700


@on_loop
async def test_one_user_does_not_take_all_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fireflyer.fs.service.meta.service.MAX_WAITING", 40)
    async with MetaRig(MemoryEngine(), accounts=(ADA, EVE)) as rig:
        await two_users(rig)
        asked = [asyncio.ensure_future(rig.ask_all(8, [Stat(at("a"))] * 5, user("eve"))) for _ in range(4)]
        found = [expect(await rig.ask(7, Stat(at("a")), user("ada")), Found)]
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(one, Busy) for one in told] == [False, False, True, True]
        assert len(await rig.ask_all(5, [Stat(at("a"))] * 30)) == 30
        assert len(await rig.ask_all(8, [Stat(at("a"))] * 10, user("eve"))) == 10
        assert found


@on_loop
async def test_administrators_are_root() -> None:
    async with MetaRig(MemoryEngine(), MetaSettings(), accounts=(ADA, EVE)) as rig:
        await rig.open_session(9, "admin")
        made = expect(await rig.ask(9, MakeDirectory(at("d"), 0o700), user("admin")), Found).inode
        assert made.uid == 0
        changed = await rig.ask(9, SetAttributes(PathRef(made.id), uid=ADA.uid), user("admin"))
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
        assert expect(await rig.ask(7, Renew(file.id, Rights.WRITE, 4), user("ada")), ErrorReply).errno == errno.EBADF
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
        theirs = Open(PathRef(closed.id), OpenFlag.READ | OpenFlag.WRITE, 3)
        assert expect(await rig.ask(8, theirs, user("eve")), ErrorReply).errno == errno.EACCES
        for number, request in ((40, theirs), (41, Open(at("closed"), OpenFlag.READ | OpenFlag.WRITE, 3))):
            nothing = expect(await rig.ask(8, Open(at("closed"), OpenFlag.CREATE), user("eve"), number=number), Opened)
            assert not nothing.rights
            assert expect(await rig.ask(8, request, user("eve"), number=number), ErrorReply).errno == errno.EINVAL

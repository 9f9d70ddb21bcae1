"""Open files of a client whose session ends, step by step."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import msgspec
import pytest
from tests.support.fs.clusters.file_rig import FileRig, Silent, content, run, turns

from fireflyer.base.units import MIB
from fireflyer.fs.client.files.open_file_table import FileOptions
from fireflyer.fs.client.files.open_inode import file_of
from fireflyer.fs.core.meta.tables import HOLDS
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.meta import Answers, Calls, ClientHeartbeat, Found, Report, Request, Stat


@pytest.mark.parametrize("sent", [False, True])
def test_what_waits_when_the_session_ends_is_never_written(sent: bool) -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        other, _ = await rig.client()
        written, read = await files.open("/a", "wb"), await files.open("/a")
        await written.pwrite(b"old" * 100_000, 0)
        played.held = True
        if sent:
            written.body.begin(everything=True)
        await rig.rig.end_session(played.client)
        async with await other.open("/a", "wb") as file:
            await file.pwrite(b"0123456789", 0)
        await files.mkdir("/d")  # tells that there is another session
        played.held = False
        for end in (written.flush, written.fsync, written.close):
            with pytest.raises(FileError) as caught:
                await end()
            assert caught.value.errno == errno.ESTALE
        assert await read.pread(0, 100) == b"0123456789"
        await read.close()
        assert await content(other, "/a") == b"0123456789"
        assert {len(chunk) for chunk in rig.store.bytes.values()} == {10}
        assert not files.open_files.dirty_bytes
        async with await files.open("/a", "r+b") as file:
            await file.pwrite(b"X", 3)
        assert await content(other, "/a") == b"012X456789"

    run(test)


def test_files_that_are_open_are_held_before_they_are_looked_for_in_another_session() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        async with await files.open("/a", "wb") as file:
            await file.pwrite(b"kept", 0)
        read = await files.open("/a")
        await files.unlink("/a")
        await rig.rig.end_session(played.client)
        await files.mkdir("/d")
        asked: list[Request] = []
        before, doomed = rig.sends, True

        async def sends(calls: Calls) -> Answers:
            asked.extend(call.request for call in calls.calls)
            answers = await before(calls)
            if isinstance(asked[-1], Stat) and doomed:
                (found,) = answers.answers
                assert isinstance(found, Found)
                body = msgspec.structs.replace(file_of(found.inode), cutting=0)
                return Answers((Found(msgspec.structs.replace(found.inode, body=body)),))
            return answers

        rig.sends = sends
        with pytest.raises(FileError) as caught:
            await read.pread(0, 4)
        assert caught.value.errno == errno.ESTALE
        heartbeat, stat = asked
        assert isinstance(heartbeat, ClientHeartbeat)
        assert heartbeat.held == (read.inode_id,)
        assert heartbeat.whole
        assert isinstance(stat, Stat)
        doomed = False
        assert await read.pread(0, 4) == b"kept"
        await read.close()

    run(test)


def test_what_was_closed_while_a_beat_waited_for_another_session_is_not_held_there() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        async with await files.open("/a", "wb") as file:
            await file.pwrite(b"kept", 0)
        read, other = await files.open("/a"), await files.open("/a")
        kept = await files.open("/a", "r+b")
        await kept.close()
        await files.meta.heartbeat()
        silent = Silent(rig, ClientHeartbeat, done=False)
        heartbeat = asyncio.create_task(files.meta.heartbeat())
        await turns()
        await read.close()
        await other.close()
        await rig.rig.end_session(played.client)
        silent.over = True
        await heartbeat
        for _ in range(2):
            await files.meta.heartbeat()
        assert not await rig.rig.rows(HOLDS)

    run(test)


def test_a_beat_that_waits_until_the_sessions_are_exchanged_is_of_the_one_before() -> None:
    """The next session has its number, and what was held is not forgotten yet."""

    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        async with await files.open("/a", "wb") as file:
            await file.pwrite(b"kept", 0)
        read = await files.open("/a")
        await files.meta.heartbeat()
        await rig.rig.end_session(played.client)
        played.want_routing = lambda: None  # type: ignore[method-assign]
        played.exchanging, played.client = True, await rig.rig.open_session(rig.next_session())
        heartbeat = asyncio.create_task(files.meta.heartbeat())
        await turns()
        await read.close()
        played.exchanging = False
        for tell in played.on_exchange:
            tell()
        await heartbeat
        await files.meta.heartbeat()
        assert not await rig.rig.rows(HOLDS)

    run(test)


def test_a_file_whose_session_ends_before_its_open_for_reading_is_heard_is_looked_for() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        async with await files.open("/a", "wb") as file:
            await file.pwrite(b"kept", 0)
        call = files.meta.call_in_session

        async def late(request: Any, **more: Any) -> Any:
            answered = await call(request, **more)
            await rig.rig.end_session(played.client)
            await played.exchange()
            return answered

        files.meta.call_in_session = late  # type: ignore[method-assign]
        read = await files.open("/a")
        files.meta.call_in_session = call  # type: ignore[method-assign]
        assert not await rig.rig.rows(HOLDS)
        assert await read.pread(0, 4) == b"kept"
        assert len(await rig.rig.rows(HOLDS)) == 1
        await read.close()

    run(test)


def test_a_report_that_its_session_does_not_live_to_hear_is_forgotten() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        other, _ = await rig.client()
        written, read = await files.open("/a", "wb"), await files.open("/a")
        await written.pwrite(b"x" * 100, 0)
        silent = Silent(rig, Report, done=False)
        told = asyncio.create_task(written.fsync())
        await turns()
        await rig.rig.end_session(played.client)
        async with await other.open("/a", "wb") as file:
            await file.pwrite(b"0123456789", 0)
        await files.mkdir("/d")
        silent.over = True
        with pytest.raises(FileError) as caught:
            await told
        assert caught.value.errno == errno.ESTALE
        assert (await files.stat("/a")).st_size == (await read.stat()).st_size == 10
        with pytest.raises(FileError):
            await written.close()
        await read.close()

    run(test)


def test_who_waits_for_room_when_the_session_ends_writes_nothing() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client(FileOptions(umask=0, write_bytes=MIB))
        written = await files.open("/a", "wb")
        played.held = True
        await written.pwrite(bytes(MIB), 0)
        waits = asyncio.create_task(written.pwrite(b"late", 0))
        await turns()
        await rig.rig.end_session(played.client)
        await files.mkdir("/d")
        played.held = False
        with pytest.raises(FileError) as caught:
            await waits
        assert caught.value.errno == errno.ESTALE
        await turns()
        assert not rig.store.bytes
        assert not files.open_files.dirty_bytes
        with pytest.raises(FileError):
            await written.close()

    run(test)


def test_a_file_whose_session_ends_before_its_open_is_heard_is_lost() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        call = files.meta.call_in_session

        async def late(request: Any, **more: Any) -> Any:
            answered = await call(request, **more)
            await rig.rig.end_session(played.client)
            await played.exchange()
            return answered

        files.meta.call_in_session = late  # type: ignore[method-assign]
        file = await files.open("/a", "wb")
        files.meta.call_in_session = call  # type: ignore[method-assign]
        with pytest.raises(FileError) as caught:
            await file.pwrite(b"x", 0)
        assert caught.value.errno == errno.ESTALE
        with pytest.raises(FileError):
            await file.close()
        async with await files.open("/a", "r+b") as file:
            await file.pwrite(b"x", 0)

    run(test)

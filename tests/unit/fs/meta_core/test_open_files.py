"""Open files of several clients, step by step: what one does while another one writes, closes or is not answered."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest
from tests.support.fs.clusters.file_rig import FileRig, Silent, content, no_space, run, turns

from fireflyer.base.errors import NotFound, Timeout
from fireflyer.base.units import MIB, MS
from fireflyer.fs.client.files.asyncio_files import Files
from fireflyer.fs.client.files.open_file_table import FileOptions
from fireflyer.fs.core.meta.tables import WRITERS
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.meta import Answers, Calls, Close, Open, OpenFlag, PathRef, Stat
from fireflyer.fs.schema.routing import Routing
from fireflyer.native import crc32c


@pytest.mark.parametrize("by", ["path", "inode"])
def test_an_open_that_cuts_comes_after_what_was_written_before(by: str) -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        first = await files.open("/a", "wb")
        await first.pwrite(b"x" * 10, 0)
        if by == "path":
            second = await files.open("/a", "wb")
        else:
            place = PathRef((await files.stat("/a")).inode.id)
            second = await files.open_at(place, OpenFlag.WRITE | OpenFlag.TRUNCATE)
        assert (await files.stat("/a")).st_size == first.length == 0
        await second.pwrite(b"new", 0)
        await second.close()
        await first.close()
        other, _ = await rig.client()
        assert await content(other, "/a") == await content(files, "/a") == b"new"

    run(test)


def test_what_was_fetched_ahead_goes_when_another_client_has_written_in_place() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        async with await files.open("/a", "wb") as file:
            await file.pwrite(b"x" * 3_000_000, 0)
        read = await files.open("/a")
        for at in range(0, 600_000, 200_000):
            assert await read.pread(at, 200_000) == b"x" * 200_000
        assert read.ahead.blocks
        other, _ = await rig.client()
        async with await other.open("/a", "r+b") as file:
            await file.pwrite(b"y" * 2_000_000, 600_000)
        opened = await files.open("/a")
        assert await read.pread(600_000, 200_000) == b"y" * 200_000
        await opened.close()
        await read.close()

    run(test)


def test_a_change_between_two_reports_of_this_client_is_seen_too() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        other, _ = await rig.client()
        mine = await files.open("/a", "w+b")
        await mine.pwrite(b"x" * 3_000_000, 0)
        await mine.fsync()
        for at in range(0, 600_000, 200_000):
            await mine.pread(at, 200_000)
        assert mine.ahead.blocks
        async with await other.open("/a", "r+b") as file:
            await file.pwrite(b"y" * 2_000_000, 600_000)
        await mine.pwrite(b"z", 0)
        await mine.fsync()
        assert await mine.pread(600_000, 200_000) == b"y" * 200_000
        await mine.close()

    run(test)


def test_an_answer_that_is_older_than_a_report_does_not_shorten_a_file() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        file = await files.open("/a", "wb")
        late: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        before = rig.sends

        async def sends(calls: Calls) -> Answers:
            answers = await before(calls)
            if isinstance(calls.calls[0].request, Stat):
                await late
            return answers

        rig.sends = sends
        asked = asyncio.create_task(files.stat("/a"))
        for _ in range(20):
            await asyncio.sleep(0)
        await file.pwrite(b"x" * 100, 0)
        await file.fsync()
        late.set_result(None)
        assert (await asked).st_size == 100
        await file.truncate(7)
        assert (await files.stat("/a")).st_size == 7
        await file.close()

    run(test)


def test_times_before_a_close_are_those_after_it() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        other, _ = await rig.client()
        seen = [await files.stat("/")]
        file = await files.open("/a", "wb")
        seen = [await files.stat("/a")]
        for step in range(3):
            await file.pwrite(b"x" * step, 1 + step)
            seen.append(await file.stat())
            await file.fsync()
            seen.append(await other.stat("/a"))
        await file.append(b"more")
        seen.append(await file.stat())
        await file.close()
        seen.append(await files.stat("/a"))
        seen.append(await other.stat("/a"))
        times = [(one.st_mtime_ns, one.st_ctime_ns) for one in seen]
        assert times[3] == times[4]
        assert times[5] == times[6]
        assert times[-3] == times[-2] == times[-1]
        assert len(set(times)) == 4

    run(test)


async def handles_of(rig: FileRig, files: Files, path: str) -> int:
    """Open for writing, as the service knows."""
    inode = (await files.stat(path)).inode.id
    return len(await rig.rig.rows(WRITERS + inode.to_bytes(8, "big")))


@pytest.mark.parametrize("done", [False, True])
def test_an_open_that_was_given_up_leaves_no_writer(done: bool) -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        async with await files.open("/a", "wb") as file:
            await file.pwrite(b"kept", 0)
        silent = Silent(rig, Open, done=done)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(files.open("/a", "r+b"), 0.05)
        orphaned, came = files.open_files.orphaned, asyncio.Event()
        add = orphaned.add

        def adds(one: Any) -> None:
            add(one)
            came.set()

        orphaned.add = adds  # type: ignore[method-assign]
        silent.over = True
        await came.wait()  # the answer, when nobody waits for it
        assert await handles_of(rig, files, "/a") == 1
        await files.open_files.maintain()
        assert await handles_of(rig, files, "/a") == 0
        assert await content(files, "/a") == b"kept"

    run(test)


def test_an_open_that_was_not_answered_in_time_leaves_no_writer() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        async with await files.open("/a", "wb"):
            pass
        silent = Silent(rig, Open, done=True)
        call = files.meta.call_in_session

        async def soon(request: Any, **more: Any) -> Any:
            return await call(request, **(more | {"timeout_ns": 50 * MS}))

        files.meta.call_in_session = soon  # type: ignore[method-assign]
        with pytest.raises(Timeout):
            await files.open("/a", "r+b")
        silent.over = True
        assert await handles_of(rig, files, "/a") == 1
        await files.open_files.maintain()
        assert await handles_of(rig, files, "/a") == 0
        assert not len(files.open_files.orphaned)

    run(test)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_close_that_was_not_answered_is_said_again(cancelled: bool) -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        other, _ = await rig.client()
        file = await files.open("/a", "wb")
        await file.pwrite(b"x" * 100, 0)
        silent = Silent(rig, Close, done=False)
        if cancelled:
            played.held = True
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(file.close(), 0.02)
            played.held = False
        else:
            call = files.meta.call

            async def soon(request: Any, **more: Any) -> Any:
                return await call(request, **(more | {"timeout_ns": 50 * MS}))

            files.meta.call = soon  # type: ignore[method-assign]
            with pytest.raises(FileError):
                await file.close()
            files.meta.call = call  # type: ignore[method-assign]
        assert (await files.stat("/a")).st_size == 100
        assert (await other.stat("/a")).st_size == 0
        silent.over = True
        while len(files.open_files.orphaned):
            await files.open_files.maintain()
            await asyncio.sleep(0)
        assert (await other.stat("/a")).st_size == 100
        assert await handles_of(rig, files, "/a") == 0
        assert not files.open_files.bodies

    run(test)


def test_a_file_whose_chains_are_away_leaves_room_to_write_others() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client(FileOptions(umask=0, write_bytes=16 * MIB))
        stuck, file = await files.open("/stuck", "wb"), await files.open("/a", "wb")
        played.away = stuck.inode_id
        more = asyncio.create_task(stuck.pwrite(bytes(20 * MIB), 0))
        await asyncio.sleep(0)
        assert files.open_files.dirty_bytes == 12 * MIB
        for at in range(0, 8 * MIB, MIB // 2):
            await file.pwrite(bytes(MIB // 2), at)
        await file.close()
        assert not more.done()
        played.away = 0
        assert await more == 20 * MIB
        await stuck.close()
        assert (await files.stat("/stuck")).st_size == 20 * MIB

    run(test)


def test_all_files_together_keep_no_more_than_the_write_budget() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client(FileOptions(umask=0, write_bytes=16 * MIB))
        opened = [await files.open(f"/{name}", "wb") for name in "abc"]
        played.held = True
        writes = [asyncio.create_task(file.pwrite(bytes(8 * MIB), 0)) for file in opened]
        most = 0
        for _ in range(100):
            await asyncio.sleep(0)
            most = max(most, files.open_files.dirty_bytes)
        done = [write.done() for write in writes]
        played.held = False
        assert await asyncio.gather(*writes) == [8 * MIB] * 3
        assert most == 16 * MIB
        assert done == [True, True, False]
        await asyncio.gather(*(file.close() for file in opened))
        assert files.open_files.dirty_bytes == 0

    run(test)


def test_what_ends_all_files_waits_for_all_of_them_at_once() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        opened = [await files.open(f"/{one}", "wb") for one in range(20)]
        for file in opened:
            await file.pwrite(b"x", 0)
            await file.flush()
        asked: list[int] = []
        before = rig.sends

        async def sends(calls: Calls) -> Answers:
            asked.append(len(calls.calls))
            return await before(calls)

        rig.sends = sends
        await files.open_files.maintain()
        assert asked == [20]
        for file in opened:
            await file.pwrite(b"y", 0)
        await files.open_files.close()
        assert sum(asked) == 40
        assert len(asked) < 15

    run(test)


def test_chains_that_a_service_knows_first_are_asked_for() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        played.routing = Routing(1)
        async with await files.open("/a", "wb") as file:
            await file.pwrite(b"x", 0)
        assert await content(files, "/a") == b"x"
        other, later = await rig.client()
        later.routing = Routing(1)

        async def never(table: int) -> None: ...

        later.learn_table = never  # type: ignore[method-assign]
        with pytest.raises(NotFound):
            await other.open("/a", "r+b")
        assert await handles_of(rig, files, "/a") == 1
        await other.open_files.maintain()
        assert await handles_of(rig, files, "/a") == 0

    run(test)


def test_attributes_that_are_set_beside_a_close_come_after_it() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        file = await files.open("/a", "wb")
        await file.pwrite(b"x", 0)
        silent = Silent(rig, Close, done=False)
        closed = asyncio.create_task(file.close())
        await turns()
        times = asyncio.create_task(files.utime("/a", ns=(5, 7)))
        await turns()
        assert not times.done()
        silent.over = True
        await closed
        await times
        assert (await files.stat("/a")).st_mtime_ns == 7

    run(test)


def test_fsync_of_an_open_for_reading_tells_the_length_and_errors() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        other, _ = await rig.client()
        written, read = await files.open("/a", "wb"), await files.open("/a")
        await written.pwrite(b"x" * 100, 0)
        await read.fsync()
        assert (await other.stat("/a")).st_size == 100
        played.failing = no_space
        await written.pwrite(b"x", 200)
        for file in (read, written):
            with pytest.raises(FileError) as caught:
                await file.fsync()
            assert caught.value.errno == errno.ENOSPC
        await read.fsync()
        await read.close()
        await written.close()

    run(test)


def test_a_read_that_is_on_its_way_brings_the_sum_of_its_bytes_but_not_of_holes() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        data = bytes(range(256)) * 11_000
        async with await files.open("/a", "w+b") as file:
            await file.pwrite(data, 0)
            await file.pwrite(b"behind a hole", 6 * MIB)
            await file.fsync()
            for begin, size in [(0, len(data)), (MIB - 3, 7), (100, 1)]:
                memory = bytearray(size)
                read = await file.begin_read(memory, begin)
                assert read.crc32c is None
                assert await read.end() == size
                assert memory == data[begin : begin + size]
                assert read.crc32c == crc32c(memory)
            memory = bytearray(6 * MIB)
            read = await file.begin_read(memory, 5)
            assert await read.end() == len(memory)
            assert read.crc32c is None, "the bytes of a hole come from no node"

    run(test)

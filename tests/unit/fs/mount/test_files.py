"""A mount's operations, over clients of files in this process: closes, locks, and what is not answered."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import time

import pytest
from tests.support.fs.clusters.file_rig import FileRig, no_space
from tests.support.fs.mounts.mounted_rig import (
    ONE,
    OTHER,
    ROOT_USER,
    create,
    heard,
    is_unlock,
    lock,
    mount,
    run,
    turns,
    unanswered,
    write,
)

from fireflyer.base.units import MIB, SECOND
from fireflyer.fs.client.files.open_file_table import FileOptions
from fireflyer.fs.client.files.open_inode import file_of
from fireflyer.fs.mount.files import MountedFiles
from fireflyer.fs.mount.metrics import MountUsage
from fireflyer.fs.mount.operations import Changes, Opened, Set
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.inodes import ROOT
from fireflyer.fs.schema.meta import (
    Answers,
    Calls,
    Close,
    Lock,
    Report,
    SetAttributes,
    Stat,
    Truncate,
)


def test_a_lock_of_an_open_file_ends_with_it_and_a_process_keeps_its_own() -> None:
    """The kernel says nothing of the former at its end (F_OFD_SETLK)."""

    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        inode, first = await create(mounted)
        second = (await mounted.open(ROOT_USER, inode, os.O_RDWR)).handle
        await lock(mounted, inode, ONE, fcntl.F_WRLCK, handle=first)
        with pytest.raises(BlockingIOError):
            await lock(mounted, inode, OTHER, fcntl.F_WRLCK, handle=second)
        await mounted.flush(first, 77)  # of whoever closes it last
        await mounted.release(first, 0, unlock=False)
        await lock(mounted, inode, OTHER, fcntl.F_WRLCK, handle=second)
        third = (await mounted.open(ROOT_USER, inode, os.O_RDWR)).handle
        await lock(mounted, inode, OTHER, fcntl.F_WRLCK, handle=third)
        await mounted.flush(second, 77)
        await mounted.release(second, 0, unlock=False)
        with pytest.raises(BlockingIOError):
            await lock(mounted, inode, ONE, fcntl.F_WRLCK, handle=third)

    run(test)


def test_each_close_of_one_open_file_returns_when_all_is_stored() -> None:
    async def test(rig: FileRig) -> None:
        mounted, played = await mount(rig)
        inode, handle = await create(mounted)
        await write(mounted, handle, b"both")
        played.held = True
        closes = [asyncio.create_task(mounted.flush(handle, owner)) for owner in (ONE, OTHER)]
        await turns()
        assert [close.done() for close in closes] == [False, False]
        found = await mounted.get_attributes(ROOT_USER, inode, handle)
        assert found.size == 4
        played.held = False
        await closes[1]
        other, _ = await rig.client()
        assert (await other.stat("/a")).st_size == 4
        await closes[0]
        sent = heard(rig)
        await mounted.flush(handle, ONE)
        assert sent == []

    run(test)


def test_it_tells_what_it_holds() -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        assert mounted.held == MountUsage(0, 0, 0)
        inode, handle = await create(mounted)
        again = await mounted.open(ROOT_USER, inode, os.O_RDONLY)
        await write(mounted, handle, b"dirty")
        assert mounted.held == MountUsage(1, 2, 5)
        await mounted.flush(handle, ONE)
        assert mounted.held == MountUsage(1, 2, 0)
        await mounted.release(handle, ONE, unlock=False)
        await mounted.release(again.handle, ONE, unlock=False)
        assert mounted.held == MountUsage(0, 0, 0)

    run(test)


def test_who_writes_an_empty_file_has_no_pages_and_those_of_others_are_dropped() -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        found, writer = await mounted.create(ROOT_USER, ROOT, b"a", 0o644, os.O_WRONLY)
        assert writer.direct
        assert await mounted.write(writer.handle, 0, memoryview(b"alone")) == (5, False)
        reader = await mounted.open(ROOT_USER, found.inode, os.O_RDONLY)
        assert not reader.direct
        assert await mounted.write(writer.handle, 0, memoryview(b"read!")) == (5, True)
        await mounted.release(reader.handle, ONE, unlock=False)
        assert await mounted.write(writer.handle, 0, memoryview(b"alone")) == (5, False)
        second = await mounted.open(ROOT_USER, found.inode, os.O_WRONLY)
        assert not second.direct
        assert await mounted.write(second.handle, 0, memoryview(b"pages")) == (5, False)
        for handle in (writer.handle, second.handle):
            await mounted.flush(handle, ONE)
            await mounted.release(handle, ONE, unlock=False)
        for flags in (os.O_WRONLY, os.O_RDWR):  # it is not empty any more, or may be mapped
            again = await mounted.open(ROOT_USER, found.inode, flags | (os.O_TRUNC if flags == os.O_RDWR else 0))
            assert not again.direct
            await mounted.release(again.handle, ONE, unlock=False)

    run(test)


def test_whole_units_are_sent_out_of_the_memory_that_was_written() -> None:
    async def test(rig: FileRig) -> None:
        mounted, played = await mount(rig)
        _, writer = await mounted.create(ROOT_USER, ROOT, b"a", 0o644, os.O_RDWR)
        unit = file_of((await mounted._files.stat("/a")).inode).layout.chunk_bytes
        data = [bytes([n]) * size for n, size in enumerate((unit, unit - 1, unit + 1, unit))]
        at, played.held = 0, True
        for piece in data:
            await write(mounted, writer.handle, piece, at)
            at += len(piece)
        into = bytearray(at)
        assert await mounted.read(writer.handle, 0, memoryview(into)) == at
        assert into == b"".join(data)
        played.held = False
        await mounted.flush(writer.handle, ONE)
        other, _ = await rig.client()
        async with await other.open("/a", "rb") as file:
            assert await file.pread(0, at) == b"".join(data)

    run(test)


def test_what_was_written_by_a_mapping_is_stored_by_the_close_of_any_who_writes() -> None:
    """The kernel sends it by whichever descriptor it likes."""

    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        inode, handle = await create(mounted)
        second: Opened = await mounted.open(ROOT_USER, inode, os.O_RDWR)
        await write(mounted, handle, b"mapped")
        await mounted.flush(second.handle, ONE)
        other, _ = await rig.client()
        assert (await other.stat("/a")).st_size == 6

    run(test)


def test_an_error_of_what_was_written_is_told_at_the_close_of_each_open_once() -> None:
    async def test(rig: FileRig) -> None:
        mounted, played = await mount(rig)
        inode, handle = await create(mounted)
        second = await mounted.open(ROOT_USER, inode, os.O_WRONLY)
        played.failing = no_space
        await write(mounted, handle, b"too much")
        for one in (handle, second.handle):
            with pytest.raises(FileError) as caught:
                await mounted.flush(one, ONE)
            assert caught.value.errno == errno.ENOSPC
            await mounted.flush(one, ONE)

    run(test)


@pytest.mark.parametrize("how", ["close", "unlock", "weaker", "flock"])
def test_who_gets_the_lock_finds_the_bytes_written_under_it(how: str) -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        inode, handle = await create(mounted)
        if how == "flock":
            await mounted.lock_whole(ROOT_USER, inode, ONE, fcntl.LOCK_EX, wait=False)
        else:
            await lock(mounted, inode, ONE, fcntl.F_WRLCK)
        await write(mounted, handle, b"under lock")
        sent = heard(rig)
        if how == "close":
            await mounted.flush(handle, ONE)
        elif how == "flock":
            await mounted.lock_whole(ROOT_USER, inode, ONE, fcntl.LOCK_UN, wait=False)
        else:
            await lock(mounted, inode, ONE, fcntl.F_UNLCK if how == "unlock" else fcntl.F_RDLCK)
        assert [type(one) for one in sent] == [Report, Lock]

    run(test)


@pytest.mark.parametrize("what", ["attributes", "length"])
def test_what_is_written_beside_a_change_of_attributes_is_stored_before_an_unlock(what: str) -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        inode, handle = await create(mounted)
        await lock(mounted, inode, ONE, fcntl.F_WRLCK)
        changes = Changes(Set.MODE if what == "attributes" else Set.SIZE, 0o600, 0, 0, 100, 0, 0)
        before, came, goes_on = rig.sends, asyncio.Event(), asyncio.Event()

        async def sends(calls: Calls) -> Answers:
            answers = await before(calls)
            if isinstance(calls.calls[0].request, SetAttributes | Truncate):
                came.set()
                await goes_on.wait()
            return answers

        rig.sends = sends
        changing = asyncio.create_task(mounted.set_attributes(ROOT_USER, inode, 0, changes))
        await came.wait()
        await write(mounted, handle, b"under lock")
        goes_on.set()
        await changing
        sent = heard(rig)
        await lock(mounted, inode, ONE, fcntl.F_UNLCK)
        assert [type(one) for one in sent] == [Report, Lock]

    run(test)


def test_what_has_waited_for_room_while_others_closed_is_stored_before_an_unlock() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client(FileOptions(umask=0, write_bytes=MIB))
        mounted = MountedFiles(files, trusted=True)
        (inode, handle), (full, other) = await create(mounted), await create(mounted, b"full")
        await lock(mounted, inode, ONE, fcntl.F_WRLCK)
        played.away = full
        await write(mounted, other, bytes(3 * MIB // 4))
        await write(mounted, handle, b"x")
        waits = asyncio.create_task(write(mounted, handle, bytes(MIB // 2), 1))
        await turns()
        assert not waits.done()
        await mounted.flush(handle, OTHER)
        played.away = 0
        await waits
        sent = heard(rig)
        await lock(mounted, inode, ONE, fcntl.F_UNLCK)
        assert [type(one) for one in sent] == [Report, Lock]

    run(test)


def test_who_reads_alone_and_closes_a_locked_file_stores_what_others_of_his_have_written() -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        inode, handle = await create(mounted)
        reading = await mounted.open(ROOT_USER, inode, os.O_RDONLY)
        await lock(mounted, inode, ONE, fcntl.F_WRLCK)
        await write(mounted, handle, b"x")
        sent = heard(rig)
        await mounted.flush(reading.handle, ONE)
        assert [type(one) for one in sent] == [Report, Lock]

    run(test)


def test_a_lock_says_when_the_file_was_changed_elsewhere() -> None:
    async def test(rig: FileRig) -> None:
        (mounted, _), (other, _) = await mount(rig), await mount(rig)
        inode, handle = await create(mounted)
        await lock(mounted, inode, ONE, fcntl.F_WRLCK)
        await lock(mounted, inode, ONE, fcntl.F_UNLCK)
        assert not await lock(mounted, inode, ONE, fcntl.F_WRLCK)
        await lock(mounted, inode, ONE, fcntl.F_UNLCK)
        theirs = await other.open(ROOT_USER, inode, os.O_WRONLY)
        await lock(other, inode, OTHER, fcntl.F_WRLCK)
        await write(other, theirs.handle, b"theirs")
        await lock(other, inode, OTHER, fcntl.F_UNLCK)
        assert await lock(mounted, inode, ONE, fcntl.F_WRLCK)
        into = bytearray(10)
        assert await mounted.read(handle, 0, memoryview(into)) == 6
        assert not await lock(mounted, inode, ONE, fcntl.F_RDLCK)
        assert not await mounted.lock_whole(ROOT_USER, inode, ONE, fcntl.LOCK_EX, wait=False)

    run(test)


@pytest.mark.parametrize("kind", [Lock, Stat])
def test_who_is_interrupted_when_his_lock_is_granted_has_it(kind: type) -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        inode, _ = await create(mounted)
        before = rig.sends
        door, asked = asyncio.Event(), asyncio.Event()

        async def sends(calls: Calls) -> Answers:
            answers = await before(calls)
            if any(isinstance(call.request, kind) for call in calls.calls):
                asked.set()
                await door.wait()
            return answers

        rig.sends = sends
        locking = asyncio.create_task(lock(mounted, inode, ONE, fcntl.F_WRLCK, wait=True))
        await asked.wait()
        locking.cancel()
        await turns()
        door.set()
        await locking
        with pytest.raises(BlockingIOError):
            await lock((await mount(rig))[0], inode, OTHER, fcntl.F_WRLCK)

    run(test)


def test_an_unlock_at_close_that_is_not_answered_is_asked_again() -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        inode, handle = await create(mounted)
        await lock(mounted, inode, ONE, fcntl.F_WRLCK)
        answered = unanswered(rig, mounted, is_unlock)
        await mounted.flush(handle, ONE)
        answered()
        other, _ = await mount(rig)
        await other.open(ROOT_USER, inode, os.O_RDWR)
        await lock(other, inode, OTHER, fcntl.F_WRLCK, wait=True)

    run(test)


def test_a_late_unlock_is_not_of_a_lock_that_was_taken_after_it() -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        inode, handle = await create(mounted)
        await lock(mounted, inode, ONE, fcntl.F_WRLCK)
        answered = unanswered(rig, mounted, is_unlock)
        await mounted.flush(handle, ONE)
        sent = heard(rig)
        again = asyncio.create_task(lock(mounted, inode, ONE, fcntl.F_WRLCK))
        await turns()
        assert all(is_unlock(one) for one in sent)
        answered()
        await again
        other, _ = await mount(rig)
        with pytest.raises(BlockingIOError):
            await lock(other, inode, OTHER, fcntl.F_WRLCK)

    run(test)


def test_an_open_file_is_closed_though_its_unlock_is_not_answered() -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        inode, handle = await create(mounted)
        await mounted.lock_whole(ROOT_USER, inode, ONE, fcntl.LOCK_EX, wait=False)
        answered = unanswered(rig, mounted, is_unlock)
        sent = heard(rig)
        await mounted.release(handle, ONE, unlock=True)
        assert [type(one) for one in sent if not is_unlock(one)] == [Close]
        answered()
        other, _ = await mount(rig)
        await other.open(ROOT_USER, inode, os.O_RDWR)
        await other.lock_whole(ROOT_USER, inode, OTHER, fcntl.LOCK_EX, wait=True)

    run(test)


def test_a_lock_of_a_whole_file_is_free_after_the_close_that_the_kernel_has_not_waited_for() -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        inode, handle = await create(mounted)
        await mounted.lock_whole(ROOT_USER, inode, ONE, fcntl.LOCK_EX, wait=False)
        opened = await mounted.open(ROOT_USER, inode, os.O_RDWR)
        answered = asyncio.Event()
        before = rig.sends

        async def sends(calls: Calls) -> Answers:
            if any(is_unlock(call.request) for call in calls.calls):
                await answered.wait()
            return await before(calls)

        rig.sends = sends
        release = asyncio.create_task(mounted.release(handle, ONE, unlock=True))
        locking = asyncio.create_task(mounted.lock_whole(ROOT_USER, inode, OTHER, fcntl.LOCK_EX, wait=False))
        await turns()
        assert not release.done()
        assert not locking.done()
        answered.set()
        await release
        await locking
        with pytest.raises(BlockingIOError):  # nothing is under way
            await mounted.lock_whole(ROOT_USER, inode, ONE, fcntl.LOCK_EX, wait=False)
        await mounted.release(opened.handle, OTHER, unlock=True)

    run(test)


def test_a_file_that_was_replaced_is_not_opened_by_the_name_that_the_kernel_remembers() -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        inode, handle = await create(mounted)
        other, _ = await rig.client()
        keeping = await other.open("/a")
        async with await other.open("/new", "wb") as file:
            await file.pwrite(b"new", 0)
        await other.rename("/new", "/a")
        opened = await mounted.open(ROOT_USER, inode, os.O_RDONLY)  # it is open here, so this may be meant
        await mounted.release(opened.handle, ONE, unlock=False)
        await mounted.release(handle, ONE, unlock=False)
        with pytest.raises(FileError) as caught:
            await mounted.open(ROOT_USER, inode, os.O_RDONLY)
        assert caught.value.errno == errno.ESTALE
        await keeping.close()

    run(test)


def test_at_the_end_all_files_are_closed_at_the_same_time() -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        for number in range(20):
            _, handle = await create(mounted, b"file-%d" % number)
            await write(mounted, handle, b"x" * number)
        under_way, most, before = 0, 0, rig.sends

        async def sends(calls: Calls) -> Answers:
            nonlocal under_way, most
            under_way += len(calls.calls)
            most = max(most, under_way)
            try:
                return await before(calls)
            finally:
                under_way -= len(calls.calls)

        rig.sends = sends
        await mounted.finish()
        assert most > 5
        other, _ = await rig.client()
        assert [found.attributes.st_size async for found in other.scandir("/")] == sorted(range(20), key=str)

    run(test)


@pytest.mark.parametrize("ahead_ns", [0, 5 * SECOND])
def test_times_are_those_of_the_write_also_while_the_answer_to_its_report_is_on_its_way(ahead_ns: int) -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        other, _ = await rig.client()
        inode, handle = await create(mounted)
        later_ns = time.time_ns() + ahead_ns
        await other.utime("/a", ns=(later_ns, later_ns))  # another machine's clock is ahead
        answers, done = asyncio.Event(), asyncio.Event()
        before = rig.sends

        async def sends(calls: Calls) -> Answers:
            answer = await before(calls)
            if any(isinstance(call.request, Report | Close) for call in calls.calls):
                done.set()
                await answers.wait()
            return answer

        async def times() -> tuple[int, int]:
            found = await mounted.get_attributes(ROOT_USER, inode, 0)
            return found.mtime_ns, found.ctime_ns

        await times()
        await write(mounted, handle, b"written")
        told = await times()
        rig.sends = sends
        for act in (mounted.flush(handle, ONE), mounted.release(handle, ONE, unlock=False)):
            done.clear()
            answers.clear()
            acting = asyncio.create_task(act)
            await done.wait()
            meanwhile = await times()
            answers.set()
            await acting
            assert meanwhile == await times() == told
        assert (await other.stat("/a")).st_mtime_ns == told[0]

    run(test)

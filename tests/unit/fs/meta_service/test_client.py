"""Requests to the meta service: together, numbered, again, and what becomes of them when the session is over."""

from __future__ import annotations

import asyncio
import errno
import stat
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import pytest
from tests.support.fs.clusters.file_rig import FileRig, no_space

from fireflyer.base.errors import Aborted, Timeout, Unreachable, UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.fs.client.meta import SESSION_EVICTED, SESSION_FORGOTTEN
from fireflyer.fs.core.files.request_routing import service_for
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.inodes import ROOT
from fireflyer.fs.schema.meta import (
    MAX_UNDER_WAY,
    Answers,
    Calls,
    Close,
    ErrorReply,
    Lock,
    LockKind,
    MakeDirectory,
    Open,
    OpenFlag,
    PathRef,
    Report,
    Stat,
    Truncate,
)


def run(test: Callable[[FileRig], Coroutine[Any, Any, None]]) -> None:
    async def inside() -> None:
        async with FileRig() as rig:
            await test(rig)

    asyncio.run(inside())


def heard(rig: FileRig) -> list[Calls]:
    """All that is sent from now on."""
    sent: list[Calls] = []
    before = rig.sends

    async def sends(calls: Calls) -> Answers:
        sent.append(calls)
        return await before(calls)

    rig.sends = sends
    return sent


def test_requests_of_one_turn_go_together_and_reads_apart() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        sent = heard(rig)
        made = [files.meta.call(MakeDirectory(PathRef(ROOT, b"d%d" % one))) for one in range(70)]
        seen = [files.meta.call(Stat(PathRef(ROOT))) for _ in range(3)]
        await asyncio.gather(*made, *seen)
        assert sorted(len(one.calls) for one in sent) == [3, 6, 64]
        numbers = [call.number for one in sent for call in one.calls if call.number]
        assert sorted(numbers) == list(range(1, 71))
        await files.stat("/")
        assert sent[-1].done_below == 71

    run(test)


def test_what_is_wrong_with_one_request_is_told_to_who_asked_and_the_others_are_done() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        before = rig.sends

        async def reads(calls: Calls) -> Answers:
            """As a service does: the message as a whole."""
            try:
                return await before(msgspec.msgpack.decode(msgspec.msgpack.encode(calls), type=Calls))
            except msgspec.ValidationError as error:
                raise UsageError(f"bad request: {error}") from None

        rig.sends = reads
        wrong: list[tuple[int, Awaitable[object]]] = [
            (errno.E2BIG, files.setxattr("/", "user.a", bytes(65_537))),
            (errno.ERANGE, files.setxattr("/", "user." + "n" * 3000, b"")),
            (errno.EINVAL, files.truncate("/file", -1)),
            (errno.EINVAL, files.truncate("/file", 1 << 70)),
            (errno.EINVAL, files.chown("/", 1 << 40, -1)),
            (errno.ENAMETOOLONG, files.mkdir("n" * 20_000)),
            (errno.ENAMETOOLONG, files.symlink("n" * 20_000, "/link")),
        ]
        right = [files.mkdir(f"/d{number}") for number in range(5)]
        told = await asyncio.gather(*(one for _, one in wrong), *right, return_exceptions=True)
        assert [one.errno if isinstance(one, OSError) else one for one in told] == [one for one, _ in wrong] + [
            None
        ] * 5
        assert await files.listdir("/") == [f"d{number}" for number in range(5)]
        found = await files.stat_many(["/d0", "/" + "n" * 20_000, "/d1"])
        assert [one.errno if isinstance(one, OSError) else 0 for one in found] == [0, errno.ENAMETOOLONG, 0]
        await files.chmod("/d0", stat.S_IFDIR | 0o711)
        assert (await files.stat("/d0")).st_mode == stat.S_IFDIR | 0o711

    run(test)


def test_what_was_done_but_not_answered_is_done_once() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        before, lost = rig.sends, 0

        async def loses(calls: Calls) -> Answers:
            nonlocal lost
            answers = await before(calls)
            if lost < 2:
                lost += 1
                raise Unreachable("the connection broke")
            return answers

        rig.sends = loses
        await files.mkdir("/once")
        assert lost == 2
        with pytest.raises(FileExistsError) as caught:
            await files.mkdir("/once")
        assert caught.value.errno == errno.EEXIST
        assert caught.value.filename == "/once"

    run(test)


def test_not_now_is_asked_again_and_never_in_time_is_a_timeout() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        before, left = rig.sends, 2

        async def busy(calls: Calls) -> Answers:
            nonlocal left
            left -= 1
            return (
                await before(calls)
                if left < 0
                else Answers(tuple(ErrorReply(0, "not now", "busy") for _ in calls.calls))
            )

        rig.sends = busy
        assert (await files.stat("/")).is_dir()
        left = 1 << 30
        with pytest.raises(Timeout, match="not now"):
            await files.meta.call(Stat(PathRef(ROOT)), timeout_ns=300 * MS)

    run(test)


def test_a_service_that_ends_is_no_end() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        before, left = rig.sends, 2

        async def ends(calls: Calls) -> Answers:
            nonlocal left
            left -= 1
            if left == 1:
                raise Aborted("the manager ends; ask another one")
            answers = await before(calls)
            return (
                answers
                if left < 0
                else Answers(tuple(ErrorReply(errno.EIO, "it ends", "aborted") for _ in calls.calls))
            )

        rig.sends = ends
        await files.mkdir("/once")
        assert left < 0
        assert await files.listdir() == ["once"]

    run(test)


def test_only_so_many_changes_are_under_way() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        before, door = rig.sends, asyncio.Event()
        numbers: list[int] = []

        async def waits(calls: Calls) -> Answers:
            numbers.extend(call.number for call in calls.calls)
            await door.wait()
            return await before(calls)

        rig.sends = waits
        made = asyncio.gather(*(files.mkdir(f"/{one}") for one in range(MAX_UNDER_WAY + 50)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert sorted(numbers) == list(range(1, MAX_UNDER_WAY + 1))
        door.set()
        await made
        assert len(await files.listdir()) == MAX_UNDER_WAY + 50

    run(test)


def hanging(rig: FileRig, *kinds: type) -> asyncio.Event:
    """Requests of these kinds get no answer before it is set."""
    before, door = rig.sends, asyncio.Event()

    async def waits(calls: Calls) -> Answers:
        if any(isinstance(call.request, kinds) for call in calls.calls):
            await door.wait()
        return await before(calls)

    rig.sends = waits
    return door


def test_one_request_that_hangs_stops_no_others() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        async with await files.open("/a", "wb"):
            pass
        door = hanging(rig, Truncate)
        hangs = asyncio.create_task(files.truncate("/a", 5))
        for one in range(MAX_UNDER_WAY + 50):
            await files.meta.call(MakeDirectory(PathRef(ROOT, b"d%d" % one)))
        assert not hangs.done()
        door.set()
        await hangs

    run(test)


def test_who_opens_to_cut_makes_nobody_wait_who_asks_in_the_same_turn() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        async with await files.open("/cut", "wb") as file:
            await file.pwrite(b"x", 0)
        place = PathRef(ROOT, b"cut")
        door = hanging(rig, Open)
        cut = asyncio.create_task(files.meta.call(Open(place, OpenFlag.WRITE | OpenFlag.TRUNCATE, files.meta.handle())))
        await files.mkdir("/beside")
        assert not cut.done()
        door.set()
        await cut

    run(test)


def test_many_that_wait_for_a_lock_leave_numbers_for_others() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        file = await files.open("/a", "wb")
        door = hanging(rig, Lock)
        waiting = [
            asyncio.create_task(file.lock(LockKind.READ, owner=one, wait_ns=5 * SECOND))
            for one in range(MAX_UNDER_WAY + 50)
        ]
        await files.mkdir("/d")
        await files.truncate("/a", 5)
        door.set()
        await asyncio.gather(*waiting)
        await file.close()

    run(test)


def test_who_waits_for_a_number_waits_for_so_long_only_and_all_go_on_together() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        door = hanging(rig, MakeDirectory)
        made = [asyncio.create_task(files.mkdir(f"/{one}")) for one in range(2 * MAX_UNDER_WAY)]
        for _ in range(20):
            await asyncio.sleep(0)
        with pytest.raises(Timeout, match="was not sent"):
            await files.meta.call(Close(1, 1, 0, 0), timeout_ns=20 * MS)
        given_up = made.pop()
        given_up.cancel()
        sent = heard(rig)
        door.set()
        await asyncio.gather(*made)
        assert len(sent) < 20
        await files.mkdir("/d")

    run(test)


def test_after_the_session_names_go_on_and_open_files_that_write_are_lost() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        written = await files.open("/a", "w+b")
        await written.pwrite(b"kept", 0)
        await written.fsync()
        read = await files.open("/a")
        await written.pwrite(b"lost?", 10)
        await rig.rig.end_session(played.client)
        await files.mkdir("/d")
        with pytest.raises(FileError) as caught:
            await written.pwrite(b"x", 0)
        assert caught.value.errno == errno.ESTALE
        with pytest.raises(FileError, match="open it again") as caught:
            await written.close()
        assert caught.value.errno == errno.ESTALE
        assert (await read.pread(0, 4)) == b"kept"
        await read.close()
        assert await files.listdir() == ["a", "d"]

    run(test)


def test_what_was_done_before_the_end_of_the_session_is_not_done_again_after_it() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        await files.mkdir("/a")
        before, lost = rig.sends, 0

        async def loses(calls: Calls) -> Answers:
            nonlocal lost
            answers = await before(calls)
            if calls.calls[0].number and not lost:
                lost += 1
                await rig.rig.end_session(calls.client)
                await played.exchange()
                raise Unreachable("the connection broke")
            return answers

        rig.sends = loses
        client = files.meta.client
        await files.rename("/a", "/b")
        assert lost == 1
        assert files.meta.client != client
        assert await files.listdir() == ["b"]
        await files.rename("/b", "/c")

    run(test)


def test_an_evicted_client_opens_another_session() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        client, before = played.client, rig.sends

        async def sends(calls: Calls) -> Answers:
            if calls.client != client:
                return await before(calls)
            return Answers(tuple(ErrorReply(errno.ESTALE, "silent", SESSION_EVICTED) for _ in calls.calls))

        rig.sends = sends
        played.want_routing = lambda: None  # type: ignore[method-assign]
        await files.mkdir("/a")
        assert files.meta.client != client
        assert await files.listdir() == ["a"]

    run(test)


def test_of_a_session_that_nobody_knows_what_was_sent_is_in_doubt() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        forgotten = ErrorReply(errno.ESTALE, "session 1 is over", SESSION_FORGOTTEN)
        answers: list[Answers | Unreachable] = [Unreachable("lost"), Answers((forgotten,))]

        async def sends(calls: Calls) -> Answers:
            answer = answers.pop(0)
            if isinstance(answer, Unreachable):
                raise answer
            return answer

        rig.sends = sends
        with pytest.raises(Timeout, match="may have been executed before that"):
            await files.mkdir("/a")
        assert not answers

    run(test)


def test_an_error_of_what_was_written_comes_once_to_each_who_could_write() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        first, second = await files.open("/a", "wb"), await files.open("/a", "r+b")
        await first.pwrite(b"before", 0)
        await first.fsync()
        played.failing = no_space
        await first.pwrite(b"full", 100)
        for file in (first, second):
            with pytest.raises(FileError) as caught:
                await file.flush()
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.filename == "/a"
        await first.flush()
        assert first.length == 6
        played.failing = lambda _: None
        await first.pwrite(b"more", 6)
        await first.close()
        await second.close()
        assert (await files.stat("/a")).st_size == 10

    run(test)


def test_who_does_not_know_what_was_written_lets_the_service_look() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        file, sent = await files.open("/a", "wb"), heard(rig)
        played.failing = lambda _: Timeout("no answer in time")
        await file.pwrite(b"who knows", 0)
        with pytest.raises(FileError) as caught:
            await file.close()
        assert caught.value.errno == errno.EIO
        closes = [call.request for one in sent for call in one.calls if isinstance(call.request, Close)]
        assert [one.cut for one in closes] == [(1 << 63) - 1]

    run(test)


def test_what_was_not_written_is_not_reported() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        file = await files.open("/a", "wb")
        sent = heard(rig)
        await file.fsync()
        await file.pwrite(b"x", 5)
        await file.fsync()
        await file.fsync()
        await file.close()
        told = [call.request for one in sent for call in one.calls]
        assert [(type(one), getattr(one, "end", 0), getattr(one, "wrote", None)) for one in told] == [
            (Report, 6, True),
            (Close, 0, False),
        ]

    run(test)


def test_what_is_on_its_way_while_the_length_is_told_is_told_later() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        file = await files.open("/a", "wb")
        played.held = True
        await file.pwrite(b"x" * 10, 0)
        await file.body.report(file.handle)
        played.held = False
        sent = heard(rig)
        await file.close()
        assert [(call.request.end, call.request.wrote) for one in sent for call in one.calls] == [(10, True)]  # type: ignore[union-attr]

    run(test)


def test_what_another_client_has_cut_is_not_read_from_what_was_fetched_ahead() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        async with await files.open("/a", "wb") as file:
            await file.pwrite(b"x" * 3_000_000, 0)
        read = await files.open("/a")
        for at in range(0, 600_000, 200_000):
            assert await read.pread(at, 200_000) == b"x" * 200_000
        assert read.ahead.blocks
        other, _ = await rig.client()
        await other.truncate("/a", 700_000)
        await other.truncate("/a", 3_000_000)
        await read.stat()
        assert await read.pread(600_000, 200_000) == b"x" * 100_000 + bytes(100_000)
        assert played.reads
        await read.close()

    run(test)


def test_what_could_not_be_fetched_ahead_is_read_when_it_is_wanted() -> None:
    async def test(rig: FileRig) -> None:
        files, played = await rig.client()
        async with await files.open("/a", "wb") as file:
            await file.pwrite(b"x" * 3_000_000, 0)
        read = await files.open("/a")
        played.unreadable = True
        with pytest.raises(FileError):
            await read.pread(0, 200_000)
        played.unreadable = False
        await read.pread(200_000, 200_000)
        await read.pread(400_000, 1)
        played.unreadable = True
        await read.pread(400_001, 200_000)
        for _ in range(20):
            await asyncio.sleep(0)
        played.unreadable = False
        for at in range(600_001, 2_600_000, 200_000):
            assert await read.pread(at, 200_000) == b"x" * 200_000
        await read.close()

    run(test)


def test_what_waits_is_not_fetched_ahead_from_below() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        file = await files.open("/a", "w+b")
        await file.pwrite(b"x" * 4_000_000, 0)
        await file.flush()
        await file.pwrite(b"new", 1_500_000)
        for at in range(0, 1_200_000, 200_000):
            assert await file.pread(at, 200_000) == b"x" * 200_000
        await file.flush()
        assert await file.pread(1_500_000, 4) == b"newx"
        await file.close()

    run(test)


def test_times_that_are_set_are_set_after_what_was_written() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        file = await files.open("/a", "wb")
        await file.pwrite(b"x" * 100, 0)
        await files.utime("/a", ns=(5, 7))
        assert (await files.stat("/a")).st_mtime_ns == 7
        await file.close()
        found = await files.stat("/a")
        assert (found.st_mtime_ns, found.st_size) == (7, 100)

    run(test)


def test_when_a_service_goes_only_its_requests_move() -> None:
    three = ("a:1", "b:1", "c:1")
    before = {key: service_for(b"%d" % key, three) for key in range(200)}
    after = {key: service_for(b"%d" % key, three[:2]) for key in range(200)}
    assert {before[key] for key in before if before[key] != after[key]} == {"c:1"}

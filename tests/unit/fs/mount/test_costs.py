"""What a mount spares the meta service: closes that nobody waits for, attributes together with what was written."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence

import pytest
from tests.support.fs.clusters.file_rig import FileRig
from tests.support.fs.mounts.mounted_rig import (
    ONE,
    ROOT_USER,
    create,
    heard,
    mount,
    run,
    turns,
    unanswered,
    write,
)
from tests.support.later import FakeTimers

from fireflyer.fs.core.meta.tables import WRITERS
from fireflyer.fs.mount.files import MountedFiles
from fireflyer.fs.mount.operations import Caller, Changes, Set
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.meta import (
    ClientHeartbeat,
    Close,
    Open,
    Report,
    Request,
    SetAttributes,
)
from fireflyer.fs.service.meta.group_commit import CommitItem
from fireflyer.fs.service.meta.requests import QueuedRequest

# --- attributes of what was written


def set_mtime(ns: int) -> Changes:
    return Changes(Set.MTIME, 0, 0, 0, 0, 0, ns)


def test_attributes_of_a_file_that_was_written_go_with_its_report() -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        other, _ = await rig.client()
        inode, handle = await create(mounted)
        await write(mounted, handle, b"written")
        sent = heard(rig)
        told = await mounted.set_attributes(ROOT_USER, inode, handle, set_mtime(1_000_000_007))
        await mounted.set_attributes(ROOT_USER, inode, handle, set_mtime(2_000_000_007))
        await mounted.flush(handle, ONE)
        assert [type(one) for one in sent] == [SetAttributes, SetAttributes]
        assert [one.report is not None for one in sent if isinstance(one, SetAttributes)] == [True, False]
        assert (told.size, told.mtime_ns) == (7, 1_000_000_007)
        found = await other.stat("/a")
        assert (found.st_size, found.st_mtime_ns) == (7, 2_000_000_007)

    run(test)


def test_attributes_that_are_refused_or_set_by_another_leave_the_report_to_be_told() -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        other, _ = await rig.client()
        inode, handle = await create(mounted)
        somebody = Caller(500, 500, 2, ())
        await write(mounted, handle, b"first")
        sent = heard(rig)
        with pytest.raises(PermissionError):
            await mounted.set_attributes(somebody, inode, handle, set_mtime(7))
        assert [type(one) for one in sent] == [Report, SetAttributes], "set-id bits fall by who writes"
        reader = await mounted.open(somebody, inode, os.O_RDONLY)
        await mounted.release(reader.handle, ONE, unlock=False)
        await write(mounted, handle, b"second", 5)
        with pytest.raises(FileError) as caught:
            await mounted.set_attributes(ROOT_USER, inode, handle, Changes(Set.UID, 0, (1 << 32) - 1, 0, 0, 0, 0))
        assert caught.value.errno == errno.EINVAL
        assert (await other.stat("/a")).st_size == 5
        assert (await mounted.get_attributes(ROOT_USER, inode, handle)).size == 11
        await mounted.flush(handle, ONE)
        assert (await other.stat("/a")).st_size == 11

    run(test)


def test_attributes_of_a_file_that_was_cut_elsewhere_come_with_the_length_that_its_chains_have() -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        other, _ = await rig.client()
        inode, handle = await create(mounted)
        await write(mounted, handle, b"before")
        await other.truncate("/a", 0)
        found = await mounted.set_attributes(ROOT_USER, inode, handle, set_mtime(7))
        assert (found.size, found.mtime_ns) == (6, 7)
        assert (await other.stat("/a")).st_size == 6

    run(test)


# --- closes that nobody waits for


def transactions(rig: FileRig) -> list[list[Request]]:
    """The requests of each, from now on; without those that the service or a heartbeat begins, whenever that is."""
    seen: list[list[Request]] = []
    queues = rig.rig.service.service_context.commit_queues
    before = queues._transact

    async def transact(batch: Sequence[CommitItem], *, again: bool = False) -> Sequence[CommitItem]:
        requests = [work.request for work in batch if isinstance(work, QueuedRequest)]
        if len(requests) == len(batch) and not any(isinstance(one, ClientHeartbeat) for one in requests):
            seen.append(requests)
        return await before(batch, again=again)

    queues._transact = transact  # type: ignore[method-assign]
    return seen


async def writers(rig: FileRig) -> int:
    return len(await rig.rig.rows(WRITERS))


async def make(mounted: MountedFiles, name: bytes) -> int:
    """As a program makes a small file."""
    inode, handle = await create(mounted, name)
    await write(mounted, handle, name)
    await mounted.flush(handle, ONE)
    await mounted.release(handle, ONE, unlock=False)
    return inode


def test_a_new_file_costs_two_commits() -> None:
    timers = FakeTimers()

    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        await make(mounted, b"first")
        seen = transactions(rig)
        for number in range(20):
            await make(mounted, b"file-%d" % number)
        assert len(seen) <= 2 * 20
        assert all(any(isinstance(one, Open | Report) for one in requests) for requests in seen)
        assert await writers(rig) <= 1
        await turns()
        timers.fire()
        while await writers(rig):
            await turns(1)

    run(test, timers)


def test_who_has_something_to_tell_or_to_unlock_does_not_close_lazily() -> None:
    timers = FakeTimers()

    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        other, _ = await rig.client()
        inode, handle = await create(mounted)
        await write(mounted, handle, b"by a mapping")
        sent = heard(rig)
        await mounted.release(handle, ONE, unlock=False)
        assert (await other.stat("/a")).st_size == 12
        opened = await mounted.open(ROOT_USER, inode, os.O_RDWR)
        await mounted.lock_whole(ROOT_USER, inode, ONE, fcntl.LOCK_EX, wait=False)
        await mounted.release(opened.handle, ONE, unlock=True)
        assert [one.lazy for one in sent if isinstance(one, Close)] == [False, False]
        assert timers.delays_ns == []

    run(test, timers)


def test_a_lazy_close_comes_before_what_its_client_does_next() -> None:
    """Or its truncations had to ask the chains, as they do beside another writer."""
    timers = FakeTimers()

    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        inode, handle = await create(mounted)
        sent, asked = heard(rig), []
        last = rig.store.last

        async def asks(file: int, chains: Sequence[int]) -> Sequence[tuple[int, int] | None]:
            asked.append(file)
            return await last(file, chains)

        rig.store.last = asks  # type: ignore[method-assign]
        for _ in range(3):
            await mounted.release(handle, ONE, unlock=False)
            handle = (await mounted.open(ROOT_USER, inode, os.O_WRONLY | os.O_TRUNC)).handle
        assert asked == []
        kinds = [(type(one), getattr(one, "lazy", False)) for one in sent]
        assert kinds == [(Close, True), (Open, False)] * 3

    run(test, timers)


def test_a_lazy_close_that_is_not_answered_is_asked_again() -> None:
    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        _, handle = await create(mounted)
        files = mounted._files
        answered = unanswered(rig, mounted, lambda request: isinstance(request, Close))
        await mounted.release(handle, ONE, unlock=False)
        while not len(files.open_files.orphaned):
            await turns(1)
        answered()
        assert await writers(rig) == 1
        await files.open_files.maintain()
        assert await writers(rig) == 0

    run(test)


def test_at_the_end_lazy_closes_wait_for_nothing() -> None:
    timers = FakeTimers()

    async def test(rig: FileRig) -> None:
        mounted, _ = await mount(rig)
        for number in range(3):
            await make(mounted, b"file-%d" % number)
        await mounted.finish()
        assert await writers(rig) == 0
        assert timers.delays_ns == []

    run(test, timers)

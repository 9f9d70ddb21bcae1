"""Single moments of reports, cuts and locks that chance meets too rarely in the simulation."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
from tests.support.fs.clusters.names import ADMINISTRATOR, Names, at, user

from fireflyer.fs.core.meta.context import Context, Requester
from fireflyer.fs.core.meta.inodes.layout import max_bytes
from fireflyer.fs.core.meta.open_files import lengths, truncate
from fireflyer.fs.core.meta.open_files.lengths import ChunkEnd
from fireflyer.fs.core.meta.ports import NotAtOnce
from fireflyer.fs.core.rows import SESSIONS
from fireflyer.fs.schema.inodes import FileDetails, Inode
from fireflyer.fs.schema.meta import (
    Close,
    Found,
    GetLock,
    Lock,
    LockKind,
    LockState,
    Open,
    Opened,
    OpenFlag,
    Report,
    Reserve,
    SetAttributes,
    Truncate,
    Window,
)

WRITING = OpenFlag.READ | OpenFlag.WRITE | OpenFlag.CREATE
ANN, BOB = Requester(7, 500, 500), Requester(8, 501, 501)


@pytest.fixture
def names() -> Iterator[Names]:
    with Names() as made:
        yield made


def opened(names: Names, requester: Requester = ANN, handle: int = 1, flags: int = WRITING) -> Inode:
    return names.ask(Open(at(b"f"), flags, handle, 0o6777), Opened, requester).inode


def body_of(inode: Inode) -> FileDetails:
    assert isinstance(inode.body, FileDetails)
    return inode.body


def test_what_was_measured_under_another_cut_is_measured_again(names: Names) -> None:
    file = opened(names)
    report = Report(file.id, 1, 5000, 3)

    async def with_old(context: Context) -> object:
        return await lengths.report(report, context, ChunkEnd(9, 4000))

    async def with_new(context: Context) -> object:
        return await lengths.report(report, context, ChunkEnd(0, 4000))

    with pytest.raises(NotAtOnce):
        names.run(with_old, ANN)
    found = names.run(with_new, ANN)
    assert isinstance(found, Found)
    assert body_of(found.inode).length == 4000


def test_nothing_extends_a_file_or_opens_it_for_writing_while_it_is_cut(names: Names) -> None:
    file = opened(names)
    names.ask(Report(file.id, 1, 5000, 0), Found, ANN)

    async def begin(context: Context) -> Found:
        context.owner, context.number = 99, 1
        return await truncate.truncate(Truncate(at(b"f"), 100), context, await context.known(file.id))

    names.run(begin, ANN)
    assert body_of(names.stat(b"f")).length == 5000, "it is as long as before until its chunks are gone"
    for request in (Report(file.id, 1, 9000, 1), Reserve(file.id, 1, 10), Open(at(b"f"), WRITING, 2)):
        with pytest.raises(NotAtOnce):
            names.ask(request, object, ANN)


def test_a_truncation_needs_no_chunks_where_only_this_client_writes_and_it_grows(names: Names) -> None:
    file = opened(names)
    names.ask(Truncate(at(b"f"), 5000), Found, ANN)
    with pytest.raises(NotAtOnce):
        names.ask(Truncate(at(b"f"), 6000), Found, ADMINISTRATOR)
    with pytest.raises(NotAtOnce):
        names.ask(Truncate(at(b"f"), 4000), Found, ANN)
    names.ask(Close(file.id, 1, 0, 0), Found, ANN)
    names.ask(Truncate(at(b"f"), 5000), Found, ANN)


def test_a_lazy_close_ends_one_handle_whenever_it_comes_and_tells_nothing(names: Names) -> None:
    file = opened(names)
    names.ask(Report(file.id, 1, 5000, 0), Found, ANN)
    opened(names, handle=2)

    async def begin(context: Context) -> Found:
        context.owner, context.number = 99, 1
        return await truncate.truncate(Truncate(at(b"f"), 100), context, await context.known(file.id))

    names.run(begin, ANN)
    assert names.errno(Close(file.id, 1, 9000, 0, lazy=True), BOB) == errno.EBADF
    answer = names.ask(Close(file.id, 1, 9000, 0, lazy=True), Found, ANN)
    assert body_of(answer.inode).length == 5000
    assert answer.inode == names.stat(b"f")

    async def handles(context: Context) -> tuple[int, ...]:
        row = await lengths.writer_row(context, file.id, ANN.client)
        return () if row is None else row.handles

    assert names.run(handles, ANN) == (2,)
    names.ask(Close(file.id, 2, 0, 0, lazy=True), Found, ANN)
    assert names.run(handles, ANN) == ()


def test_handles_are_of_their_client_and_used_once(names: Names) -> None:
    file = opened(names)
    assert names.errno(Open(at(b"f"), WRITING, 1), ANN) == errno.EINVAL
    assert names.errno(Open(at(b"f"), WRITING, 0), ANN) == errno.EINVAL
    assert names.errno(Report(file.id, 1, 0, 0), BOB) == errno.EBADF
    names.ask(Close(file.id, 1, 0, 0), Found, ANN)
    assert names.errno(Close(file.id, 1, 0, 0), ANN) == errno.EBADF
    assert names.errno(Report(12345, 1, 0, 0), ANN) == errno.ESTALE


def test_a_file_does_not_become_longer_than_its_chunks_can_be_counted(names: Names) -> None:
    file = opened(names)
    most = max_bytes(body_of(file).layout)
    assert names.errno(Truncate(at(b"f"), most + 1), ANN) == errno.EFBIG
    names.ask(Truncate(at(b"f"), most), Found, ANN)
    assert names.errno(Reserve(file.id, 1, 1), ANN) == errno.EFBIG


def test_writing_takes_privileges_away_but_not_for_the_superuser(names: Names) -> None:
    file = opened(names)
    names.do(SetAttributes(at(b"f"), mode=0o6777), requester=ANN)
    assert names.ask(Report(file.id, 1, 10, 0, wrote=False), Found, ANN).inode.mode == 0o6777
    assert names.ask(Report(file.id, 1, 10, 0), Found, ANN).inode.mode == 0o777
    names.do(SetAttributes(at(b"f"), mode=0o6777), requester=ADMINISTRATOR)
    opened(names, ADMINISTRATOR, 5)
    assert names.ask(Report(file.id, 5, 10, 0), Found, ADMINISTRATOR).inode.mode == 0o6777


def test_locks_are_for_who_may_read_or_write_and_are_shown_with_their_process(names: Names) -> None:
    file = opened(names)
    names.do(SetAttributes(at(b"f"), mode=0o700), requester=ANN)
    mine = Lock(file.id, Window.RANGE, 3, LockKind.WRITE, 10, 20, process=4242)
    names.do(mine, requester=ANN)
    assert names.errno(mine, BOB) == errno.EACCES
    wanted = Lock(file.id, Window.RANGE, 3, LockKind.READ, 0, 100)
    root = user(0)
    assert names.ask(GetLock(wanted), LockState, ADMINISTRATOR).lock is None, "its client has no session"

    async def begin_session(context: Context) -> None:
        context.rows.set(SESSIONS.key(ANN.client), b"lives")

    names.run(begin_session)
    state = names.ask(GetLock(wanted), LockState, ADMINISTRATOR)
    assert state.client == ANN.client
    assert state.lock is not None
    assert (state.lock.start, state.lock.end, state.lock.process) == (10, 20, 4242)
    assert names.errno(Lock(file.id, Window.RANGE, 3, LockKind.READ, 5, 5), root) == errno.EINVAL

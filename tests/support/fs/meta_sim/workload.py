"""Clients of the simulated meta services: each does one thing after the other by chance, and beats meanwhile.

A client keeps to what `schema.meta` asks of it: numbers, handles, a report under the cut that was known when its oldest
unreported write began, beats one after the other. What it was told goes into the world's books. Handles for which there
is nothing to report it closes lazily, mostly: it goes on at once, so what it does next may overtake the close.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from tests.support.fs.meta_sim.chunks import CELL_BYTES, CELLS, CHAINS, CHUNK_BYTES, ChunkClient
from tests.support.fs.meta_sim.oracle import NEVER, Event
from tests.support.fs.meta_sim.steps import Gate, drive, sleep
from tests.support.fs.meta_sim.world import ENCODE, TOLD, Asked, MetaWorld

from fireflyer.base.errors import Aborted, Timeout
from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.meta.inodes.layout import chain_of, order_of, pieces
from fireflyer.fs.core.meta.replies import SESSION_OVER
from fireflyer.fs.schema.inodes import ROOT, FileDetails, Inode, Layout
from fireflyer.fs.schema.meta import (
    END_OF_FILE,
    UNKNOWN_CUT,
    Allocate,
    AllocateMode,
    Answer,
    Call,
    Calls,
    ClientHeartbeat,
    Close,
    Done,
    ErrorReply,
    Found,
    Link,
    Lock,
    LockKind,
    MakeDirectory,
    Now,
    Open,
    Opened,
    OpenFlag,
    PathRef,
    Remove,
    RemoveDirectory,
    RemoveXattr,
    Rename,
    RenameFlag,
    Report,
    Request,
    Reserve,
    Reserved,
    SetAttributes,
    SetXattr,
    Stat,
    Symlink,
    Truncate,
    Window,
)
from fireflyer.sim import SimNode

__all__ = ["DIRECTORIES", "FILE_CELLS", "PATHS", "MetaClient"]

DIRECTORIES: Final = (b"d", b"e", b"q")
"""`q` is a quota tree."""
PATHS: Final = tuple(directory + name for directory in DIRECTORIES for name in (b"/a", b"/b"))
FILE_CELLS: Final = 40
BEAT_NS: Final = 400 * MS
ASK_AGAIN_NS: Final = 500 * MS
PATIENCE_NS: Final = 60 * SECOND
"""For one request, in the world's time: then the simulation has found something that never ends."""


class _SessionOver(Exception):
    """Out of everything that the client does: it begins anew."""


@dataclass(slots=True)
class _File:
    inode: int
    layout: Layout
    handle: int
    cut: int
    """That it knows."""
    writes: list[Event] = field(default_factory=list)
    """Not reported."""
    end: int = 0
    """Of those, in cells."""
    cut_then: int = 0
    """When the first of those began."""


def _file_body(inode: Inode) -> FileDetails:
    assert isinstance(inode.body, FileDetails)
    return inode.body


class MetaClient:
    """A process that is started again when it dies."""

    def __init__(self, world: MetaWorld, name: str, *, busy: bool = True) -> None:
        self.world, self.name = world, name
        self.busy = busy
        """It goes on beginning things."""
        self._by_itself = busy
        self.stay_away = False
        """It is not started again."""
        self.idle = False
        """It has closed everything, with its session over."""
        self.done: dict[str, int] = {}
        self.rng = world.sim.fork_random(f"client {name}")
        self.laziness = world.sim.fork_random(f"lazy client {name}")
        self.values = world.sim.fork_random(f"attributes of client {name}")
        self.client = 0
        self._messages = 0
        """Never again the same: answers to a process before this one are not its."""
        self._begin()
        self.node = world.sim.node(name, self._boot)

    def _begin(self) -> None:
        self._answers: dict[int, Gate[Answer]] = {}
        self._asked: dict[int, None] = {}
        self._number = self._handles = self._beats = 0
        self._files: list[_File] = []
        self._readers: list[tuple[int, Layout, int]] = []
        """Inode, layout, and when it was opened."""
        self._held: dict[int, None] = {}
        self._closing = 0
        """Lazily."""
        self._locked: list[Lock] = []

    def crash(self) -> None:
        if self.node.alive:
            session = self.client
            self._lost()
            self.node.crash()
            self.world.sim.call_after(self.rng.randrange(3 * SECOND), lambda: self.world.end_session(session))
            self.world.sim.call_after(self.rng.randrange(2 * SECOND), self.start)

    def start(self) -> None:
        if not self.node.alive and not self.stay_away:
            self.node.restart()

    def _lost(self) -> None:
        """Over the quota nobody is told what became of its last bytes."""
        for file in self._files:
            for event in file.writes:
                if self.world.limited.get(file.inode, False):
                    event.done_ns = event.known_ns = NEVER

    def _boot(self, node: SimNode) -> None:
        self._begin()
        self.node = node
        self.client = client = self.world.open_session(self.name)
        self.chunks = ChunkClient(self.world.chunks, lambda: client)
        self.node.on_message(self._hear)
        if self._by_itself:
            drive(self.node, lambda: self._guarded(self._live))
        drive(self.node, lambda: self._guarded(self._beat))

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (_SessionOver, Aborted):
            self.world.sim.record("begins anew", self.name)
            self.crash()

    # --- requests ---

    def _next_request(self) -> tuple[int, int]:
        """What is asked next, with nothing in between."""
        return self.client, self._number + 1

    def _hear(self, _source: str, payload: bytes) -> None:
        told = TOLD(payload)
        gate = self._answers.get(told.number)
        if gate is not None:
            gate.open(told.answers.answers[0])

    async def ask(self, request: Request, *, numbered: bool = True) -> Answer:
        """The answer, also `ErrorReply`. Sent again until there is one."""
        number = 0
        if numbered:
            self._number += 1
            number = self._number
            self._asked[number] = None
        self._messages += 1
        message = self._messages
        gate = self._answers[message] = Gate[Answer]()
        until_ns = self.world.sim.now_ns + PATIENCE_NS
        while True:
            calls = Calls(self.client, min(self._asked, default=self._number + 1), (Call(request, number),))
            service = self.rng.choice(self.world.services)
            self.world.net.send(self.name, service.name, ENCODE(Asked(message, calls)))
            answer = await gate.wait(ASK_AGAIN_NS)
            if isinstance(answer, ErrorReply) and answer.code == SESSION_OVER:
                raise _SessionOver
            if answer is not None and not (isinstance(answer, ErrorReply) and answer.errno == 0):
                break
            if answer is not None:
                gate = self._answers[message] = Gate[Answer]()
                await sleep(ASK_AGAIN_NS)
            if self.world.sim.now_ns > until_ns:
                raise AssertionError(f"{self.name} has no answer to {request}; the last one: {answer}")
        self._asked.pop(number, None)
        del self._answers[message]
        name = type(request).__name__
        self.done[name] = self.done.get(name, 0) + (not isinstance(answer, ErrorReply))
        return answer

    def send_again(self, request: Request, number: int, service: str) -> Gate[Answer]:
        """What was sent before, by somebody who does not know that it was answered."""
        self._messages += 1
        gate = self._answers[self._messages] = Gate[Answer]()
        calls = Calls(self.client, 1, (Call(request, number),))
        self.world.net.send(self.name, service, ENCODE(Asked(self._messages, calls)))
        return gate

    @property
    def last_number(self) -> int:
        return self._number

    async def _beat(self) -> None:
        before: dict[int, None] = {}
        while True:
            await sleep(BEAT_NS)
            now = dict.fromkeys(inode for inode, _, _ in self._readers)
            held = [one for one in now if one in before and one not in self._held]
            closed = [one for one in self._held if one not in now]
            self._beats += 1
            self._held = {one: None for one in (*self._held, *held) if one in now}
            before = now
            await self.ask(ClientHeartbeat(self._beats, tuple(held), tuple(closed)))

    # --- what it does ---

    async def _live(self) -> None:
        while self.busy:
            await sleep(self.rng.randrange(120 * MS))
            await self._one_thing()
        while self._files:
            await self._close(self._files[0])
        while self._closing:
            await sleep(10 * MS)
        for lock in list(self._locked):
            await self._unlock(lock)
        self._readers.clear()
        self._lost()
        self.world.end_session(self.client)
        self.node.crash()
        self.idle = True

    async def _one_thing(self) -> None:
        if self.world.plan not in ("cuts", "holds", "sessions") and self.values.random() < 0.15:
            await self.values.choice([self._set_value, self._set_value, self._remove_value, self._symlinks])()
        kinds: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (3, self._open_to_write), (8, self._write_some), (3, self._report_some), (2, self._truncate),
            (2, self._truncate_by_name), (2, self._allocate), (3, self._open_to_read), (5, self._read_some),
        ]  # fmt: skip
        if self.world.plan == "holds":
            kinds = [
                (4, self._open_to_write), (2, self._write_some), (4, self._close_some), (6, self._open_to_read),
                (4, self._read_some), (1, self._stop_reading), (3, self._remove),
            ]  # fmt: skip
        elif self.world.plan != "cuts":
            kinds += [
                (3, self._close_some), (3, self._append), (2, self._stop_reading), (2, self._remove),
                (2, self._rename), (1, self._link), (1, self._directories), (3, self._lock), (2, self._unlock_some),
            ]  # fmt: skip
        await self.rng.choices([one for _, one in kinds], [weight for weight, _ in kinds])[0]()

    def _place(self) -> PathRef:
        return PathRef(ROOT, self.rng.choice(self.world.paths))

    def _some_file(self) -> _File | None:
        return self.rng.choice(self._files) if self._files else None

    async def _open_to_write(self) -> None:
        if len(self._files) > 3:
            return
        flags = OpenFlag.READ | OpenFlag.WRITE | OpenFlag.CREATE | OpenFlag.FOLLOW
        place, event = self._place(), None
        if self.rng.random() < 0.4:
            found = await self.ask(Stat(place), numbered=False)
            if isinstance(found, Found) and isinstance(found.inode.body, FileDetails):
                # By its number: so that it is known which file may be empty from now on.
                place, flags = PathRef(found.inode.id), OpenFlag.WRITE | OpenFlag.TRUNCATE
                event = self.world.files.cut(found.inode.id, "truncating open", 0)
                event.by = self._next_request()
        self._handles += 1
        answer = await self.ask(Open(place, flags, self._handles))
        if not isinstance(answer, Opened):
            return
        inode, body = answer.inode.id, _file_body(answer.inode)
        if answer.inode.quota_tree:
            self.world.limited[inode] = True
        if event is not None:
            event.done(self.world.sim.now_ns)
        if body.cutting is not None:
            raise AssertionError(f"{self.name} was told of a truncation that is not through: {answer}")
        self._files.append(_File(inode, body.layout, self._handles, body.cut))

    async def _write_some(self) -> None:
        file = self._some_file()
        if file is None:
            return
        first = self.rng.randrange(FILE_CELLS)
        await self._write(file, first, min(FILE_CELLS - first, self.rng.randrange(1, 7)))

    async def _write(self, file: _File, first: int, count: int) -> None:
        event = self.world.files.write(file.inode, first, count)
        if not file.writes:
            file.cut_then = file.cut
        file.writes.append(event)
        file.end = max(file.end, first + count)
        order = order_of(file.layout, CHAINS)
        for piece in pieces(file.layout, first * CELL_BYTES, count * CELL_BYTES):
            tags = [event.value] * (piece.size // CELL_BYTES)
            while True:
                try:
                    await self.chunks.write(
                        file.inode, chain_of(order, piece.chunk), piece.chunk, piece.offset // CELL_BYTES, tags
                    )
                    break
                except Timeout:
                    continue  # the next one says what became of it
        event.done_ns = self.world.sim.now_ns

    async def _report_some(self) -> None:
        file = self._some_file()
        if file is not None:
            await self._report(file)

    def _end_of(self, file: _File) -> tuple[int, int]:
        cut = file.cut_then if file.writes else file.cut
        if file.writes and self.rng.random() < 0.1:
            cut = UNKNOWN_CUT
        return file.end * CELL_BYTES if file.writes else 0, cut

    async def _report(self, file: _File) -> None:
        writes = list(file.writes)
        report = Report(file.inode, file.handle, *self._end_of(file), bool(writes))
        if self.laziness.random() < 0.3:
            answer = await self.ask(SetAttributes(PathRef(file.inode), now=Now.ATIME, report=report))
        else:
            answer = await self.ask(report)
        self._reported(file, writes, answer)

    async def _report_all(self, inode: int) -> None:
        for file in [one for one in self._files if one.inode == inode]:
            await self._report(file)

    def _may_be_lazy(self, file: _File) -> bool:
        return not file.writes

    async def _close(self, file: _File) -> None:
        if self._may_be_lazy(file) and self.laziness.random() < 0.8:
            self._files.remove(file)
            self._close_lazily(file)
            return
        writes = list(file.writes)
        answer = await self.ask(Close(file.inode, file.handle, *self._end_of(file), bool(writes)))
        self._files.remove(file)
        self._reported(file, writes, answer)

    def _close_lazily(self, file: _File) -> None:
        self._closing += 1
        self._reported(file, file.writes, None)

        async def close() -> None:
            answer = await self.ask(Close(file.inode, file.handle, 0, file.cut, False, lazy=True))
            assert isinstance(answer, Found), answer
            self._closing -= 1

        drive(self.node, lambda: self._guarded(close))

    def _reported(self, file: _File, writes: list[Event], answer: Answer | None) -> None:
        for event in writes:
            if isinstance(answer, ErrorReply):
                event.done_ns = event.known_ns = NEVER
            else:
                event.known_ns = self.world.sim.now_ns
        file.writes, file.end = [], 0
        if isinstance(answer, ErrorReply):
            assert answer.errno == errno.EDQUOT, answer
        elif answer is not None:
            assert isinstance(answer, Found)
            file.cut = _file_body(answer.inode).cut

    async def _close_some(self) -> None:
        file = self._some_file()
        if file is not None:
            await self._close(file)

    async def _append(self) -> None:
        file = self._some_file()
        if file is None:
            return
        await self._report_all(file.inode)
        count, begun_ns = self.rng.randrange(1, 4), self.world.sim.now_ns
        grown = self.world.files.grow(file.inode, "reservation", 2 * FILE_CELLS)
        answer = await self.ask(Reserve(file.inode, file.handle, count * CELL_BYTES))
        if isinstance(answer, Reserved):
            first, rest = divmod(answer.offset, CELL_BYTES)
            assert not rest
            grown.reach = first + count
            grown.done(self.world.sim.now_ns)
            self.world.files.reserve(file.inode, first, first + count, begun_ns)
            file.cut = _file_body(answer.inode).cut
            if first + count < 2 * FILE_CELLS:
                await self._write(file, first, count)

    async def _truncate(self) -> None:
        file = self._some_file()
        if file is None:
            return
        await self._report_all(file.inode)
        await self._truncate_at(PathRef(file.inode), file.inode, file.handle)

    async def _truncate_by_name(self) -> None:
        place = self._place()
        for file in self._files:
            await self._report(file)
        answer = await self.ask(Stat(place), numbered=False)
        if isinstance(answer, Found) and isinstance(answer.inode.body, FileDetails) and answer.inode.links:
            await self._truncate_at(PathRef(answer.inode.id), answer.inode.id, 0)

    async def _truncate_at(self, place: PathRef, inode: int, handle: int) -> None:
        cells = self.rng.choice([0, 0, self.rng.randrange(FILE_CELLS)])
        event = self.world.files.cut(inode, "truncation", cells)
        event.by = self._next_request()
        answer = await self.ask(Truncate(place, cells * CELL_BYTES, handle))
        if isinstance(answer, Found):
            event.done(self.world.sim.now_ns)
            for file in self._files:
                if file.inode == inode:
                    file.cut = _file_body(answer.inode).cut

    async def _allocate(self) -> None:
        file = self._some_file()
        if file is None:
            return
        await self._report_all(file.inode)
        mode = self.rng.choice(list(AllocateMode))
        first = self.rng.randrange(FILE_CELLS)
        count = self.rng.randrange(1, 10)
        zeroes = mode in (AllocateMode.PUNCH_HOLE, AllocateMode.ZERO_RANGE)
        files = self.world.files
        event = (
            files.cut(file.inode, mode.name, first, first + count)
            if zeroes else files.grow(file.inode, mode.name, first + count)
        )  # fmt: skip
        event.by = self._next_request()
        answer = await self.ask(Allocate(file.inode, file.handle, mode, first * CELL_BYTES, count * CELL_BYTES))
        if isinstance(answer, Found):
            file.cut = _file_body(answer.inode).cut
            event.done(self.world.sim.now_ns)

    # --- reading ---

    async def _open_to_read(self) -> None:
        if len(self._readers) > 3:
            return
        began_ns = self.world.sim.now_ns
        answer = await self.ask(Open(self._place(), OpenFlag.READ | OpenFlag.FOLLOW), numbered=False)
        if isinstance(answer, Opened) and self.world.sim.now_ns - began_ns < BEAT_NS:
            self._readers.append((answer.inode.id, _file_body(answer.inode).layout, began_ns))

    async def _read_some(self) -> None:
        if not self._readers:
            return
        inode, layout, _ = self.rng.choice(self._readers)
        began_ns = self.world.sim.now_ns
        answer = await self.ask(Stat(PathRef(inode)), numbered=False)
        if not self.world.lives(self.client):
            return  # it will hear of it with its next request that is numbered
        assert isinstance(answer, Found), f"inode {inode} is open at {self.name}: {answer}"
        length = _file_body(answer.inode).length
        self.world.files.check_length(inode, length // CELL_BYTES, began_ns, self.world.sim.now_ns)
        order = order_of(layout, CHAINS)
        for index in range(-(-FILE_CELLS // CELLS)):
            try:
                cells = await self.chunks.read(chain_of(order, index), inode, index)
            except Timeout:
                continue
            if not self.world.lives(self.client):
                return
            for at in range(CELLS):
                seen = at < len(cells) and index * CHUNK_BYTES + at * CELL_BYTES < length
                value = cells[at] if seen else 0
                self.world.files.check(inode, index * CELLS + at, value, began_ns, self.world.sim.now_ns)

    async def _stop_reading(self) -> None:
        if self._readers:
            self._readers.remove(self.rng.choice(self._readers))

    # --- names ---

    async def _remove(self) -> None:
        await self.ask(Remove(self._place()))

    async def _rename(self) -> None:
        flags = self.rng.choice([RenameFlag(0), RenameFlag(0), RenameFlag.NO_REPLACE, RenameFlag.EXCHANGE])
        await self.ask(Rename(self._place(), self._place(), flags))

    async def _link(self) -> None:
        await self.ask(Link(self._place(), self._place()))

    async def _directories(self) -> None:
        place = PathRef(ROOT, self.rng.choice((b"d/x", b"e/x", b"d/x/y")))
        if self.rng.random() < 0.6:
            await self.ask(MakeDirectory(place))
        else:
            await self.ask(RemoveDirectory(place))

    # --- what quotas count besides files ---

    def _valued(self) -> PathRef:
        """Of what is open too, which may have no name any more."""
        known = [file.inode for file in self._files] + [inode for inode, _, _ in self._readers]
        if known and self.values.random() < 0.5:
            return PathRef(self.values.choice(known))
        return PathRef(ROOT, self.values.choice((*self.world.paths, *DIRECTORIES)))

    async def _set_value(self) -> None:
        name = self.values.choice((b"user.a", b"user.bb"))
        await self.ask(SetXattr(self._valued(), name, bytes(self.values.randrange(3 * CELL_BYTES))))

    async def _remove_value(self) -> None:
        await self.ask(RemoveXattr(self._valued(), b"user.a"))

    async def _symlinks(self) -> None:
        place = PathRef(ROOT, self.values.choice((b"q/s", b"d/s")))
        if self.values.random() < 0.6:
            await self.ask(Symlink(place, b"x" * self.values.randrange(1, 300)))
        else:
            await self.ask(Remove(place))

    # --- locks ---

    async def _lock(self) -> None:
        if len(self._locked) > 2:
            return
        window = self.rng.choice(list(Window))
        start = self.rng.randrange(8) * 10
        end = self.rng.choice([start + 10, start + 30, END_OF_FILE])
        if window is Window.WHOLE:
            start, end = 0, END_OF_FILE
        kind = self.rng.choice([LockKind.READ, LockKind.WRITE])
        wait_ns = self.rng.choice([0, 2 * SECOND])
        owner = self.rng.randrange(2)
        lock = Lock(self.world.lock_inode, window, owner, kind, start, end, wait_ns)
        self.world.locks.asking(lock.inode, window, self.client, owner, start, end)
        answer = await self.ask(lock)
        if isinstance(answer, Done) and self.world.lives(self.client):
            self.world.locks.got(lock.inode, window, self.client, owner, kind, start, end)
            self._locked.append(lock)
        elif isinstance(answer, ErrorReply):
            assert answer.errno in (errno.EAGAIN, errno.EDEADLK), answer

    async def _unlock_some(self) -> None:
        if self._locked:
            await self._unlock(self.rng.choice(self._locked))

    async def _unlock(self, lock: Lock) -> None:
        self._locked.remove(lock)
        self.world.locks.asking(lock.inode, lock.window, self.client, lock.owner, lock.start, lock.end)
        answer = await self.ask(Lock(lock.inode, lock.window, lock.owner, LockKind.NONE, lock.start, lock.end))
        assert isinstance(answer, Done), answer

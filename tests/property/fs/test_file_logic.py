"""What the client of files decides by itself, against plain models: pending writes, blocks ahead, numbers, holds."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.fs.core.files.chunk_map import ChunkMap
from fireflyer.fs.core.files.holds import HoldReporter
from fireflyer.fs.core.files.meta_requests import RequestNumbers
from fireflyer.fs.core.files.readahead import Block, ReadAhead
from fireflyer.fs.core.files.write_behind import MAX_OPEN, Extent, WriteBehindBuffer
from fireflyer.fs.schema.inodes import Layout
from fireflyer.fs.schema.meta import MAX_NUMBERS, MAX_UNDER_WAY

UNIT = 64
SIZE = 512
SEEDS = st.integers(0, 1 << 32)


@dataclass
class _Chunks:
    """Bytes of a file at storage nodes that do the updates of one unit in the order in which they were sent."""

    stored: bytearray = field(default_factory=lambda: bytearray(SIZE))
    under_way: list[Extent] = field(default_factory=list)

    def one_ends(self, pending: WriteBehindBuffer, rng: random.Random) -> None:
        first = {extent.begin // UNIT: extent for extent in reversed(self.under_way)}
        extent = rng.choice(list(first.values()))
        self.under_way.remove(extent)
        self.stored[extent.begin : extent.end] = extent.data[: extent.size]
        pending.ended(extent)
        if len(extent.data) == UNIT and isinstance(extent.data, bytearray):
            extent.data[:] = b"\xff" * UNIT
            pending.buffers.append(extent.data)


@settings(max_examples=60)
@given(SEEDS)
def test_what_is_pending_over_what_is_stored_is_what_was_written(seed: int) -> None:
    rng = random.Random(seed)
    pending, chunks, expected = WriteBehindBuffer(UNIT), _Chunks(), bytearray(SIZE)
    for step in range(120):
        what = rng.random()
        if what < 0.55:
            offset = rng.choice([rng.randrange(SIZE), rng.randrange(0, SIZE, UNIT)])
            data = bytes([1 + step % 255]) * rng.randint(1, min(SIZE - offset, 3 * UNIT))
            pending.write(offset, memoryview(data), lent=rng.random() < 0.5)
            expected[offset : offset + len(data)] = data
            chunks.under_way += pending.ready()
        elif what < 0.65:
            chunks.under_way += pending.ready(everything=True)
        elif chunks.under_way:
            chunks.one_ends(pending, rng)
        assert pending.kept_bytes == sum(one.size for one in pending.extents if not one.sent)
        assert pending.sent_bytes == sum(one.size for one in chunks.under_way)
        offset = rng.randrange(SIZE)
        seen = chunks.stored[offset : offset + 100]
        pending.over(offset, memoryview(seen))
        assert seen == expected[offset : offset + 100]
        covered = bytearray(b"\xff" * len(seen))
        if pending.covers(offset, len(seen)):
            pending.over(offset, memoryview(covered))
            assert covered == seen
    chunks.under_way += pending.ready(everything=True)
    while chunks.under_way:
        chunks.one_ends(pending, rng)
    assert chunks.stored == expected
    assert not pending
    assert pending.kept_bytes == pending.sent_bytes == pending.end() == 0


def test_writes_one_after_the_other_become_whole_units() -> None:
    pending = WriteBehindBuffer(UNIT)
    for at in range(0, 4 * UNIT, 16):
        pending.write(at, memoryview(bytes(16)))
    assert [(one.begin, one.end) for one in pending.ready()] == [(at * UNIT, (at + 1) * UNIT) for at in range(4)]
    assert not pending.ready(everything=True)


def test_only_so_many_extents_wait_for_more() -> None:
    pending = WriteBehindBuffer(UNIT)
    for at in range(MAX_OPEN + 3):
        pending.write(at * UNIT + 5, memoryview(b"x"))
    assert [one.begin // UNIT for one in pending.ready()] == [0, 1, 2]


def test_writes_of_two_cuts_are_apart() -> None:
    pending = WriteBehindBuffer(UNIT)
    pending.write(0, memoryview(b"ab"), cut=1)
    pending.write(2, memoryview(b"cd"), cut=2)
    assert [(bytes(one.data[: one.size]), one.cut) for one in pending.ready(everything=True)] == [
        (b"ab", 1),
        (b"cd", 2),
    ]


@settings(max_examples=60)
@given(SEEDS)
def test_blocks_ahead_are_apart_bounded_and_in_the_file(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.randint(1, 40 * UNIT)
    ahead, limit, at = ReadAhead(UNIT, 8 * UNIT), 8 * UNIT, 0
    for _ in range(60):
        at = rng.randrange(length) if rng.random() < 0.1 else at
        size = min(length - at, rng.choice([1, 7, UNIT, 3 * UNIT, 200_000]))
        before = set(map(id, ahead.blocks.values()))
        fetch, passed = ahead.due(at, size, length)
        assert all(at + size <= one.begin < one.end <= length for one in fetch)
        assert all(one.begin // UNIT == (one.end - 1) // UNIT for one in fetch)
        assert not {id(one) for one in fetch} & before
        blocks = sorted(ahead.blocks.values(), key=lambda one: one.begin)
        assert all(one.end <= other.begin for one, other in itertools.pairwise(blocks))
        assert sum(one.end - one.begin for one in blocks) <= limit + 2 * UNIT
        for byte in range(at, min(at + size, at + 3 * UNIT)):
            block = ahead.find(byte, passed)
            assert block is None or block.begin <= byte < block.end
        at = (at + size) % length
    assert all(isinstance(one, Block) for one in ahead.forget(0, length))
    assert not ahead.blocks


def test_who_reads_front_to_back_finds_what_comes_next() -> None:
    ahead, found = ReadAhead(UNIT, 8 * UNIT), 0
    for at in range(0, 20 * UNIT, UNIT):
        _fetch, passed = ahead.due(at, UNIT, 20 * UNIT)
        found += ahead.find(at, passed) is not None
    assert found == 18


def test_who_jumps_about_fetches_nothing() -> None:
    ahead = ReadAhead(UNIT, 8 * UNIT)
    assert all(not ahead.due(at, UNIT, 100 * UNIT)[0] for at in (640, 64, 3200, 0, 1280))


@given(SEEDS)
def test_numbers_are_used_once_and_in_a_window(seed: int) -> None:
    rng = random.Random(seed)
    numbers = RequestNumbers()
    open_: list[int] = []
    given_: list[int] = []
    for _ in range(600):
        if numbers.free and rng.random() < 0.7:
            open_.append(numbers.take())
            given_.append(open_[-1])
        elif open_:
            numbers.done(open_.pop(rng.randrange(len(open_))))
        assert numbers.done_below <= min(open_, default=numbers.next)
        assert len(open_) <= MAX_UNDER_WAY
        assert not open_ or max(open_) < numbers.done_below + MAX_NUMBERS
        assert numbers.free or len(open_) == MAX_UNDER_WAY
    assert given_ == list(range(1, len(given_) + 1))
    for number in open_:
        numbers.done(number)
    assert numbers.done_below == numbers.next


def test_one_that_is_never_answered_stops_the_others_only_in_the_end() -> None:
    numbers = RequestNumbers()
    hangs = numbers.take()
    for _ in range(MAX_NUMBERS - 1):
        assert numbers.free
        numbers.done(numbers.take())
    free = [numbers.free]
    numbers.done(hangs)
    assert [*free, numbers.free] == [False, True]
    assert numbers.done_below == numbers.next == MAX_NUMBERS + 1


class _Opens:
    """Some open and close, as `HoldReporter` hears of it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.holding = HoldReporter()
        self.open: dict[int, list[int]] = {}

    def some(self, step: int) -> None:
        for _ in range(self.rng.randrange(4)):
            inode = self.rng.randint(1, 6)
            if self.rng.random() < 0.5:
                self.holding.opened(inode)
                self.open.setdefault(inode, []).append(step)
            elif self.open.get(inode):
                self.holding.closed(inode)
                if len(self.open[inode]) == 1:
                    del self.open[inode]
                else:
                    self.open[inode].pop()


@given(SEEDS)
def test_what_stays_open_is_held_after_two_beats_and_let_go_after_it_is_closed(seed: int) -> None:
    opens, held = _Opens(random.Random(seed)), set[int]()
    for step in range(80):
        opens.some(step)
        heartbeat = opens.holding.heartbeat()
        assert heartbeat.count == step + 1
        held = (held | set(heartbeat.held)) - set(heartbeat.closed)
        assert held <= set(opens.open)
        assert {inode for inode, since in opens.open.items() if since[0] < step} <= held
    opens.holding.another_session()
    assert set(opens.holding.heartbeat().held) == set(opens.open)


@given(SEEDS)
def test_a_beat_that_failed_was_heard_or_not_and_nothing_stays_held_for_ever(seed: int) -> None:
    rng = random.Random(seed)
    opens, held = _Opens(rng), set[int]()
    for step in range(80):
        opens.some(step)
        heartbeat = opens.holding.heartbeat()
        what = rng.random()
        if what < 0.7 or rng.random() < 0.5:
            held = (held | set(heartbeat.held)) - set(heartbeat.closed)
        if what >= 0.7:
            opens.some(step)  # while it is under way
            opens.holding.failed(heartbeat)
        else:
            assert held <= set(opens.open)
    for _ in range(2):
        heartbeat = opens.holding.heartbeat()
        held = (held | set(heartbeat.held)) - set(heartbeat.closed)
    assert held == set(opens.open)


def test_parts_of_a_file_are_all_of_it_and_each_in_one_chunk() -> None:
    where = ChunkMap(Layout(1, 1 << 16, 3, 9), (4, 5, 6, 7))
    at = 100
    for part in where.parts(100, 400_000):
        assert part.at + 100 == at == part.chunk * (1 << 16) + part.offset
        assert part.chain == where.order[part.chunk % 3]
        at += part.size
        assert part.offset + part.size <= 1 << 16
    assert at == 400_100

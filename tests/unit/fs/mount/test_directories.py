"""What an open directory of a mount tells, request by request, while names come and go."""

from __future__ import annotations

import asyncio
import random
import zlib
from types import SimpleNamespace
from typing import cast

import pytest

from fireflyer.fs.mount.directories import Directory
from fireflyer.fs.mount.operations import Attributes, Caller, Listing, Operations

CALLER = Caller(1, 1, 1, ())
BYTES = 32 << 10


class Names:
    """A directory: names, and the length of each file. `asked`: the limits of its pages."""

    def __init__(self, count: int) -> None:
        self.lengths = dict.fromkeys((b"%05d" % number for number in range(count)), 0)
        self.asked: list[int] = []
        self.opened: list[bool] = []

    async def list_directory(
        self, caller: Caller, _inode: int, after: bytes, limit: int, *, attributes: bool, opened: bool
    ) -> Listing:
        assert caller == CALLER
        self.asked.append(limit)
        self.opened.append(opened)
        behind = sorted(name for name in self.lengths if name > after)
        entries = [
            (name, Attributes(zlib.crc32(name), 0o100644, 1, 0, 0, 0, self.lengths[name] if attributes else 0, 0, 0, 0))
            for name in behind[:limit]
        ]
        return Listing(entries, len(behind) > limit, 1)


class Reader:
    """As the kernel: each request goes on behind the last entry that it took."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.directory = Directory(7, CALLER)
        self.offset = 0
        self.seen: list[bytes] = []
        self.offsets: dict[bytes, int] = {}

    def read(self, count: int, *, plus: bool) -> dict[bytes, Attributes]:
        operations = cast("Operations", SimpleNamespace(list_directory=self.names.list_directory))
        told = asyncio.run(self.directory.entries_from(operations, self.offset, attributes=plus, size=BYTES))
        taken = told.entries[told.first : told.first + count]
        for place, (name, _) in enumerate(taken):
            self.offset = told.offset + place + 1
            self.seen.append(name)
            self.offsets[name] = self.offset
        return dict(taken)

    def read_all(self, count: int, *, plus: bool) -> None:
        while self.read(count, plus=plus):
            pass


@pytest.fixture
def names() -> Names:
    return Names(3000)


@pytest.mark.parametrize("plus", [False, True])
def test_all_names_are_told_once(names: Names, plus: bool) -> None:
    reader = Reader(names)
    reader.read_all(190, plus=plus)
    assert reader.seen == [b".", b"..", *sorted(names.lengths)]
    reader.offset, reader.seen = 0, []
    reader.read_all(190, plus=not plus)
    assert reader.seen == [b".", b"..", *sorted(names.lengths)]


def test_the_right_to_list_is_looked_at_with_the_first_page(names: Names) -> None:
    reader = Reader(names)
    reader.read_all(190, plus=False)
    reader.offset = 0
    reader.read(190, plus=True)
    assert reader.names.opened == [False, *[True] * (len(names.opened) - 1)]


def test_names_removed_while_listing_turns_to_attributes_hide_no_others(names: Names) -> None:
    reader = Reader(names)
    reader.read(190, plus=True)
    while len(reader.seen) < 1500:
        reader.read(400, plus=False)
    for name in reader.seen[-300:-260]:
        del names.lengths[name]
    reader.read_all(190, plus=True)
    assert set(names.lengths) <= set(reader.seen)
    assert len(reader.seen) == len(set(reader.seen))


def test_a_name_made_before_the_place_is_not_told_again_nor_shifts_it(names: Names) -> None:
    reader = Reader(names)
    while len(reader.seen) < 1500:
        reader.read(400, plus=False)
    for number in range(30):
        names.lengths[b"00000%d" % number] = 0
    reader.read_all(190, plus=True)
    assert len(reader.seen) == len(set(reader.seen))


def test_attributes_are_of_the_request_that_tells_them(names: Names) -> None:
    reader = Reader(names)
    reader.read(100, plus=True)
    names.lengths[b"00150"] = 1 << 20
    found = reader.read(100, plus=True)
    assert found[b"00150"].size == 1 << 20
    reader.read(50, plus=False)
    names.lengths[b"00260"] = 1 << 20
    assert reader.read(50, plus=True)[b"00260"].size == 1 << 20


def test_no_more_attributes_are_asked_for_than_the_answer_has_room_for(names: Names) -> None:
    reader = Reader(names)
    reader.read(190, plus=True)
    assert names.asked == [BYTES // 160]
    reader.read(190, plus=False)
    reader.read(190, plus=False)
    assert names.asked == [BYTES // 160, 1024]


def test_a_place_that_was_told_stays_the_same_when_names_before_it_go(names: Names) -> None:
    reader = Reader(names)
    while len(reader.seen) < 1400:
        reader.read(400, plus=False)
    earlier, later = reader.seen[1000], reader.seen[1300]
    for name in reader.seen[900:960] + reader.seen[1100:1160]:
        del names.lengths[name]
    for plus in (True, False):
        reader.offset = reader.offsets[earlier]
        assert next(iter(reader.read(50, plus=plus))) == min(name for name in names.lengths if name > earlier)
        reader.offset = reader.offsets[later]
        assert next(iter(reader.read(50, plus=plus))) == min(name for name in names.lengths if name > later)


def test_a_place_far_back_is_found_by_counting(names: Names) -> None:
    names.lengths |= dict.fromkeys((b"1%05d" % number for number in range(6000)), 0)
    reader = Reader(names)
    reader.read_all(400, plus=False)
    for name in [b"00000", b"00500", b"01500", b"103000"]:
        reader.offset = reader.offsets[name]
        assert next(iter(reader.read(10, plus=False))) == min(other for other in names.lengths if other > name)


def test_the_dots_can_be_gone_on_from(names: Names) -> None:
    for offset, expected in [(1, b".."), (2, b"00000")]:
        reader = Reader(names)
        reader.read(5, plus=False)
        reader.offset = offset
        assert next(iter(reader.read(1, plus=True))) == expected


def test_an_empty_directory_and_an_offset_that_nobody_was_told() -> None:
    reader = Reader(Names(0))
    assert list(reader.read(10, plus=True)) == [b".", b".."]
    assert not reader.read(10, plus=True)
    reader.offset = 10**9
    assert not reader.read(10, plus=False)


@pytest.mark.parametrize("seed", range(10))
def test_what_stays_is_told_once_whatever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    names = Names(2500)
    reader = Reader(names)
    always = set(names.lengths)
    while reader.read(rng.choice([20, 190, 700]), plus=rng.random() < 0.5):
        for name in rng.sample(sorted(names.lengths), 20):
            del names.lengths[name]
            always.discard(name)
        names.lengths |= {b"%05d+" % rng.randrange(2500): 0 for _ in range(20)}
    told = [name for name in reader.seen if name in always]
    assert sorted(told) == sorted(always)

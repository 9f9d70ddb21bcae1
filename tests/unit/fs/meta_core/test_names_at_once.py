"""Operations at the same time, each in its own transaction, with switches between any two reads: the store is what
they would have left one after the other."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from tests.support.fs.clusters.names import ADMINISTRATOR, Names, at, violations

from fireflyer.fs.core.meta.dispatch import carry_out
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.inodes import Kind
from fireflyer.fs.schema.meta import (
    Link,
    MakeDirectory,
    MakeNode,
    Remove,
    RemoveDirectory,
    Rename,
    RenameFlag,
    Request,
    SetQuota,
)
from fireflyer.kvstore import MemoryEngine, SteppedTiming, steps
from fireflyer.kvstore.errors import Conflict

NAMES = ["a", "b", "c", "d", "e"]


def request(rng: random.Random, directories: list[int]) -> Request:
    """By the numbers of directories, so that nothing above them is read but what has to be."""
    one, other = (at(rng.choice(NAMES), rng.choice(directories)) for _ in range(2))
    kinds: list[Any] = [
        MakeDirectory(one),
        MakeNode(one, Kind.FILE),
        MakeNode(one, Kind.FILE),
        Link(one, other),
        Remove(one),
        RemoveDirectory(one),
        *[Rename(one, other)] * 30,
        Rename(one, other, RenameFlag.EXCHANGE),
        SetQuota(one, rng.choice([None, 1 << 30])),
    ]
    picked: Request = rng.choice(kinds)
    return picked


@pytest.mark.parametrize("seed", range(4))
def test_at_the_same_time(seed: int) -> None:
    with Names() as names:
        rng = random.Random(seed)
        engine = MemoryEngine(names.store, waits=SteppedTiming(lambda: 0, rng.randrange))
        ends: Counter[str] = Counter()
        made = ["/".join(name * depth) for name in "abcde" for depth in range(1, 5)]
        names.do(*(MakeDirectory(at(path)) for path in made))
        directories = [names.stat(path).id for path in made]

        async def client() -> None:
            for _ in range(100):
                asked = request(rng, directories)
                try:
                    await engine.transact(lambda rows: carry_out(asked, names.context(rows, ADMINISTRATOR)))  # noqa: B023
                    ends["done"] += 1
                except FileError:
                    ends["refused"] += 1
                except Conflict:
                    ends["given up"] += 1

        clients = [steps(client) for _ in range(6)]
        while clients:
            one = rng.choice(clients)
            try:
                next(one)
            except StopIteration:
                clients.remove(one)
        assert violations(names.rows()) == []
        assert ends["done"] > 50
        assert ends["given up"] < 50


def test_two_directories_are_not_moved_into_each_other_at_the_same_time() -> None:
    """Neither move writes what the other does; each has to have read what the other writes."""
    with Names() as names:
        for path in ("p", "p/a", "p/a/x", "p/a/x/deep", "q", "q/b", "q/b/y", "q/b/y/deep"):
            names.do(MakeDirectory(at(path)))
        ids = {path: names.stat(path).id for path in ("p", "p/a/x/deep", "q", "q/b/y/deep")}
        moves = [
            Rename(at("a", ids["p"]), at("a", ids["q/b/y/deep"])),
            Rename(at("b", ids["q"]), at("b", ids["p/a/x/deep"])),
        ]
        engine = MemoryEngine(names.store)

        async def both() -> None:
            async with engine.transaction() as first, engine.transaction() as second:
                for move, rows in zip(moves, (first, second), strict=True):
                    await carry_out(move, names.context(rows, ADMINISTRATOR))

        with pytest.raises(Conflict):
            asyncio.run(both())
        assert violations(names.rows()) == []

"""Memory for reads of a mount: no chain gets all of it, and whoever waits is served or told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.support.fs.mounts.mounted_rig import turns

from fireflyer.base.errors import Timeout
from fireflyer.base.units import SECOND
from fireflyer.fs.mount import read_memory
from fireflyer.fs.mount.read_memory import ReadMemory

LIMIT = 48
SHARE = LIMIT // 4
"""Of one chain, where no other has any."""
AWAY, BUSY, OTHER = 1, 2, 3


class Played:
    """Reads of one unit each; `pool`: units that there are, whatever is counted."""

    def __init__(self) -> None:
        self.now_ns = SECOND
        self.answered: dict[int, int] = {}
        self.pool = LIMIT
        self.memory: ReadMemory[bytes] = ReadMemory(
            self._take, lambda size: size, LIMIT, now_ns=lambda: self.now_ns,
            answered_ns=lambda chain: self.answered.get(chain, 0),
        )  # fmt: skip
        self.tasks: list[asyncio.Task[bytes]] = []

    def _take(self, size: int) -> bytes | None:
        if self.pool < size:
            return None
        self.pool -= size
        return bytes(size)

    async def read(self, *chains: int, count: int = 1) -> list[asyncio.Task[bytes]]:
        begun = [asyncio.create_task(self.memory.take(chains, 1)) for _ in range(count)]
        self.tasks += begun
        await turns(5)
        return begun

    async def end(self, *chains: int, answered: bool = True) -> None:
        if answered:
            self.answered.update(dict.fromkeys(chains, self.now_ns))
        self.pool += 1
        self.memory.give_back(chains, 1)
        await turns(5)


def run(test: Callable[[Played], Coroutine[Any, Any, None]]) -> None:
    async def inside() -> None:
        played = Played()
        try:
            await test(played)
        finally:
            for task in played.tasks:
                task.cancel()
            await asyncio.gather(*played.tasks, return_exceptions=True)

    asyncio.run(inside())


def served(tasks: list[asyncio.Task[bytes]]) -> int:
    return sum(task.done() for task in tasks)


def test_a_chain_that_does_not_answer_leaves_most_of_it_to_others() -> None:
    async def test(played: Played) -> None:
        assert served(await played.read(AWAY, count=200)) == SHARE
        for _ in range(100):
            assert served(await played.read(OTHER)) == 1
            await played.end(OTHER)

    run(test)


def test_each_further_one_leaves_some_too() -> None:
    async def test(played: Played) -> None:
        for chain in range(10, 18):
            await played.read(chain, count=200)
        assert served(await played.read(OTHER)) == 1

    run(test)


def test_a_read_of_several_chains_counts_for_each() -> None:
    async def test(played: Played) -> None:
        away = await played.read(AWAY, BUSY, count=6) + await played.read(9, AWAY, count=200)
        assert served(away) == SHARE
        assert served(await played.read(AWAY)) == 0
        assert served(await played.read(OTHER, BUSY)) == 1

    run(test)


def test_those_that_wait_are_served_in_turn_when_some_is_given_back() -> None:
    async def test(played: Played) -> None:
        await played.read(AWAY, count=SHARE)
        first, second = await played.read(AWAY, count=2)
        assert not first.done()
        await played.end(AWAY, answered=False)
        assert (first.done(), second.done()) == (True, False)

    run(test)


def test_memory_that_is_still_being_copied_is_waited_for() -> None:
    async def test(played: Played) -> None:
        played.pool = 0
        (read,) = await played.read(OTHER)
        assert not read.done()
        played.pool = 1
        played.memory.retry()
        await turns(5)
        assert read.done()

    run(test)


def test_a_read_of_two_busy_chains_is_not_passed_by_for_ever() -> None:
    async def test(played: Played) -> None:
        await played.read(BUSY, count=60)
        await played.read(OTHER, count=60)
        (both,) = await played.read(BUSY, OTHER)
        for _ in range(60):
            played.now_ns += SECOND // 10
            for chain in (BUSY, OTHER):
                await played.end(chain)
                await played.read(chain, count=1)
        assert both.done()

    run(test)


def test_what_waits_for_a_chain_that_answers_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_memory, "_AWAY_S", 0.01)

    async def test(played: Played) -> None:
        away = await played.read(AWAY, count=LIMIT)
        done, _ = await asyncio.wait(away[SHARE:])
        assert all(isinstance(task.exception(), Timeout) for task in done)
        await played.end(AWAY, answered=False)
        assert served(await played.read(AWAY)) == 1

    run(test)


def test_what_waits_for_a_chain_that_answers_others_goes_on_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_memory, "_AWAY_S", 0.01)

    async def test(played: Played) -> None:
        await played.read(BUSY, count=SHARE)
        (read,) = await played.read(BUSY)
        played.answered[BUSY] = played.now_ns + 1
        await asyncio.wait([read], timeout=0.1)
        assert not read.done()
        await played.end(BUSY)
        assert read.done()

    run(test)


def test_who_waits_no_more_takes_nothing_with_him() -> None:
    async def test(played: Played) -> None:
        await played.read(AWAY, count=SHARE)
        first, second, third = await played.read(AWAY, count=3)
        first.cancel()
        await turns(5)
        played.pool += 1
        played.memory.give_back((AWAY,), 1)  # `second` has it when it is told to wait no more
        second.cancel()
        await turns(5)
        assert second.cancelled()
        played.pool += 1
        played.memory.retry()
        await turns(5)
        assert third.done()

    run(test)

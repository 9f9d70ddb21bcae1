"""The driver of a service of which one process leads: ticks, transactions, the clean end, and what breaks it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from tests.support.kvstore.engines import values
from tests.support.loops import on_loop

from fireflyer.base.errors import DataCorruption
from fireflyer.base.units import MS, SECOND
from fireflyer.kvstore import CommitFault, MemoryEngine
from fireflyer.kvstore.core.fenced import Committed, LeaseRow, Outcome, PreconditionFailed, Transact
from fireflyer.kvstore.core.lease import LeaseMachine
from fireflyer.kvstore.core.rows import decode_row, encode_row
from fireflyer.kvstore.fenced_driver import FencedDriver

LEASE_KEY = b"PMle"
COUNT_KEY = b"PMcount"
LEASE_NS = 100 * MS


class Tick(msgspec.Struct, frozen=True):
    pass


class Leave(msgspec.Struct, frozen=True):
    pass


class Add(msgspec.Struct, frozen=True):
    """One more in the store."""


class Leads(msgspec.Struct, frozen=True):
    term: int


class Added(msgspec.Struct, frozen=True):
    count: int


class Counter:
    """A service in a few lines: it counts in the store while it leads."""

    def __init__(self, name: str, lease_ns: int = LEASE_NS) -> None:
        self.lease = LeaseMachine(LEASE_KEY, name, f"{name}:1", lease_ns)
        self._numbers = 0
        self._led = 0
        self._count = 0
        self._adding: int | None = None

    @property
    def left(self) -> bool:
        return self.lease.left

    def handle(self, now_ns: int, event: Tick | Leave | Add | Outcome) -> Sequence[Leads | Added | Transact]:
        effects: list[Leads | Added | Transact] = []
        match event:
            case Add() if self.lease.held is None:
                effects.append(Added(self._count))
            case Add():
                self._adding = self._number()
                write = ((COUNT_KEY, b"%d" % (self._count + 1)),)
                effects.append(Transact(self._adding, held=self.lease.held, write=write))
            case Leave():
                self.lease.leave()
            case Tick():
                pass
            case _ if not self.lease.outcome(now_ns, event) and event.number == self._adding:
                assert isinstance(event, Committed | PreconditionFailed)
                self._count += isinstance(event, Committed)
                effects.append(Added(self._count))
        if (order := self.lease.tick(now_ns, self._number())) is not None:
            effects.append(order)
        if self.lease.may_act(now_ns) and self.lease.held is not None and self.lease.held.term != self._led:
            self._led = self.lease.held.term
            effects.append(Leads(self._led))
        return effects

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


class Running:
    def __init__(self, engine: MemoryEngine, name: str, lease_ns: int = LEASE_NS) -> None:
        self.effects: asyncio.Queue[Leads | Added] = asyncio.Queue()
        self.driver: FencedDriver[Tick | Leave | Add, Leads | Added] = FencedDriver(
            Counter(name, lease_ns),
            self.effects.put_nowait,
            engine=engine,
            lease_key=LEASE_KEY,
            lease_ns=lease_ns,
            tick=Tick,
            leave=Leave(),
        )
        self.task = asyncio.get_running_loop().create_task(self.driver.run(self.before_end))
        self.ends: list[bool] = []

    async def before_end(self) -> None:
        self.ends.append(self.driver.leaving)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


async def lease_in(engine: MemoryEngine) -> LeaseRow:
    return decode_row(LEASE_KEY, (await values(engine))[LEASE_KEY], LeaseRow)


@on_loop
async def test_a_machine_leads_writes_under_its_lease_and_gives_it_up_when_it_is_cancelled() -> None:
    engine = MemoryEngine()
    one = Running(engine, "a/1")
    assert await one.effects.get() == Leads(1)
    one.driver.post(Add())
    assert await one.effects.get() == Added(1)
    assert (await values(engine))[COUNT_KEY] == b"1"
    await one.end()
    assert one.task.cancelled()
    assert one.ends == [False], "it still answers when the end begins"
    assert one.driver.leaving
    assert (await lease_in(engine)).lease_ns == 0


@on_loop
async def test_the_next_process_leads_at_once_after_a_clean_end() -> None:
    engine = MemoryEngine()
    async with engine.transaction() as rows:
        rows.set(LEASE_KEY, encode_row(LeaseRow("a/1", "a:1", 4, 9, 0)))
    two = Running(engine, "b/1")
    assert await two.effects.get() == Leads(5)
    await two.end()
    assert (await lease_in(engine)).holder == "b/1"


@on_loop
async def test_a_process_that_lost_the_lease_writes_nothing() -> None:
    engine = MemoryEngine()
    one = Running(engine, "a/1")
    assert await one.effects.get() == Leads(1)
    other = LeaseRow("b/1", "b:1", 2, 1, 3600 * SECOND)
    async with engine.transaction() as rows:
        rows.set(LEASE_KEY, encode_row(other))
    one.driver.post(Add())
    assert await one.effects.get() == Added(0)
    await one.end()
    assert COUNT_KEY not in await values(engine)
    assert await lease_in(engine) == other


@on_loop
async def test_commits_that_fail_or_stay_unknown_do_not_end_the_driver() -> None:
    faults = [CommitFault.UNKNOWN_LOST, CommitFault.UNKNOWN_LOST]
    engine = MemoryEngine(faults=lambda: faults.pop() if faults else CommitFault.NONE)
    one = Running(engine, "a/1")
    assert isinstance(await one.effects.get(), Leads)
    assert not faults
    await one.end()


@on_loop
async def test_a_row_of_the_lease_that_is_damaged_ends_the_process() -> None:
    engine = MemoryEngine()
    async with engine.transaction() as rows:
        rows.set(LEASE_KEY, b"\x01nonsense")
    one = Running(engine, "a/1")
    with pytest.raises(DataCorruption, match="restore the store"):
        await one.task

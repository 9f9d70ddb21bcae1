"""The driver feeds a machine one event at a time, performs its effects in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tests.support.loops import on_loop

from fireflyer.base.errors import Busy
from fireflyer.runtime.driver import MAX_EVENTS_QUEUED, Driver, run


class Recorder:
    """Answers each event with two effects, and knows whether it was entered twice."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []
        self._inside = False

    def handle(self, now_ns: int, event: str) -> Sequence[str]:
        assert not self._inside
        self._inside = True
        if event == "bad":
            raise ZeroDivisionError("a bug in the machine")
        self.seen.append((now_ns, event))
        self._inside = False
        return [f"{event}-1", f"{event}-2"]


@on_loop
async def test_effects_are_performed_in_order_before_the_next_event() -> None:
    performed: list[str] = []

    def perform(effect: str) -> None:
        performed.append(effect)
        if effect == "a-1":
            driver.post("c")
        if effect == "c-2":
            driver.stop()

    driver = Driver(Recorder(), perform)
    driver.post("a")
    driver.post("b")
    await driver.run()
    assert performed == ["a-1", "a-2", "b-1", "b-2", "c-1", "c-2"]
    driver.post("ignored after the stop")


@on_loop
async def test_spawned_work_posts_its_outcome_and_ends_with_the_driver() -> None:
    ended = []

    async def work() -> None:
        driver.post("done")

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("forever")

    driver = Driver(Recorder(), lambda effect: driver.stop() if effect == "done-2" else None)
    driver.spawn(forever())
    driver.spawn(work())
    await driver.run()
    assert ended == ["forever"]


@on_loop
async def test_a_bug_anywhere_stops_the_driver_and_is_raised() -> None:
    driver = Driver(Recorder(), lambda effect: None)
    driver.post("bad")
    driver.post("not handled any more")
    with pytest.raises(ZeroDivisionError):
        await driver.run()

    async def broken() -> None:
        raise LookupError("in spawned work")

    driver = Driver(Recorder(), lambda effect: None)
    driver.spawn(broken())
    with pytest.raises(LookupError):
        await driver.run()

    def perform(effect: str) -> None:
        raise KeyError(effect)

    driver = Driver(Recorder(), perform)
    driver.post("a")
    with pytest.raises(KeyError):
        await driver.run()


@on_loop
async def test_cancelling_run_stops_everything() -> None:
    driver = Driver(Recorder(), lambda effect: None)
    running = asyncio.create_task(driver.run())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    driver.post("ignored")


@on_loop
async def test_the_queue_is_bounded() -> None:
    driver = Driver(Recorder(), lambda effect: None)
    for _ in range(MAX_EVENTS_QUEUED):
        driver.post("x")
    with pytest.raises(Busy, match="65536 events"):
        driver.post("one too many")
    driver.stop()
    await driver.run()


def test_run_returns_the_result_and_uses_uvloop() -> None:
    async def main() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert run(main()).startswith("uvloop")

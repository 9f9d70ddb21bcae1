from __future__ import annotations

import asyncio
import gc
import weakref

from fireflyer.runtime.garbage import collect_at_times


class _Cycle:
    def __init__(self) -> None:
        self.own = self


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def _all_at_fixed_times() -> None:
    before = gc.get_threshold()
    task = asyncio.create_task(collect_at_times(3600))
    await asyncio.sleep(0)
    try:
        assert gc.get_freeze_count() > 10_000
        walked = gc.get_stats()[2]["collections"]
        kept: list[list[int]] = [[] for _ in range(200_000)]  # many times a quarter of what is not frozen
        assert gc.get_stats()[2]["collections"] == walked, f"{len(kept)} lists made Python walk all objects"
    finally:
        await _cancelled(task)
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


async def _old_cycle_is_found() -> None:
    task = asyncio.create_task(collect_at_times(0.001))
    await asyncio.sleep(0)
    try:
        cycle = _Cycle()
        gc.collect()  # it is of the oldest generation
        gone = asyncio.Event()
        weakref.finalize(cycle, gone.set)
        del cycle
        await gone.wait()
    finally:
        await _cancelled(task)


def test_all_objects_are_walked_at_fixed_times_only_and_python_chooses_again_at_the_end() -> None:
    asyncio.run(_all_at_fixed_times())


def test_a_cycle_that_has_grown_old_is_found() -> None:
    asyncio.run(_old_cycle_is_found())

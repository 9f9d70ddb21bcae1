"""Those who follow changes miss none in silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from fireflyer.base.errors import Busy
from fireflyer.cluster.manager import changes as module
from fireflyer.cluster.manager.changes import MAX_KEPT, Changes
from fireflyer.cluster.schema.api import Change


def change(number: int) -> Change:
    return Change(number=number, what="task", name=str(number), state="running")


def opened(newest: int = 0) -> Changes:
    changes = Changes()
    changes.open(newest)
    return changes


async def take(following: AsyncIterator[Change | None], count: int) -> list[int | str]:
    """Numbers of so many changes, or `gap N`."""
    found: list[int | str] = []
    while len(found) < count:
        one = await anext(following)
        assert one is not None
        found.append(f"gap {one.number}" if one.what == "gap" else one.number)
    return found


def test_a_new_follower_hears_what_comes() -> None:
    async def main() -> None:
        changes = opened(7)
        following = changes.follow(None)
        waiting = asyncio.ensure_future(take(following, 2))
        await asyncio.sleep(0)
        changes.add(change(8))
        changes.add(change(9))
        assert await waiting == [8, 9]

    asyncio.run(main())


def test_who_comes_back_hears_what_it_missed() -> None:
    async def main() -> None:
        changes = opened()
        for number in range(1, 6):
            changes.add(change(number))
        assert await take(changes.follow(2), 3) == [3, 4, 5]

    asyncio.run(main())


def test_who_was_away_too_long_is_told_of_a_gap_and_goes_on_from_there() -> None:
    async def main() -> None:
        changes = opened()
        for number in range(1, MAX_KEPT + 12):
            changes.add(change(number))
        following = changes.follow(3)
        assert await take(following, 1) == [f"gap {MAX_KEPT + 11}"]
        changes.add(change(MAX_KEPT + 12))
        assert await take(following, 1) == [MAX_KEPT + 12]

    asyncio.run(main())


@pytest.mark.parametrize("heard", [50, 200])
def test_a_new_leader_tells_of_a_gap_where_it_does_not_have_the_changes(heard: int) -> None:
    """Those before it led, and numbers of another cluster."""

    async def main() -> None:
        assert await take(opened(100).follow(heard), 1) == ["gap 100"]

    asyncio.run(main())


def test_a_new_leader_goes_on_where_all_was_heard() -> None:
    async def main() -> None:
        changes = opened(100)
        following = changes.follow(100)
        waiting = asyncio.ensure_future(take(following, 1))
        await asyncio.sleep(0)
        changes.add(change(101))
        assert await waiting == [101]

    asyncio.run(main())


def test_followers_end_when_the_manager_leads_no_more() -> None:
    async def main() -> None:
        changes = opened()
        waiting = asyncio.ensure_future(anext(changes.follow(None)))
        await asyncio.sleep(0)
        changes.close()
        with pytest.raises(StopAsyncIteration):
            await waiting
        assert changes.followers == 0

    asyncio.run(main())


def test_followers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FOLLOWERS", 1)

    async def main() -> None:
        changes = opened()
        waiting = asyncio.ensure_future(anext(changes.follow(None)))
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await anext(changes.follow(None))
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(main())

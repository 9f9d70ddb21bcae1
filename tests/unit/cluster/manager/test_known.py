"""Which managers a run is told of."""

from __future__ import annotations

import asyncio

from fireflyer.cluster.manager.known import FORGET_S, SAY_S, KnownManagers
from fireflyer.kvstore import MemoryEngine, MemoryStore

NOW = 1_700_000_000


def test_managers_tell_each_other_where_they_are_and_those_that_are_gone_for_good_are_forgotten() -> None:
    async def main() -> None:
        store = MemoryStore()
        one = KnownManagers(MemoryEngine(store), "head-1", "https://head-1:9440#01", ())
        other = KnownManagers(MemoryEngine(store), "head-2", "https://head-2:9440#02", ())
        await one.refresh(NOW)
        assert list(one.urls) == ["https://head-1:9440#01"]
        await other.refresh(NOW)
        await one.refresh(NOW + 1)
        assert list(one.urls) == ["https://head-1:9440#01", "https://head-2:9440#02"]
        assert list(other.urls) == ["https://head-2:9440#02", "https://head-1:9440#01"]
        anew = KnownManagers(MemoryEngine(store), "head-2", "https://head-2:9440#03", ())
        await anew.refresh(NOW + 2)
        await one.refresh(NOW + 2)
        assert list(one.urls) == ["https://head-1:9440#01", "https://head-2:9440#03"], "its newest certificate"
        for passed_s in range(SAY_S, FORGET_S + 2 * SAY_S, SAY_S):
            await one.refresh(NOW + passed_s)
        assert list(one.urls) == ["https://head-1:9440#01"]
        await other.refresh(NOW + FORGET_S + 2 * SAY_S)
        assert list(other.urls) == ["https://head-2:9440#02", "https://head-1:9440#01"], (
            "it has said it again meanwhile"
        )

    asyncio.run(main())


def test_what_is_configured_is_told_instead() -> None:
    async def main() -> None:
        engine = MemoryEngine(MemoryStore())
        await KnownManagers(engine, "head-1", "https://head-1:9440", ()).refresh(NOW)
        configured = KnownManagers(engine, "head-2", "https://head-2:9440", ("https://proxy",))
        await configured.refresh(NOW)
        assert list(configured.urls) == ["https://proxy"]

    asyncio.run(main())

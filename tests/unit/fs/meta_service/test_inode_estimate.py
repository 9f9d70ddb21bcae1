"""About how many inodes there are, out of a few looks at the store."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tests.support.fs.clusters.meta_service import MetaRig, expect
from tests.support.loops import on_loop

from fireflyer.fs.core.meta.tables import inode_key
from fireflyer.fs.schema.inodes import ROOT
from fireflyer.fs.schema.meta import GetSpace, MakeDirectory, PathRef, Space
from fireflyer.fs.service.meta.inode_estimate import about_inodes
from fireflyer.kvstore import MemoryEngine, Transaction


async def filled(numbers: Iterable[int]) -> MemoryEngine:
    engine = MemoryEngine()

    async def body(tx: Transaction) -> None:
        for number in numbers:
            tx.set(inode_key(number), b"")

    await engine.transact(body)
    return engine


@pytest.mark.parametrize("numbers", [range(1, 1), range(1, 2), range(1, 2000), range(5, 4000, 7)])
@on_loop
async def test_few_are_counted(numbers: range) -> None:
    assert await about_inodes(await filled(numbers)) == len(numbers)


@pytest.mark.parametrize(
    "numbers",
    [
        range(1, 20_000),
        range(1, 60_000, 3),
        [*range(1, 1_000_000, 40_000), *range(1_000_000, 1_009_000)],
        [*range(1, 12_000), *range(12_000, 5_000_000, 40_000)],
    ],
    ids=["all", "a third", "old ones are gone", "old ones are left"],
)
@on_loop
async def test_many_are_estimated(numbers: list[int]) -> None:
    assert len(numbers) * 0.7 < await about_inodes(await filled(numbers)) < len(numbers) * 1.4


@on_loop
async def test_space_tells_them() -> None:
    async with MetaRig(MemoryEngine()) as rig:
        await rig.open_session(5)
        for number in range(9):
            await rig.ask(5, MakeDirectory(PathRef(ROOT, b"%d" % number)))
        await rig.service.service_context.count()
        await rig.service.service_context.look()
        assert expect(await rig.ask(5, GetSpace(ROOT)), Space).inodes == 10

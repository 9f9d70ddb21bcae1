"""Who looks after a target's directory: what makes it give the target up, and what does not."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

from tests.support.loops import on_loop

from fireflyer.base.errors import NoSpace
from fireflyer.base.units import MIB
from fireflyer.fs.core.chain import effects as fx
from fireflyer.fs.core.chain.node_membership import Measured
from fireflyer.fs.core.chain.storage_node import TargetScoped
from fireflyer.fs.service.storage.config import StorageConfig, StorageTarget
from fireflyer.fs.service.storage.target_directory import TargetDirectory, make_target
from fireflyer.fs.service.storage.targets import OpenTarget, close_targets, maintain, open_targets
from fireflyer.native import ChunkNode


class _Full(TargetDirectory):
    """On a disk without space for its notes, at first."""

    refusals = 1

    def mark_clean(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise NoSpace("write run.json: no space left on the device")
        super().mark_clean()


def test_a_full_disk_is_no_reason_to_give_a_target_up_and_a_missing_directory_is_one(tmp_path: Path) -> None:
    path = tmp_path / "target"
    make_target(str(path), "home", 7)
    config = StorageConfig(
        cluster="home", node=1, managers=("localhost:1",), targets=(StorageTarget(7, str(path)),), secret_file=""
    )

    async def work() -> None:
        native = ChunkNode(io_threads=1, job_threads=1, buffer_bytes=MIB)
        try:
            await watched(native)
        finally:
            native.close()

    async def watched(native: ChunkNode) -> None:
        opened = (await open_targets(native, config))[7]
        full = _Full(str(path), "home", 7, "boot")
        full.prepare()
        full.begin(durable=True)
        target = OpenTarget(opened.config, full, opened.engine, opened.scrub)
        heard: asyncio.Queue[Measured | TargetScoped] = asyncio.Queue()
        news = asyncio.Event()
        looking = asyncio.create_task(
            maintain(target, news, config=config, is_clean=lambda: True, post=heard.put_nowait)
        )
        news.set()
        assert isinstance(await heard.get(), Measured)
        assert (full.refusals, full.clean) == (0, True)
        shutil.rmtree(path)
        news.set()
        while isinstance(told := await heard.get(), Measured):
            pass
        assert isinstance(told.what, fx.DiskFailed)
        await looking

    on_loop(work, limit_s=20)()


class _Slow(TargetDirectory):
    """On a disk that takes until all have got here."""

    all_here: threading.Barrier

    def end(self) -> None:
        self.all_here.wait(10)
        super().end()


def test_a_target_is_closed_however_long_the_disks_of_others_take(tmp_path: Path) -> None:
    paths = {number: str(tmp_path / str(number)) for number in (7, 8, 9)}
    for number, path in paths.items():
        make_target(path, "home", number)
    wanted = tuple(StorageTarget(number, path) for number, path in paths.items())
    config = StorageConfig(cluster="home", node=1, managers=("localhost:1",), targets=wanted, secret_file="")

    async def work() -> None:
        native = ChunkNode(io_threads=1, job_threads=1, buffer_bytes=MIB)
        try:
            targets = await open_targets(native, config)
            all_here = threading.Barrier(len(targets))
            for number, one in targets.items():
                slow = _Slow(paths[number], "home", number, "boot")
                slow.all_here = all_here
                slow.prepare()
                slow.begin(durable=True)
                one.directory = slow
            await close_targets(targets)
            assert not all_here.broken
        finally:
            native.close()

    on_loop(work, limit_s=20)()

"""Opens the targets of a storage process, and looks after their directories."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from fireflyer.base.errors import Busy, DataCorruption, FireflyerError, NoSpace, PermanentError, TransientError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND
from fireflyer.fs.core.chain import effects as fx
from fireflyer.fs.core.chain.node_membership import Measured
from fireflyer.fs.core.chain.storage_node import TargetScoped
from fireflyer.fs.schema.ids import TargetId
from fireflyer.fs.service.storage.config import StorageConfig, StorageTarget
from fireflyer.fs.service.storage.scrub import Scrub
from fireflyer.fs.service.storage.target_directory import TargetDirectory
from fireflyer.fs.service.storage.target_engine import TargetEngine
from fireflyer.native import ChunkError, ChunkNode, ChunkTarget

__all__ = ["OpenTarget", "boot_id", "close_targets", "maintain", "note_failure", "open_targets"]

_log = logging.getLogger(__name__)
LOOK_S: Final = 2.0
"""Between two looks at a directory."""


@dataclass(slots=True)
class OpenTarget:
    config: StorageTarget
    directory: TargetDirectory
    engine: TargetEngine
    scrub: Scrub


def boot_id() -> str:
    """Names the boot of this machine. Raises `PermanentError` where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError as error:
        raise translate_os_error(error, "read the boot id of this machine") from error


async def open_targets(native: ChunkNode, config: StorageConfig) -> dict[TargetId, OpenTarget]:
    """All that can be opened, side by side; the others are logged: a disk that is gone must not keep the rest from
    serving. Raises `PermanentError` when there is none."""
    boot = boot_id()
    opened: dict[TargetId, OpenTarget] = {}
    work = [asyncio.to_thread(_open, native, config, one, boot) for one in config.targets]
    for one, result in zip(config.targets, await asyncio.gather(*work, return_exceptions=True), strict=True):
        if isinstance(result, OpenTarget):
            opened[one.id] = result
            _log.info("target opened target=%d directory=%s clean=%s", one.id, one.directory, result.directory.clean)
        elif isinstance(result, FireflyerError) and not isinstance(result, Busy):
            _log.error("target cannot be opened target=%d reason=%s", one.id, result)
            if len(config.targets) == 1:
                raise result
        else:
            # Busy: the process before this one is not dead, and registering would say that it is.
            raise result
    if not opened:
        raise PermanentError(
            f"none of the {len(config.targets)} targets of node {config.node} can be opened; the reasons are in the "
            "log above"
        )
    return opened


def _open(native: ChunkNode, config: StorageConfig, one: StorageTarget, boot: str) -> OpenTarget:
    directory = TargetDirectory(one.directory, config.cluster, one.id, boot)
    directory.prepare()
    try:
        target = _open_chunks(native, config, one, directory)
    except DataCorruption as error:
        _log.error("target starts empty and must be synced target=%d reason=%s", one.id, error)
        directory.put_aside()
        target = _open_chunks(native, config, one, directory)
    directory.begin(durable=config.durable)
    engine = TargetEngine(target, one.id)
    rest_ns = config.scrub_rest_s * SECOND
    return OpenTarget(one, directory, engine, Scrub(engine, bytes_per_s=config.scrub_bytes_per_s, rest_ns=rest_ns))


def _open_chunks(
    native: ChunkNode, config: StorageConfig, one: StorageTarget, directory: TargetDirectory
) -> ChunkTarget:
    try:
        return native.open_target(
            one.id,
            directory.chunks,
            capacity_bytes=one.capacity_bytes,
            reserve=config.reserve,
            reserve_at_most_bytes=config.reserve_at_most_bytes,
            durable=config.durable,
        )
    except BlockingIOError:
        raise Busy(f"another process has {directory.chunks} open; stop it first") from None
    except OSError as error:
        raise translate_os_error(error, f"open {directory.chunks}") from error
    except ChunkError as error:
        kind, message = error.args
        kind_of = DataCorruption if kind == "damaged" else PermanentError
        raise kind_of(f"open {directory.chunks}: {message}") from error


async def maintain(
    target: OpenTarget,
    news: asyncio.Event,
    *,
    config: StorageConfig,
    is_clean: Callable[[], bool],
    post: Callable[[Measured | TargetScoped], None],
) -> None:
    """Until the directory is gone or cannot be read: what is written into a directory that was removed would be lost.
    Measures it, and remembers on disk that the target has become clean, at once when there is `news`. In threads: a
    disk that hangs must hold up nobody else."""
    number = target.config.id
    while True:
        try:
            await asyncio.to_thread(target.directory.check)
            if is_clean() and not target.directory.clean:
                await asyncio.to_thread(target.directory.mark_clean)
            post(await asyncio.to_thread(measure, target, config))
        except (TransientError, NoSpace) as error:
            # No descriptors or memory, or no space to write down that it is clean: that passes.
            _log.warning("checking the target directory failed target=%d reason=%s", number, error)
        except (FireflyerError, OSError, ChunkError) as error:
            _log.error("target failed target=%d reason=%s", number, error)
            post(TargetScoped(number, fx.DiskFailed(str(error))))
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await news.wait()
        news.clear()


def measure(target: OpenTarget, config: StorageConfig) -> Measured:
    """How full it is. Blocks."""
    stats = target.engine.native.stats()
    used = stats["taken_bytes"]
    reserved = min(int(config.reserve * stats["total_bytes"]), config.reserve_at_most_bytes)
    left = max(0, stats["free_bytes"] - reserved)
    capacity = target.config.capacity_bytes or max(used, stats["file_bytes"]) + left
    disk = 0 if target.config.capacity_bytes else os.stat(target.directory.chunks).st_dev
    return Measured(target.config.id, used, capacity, disk)


async def close_targets(targets: Mapping[TargetId, OpenTarget]) -> None:
    """In order, and side by side: a disk that hangs takes all the time that whoever asked the process to end gives it.
    What they have is on the disk then, and they say so; or that it is not."""
    await asyncio.gather(*(asyncio.to_thread(_close, one) for one in targets.values()))


def _close(target: OpenTarget) -> None:
    try:
        target.engine.native.close()
        if os.path.isdir(target.directory.path):
            target.directory.end()
    except (ChunkError, OSError, FireflyerError) as error:
        _log.error("closing the target failed target=%d reason=%s", target.config.id, error)
        if not (isinstance(error, ChunkError) and error.args[0] == "hung"):
            note_failure(target)


def note_failure(target: OpenTarget) -> None:
    """Its disk has refused something. Blocks."""
    try:
        target.directory.failed()
    except (OSError, FireflyerError) as error:
        _log.error(
            "target may lack acknowledged writes, and marking it so failed target=%d reason=%s", target.config.id, error
        )

"""A mount whose meta service and chunks are in its own process, where all is counted that a cluster would do.

    python -m tests.support.fs.mounts.counted_mount PLACE

says "Mounted", and at the end what was done, as one line of JSON: `Counts`. Nothing of it depends on time: lazy closes
wait until something else is asked, for ever if need be; what the service does by itself, and heartbeats, are not
counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from tests.support.fs.clusters.file_rig import FileRig
from tests.support.fs.mounts.mounting import Mount, mounted
from tests.support.later import FakeTimers

from fireflyer.fs.mount.daemon import MountOptions, serve_mount
from fireflyer.fs.mount.files import MountedFiles
from fireflyer.fs.mount.serving import Serving
from fireflyer.fs.schema.meta import ClientHeartbeat
from fireflyer.fs.service.meta.group_commit import CommitItem
from fireflyer.fs.service.meta.requests import QueuedRequest

__all__ = ["Counts", "counted_mount"]

_ROOT: Final = Path(__file__).parents[4]


class Counts(msgspec.Struct):
    kernel: dict[str, int]
    """Requests of the kernel that reach Python, by kind."""
    changes: dict[str, int]
    """Numbered requests to the meta service."""
    transactions: int
    updates: int
    """Of chunks."""
    cpu_s: float
    """Of the process."""


class _Counting:
    def __init__(self, rig: FileRig) -> None:
        self.kernel: Counter[str] = Counter()
        self.changes: Counter[str] = Counter()
        self.transactions = 0
        self.updates = 0
        self._transact = rig.rig.service.service_context.commit_queues._transact
        rig.rig.service.service_context.commit_queues._transact = self.transact  # type: ignore[method-assign]
        self._put = rig.store.put
        rig.store.put = self.put  # type: ignore[method-assign]

    async def transact(self, batch: Sequence[CommitItem], *, again: bool = False) -> Sequence[CommitItem]:
        requests = [work.request for work in batch if isinstance(work, QueuedRequest)]
        own = [one for one in requests if not isinstance(one, ClientHeartbeat)]
        self.changes.update(type(one).__name__ for one in own)
        self.transactions += len(own) == len(batch)
        return await self._transact(batch, again=again)

    def put(self, key: tuple[int, int, int], offset: int, data: bytes) -> None:
        self.updates += 1
        self._put(key, offset, data)

    def counted(self) -> Counts:
        times = os.times()
        return Counts(self.kernel, self.changes, self.transactions, self.updates, times.user + times.system)


async def _main(place: str) -> None:
    rig = FileRig(later=FakeTimers().later)
    async with rig:
        files, _ = await rig.client()
        counting = _Counting(rig)
        take = Serving._answer

        async def answer(self: Serving, event: Any) -> None:
            counting.kernel[event[0]] += 1
            await take(self, event)

        Serving._answer = answer  # type: ignore[method-assign]
        mounted_files = MountedFiles(files, trusted=True)
        await serve_mount(place, mounted_files, MountOptions(), on_ready=lambda _: print("Mounted", flush=True))
        print(msgspec.json.encode(counting.counted()).decode(), flush=True)


@contextlib.contextmanager
def counted_mount(place: Path) -> Iterator[Mount]:
    """What its `end` returns after `unmount` is for `Counts`."""
    place.mkdir()
    command = ["env", f"PYTHONPATH={_ROOT}", sys.executable, "-m", "tests.support.fs.mounts.counted_mount", str(place)]
    with mounted(command, str(place)) as mount:
        yield mount


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))

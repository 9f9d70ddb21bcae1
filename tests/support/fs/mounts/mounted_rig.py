"""A mount's operations over clients of files in the test's process: what its tests have in common."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from tests.support.fs.clusters.file_rig import FileRig
from tests.support.later import FakeTimers

from fireflyer.base.errors import Timeout
from fireflyer.base.units import MS
from fireflyer.fs.mount.files import MountedFiles
from fireflyer.fs.mount.operations import Caller, RangeLock
from fireflyer.fs.schema.inodes import ROOT
from fireflyer.fs.schema.meta import END_OF_FILE, Answers, Calls, Lock, LockKind, Request
from fireflyer.fs.service.meta.group_commit import in_loop

__all__ = ["ONE", "OTHER", "ROOT_USER", "WHOLE_FILE", "create", "heard", "is_unlock", "lock", "mount", "run", "turns"]
__all__ += ["unanswered", "write"]

ROOT_USER = Caller(0, 0, 1, ())
ONE, OTHER = 11, 12
WHOLE_FILE = (0, END_OF_FILE)


def run(test: Callable[[FileRig], Coroutine[Any, Any, None]], timers: FakeTimers | None = None) -> None:
    async def inside() -> None:
        async with asyncio.timeout(60), FileRig(later=in_loop if timers is None else timers.later) as rig:
            await test(rig)

    asyncio.run(inside())


async def mount(rig: FileRig) -> tuple[MountedFiles, Any]:
    files, played = await rig.client()
    return MountedFiles(files, trusted=True), played


async def create(mounted: MountedFiles, name: bytes = b"a") -> tuple[int, int]:
    """The inode, and a handle for reading and writing."""
    found, opened = await mounted.create(ROOT_USER, ROOT, name, 0o644, os.O_RDWR)
    return found.inode, opened.handle


async def write(mounted: MountedFiles, handle: int, data: bytes, offset: int = 0) -> None:
    assert (await mounted.write(handle, offset, memoryview(data))).size == len(data)


def heard(rig: FileRig) -> list[Request]:
    """What changes something and is sent from now on."""
    sent: list[Request] = []
    before = rig.sends

    async def sends(calls: Calls) -> Answers:
        sent.extend(call.request for call in calls.calls if call.number)
        return await before(calls)

    rig.sends = sends
    return sent


def unanswered(rig: FileRig, mounted: MountedFiles, which: Callable[[Request], bool]) -> Callable[[], None]:
    """Requests of a kind find no service, and this mount does not wait long for them, until it is called."""
    before, meta = rig.sends, mounted._files.meta
    call = meta.call

    async def hasty(request: Request, **more: Any) -> Any:
        return await call(request, **(more | {"timeout_ns": 20 * MS} if which(request) else more))

    meta.call = hasty  # type: ignore[method-assign]

    async def sends(calls: Calls) -> Answers:
        if any(which(call.request) for call in calls.calls):
            raise Timeout("no answer in time")
        return await before(calls)

    def answered() -> None:
        rig.sends, meta.call = before, call  # type: ignore[method-assign]

    rig.sends = sends
    return answered


def is_unlock(request: Request) -> bool:
    return isinstance(request, Lock) and request.kind is LockKind.NONE


async def lock(
    mounted: MountedFiles, inode: int, owner: int, kind: int, *, handle: int = 0, wait: bool = False
) -> bool:
    return await mounted.lock(ROOT_USER, inode, owner, RangeLock(kind, *WHOLE_FILE, 5), handle=handle, wait=wait)


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)

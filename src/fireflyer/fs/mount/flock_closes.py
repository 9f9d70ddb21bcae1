"""Last closes of descriptors that may hold a lock of a whole file (flock), until that lock is gone.

The kernel tells of a last close when `close` has returned already, so a program's next lock can be asked for before the
one that it has given up is gone. On a local file system it would be granted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

__all__ = ["FlockCloses"]


class FlockCloses:
    """Of one mount, in its loop."""

    def __init__(self) -> None:
        self._under_way: dict[int, dict[int, asyncio.Future[None]]] = {}
        self._begun = 0

    @contextlib.contextmanager
    def of(self, inode: int) -> Iterator[None]:
        """One of them is under way."""
        self._begun += 1
        number, ended = self._begun, asyncio.get_running_loop().create_future()
        here = self._under_way.setdefault(inode, {})
        here[number] = ended
        try:
            yield
        finally:
            ended.set_result(None)
            del here[number]
            if not here:
                del self._under_way[inode]

    def seen(self, inode: int) -> int:
        """For `since`: those that are over now."""
        return min(self._under_way.get(inode, {self._begun + 1: None})) - 1

    async def since(self, inode: int, seen: int) -> bool:
        """Whether there may have been others since, which have ended when this returns."""
        if self._begun <= seen:
            return False
        if here := self._under_way.get(inode):
            await asyncio.wait(list(here.values()))
        return True

"""Changes of tasks and nodes, numbered, for whoever follows them: the newest are kept, older ones are a gap.

Numbers go on across leaders (they are those of the manager's rows), so a client that comes back with the number that it
heard last, to this manager or to another, gets what it missed, or is told that it must ask for everything again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from itertools import islice
from typing import Final

from fireflyer.base.errors import Busy
from fireflyer.cluster.schema.api import Change

__all__ = ["MAX_FOLLOWERS", "MAX_KEPT", "Changes"]

MAX_KEPT: Final = 4096
MAX_FOLLOWERS: Final = 1024
KEEP_ALIVE_S: Final = 5.0
"""A follower that would hear nothing for so long hears of that: proxies close silent connections."""


class Changes:
    """Lives in one event loop."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Change], None]] = []
        self._kept: deque[Change] = deque(maxlen=MAX_KEPT)
        self._newest = 0
        self._news = asyncio.Event()
        self._followers = 0
        self._open = False

    @property
    def followers(self) -> int:
        return self._followers

    def open(self, newest: int) -> None:
        """This manager leads from now on, and the last change before it had the number `newest`."""
        self._open = True
        self._kept.clear()
        self._newest = newest

    def listen(self, heard: Callable[[Change], None]) -> None:
        """`heard` is called with each change, and must not block."""
        self._listeners.append(heard)

    def add(self, change: Change) -> None:
        """Numbers grow by one."""
        self._kept.append(change)
        self._newest = change.number
        for heard in self._listeners:
            heard(change)
        self._wake()

    def close(self) -> None:
        """All followers end: this manager leads no more."""
        self._open = False
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def follow(self, heard: int | None) -> AsyncIterator[Change | None]:
        """Those after `heard`, or from now on; None: nothing for a while. Raises `Busy` over the limit."""
        if self._followers >= MAX_FOLLOWERS:
            raise Busy(f"{MAX_FOLLOWERS} clients follow changes already; try again later")
        self._followers += 1
        try:
            at = self._newest if heard is None else heard
            while self._open:
                news = self._news
                oldest = self._newest - len(self._kept) + 1
                if at > self._newest or at < oldest - 1:
                    at = self._newest
                    yield Change(number=at, what="gap")
                    continue
                for change in list(islice(self._kept, at + 1 - oldest, None)):
                    at = change.number
                    yield change
                if at < self._newest:
                    continue
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        await news.wait()
                except TimeoutError:
                    yield None
        finally:
            self._followers -= 1

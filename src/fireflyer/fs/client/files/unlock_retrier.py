"""What must be ended in the meta service, whether it answers now or later: locks, and open files that could write.

Who is not told of an end keeps it for as long as the session lives: other programs wait for the lock, a removed file is
never collected. So a request that ends something and was not answered in time is asked again, until it was answered or
the session is over, which ends all of it. Asking twice does no harm: what is ended is not there any more.

    end ──not answered──> left ──one, and when it is answered many together──> answered, or another session

Who takes the same thing again (`key`) must wait for `ended` before: a late end would be of what was just taken.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Protocol

from fireflyer.base.errors import FireflyerError, Timeout, TransientError
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.meta import Actor, Answer, Request

__all__ = ["UnlockRetrier"]

_log = logging.getLogger(__name__)
_TOGETHER: Final = 64
"""At most; a client's other requests are to find room beside them."""
_ENDED_S: Final = 60.0


class _Meta(Protocol):
    @property
    def client(self) -> int: ...

    async def call(self, request: Request, *, actor: Actor | None = None) -> Answer: ...


@dataclass(slots=True, eq=False)
class _PendingUnlock:
    request: Request
    actor: Actor | None
    key: Hashable
    client: int
    ended: asyncio.Future[None]


class UnlockRetrier:
    """Of one client, in its loop."""

    def __init__(self, meta: _Meta) -> None:
        self._meta = meta
        self._left: collections.deque[_PendingUnlock] = collections.deque()
        self._keys: dict[Hashable, _PendingUnlock] = {}
        self._work: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        """Ends that were not answered yet."""
        return len(self._left)

    async def end(self, request: Request, actor: Actor | None = None, *, key: Hashable = None) -> Answer:
        """As `MetaClient.call`. When it raises a `TransientError`, it goes on by itself."""
        client = self._meta.client
        try:
            return await self._meta.call(request, actor=actor)
        except TransientError as error:
            if not self._closed:
                _log.warning("unlock not answered, retrying request=%s reason=%s", type(request).__name__, error)
                self._leave(_PendingUnlock(request, actor, key, client, asyncio.get_running_loop().create_future()))
            raise

    async def ended(self, key: Hashable) -> None:
        """Nothing of this key is left to be ended. Raises `Timeout`."""
        while (left := self._keys.get(key)) is not None:
            done, _ = await asyncio.wait([left.ended], timeout=_ENDED_S)
            if not done:
                raise Timeout(
                    f"an earlier {type(left.request).__name__} of this lock owner is not answered yet; try again"
                )

    async def close(self) -> None:
        """What is left ends with the session."""
        self._closed = True
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
        while self._left:
            self._over(self._left[0])

    def _leave(self, left: _PendingUnlock) -> None:
        self._left.append(left)
        if left.key is not None:
            self._keys[left.key] = left
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._go_on())

    async def _go_on(self) -> None:
        width = 1
        while self._left:
            asked = [self._left[place] for place in range(min(width, len(self._left)))]
            answered = await asyncio.gather(*(self._again(one) for one in asked))
            for one, over in zip(asked, answered, strict=True):
                if over:
                    self._over(one)
            width = _TOGETHER if all(answered) else 1

    async def _again(self, left: _PendingUnlock) -> bool:
        if self._meta.client != left.client:
            return True
        try:
            await self._meta.call(left.request, actor=left.actor)
        except TransientError:
            return False
        except FileError:
            pass  # it is ended already
        except FireflyerError as error:
            _log.warning("unlock refused request=%s reason=%s", type(left.request).__name__, error)
        return True

    def _over(self, left: _PendingUnlock) -> None:
        self._left.remove(left)
        if self._keys.get(left.key) is left:
            del self._keys[left.key]
        if not left.ended.done():
            left.ended.set_result(None)

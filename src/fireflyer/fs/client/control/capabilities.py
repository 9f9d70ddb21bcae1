"""Rights to files, held as long as the client wants them: asked for again before they expire, and when a node refuses.

    acquire ──> ask ──> presented everywhere ──> keep ──half of its time, or refused──> ask ──> renewed
                                                                                         └────> denied

A node refuses a capability that another node has granted when it knows another set of keys, or another time. So what it
refused is of no more use, and a new one is asked for, with pauses. Only the manager says that there is no such right.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple, TypeAlias

from fireflyer.base.errors import FireflyerError, PermissionDenied, StaleVersion
from fireflyer.fs.schema.sessions import CapabilityAnswer

__all__ = ["ATTEMPTS", "Asks", "Renewals", "Right"]

_log = logging.getLogger(__name__)
ATTEMPTS: Final = 4
"""To get a capability that all nodes grant, before the caller is told that one did not."""
_RENEW_SHARE: Final = 0.5
"""Of its time a capability is used before the next one is asked for."""
_PAUSE_S: Final = 0.25
_MAX_PAUSE_S: Final = 30.0
_LEAST_S: Final = 1.0


class Right(NamedTuple):
    """`rights`: as in `core.capability`."""

    first_file: int
    last_file: int
    rights: int


Asks: TypeAlias = Callable[[Right], Coroutine[Any, Any, CapabilityAnswer]]


class Renewals:
    """Of one session, in one loop. `ask`: the manager. `renewed` and `denied` are told of rights that are kept."""

    def __init__(
        self,
        ask: Asks,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        renewed: Callable[[Right, bytes], None],
        denied: Callable[[Right], None],
    ) -> None:
        self._ask, self._spawn = ask, spawn
        self._renewed, self._denied = renewed, denied
        self._wanted: dict[Right, asyncio.Event] = {}
        """Set: anew, because a node has refused it."""
        self._kept: dict[Right, Asks | None] = {}
        """And who is asked for it, if it is not the manager."""

    async def ask(self, right: Right, attempt: int = 0) -> CapabilityAnswer:
        """The first time at once, then after a pause. Raises `PermissionDenied`; `StaleVersion` when the session is
        over."""
        if attempt:
            await asyncio.sleep(_pause_s(attempt))
        return await self._ask(right)

    def keep(self, right: Right, expires_unix_s: int, ask: Asks | None = None) -> None:
        """From now on. `ask`: instead of the manager; then the right ends with the session, else it goes on."""
        if right not in self._kept:
            self._kept[right] = ask
            self._spawn(self._keep(right, expires_unix_s))

    def drop(self, right: Right) -> None:
        """Nobody needs it any more."""
        self._kept.pop(right, None)
        wanted = self._wanted.pop(right, None)
        if wanted is not None:
            wanted.set()

    async def anew(self, ask: Asks) -> dict[Right, bytes]:
        """All that are kept, for another session; without those that the manager denies. Raises `StaleVersion` when
        that session is over."""
        capabilities: dict[Right, bytes] = {}
        for right, own in list(self._kept.items()):
            attempt = 0
            if own is not None:
                self.drop(right)
            while right in self._kept and right not in capabilities:
                try:
                    capabilities[right] = (await ask(right)).capability
                except PermissionDenied as error:
                    self._lose(right, error)
                except StaleVersion:
                    raise
                except FireflyerError:
                    attempt += 1
                    await asyncio.sleep(_pause_s(attempt))
        return capabilities

    def _lose(self, right: Right, error: FireflyerError) -> None:
        _log.warning("capability lost files=%d to %d reason=%s", *right[:2], error)
        self._kept.pop(right, None)
        self._wanted.pop(right, None)
        self._denied(right)

    def refused(self, right: Right) -> None:
        """A node does not grant what it was shown last."""
        self._wanted.setdefault(right, asyncio.Event()).set()

    async def _keep(self, right: Right, expires_unix_s: int) -> None:
        wanted, attempt = self._wanted.setdefault(right, asyncio.Event()), 0
        while right in self._kept:
            limit_s = max(_LEAST_S, (expires_unix_s - time.time()) * _RENEW_SHARE)
            if await _set_within(wanted, limit_s):
                attempt += 1
                await asyncio.sleep(_pause_s(attempt))
            else:
                attempt = 0
            wanted.clear()
            if right not in self._kept or self._wanted.get(right) is not wanted:
                return  # it was dropped, and perhaps is kept anew
            try:
                answer = await (self._kept[right] or self._ask)(right)
            except PermissionDenied as error:
                self._lose(right, error)
                return
            except FireflyerError as error:
                _log.info("capability not renewed yet files=%d to %d reason=%s", *right[:2], error)
                wanted.set()
                continue
            expires_unix_s = answer.expires_unix_s
            self._renewed(right, answer.capability)


def _pause_s(attempt: int) -> float:
    return min(_MAX_PAUSE_S, _PAUSE_S * 2.0 ** min(attempt - 1, 16))


async def _set_within(event: asyncio.Event, limit_s: float) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return False
    return True

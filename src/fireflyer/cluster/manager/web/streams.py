"""Streams of events end with the right to read them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final, TypeVar

from fireflyer.base.errors import FireflyerError
from fireflyer.cluster.manager.web.sessions import Principal, Sessions

__all__ = ["RECHECK_S", "while_valid"]

T = TypeVar("T")
RECHECK_S: Final = 4.0
"""So often it is looked whether the token of who follows is still valid; at the next event or sign of life."""


async def while_valid(events: AsyncIterator[T], sessions: Sessions, who: Principal) -> AsyncGenerator[T]:
    """The events, until the token of `who` is revoked or expires, or their session ends. Where the store cannot tell,
    the stream ends too: the client asks again. What `events` holds is released at the end."""
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(events, AsyncGenerator):
            await stack.enter_async_context(contextlib.aclosing(events))
        checked_s = time.monotonic()
        async for event in events:
            if time.monotonic() - checked_s >= RECHECK_S:
                try:
                    if not await sessions.still_valid(who, int(time.time())):
                        return
                except FireflyerError:
                    return
                checked_s = time.monotonic()
            yield event

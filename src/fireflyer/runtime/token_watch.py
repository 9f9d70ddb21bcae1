"""Tokens of open connections are looked up again: one that is revoked or expires ends the connections that it began.

connection opens ──> add ──┐                        ┌── known: nothing
                           ├── every RECHECK_S: look ┤
connection ends ──> remove ┘                        └── unknown: `cut` each of its connections
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from fireflyer.base.errors import FireflyerError
from fireflyer.identity.handshake import UserKey

__all__ = ["RECHECK_S", "TokenWatch"]

_log = logging.getLogger(__name__)
RECHECK_S: Final = 4.0
"""With the time of a look and of an end, less than the 10 s that are promised."""

C = TypeVar("C")


class TokenWatch(Generic[C]):
    """`find_user` is what new connections are asked with; None: there are no users. `cut` must not block; the owner
    calls `remove` when the connection has ended."""

    def __init__(self, find_user: Callable[[str], UserKey | None] | None, cut: Callable[[C], None]) -> None:
        self._find_user = find_user
        self._cut = cut
        self._connections: dict[str, set[C]] = {}

    def add(self, token_id: str, connection: C) -> None:
        """Of a node, which has no token, nothing is kept."""
        if token_id and self._find_user is not None:
            self._connections.setdefault(token_id, set()).add(connection)

    def remove(self, token_id: str, connection: C) -> None:
        connections = self._connections.get(token_id)
        if connections is not None:
            connections.discard(connection)
            if not connections:
                del self._connections[token_id]

    def look(self) -> None:
        """Once. Where tokens cannot be read all connections stay."""
        for token_id, connections in list(self._connections.items()):
            try:
                known = self._find_user is None or self._find_user(token_id) is not None
            except (FireflyerError, OSError) as error:
                _log.warning("tokens cannot be read; connections stay as they are reason=%s", error)
                return
            if not known:
                _log.info("token revoked or expired token=%s connections=%d", token_id, len(connections))
                for connection in list(connections):
                    self._cut(connection)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(RECHECK_S)
            self.look()

"""Tokens of open connections are looked up again: one that is revoked or expires ends the connections that it began,
and so does one whose user is another one by now, or has other roles.

connection opens ──> add ──┐                        ┌── as it was: nothing
                           ├── every RECHECK_S: look ┤
connection ends ──> remove ┘                        └── else: `cut` each of its connections
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from fireflyer.base.errors import DataCorruption, FireflyerError
from fireflyer.identity.handshake import FindUser, Session, UserKey

__all__ = ["RECHECK_S", "TokenWatch"]

_log = logging.getLogger(__name__)
RECHECK_S: Final = 4.0
"""With the time of a look and of an end, and the lifetimes of what services on the way remember, less than the 10 s
that are promised."""
AT_ONCE: Final = 32
"""Tokens that are looked up side by side."""

C = TypeVar("C")


class TokenWatch(Generic[C]):
    """`find_user` is what new connections are asked with; None: there are no users. `cut` must not block; the owner
    calls `remove` when the connection has ended."""

    def __init__(self, find_user: FindUser | None, cut: Callable[[C], None]) -> None:
        self._find_user = find_user
        self._cut = cut
        self._connections: dict[str, dict[C, Session]] = {}

    def add(self, session: Session, connection: C) -> None:
        """Of a node, which has no token, nothing is kept."""
        if session.token_id and self._find_user is not None:
            self._connections.setdefault(session.token_id, {})[connection] = session

    def remove(self, token_id: str, connection: C) -> None:
        connections = self._connections.get(token_id)
        if connections is not None:
            connections.pop(connection, None)
            if not connections:
                del self._connections[token_id]

    async def look(self) -> None:
        """Once. Where tokens cannot be looked up all connections stay."""
        if self._find_user is None:
            return
        tokens = list(self._connections)
        for some in (tokens[at : at + AT_ONCE] for at in range(0, len(tokens), AT_ONCE)):
            found = await asyncio.gather(*(self._find_user(token_id) for token_id in some), return_exceptions=True)
            failed = [one for one in found if isinstance(one, BaseException)]
            for token_id, one in zip(some, found, strict=True):
                if not isinstance(one, BaseException):
                    self._compare(token_id, one)
            for error in failed:
                if not isinstance(error, FireflyerError | OSError):
                    raise error
            if failed:
                _log.warning("tokens cannot be looked up; connections stay as they are reason=%s", failed[0])
                if not all(isinstance(error, DataCorruption) for error in failed):
                    return  # one row that is damaged says nothing of the others; a store that is away does

    def _compare(self, token_id: str, user: UserKey | None) -> None:
        gone = [one for one, session in self._connections.get(token_id, {}).items() if not _same(session, user)]
        if gone:
            _log.info("token does not count as it did token=%s connections=%d", token_id, len(gone))
        for connection in gone:
            self._cut(connection)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(RECHECK_S)
            await self.look()


def _same(session: Session, user: UserKey | None) -> bool:
    if user is None:
        return False
    return (session.peer, session.account, session.roles) == (user.user, user.account, user.roles)

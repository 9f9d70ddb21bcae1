"""What a service remembers of users whom it has asked others for: for a moment, of a bounded number of tokens. Pure.

That a token is unknown is not remembered: one that was just issued counts at once.
"""

from __future__ import annotations

from typing import Final

from fireflyer.base.units import MS
from fireflyer.identity.handshake import UserKey

__all__ = ["LIFETIME_NS", "MOST", "RememberedUsers"]

LIFETIME_NS: Final = 1500 * MS
"""A token that is revoked counts for so long still, once for each service on the way to the store. With the time
between two looks at the tokens of open connections that is less than the 10 s after which they have ended."""
MOST: Final = 4096
"""Tokens; the one that was kept first makes room."""


class RememberedUsers:
    """By the public numbers of their tokens."""

    def __init__(self, lifetime_ns: int = LIFETIME_NS, most: int = MOST) -> None:
        self._lifetime_ns, self._most = lifetime_ns, most
        self._kept: dict[str, tuple[int, UserKey]] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, now_ns: int, token_id: str) -> UserKey | None:
        kept = self._kept.get(token_id)
        return None if kept is None or now_ns - kept[0] >= self._lifetime_ns else kept[1]

    def keep(self, asked_ns: int, token_id: str, user: UserKey | None) -> None:
        """`asked_ns`: when the question was sent, since the answer may have been true only then."""
        self._kept.pop(token_id, None)
        if user is None:
            return
        if len(self._kept) >= self._most:
            del self._kept[next(iter(self._kept))]
        self._kept[token_id] = asked_ns, user

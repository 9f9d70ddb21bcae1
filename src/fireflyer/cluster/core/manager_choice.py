"""Which manager an agent asks. Pure.

The one that answered last comes first, then those that the managers named, then those of the time of joining. The one
that was lost comes last: its machine may be silent, and another one leads soon. After a round in which nobody answered
there is a pause, which doubles; who waits spreads it by chance, so that the agents of a cluster do not come all at once
when a manager is back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fireflyer.base.units import MS, SECOND

__all__ = ["MAX_MANAGERS", "ManagerChoice"]

MAX_MANAGERS: Final = 32
PAUSE_NS: Final = 200 * MS
MAX_PAUSE_NS: Final = 5 * SECOND


class ManagerChoice:
    def __init__(self) -> None:
        self._leader = ""
        """Manager that answers."""
        self._lost = ""
        """Manager that answered last, and then did not."""
        self._pause_ns = PAUSE_NS

    def addresses(self, named: Sequence[str], joined: Sequence[str]) -> list[str]:
        """In the order in which they are asked."""
        known = dict.fromkeys((self._leader, *named, *joined))
        first = [one for one in known if one not in ("", self._lost)]
        return [*first[: MAX_MANAGERS - 1], *([self._lost] if self._lost else [])]

    def answers(self, address: str) -> None:
        """It leads, and has given orders."""
        self._leader, self._lost = address, ""
        self._pause_ns = PAUSE_NS

    def lost(self, address: str) -> None:
        """It had answered, and does so no more."""
        self._leader, self._lost = "", address

    def pause_ns(self, *, heard: bool) -> int:
        """At most, after a round; `heard`: somebody answered in it."""
        self._pause_ns = PAUSE_NS if heard else min(2 * self._pause_ns, MAX_PAUSE_NS)
        return self._pause_ns

"""How many nodes of which users may run at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from fireflyer.cluster.core.scheduler.model import Limit, LimitKind, Request

__all__ = ["LimitKey", "Limits"]

LimitKey: TypeAlias = tuple[int, str]
"""Number of the limit, and whose nodes it counts."""


class Limits:
    """What is used of each limit."""

    def __init__(self, limits: Sequence[Limit]) -> None:
        self.limits = tuple(limits)
        self._own = {
            (limit.name, limit.node_group, limit.priority) for limit in self.limits if limit.kind == LimitKind.USER
        }
        self._used: dict[LimitKey, int] = {}
        self._found: dict[tuple[str, str, str, int], tuple[LimitKey, ...]] = {}

    def applying(self, request: Request) -> tuple[LimitKey, ...]:
        if not self.limits:
            return ()
        who = request.user, request.user_group, request.node_group, request.priority
        found = self._found.get(who)
        if found is None:
            found = self._found[who] = tuple(self._search(request))
        return found

    def _search(self, request: Request) -> list[LimitKey]:
        return [
            key
            for key in self.of(request.user, request.user_group)
            if self.limits[key[0]].node_group == request.node_group
            and self.limits[key[0]].priority in (None, request.priority)
        ]

    def of(self, user: str, user_group: str) -> list[LimitKey]:
        """All that limit the tasks of a user, of whatever priority and on whatever nodes."""
        found = []
        for number, limit in enumerate(self.limits):
            if limit.kind == LimitKind.GROUP:
                if limit.name == user_group:
                    found.append((number, ""))
            elif limit.kind == LimitKind.USER:
                if limit.name == user:
                    found.append((number, ""))
            elif (user, limit.node_group, limit.priority) not in self._own:
                found.append((number, user))
        return found

    def used(self, key: LimitKey) -> int:
        return self._used.get(key, 0)

    def users_of(self, number: int) -> list[LimitKey]:
        """Whose nodes a limit counts now."""
        return [key for key, used in self._used.items() if key[0] == number and used]

    def take(self, request: Request, nodes: int) -> None:
        """A run of it has so many nodes; fewer than 0 gives them back."""
        for key in self.applying(request):
            self._used[key] = self._used.get(key, 0) + nodes

    def room(self, request: Request) -> tuple[int, str]:
        """How many nodes a run of it may have, and of the tightest limit its words; any number where there is none."""
        rooms = [(self.limits[key[0]].nodes - self._used.get(key, 0), key[0]) for key in self.applying(request)]
        if not rooms:
            return 1 << 62, ""
        room, number = min(rooms)
        return room, _words(self.limits[number], request)


def _words(limit: Limit, request: Request) -> str:
    who = f"group {limit.name}" if limit.kind == LimitKind.GROUP else f"user {request.user}"
    priority = "" if limit.priority is None else f" at priority {limit.priority}"
    return f"{who} may use {limit.nodes} nodes of {limit.node_group}{priority} at a time"

"""A user's program in a seeded world: submits and commands, asks again until somebody answers."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.platform.post import Ask, Post, Tell

from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.platform.messages import (
    Commanded,
    NotLeader,
    Refused,
    Result,
    Submission,
    Submitted,
)
from fireflyer.sim import SimNode, Timer, World

__all__ = ["Client"]

PATIENCE_NS = 3 * SECOND
AGAIN = ("busy", "transient", "unreachable")
"""Codes of refusals after which a client asks again."""


class Client:
    def __init__(self, world: World, post: Post, name: str, managers: list[str]) -> None:
        self.world, self.post, self.name, self.managers = world, post, name, managers
        self.waiting: dict[int, Submitted | Commanded] = {}
        self.submitted: dict[str, tuple[int, ...]] = {}
        """Idempotency key -> tasks, as it was first told."""
        self.results: list[tuple[Submitted | Commanded, Result]] = []
        self._current = managers[0]
        self._number = 0
        self._timers: dict[int, Timer] = {}
        self.node = world.node(name, self._boot)

    @property
    def idle(self) -> bool:
        return not self.waiting

    def ask(self, request: Submitted | Commanded) -> None:
        self._number += 1
        self.waiting[self._number] = request
        self._send(self._number)

    def _boot(self, node: SimNode) -> None:
        node.on_message(self._receive)

    def _send(self, number: int) -> None:
        request = self.waiting.get(number)
        if request is None:
            return
        self.post.send(self.name, self._current, Ask(number, request))

        def again() -> None:
            self._current = self.world.random.choice(self.managers)
            self._send(number)

        self._send_later(number, PATIENCE_NS, again)

    def _send_later(self, number: int, delay_ns: int, send: Callable[[], None]) -> None:
        """In the place of a sending that was to come, so that doubled answers do not double what is asked."""
        before = self._timers.pop(number, None)
        if before is not None:
            before.cancel()
        self._timers[number] = self.node.after(delay_ns, send)

    def _receive(self, _source: str, payload: bytes) -> None:
        tell = self.post.opened(payload)
        assert isinstance(tell, Tell)
        request = self.waiting.get(tell.number)
        if request is None:
            self._check_repeated(tell)
            return
        if isinstance(tell.body, NotLeader) or (isinstance(tell.body, Refused) and tell.body.code in AGAIN):
            if isinstance(tell.body, NotLeader) and tell.body.address:
                self._current = tell.body.address
            self._send_later(tell.number, 500 * MS, lambda: self._send(tell.number))
            return
        del self.waiting[tell.number]
        self.results.append((request, tell.body))
        if isinstance(tell.body, Submission):
            assert isinstance(request, Submitted)
            known = self.submitted.setdefault(request.key, tell.body.tasks)
            assert known == tell.body.tasks, f"{request.key} became {known} and {tell.body.tasks}"

    def _check_repeated(self, tell: Tell) -> None:
        """A second answer to the same submission names the same tasks."""
        if isinstance(tell.body, Submission):
            assert tell.body.tasks in self.submitted.values(), f"submitted twice: {tell.body.tasks}"

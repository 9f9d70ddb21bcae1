"""Calls of a launcher to the agents of its run's nodes, over links that are cut: answered, refused, or nobody knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tests.support.platform.hosts import Child, Grounds, Host, Process

from fireflyer.base.errors import FireflyerError, Unreachable
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.agent import Order
from fireflyer.cluster.schema.agent import GuardStatus

__all__ = ["AgentLike", "Answer", "Calls", "MakeChild", "Reply"]

DELAY_NS = 40 * MS
LIMIT_NS = 6 * SECOND
"""After which a call counts as not answered."""
UNREACHABLE_NS = SECOND
Answer = GuardStatus | FireflyerError | None
Reply = Callable[[Answer], None]
MakeChild = Callable[[Process], Child]


class AgentLike(Protocol):
    """What a launcher asks of an agent."""

    def ask(self, run_token: str, reply: Reply) -> None: ...

    def start(self, order: Order, make: MakeChild, reply: Reply) -> None: ...

    def wait(self, token: str, reply: Reply) -> None: ...

    def stop(self, token: str, reply: Reply) -> None: ...

    def forget(self, token: str, reply: Reply) -> None: ...


class Calls:
    def __init__(self, grounds: Grounds, find: Callable[[Host], AgentLike | None]) -> None:
        self.grounds = grounds
        self._find = find

    def call(self, source: Host, target: Host, ask: Callable[[AgentLike, Reply], None], answered: Reply) -> None:
        """`answered` is called once: with what the agent says, or with `Unreachable`."""
        world, grounds = self.grounds.world, self.grounds
        done = False

        def finish(answer: Answer) -> None:
            nonlocal done
            if not done:
                done = True
                answered(answer)

        def back(answer: Answer) -> None:
            if not grounds.blocked(source, target):
                finish(answer)

        def there() -> None:
            agent = self._find(target)
            if grounds.blocked(source, target) or agent is None:
                world.call_after(UNREACHABLE_NS, lambda: finish(Unreachable(f"{target.name} does not answer")))
                return
            target.agent.guarded(lambda: ask(agent, lambda answer: source.later(DELAY_NS, lambda: back(answer))))

        source.later(DELAY_NS, there)
        world.call_after(LIMIT_NS, lambda: finish(Unreachable(f"{target.name} did not answer in time")))

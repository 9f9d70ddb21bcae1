"""The agent of a machine: which guards it starts, adopts, stops and forgets. Pure.

States of a guard
-----------------

    (unknown) ──StartRequested──> STARTING ──GuardUp──> RUNNING ──StopRequested──> STOPPING
        │                        │                     │                      │
        └──StopRequested──> ENDED <──┴──────GuardGone──────┴──────────────────────┘ ──Forgotten, age──> (unknown)

A guard is named by its token, which its launcher makes and which names the job, the node and the incarnation. An agent
is not the parent of its guards: it may be killed at any moment, and the next one begins with what is on disk (`Begin`).
Before a guard is started its order is on disk, and what shows that it lives is a lock that its processes hold; so an
agent that is started later finds each guard, and whether it lives.

Why no guard is started twice: a token that is known is never spawned again, and a token is known from before its guard
is started until a day after its end. On disk it is only until the launcher says that it has heard of the end
(`Forgotten`): its connections, over which a start could still come late, end with the agent. A launcher that stops a
guard does not start it again; its stop may still overtake the start, so the stop of an unknown token makes it known, as
ended. Why two incarnations of one node of a job never run beside each other on a machine: the start of the newer one is
refused, to be asked again, and stops the older one; the start of an older one is refused for good.

A guard that does not end when it is asked to is killed `STOP_NS` later, with all that carries its token. Guards of a
machine whose credential is revoked are stopped, and nothing is started until the machine has joined again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from fireflyer.base.units import SECOND

__all__ = [
    "KEEP_NS",
    "MAX_ENDED",
    "MAX_GUARDS",
    "ROOT_REFUSAL",
    "START_NS",
    "STOP_NS",
    "AgentMachine",
    "Begin",
    "Effect",
    "End",
    "Event",
    "Forget",
    "Forgotten",
    "Found",
    "Guard",
    "GuardGone",
    "GuardState",
    "GuardUp",
    "Joined",
    "Kill",
    "Order",
    "Refused",
    "Revoked",
    "Spawn",
    "StartRequested",
    "StopRequested",
    "Terminate",
    "Tick",
    "Watch",
]

MAX_GUARDS: Final = 64
"""That live at a time."""
MAX_ENDED: Final = 256
"""That are remembered; older ones are forgotten."""
KEEP_NS: Final = 24 * 3600 * SECOND
START_NS: Final = 60 * SECOND
"""A guard that is not there so long after its start is killed."""
STOP_NS: Final = 15 * SECOND
"""A guard kills for 10 s before it gives up by itself."""
ROOT_REFUSAL: Final = (
    "its agent runs as root and takes work only from a platform, for a mapped user; run `ff agent run` there as the "
    "user whose jobs it is to start"
)


class GuardState(Enum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


LIVING: Final = (GuardState.STARTING, GuardState.RUNNING, GuardState.STOPPING)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a guard is for. On disk before the guard is started."""

    token: str
    job: str
    """The name of the job, for people."""
    node: int
    incarnation: int
    run_token: str = ""
    """Of the platform's run whose ticket was shown; empty: it is asked for by who has the machine's credential."""
    account: str = ""
    """As which it runs, where that is not the agent's."""

    @property
    def place(self) -> str:
        """Job and node: what only one incarnation has at a time."""
        return self.token.rpartition(".")[0]


class End(msgspec.Struct, frozen=True, kw_only=True):
    """`clean`: no process of the guard is left."""

    clean: bool
    reason: str
    exit_code: int | None = None
    """Of the supervisor, as the shell says it; None where nobody saw it end."""


class Found(msgspec.Struct, frozen=True):
    """A guard that an earlier agent started. `end` None: it lives, or how it ended is to be found out."""

    order: Order
    end: End | None


class Begin(msgspec.Struct, frozen=True):
    found: tuple[Found, ...]


class StartRequested(msgspec.Struct, frozen=True):
    order: Order


class StopRequested(msgspec.Struct, frozen=True):
    token: str


class GuardUp(msgspec.Struct, frozen=True):
    """Its process is known and can be asked to end."""

    token: str


class GuardGone(msgspec.Struct, frozen=True):
    token: str
    end: End


class Forgotten(msgspec.Struct, frozen=True):
    """The launcher knows how the guard ended, and asks nothing of it any more."""

    token: str


class Joined(msgspec.Struct, frozen=True):
    """The machine has a credential."""


class Revoked(msgspec.Struct, frozen=True):
    """The machine's credential is not valid any more."""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event = Begin | StartRequested | StopRequested | GuardUp | GuardGone | Forgotten | Joined | Revoked | Tick


class Spawn(msgspec.Struct, frozen=True):
    """Write the order to disk, then start the guard and watch it. Answered by `GuardUp` or `GuardGone`."""

    order: Order


class Watch(msgspec.Struct, frozen=True):
    """A guard of an earlier agent. Answered by `GuardUp` or `GuardGone`."""

    token: str


class Terminate(msgspec.Struct, frozen=True):
    """The guard is to kill its ranks and end."""

    token: str


class Kill(msgspec.Struct, frozen=True):
    """SIGKILL to the guard and to all that carries its token."""

    token: str


class Forget(msgspec.Struct, frozen=True):
    """Remove what is on disk of a guard that has ended."""

    token: str


class Refused(msgspec.Struct, frozen=True):
    """The start that was asked for is not done. `busy`: it may be asked for again soon."""

    reason: str
    busy: bool = False


Effect = Spawn | Watch | Terminate | Kill | Forget | Refused


@dataclass(slots=True)
class Guard:
    order: Order
    state: GuardState
    since_ns: int
    """When it came into its state."""
    end: End | None = None
    up: bool = False
    on_disk: bool = True


class AgentMachine:
    """`serves_own`: it starts guards as its own user; else for named accounts alone."""

    def __init__(self, *, serves_own: bool) -> None:
        self._serves_own = serves_own
        self._joined = True
        self._now_ns = 0
        self._effects: list[Effect] = []
        self.guards: dict[str, Guard] = {}

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        self._now_ns, self._effects = now_ns, []
        match event:
            case Begin(found):
                for one in found:
                    self._adopt(one)
            case StartRequested(order):
                self._on_start(order)
            case StopRequested(token):
                self._on_stop(token)
            case GuardUp(token):
                self._on_up(token)
            case GuardGone(token, end):
                self._on_gone(token, end)
            case Forgotten(token):
                self._remove(token)
            case Joined():
                self._joined = True
            case Revoked():
                self._joined = False
                for token in list(self.guards):
                    self._stop(token)
            case Tick():
                self._on_tick()
        return self._effects

    def living(self) -> list[Guard]:
        return [guard for guard in self.guards.values() if guard.state in LIVING]

    def living_of(self, run_token: str) -> int:
        """Guards of the run that have not ended."""
        return sum(guard.order.run_token == run_token for guard in self.living())

    def to_stop(self, run_token: str) -> list[StopRequested]:
        """For guards of the run that nobody has asked to end yet."""
        return [
            StopRequested(guard.order.token)
            for guard in self.living()
            if guard.order.run_token == run_token and guard.state is not GuardState.STOPPING
        ]

    def _adopt(self, found: Found) -> None:
        token = found.order.token
        state = GuardState.STARTING if found.end is None else GuardState.ENDED
        self.guards[token] = Guard(found.order, state, self._now_ns, found.end)
        if found.end is None:
            self._effects.append(Watch(token))

    def _on_start(self, order: Order) -> None:
        if order.token in self.guards:
            return
        refused = self._refusal(order)
        if refused is not None:
            self._effects.append(refused)
            return
        self.guards[order.token] = Guard(order, GuardState.STARTING, self._now_ns)
        self._effects.append(Spawn(order))

    def _refusal(self, order: Order) -> Refused | None:
        if not self._serves_own and not order.account:
            return Refused(ROOT_REFUSAL)
        if not self._joined:
            return Refused("its credential was revoked; let it join again (`ff agent token`)")
        others = [one for one in self.guards.values() if one.order.place == order.place]
        if any(one.order.incarnation > order.incarnation for one in others):
            return Refused(f"a later incarnation than {order.incarnation} of this node was started there")
        older = [one for one in others if one.state in LIVING]
        for one in older:
            self._stop(one.order.token)
        if older:
            return Refused("the node's former processes are being killed there", busy=True)
        if len(self.living()) >= MAX_GUARDS:
            return Refused(f"it runs {MAX_GUARDS} nodes of jobs already, the maximum", busy=True)
        return None

    def _on_stop(self, token: str) -> None:
        if token in self.guards:
            self._stop(token)
            return
        place, _, number = token.rpartition(".")
        incarnation = int(number) if number.isdecimal() and len(number) < 10 else 0
        order = Order(token=token, job=place, node=0, incarnation=incarnation)
        end = End(clean=True, reason="it was stopped before it was started")
        self.guards[token] = Guard(order, GuardState.ENDED, self._now_ns, end, on_disk=False)
        self._trim()

    def _stop(self, token: str) -> None:
        guard = self.guards[token]
        if guard.state in (GuardState.STARTING, GuardState.RUNNING):
            self._enter(guard, GuardState.STOPPING)
            if guard.up:
                self._effects.append(Terminate(token))

    def _on_up(self, token: str) -> None:
        guard = self.guards.get(token)
        if guard is None or guard.state is GuardState.ENDED:
            return
        guard.up = True
        if guard.state is GuardState.STARTING:
            self._enter(guard, GuardState.RUNNING)
        elif guard.state is GuardState.STOPPING:
            self._effects.append(Terminate(token))

    def _on_gone(self, token: str, end: End) -> None:
        guard = self.guards.get(token)
        if guard is not None and guard.state is not GuardState.ENDED:
            guard.end = end
            self._enter(guard, GuardState.ENDED)
            self._trim()

    def _on_tick(self) -> None:
        for token, guard in list(self.guards.items()):
            age_ns = self._now_ns - guard.since_ns
            if guard.state is GuardState.ENDED and age_ns >= KEEP_NS:
                self._forget(token)
            elif guard.state is GuardState.STARTING and age_ns >= START_NS:
                self._enter(guard, GuardState.STOPPING)
                self._effects.append(Kill(token))
            elif guard.state is GuardState.STOPPING and age_ns >= STOP_NS:
                guard.since_ns = self._now_ns
                self._effects.append(Kill(token))

    def _enter(self, guard: Guard, state: GuardState) -> None:
        guard.state, guard.since_ns = state, self._now_ns

    def _trim(self) -> None:
        ended = [token for token, guard in self.guards.items() if guard.state is GuardState.ENDED]
        oldest = sorted(ended, key=lambda token: self.guards[token].since_ns)
        for token in oldest[: max(0, len(ended) - MAX_ENDED)]:
            self._forget(token)

    def _remove(self, token: str) -> None:
        """From the disk; this agent still knows the token, so that a start which comes late is none."""
        guard = self.guards.get(token)
        if guard is not None and guard.state is GuardState.ENDED and guard.on_disk:
            guard.on_disk = False
            self._effects.append(Forget(token))

    def _forget(self, token: str) -> None:
        self._remove(token)
        del self.guards[token]

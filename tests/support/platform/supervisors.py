"""Supervisors of simulated nodes: what they do with the ranks of their node and with their lease.

The connection to the launcher keeps its order; a message that meets a cut link breaks it, or comes when the link is
mended. A supervisor that has lost its launcher ends, and its guard with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from tests.support.platform.hosts import Grounds, Host, LauncherLike, Process

from fireflyer.base.suspension import NEVER, SUSPENDED_EXIT_CODE
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.messages import (
    Event,
    LeaseRenewed,
    PointsCollected,
    RankEnded,
    RanksGone,
    SupervisorHeartbeat,
)
from fireflyer.cluster.schema.wire import Points, RankEnd, RankError, Stop

__all__ = ["Command", "Control", "Supervisor", "Training", "Wire"]

BEAT_NS = SECOND
DELAY_NS = 40 * MS
RETRY_NS = 500 * MS
BREAKS = 0.1
"""Per try of a message that meets a cut link: TCP goes on trying for longer than most cuts here last."""
FIRST_LEASE_NS = 12 * SECOND
STEP_NS = SECOND
SAVE_STEPS = 5
PEER_FAILED = RankError("fireflyer.base.errors.PeerFailed", "a rank is gone", "", 0)
Command = Callable[["Supervisor"], None]


class Wire:
    """A connection between two hosts."""

    def __init__(self, grounds: Grounds, a: Host, b: Host) -> None:
        self._grounds, self._a, self._b = grounds, a, b
        self._last_ns = 0
        self.broken = False

    def send(self, arrive: Callable[[], bool], broke: Callable[[], None]) -> None:
        """`arrive` says whether anybody is there; `broke` is called where not, or where the connection is broken."""
        world = self._grounds.world
        self._last_ns = max(self._last_ns + 1, world.now_ns + self._grounds.upto(DELAY_NS))

        def there() -> None:
            if self.broken:
                broke()
            elif not self._grounds.blocked(self._a, self._b):
                if not arrive():
                    self.broken = True
                    broke()
            elif self._grounds.happens(BREAKS):
                self.broken = True
                broke()
            else:
                self._last_ns = max(self._last_ns, world.now_ns + RETRY_NS)
                world.call_after(RETRY_NS, there)

        world.call_at(self._last_ns, there)


class Control(LauncherLike, Protocol):
    """The launcher's side: as `launcher.control`."""

    lease_ns: int

    def hello(self, supervisor: Supervisor) -> bool:
        """Whether it is let in."""

    def is_revoked(self, node: int, incarnation: int) -> bool: ...

    def feed(self, event: Event) -> None: ...


class Supervisor:
    """One incarnation of one node of a run; `process`: its guard, None where it is below that of the launcher."""

    def __init__(
        self, control: Control, host: Host, node: int, incarnation: int, wire: Wire, process: Process | None
    ) -> None:
        self.launcher: LauncherLike = control
        self._control, self.host, self.node, self.incarnation = control, host, node, incarnation
        self._grounds, self.wire, self._process = host.grounds, wire, process
        self.alive = True
        self.attempt = -1
        self.rank_alive = False
        self._told = False
        self._ends: tuple[RankEnd, ...] = ()
        self._training: Training | None = None
        self._hangs = self._grounds.happens(self._grounds.faults.hangs)
        self._lease_ends_ns = host.now_ns + FIRST_LEASE_NS
        self._up = False

    @property
    def _is_hung(self) -> bool:
        return self._hangs and self._grounds.faults.hangs > 0

    # -- its guard -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        asked_ns = self.host.now_ns
        self._send(lambda: self._control.alive and self._control.hello(self) and self._granted_later(asked_ns))
        self._beat()

    def die(self) -> None:
        self.alive = self.rank_alive = False

    def lease_over(self) -> bool:
        return self._process is not None and self.host.now_ns >= self._lease_ends_ns

    def hear(self, signal: str) -> None:
        pass

    def lost_launcher(self) -> None:
        if self.alive and self._process is not None:
            self._process.stop()

    def shut_down(self) -> None:
        """It ends by itself."""
        if self._process is not None:
            self._process.stop()
        else:
            self.die()

    # -- the connection ------------------------------------------------------------------------------------------------

    def _send(self, arrive: Callable[[], bool]) -> None:
        self.wire.send(arrive, self.lost_launcher)

    def say(self, event: Event) -> None:
        if self.alive and not self._is_hung:
            self._send(partial(self._heard, event))

    def _heard(self, event: Event) -> bool:
        if self._control.alive:
            self._control.feed(event)
        return self._control.alive

    def _beat(self) -> None:
        """A sign of life, which also asks for the next lease."""
        if not self.alive:
            return
        if not self._is_hung and self._up:
            asked_ns = self.host.now_ns
            self._send(lambda: self._control.alive and self._renewed(asked_ns))
        self.host.world.call_after(BEAT_NS, self._beat)

    def _renewed(self, asked_ns: int) -> bool:
        self._control.feed(SupervisorHeartbeat(self.node, self.incarnation))
        if self._process is None:
            return True
        self._control.feed(LeaseRenewed(self.node, self.incarnation))
        return not self._control.is_revoked(self.node, self.incarnation) and self._granted_later(asked_ns)

    def _granted_later(self, asked_ns: int) -> bool:
        def granted() -> bool:
            if self.alive and not self._is_hung:
                before_ns = self._lease_ends_ns if self._up else 0
                self._lease_ends_ns = max(before_ns, asked_ns + self._control.lease_ns)
                self._up = True
            return self.alive

        self.wire.send(granted, lambda: None)
        return True

    def command(self, command: Command) -> bool:
        """As it arrives. False: nobody is there."""
        if self.alive and not self._is_hung:
            command(self)
        return self.alive

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def start_ranks(self, attempt: int, training: Training) -> None:
        self.attempt, self.rank_alive, self._told, self._ends = attempt, True, False, ()
        self._training = training
        if self not in self._grounds.ranks:
            self._grounds.ranks.append(self)
        self._grounds.started(self)
        training.join(self)

    def stop_ranks(self, stop: Stop) -> None:
        if stop.attempt == self.attempt:
            self.host.world.call_after(stop.settle_ns, partial(self._end_politely, stop))

    def _end_politely(self, stop: Stop) -> None:
        if self.alive and self.attempt == stop.attempt and self.rank_alive:
            self._told = True
            self.host.later(stop.grace_ns, partial(self.end_rank, stop.attempt, 143))

    def hold(self, attempt: int) -> None:
        training = self._training
        if training is not None and attempt == self.attempt:
            point = NEVER if training.ignores else training.hold(self)
            self.say(PointsCollected(self.node, self.incarnation, Points(attempt, (point,))))

    def set_horizon(self, attempt: int, horizon: int) -> None:
        if self._training is not None and attempt == self.attempt:
            self._training.named(self, horizon)

    def end_rank(self, attempt: int, code: int, error: RankError | None = None, memory: str = "") -> None:
        if not self.rank_alive or attempt != self.attempt:
            return
        self.rank_alive = False
        end = RankEnd(
            attempt, self.node, code, self._told, error=error, out_of_memory=memory,
            suspended=code == SUSPENDED_EXIT_CODE,
        )  # fmt: skip
        self._ends = (end,)
        self.say(RankEnded(self.node, self.incarnation, end))
        self.host.later(200 * MS, partial(self._gone, attempt))

    def _gone(self, attempt: int) -> None:
        if self.alive and attempt == self.attempt:
            self.say(RanksGone(self.node, self.incarnation, attempt, self._ends))


class Training:
    """What the ranks of an attempt do together: they step when all are there and reach each other, save every
    `SAVE_STEPS` steps, and end together. Who is left when a rank is gone gives up after a while."""

    def __init__(
        self, grounds: Grounds, attempt: int, size: int, *, done_ns: int, work_ns: int, code: int, ignores: bool,
        on_step: Callable[[Training], None],
    ) -> None:  # fmt: skip
        self._grounds, self.attempt, self._size = grounds, attempt, size
        self._work_ns, self._code, self.ignores, self._on_step = work_ns, code, ignores, on_step
        self.done_ns = self.saved_ns = done_ns
        self.steps = 0
        self._members: list[Supervisor] = []
        self._held: set[int] = set()
        self._horizons: dict[int, int] = {}
        self._broken_steps = 0
        self.over = False
        grounds.world.call_after(STEP_NS, self._step)

    def join(self, member: Supervisor) -> None:
        self._members.append(member)

    def hold(self, member: Supervisor) -> int:
        self._held.add(member.node)
        return self.steps

    def named(self, member: Supervisor, horizon: int) -> None:
        self._horizons[member.node] = horizon

    def _living(self) -> list[Supervisor]:
        return [one for one in self._members if one.rank_alive and one.attempt == self.attempt]

    def _step(self) -> None:
        living = self._living()
        if self._members and not living:
            self.over = True
        if self.over:
            return
        self._grounds.world.call_after(STEP_NS, self._step)
        if len(self._members) < self._size:
            return
        if len(living) < self._size:
            self._broken_steps += 1
            if self._broken_steps > 1:
                self._end(1, PEER_FAILED)
        elif self._grounds.happens(self._grounds.faults.rank_dies):
            living[0].end_rank(self.attempt, 137)
        elif self._together(living) and not (self._held and len(self._horizons) < self._size):
            self._advance()

    def _together(self, living: list[Supervisor]) -> bool:
        first = living[0].host
        return not any(self._grounds.blocked(first, one.host) for one in living[1:])

    def _advance(self) -> None:
        self.steps += 1
        self.done_ns += STEP_NS
        leaving = len(self._horizons) == self._size and self.steps >= max(self._horizons.values())
        if leaving or self.steps % SAVE_STEPS == 0:
            self.saved_ns = self.done_ns
        self._on_step(self)
        if self.done_ns >= self._work_ns:
            self.saved_ns = self.done_ns
            self._end(self._code, memory="cgroup limit 1 GiB" if self._code == 137 else "")
        elif leaving:
            self._end(SUSPENDED_EXIT_CODE)

    def _end(self, code: int, error: RankError | None = None, memory: str = "") -> None:
        for one in self._living():
            one.host.later(300 * MS, partial(one.end_rank, self.attempt, code, error, memory))

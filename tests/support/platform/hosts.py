"""Machines of a simulated cluster: power, a clock, a disk, and the processes that really run.

A *process* here is a detached guard with what is below it: the launcher of a run, or the supervisor of a node with its
ranks. It is what `runtime.processes.guard` is: it kills what is below it when the lease of its machine is over, when
its own lease is, when it is asked to, and when its child ends; it says `clean` then. Killed itself, it says nothing.
What an agent decides is the product's (`agents`), what a launcher decides as well (`launchers`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from fireflyer.base.units import MS
from fireflyer.cluster.core.agent import End, Order
from fireflyer.cluster.core.runs import RunRecord
from fireflyer.cluster.schema.sync import EndedRun
from fireflyer.cluster.schema.tasks import Cause
from fireflyer.sim import SimClock, SimNode, World

__all__ = ["Chances", "Child", "Grounds", "GuardDisk", "Host", "LauncherLike", "Process", "RanksLike"]

RANKS_READ_NS = 500 * MS
"""A guard looks so often whether a lease is over."""
KILL_NS = 500 * MS
"""What it needs at most to kill."""
START_NS = 300 * MS
"""From the start of a process until it is a guard, at most."""


class Child(Protocol):
    """What a guard is the parent of."""

    def begin(self) -> None: ...

    def die(self) -> None:
        """Killed, or ended."""

    def lease_over(self) -> bool: ...

    def hear(self, signal: str) -> None:
        """`suspend` or `terminate`, forwarded."""


class LauncherLike(Protocol):
    """What checks need to know of a launcher of a run."""

    token: str
    alive: bool

    @property
    def task(self) -> int: ...

    @property
    def run(self) -> int: ...

    @property
    def nodes(self) -> list[str]: ...

    @property
    def size(self) -> int:
        """Of the gang that it started last, in nodes."""


class RanksLike(Protocol):
    """The ranks of one node."""

    host: Host
    launcher: LauncherLike
    attempt: int
    rank_alive: bool


@dataclass
class GuardDisk:
    """The directory of a guard; of a launcher with its run directory."""

    order: Order | None = None
    process: Process | None = None
    """As the guard wrote itself; None: it has not begun."""
    clean: bool = False
    expired: bool = False
    end: End | None = None
    result: EndedRun | None = None
    progress: bool = False


@dataclass
class Chances:
    """Per occasion, in a rough time."""

    agent_dies: float = 0.0
    """Before an effect of its machines."""
    disk_full: float = 0.0
    start_fails: float = 0.0
    hangs: float = 0.0
    """A launcher that hears nothing, or a supervisor that says nothing."""
    rank_dies: float = 0.0
    """Per second of a gang."""


ROUGH = Chances(agent_dies=0.004, disk_full=0.03, start_fails=0.03, hangs=0.04, rank_dies=0.01)


@dataclass
class Grounds:
    """What really happens, beside what anybody says."""

    world: World
    launched: Callable[[Host, LauncherLike], None]
    """The launcher of a run begins."""
    started: Callable[[RanksLike], None]
    """Ranks begin on a host; they are in `ranks` already."""
    work_ns: Callable[[int], int]
    """How long a task runs in all."""
    cause: Callable[[int], Cause]
    """How its program ends."""
    cut: Callable[[str, str], bool]
    hosts: dict[str, Host] = field(default_factory=dict)
    launchers: list[LauncherLike] = field(default_factory=list)
    ranks: list[RanksLike] = field(default_factory=list)
    """That live, or have not been looked at since they ended."""
    faults: Chances = field(default_factory=Chances)
    done_ns: dict[int, int] = field(default_factory=dict)
    """What a task has come to, at most."""

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.world.random.random() < probability

    def upto(self, limit_ns: int) -> int:
        return self.world.random.randrange(1, limit_ns + 1)

    def blocked(self, a: Host, b: Host) -> bool:
        """Whether a connection between the two is cut in a direction, or one of them is off."""
        if not (a.powered and b.powered):
            return True
        return a is not b and (self.cut(a.name, b.name) or self.cut(b.name, a.name))

    def living_ranks(self) -> list[RanksLike]:
        self.ranks = [one for one in self.ranks if one.rank_alive]
        return self.ranks


class Process:
    """`mark`: what its processes carry (`FF_JOB_TOKEN`); `child` is made when the guard begins."""

    def __init__(self, host: Host, mark: str, disk: GuardDisk, make: Callable[[Process], Child]) -> None:
        self.host, self.mark, self.disk = host, mark, disk
        self.alive = True
        self.watchers: list[Callable[[], None]] = []
        self._ending = False
        self.child: Child | None = None
        host.processes.append(self)
        host.later(START_NS, lambda: self._begin(make))

    def _begin(self, make: Callable[[Process], Child]) -> None:
        if not self.alive:
            return
        if self.host.grounds.happens(self.host.grounds.faults.start_fails):
            self.finish(clean=False)
            return
        self.disk.process = self
        self.child = make(self)
        self.child.begin()
        self._look()

    def _look(self) -> None:
        if not self.alive or self.child is None:
            return
        if self.host.lease_over() or self.child.lease_over():
            self.disk.expired = True
            self.stop()
        self.host.world.call_after(RANKS_READ_NS, self._look)

    def hear(self, signal: str) -> None:
        if self.alive and self.child is not None:
            self.child.hear(signal)

    def stop(self) -> None:
        """Kills all that is below it, and ends."""
        if not self._ending:
            self._ending = True
            self.host.later(KILL_NS, lambda: self.finish(clean=True))

    def finish(self, *, clean: bool) -> None:
        if not self.alive:
            return
        self.alive = False
        self.disk.clean = clean
        self.host.processes.remove(self)
        if self.child is not None:
            self.child.die()
        for tell in self.watchers:
            tell()


class Host:
    """`boot_agent` is called when the agent is started."""

    def __init__(
        self, world: World, grounds: Grounds, name: str, drift_ppm: int, boot_agent: Callable[[Host, SimNode], None]
    ) -> None:
        self.world, self.grounds, self.name = world, grounds, name
        self.powered = True
        self.processes: list[Process] = []
        self.boot = 1
        # on disk
        self.runs: dict[str, tuple[RunRecord, int]] = {}
        """Record and when it was written."""
        self.launcher_disks: dict[str, GuardDisk] = {}
        self.guard_disks: dict[str, GuardDisk] = {}
        self.lease: tuple[int, int] = (0, 0)
        """End, and the boot in which it was written."""
        self.leader: tuple[int, int] = (0, 0)
        """Term and `stop_after_ns`."""
        self.incarnation = 0
        grounds.hosts[name] = self
        self._clock = SimClock(world, offset_ns=world.random.randrange(10**15), drift_ppm=drift_ppm)
        self.agent = world.node(name, lambda node: boot_agent(self, node), clock=self._clock)

    @property
    def now_ns(self) -> int:
        return self._clock.now_ns()

    def later(self, limit_ns: int, act: Callable[[], None]) -> None:
        self.world.call_after(self.grounds.upto(limit_ns), act)

    def lease_ends_ns(self) -> int:
        return self.lease[0] if self.lease[1] == self.boot else 0

    def lease_over(self) -> bool:
        return self.now_ns >= self.lease_ends_ns()

    def marked(self, mark: str) -> list[Process]:
        """Processes with the mark, or with one that continues it after a dot."""
        return [one for one in self.processes if one.mark == mark or one.mark.startswith(f"{mark}.")]

    def sweep(self, mark: str) -> None:
        for process in self.marked(mark):
            process.finish(clean=False)

    def lives(self, token: str) -> bool:
        """Anything of the run."""
        return bool(self.marked(token)) or bool(self.marked(f"{token}-launcher"))

    def start_agent(self) -> None:
        if self.powered and not self.agent.alive:
            self.agent.restart()

    def power_cut(self) -> None:
        self.powered = False
        self.agent.crash()
        for process in list(self.processes):
            process.watchers.clear()
            process.finish(clean=False)

    def power_on(self) -> None:
        self.powered = True
        self.boot += 1
        self.agent.restart()

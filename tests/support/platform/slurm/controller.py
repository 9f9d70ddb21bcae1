"""slurmctld and the slurmds of a simulated Slurm: jobs, nodes, and who knows what of them.

slurmctld hears a node once a second, as long as it reaches it. It learns there what has ended, and says what to start
and to kill: so a node that is cut off runs on what it has, however often slurmctld says that the job has ended. State
is saved every few seconds; killed, slurmctld goes on with what was saved last, or before that, and gives the last
numbers again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from fireflyer.base.units import MS, SECOND
from fireflyer.sim import World

__all__ = ["OURS", "THEIRS", "Controller", "Job", "Machine", "Refusal", "SlurmChances", "Step"]

OURS, THEIRS = 1000, 2000
"""Accounts."""
UNIX_S = 1_700_000_000
SILENT, DOWN = 3, 8
"""A node that was not heard so often is shown not to answer, and then counts as down."""
SAVE_NS = 5 * SECOND
PURGE_NS = 20 * SECOND
GRACE_S = 6
"""Of a partition, before a preempted job is killed."""
RECORD_NS = 15 * SECOND
LIVES = ("PENDING", "RUNNING")


class Refusal(Exception):
    """A command of Slurm ends with 1, and prints this."""


class Step(Protocol):
    """What a job is on one node, in truth."""

    alive: bool
    code: int

    def kill(self) -> None: ...

    def power_cut(self) -> None: ...


@dataclass
class Job:
    id: int
    name: str
    uid: int
    submit_s: int
    least: int
    most: int
    exclude: tuple[str, ...] = ()
    script: str = ""
    lasts_ns: int = 0
    """Of others' jobs."""
    state: str = "PENDING"
    nodes: tuple[str, ...] = ()
    parts: dict[str, None] = field(default_factory=dict)
    """Nodes where something of it may live, as far as slurmctld knows."""
    launched: dict[str, None] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    """Of nodes where it has ended."""
    start_s: int | None = None
    end_s: int | None = None
    preempt_s: int | None = None
    code: int = 0
    cancelled_by: int | None = None

    @property
    def lives(self) -> bool:
        return self.state in LIVES

    @property
    def shown(self) -> str:
        return "COMPLETING" if self.parts and not self.lives else self.state


@dataclass
class Machine:
    """A node, in truth."""

    name: str
    powered: bool = True
    steps: dict[int, Step] = field(default_factory=dict)


@dataclass
class NodeView:
    """As slurmctld sees it."""

    drained: bool = False
    reason: str = ""
    down: bool = False
    silent: int = 0
    registered: bool = True


@dataclass
class SlurmChances:
    """Per occasion, in a rough time."""

    lost: float = 0.0
    """Of a command: half of them are carried out all the same."""
    late: float = 0.0
    """It is carried out when its caller waits for it no more."""
    slow: float = 0.0
    refused: float = 0.0
    """Of `sbatch`."""
    prolog: float = 0.0
    """It fails."""
    record_lost: float = 0.0
    record_twice: float = 0.0
    sacct_fails: float = 0.0


class Controller:
    def __init__(self, world: World, names: list[str], cut: Callable[[str, str], bool]) -> None:
        self.world, self._cut = world, cut
        self.rng = world.fork_random("slurm")
        self.probabilities = SlurmChances()
        self.up = True
        self.asked: dict[str, None] = {}
        """Commands that were ever started."""
        self.sends_term = self.rng.random() < 0.3
        """To jobs that it preempts, instead of waiting for as long as its partition grants."""
        self.returns = self.rng.random() < 0.7
        """Nodes that went down serve again when they are heard (ReturnToService)."""
        self.skew_s = self.rng.randrange(-5, 6)
        self.machines = {name: Machine(name) for name in names}
        self.views = {name: NodeView() for name in names}
        self.jobs: dict[int, Job] = {}
        self.next_id = 1
        self.records: list[tuple[int, Job]] = []
        """When it comes to accounting storage, and what."""
        self.by_users: dict[int, None] = {}
        """Numbers of jobs that somebody cancelled."""
        self.preempted: dict[int, None] = {}
        self.launch: Callable[[Machine, Job], Step]
        self._saved = [self._state()]
        self._tick()
        self._save()
        for machine in self.machines.values():
            self._ping_later(machine)

    @property
    def now_s(self) -> int:
        return UNIX_S + self.skew_s + self.world.now_ns // SECOND

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    # --- slurmctld ---

    def _state(self) -> tuple[dict[int, Job], int]:
        return copy.deepcopy(self.jobs), self.next_id

    def _save(self) -> None:
        if self.up:
            self._saved = [*self._saved[-1:], self._state()]
        self.world.call_after(SAVE_NS, self._save)

    def crash(self) -> None:
        self.up = False

    def forget_all(self) -> None:
        """What was saved."""
        self._saved = [({}, 1)]

    def start(self) -> None:
        if not self.up:
            self.up = True
            jobs, self.next_id = self.rng.choice(self._saved)
            self.jobs = copy.deepcopy(jobs)
            for job in self.jobs.values():
                job.launched = dict.fromkeys(job.nodes)  # what runs is not started again
            for view in self.views.values():
                view.registered, view.silent = False, 0

    def _tick(self) -> None:
        if self.up:
            self._schedule()
            for job in list(self.jobs.values()):
                if job.state == "RUNNING" and job.preempt_s is not None and self.now_s >= job.preempt_s + GRACE_S:
                    self.end(job, "PREEMPTED")
                over_s = self.now_s - PURGE_NS // SECOND
                if not job.lives and not job.parts and job.end_s is not None and job.end_s < over_s:
                    del self.jobs[job.id]
        self.world.call_after(500 * MS, self._tick)

    def _schedule(self) -> None:
        for job in list(self.jobs.values()):
            if job.state != "PENDING" or self._waits_for_namesake(job):
                continue
            free = [name for name in self.machines if name not in job.exclude and self._is_free(name)]
            if len(free) < job.least:
                continue
            self.rng.shuffle(free)
            job.nodes = tuple(sorted(free[: job.most]))
            job.parts = dict.fromkeys(job.nodes)
            job.state, job.start_s = "RUNNING", self.now_s
            self._record(job)

    def _waits_for_namesake(self, job: Job) -> bool:
        """`--dependency=singleton`."""
        return any(other.parts and (other.name, other.uid) == (job.name, job.uid) for other in self.jobs.values())

    def _is_free(self, name: str) -> bool:
        view = self.views[name]
        taken = any(name in job.parts for job in self.jobs.values())
        return not (taken or view.drained or view.down or view.silent)

    def _record(self, job: Job) -> None:
        for _ in range(2 if self.happens(self.probabilities.record_twice) else 1):
            if not self.happens(self.probabilities.record_lost):
                due_ns = self.world.now_ns + self.rng.randrange(RECORD_NS)
                self.records.append((due_ns, replace(job, parts={})))

    def end(self, job: Job, state: str, code: int = 0, by: int | None = None) -> None:
        if not job.lives:
            return
        job.state, job.end_s, job.code, job.cancelled_by = state, self.now_s, code, by
        self._record(job)

    # --- nodes ---

    def _ping_later(self, machine: Machine) -> None:
        def ping() -> None:
            if self.up:
                self._ping(machine, self.views[machine.name])
            self._ping_later(machine)

        self.world.call_after(SECOND - self.rng.randrange(200 * MS), ping)

    def _reaches(self, machine: Machine) -> bool:
        name = machine.name
        return machine.powered and not self._cut("slurmctld", name) and not self._cut(name, "slurmctld")

    def _ping(self, machine: Machine, view: NodeView) -> None:
        if not self._reaches(machine):
            view.silent += 1
            if view.silent == DOWN:
                self.take_down(machine.name, "Not responding")
            return
        if not view.registered and not self._register(machine, view):
            return
        view.silent = 0
        for job in list(self.jobs.values()):
            if machine.name in job.parts:
                self._part(job, machine, view)

    def _register(self, machine: Machine, view: NodeView) -> bool:
        """What slurmctld does not know of is killed first."""
        for number, step in list(machine.steps.items()):
            job = self.jobs.get(number)
            if job is not None and job.state == "RUNNING" and machine.name in job.parts:
                continue
            if step.alive:
                step.kill()
            else:
                del machine.steps[number]
        mine = [number for number, job in self.jobs.items() if job.state == "RUNNING" and machine.name in job.parts]
        if any(number not in mine for number in machine.steps):
            return False
        view.registered = True
        if self.returns and view.reason == "Not responding":
            view.down, view.reason = False, ""
        return True

    def _part(self, job: Job, machine: Machine, view: NodeView) -> None:
        """Of a job, on a node that is heard."""
        name, step = machine.name, machine.steps.get(job.id)
        if not job.lives:
            if step is not None and step.alive:
                step.kill()
                return
            machine.steps.pop(job.id, None)
            del job.parts[name]
        elif name not in job.launched:
            job.launched[name] = None
            if step is not None:
                self._cancels(job, view, "Duplicate jobid")
            elif self.happens(self.probabilities.prolog):
                self._cancels(job, view, "Prolog error")
            else:
                machine.steps[job.id] = self.launch(machine, job)
        elif step is None and name not in job.codes:
            self.end(job, "NODE_FAIL")
        elif step is not None and not step.alive:
            job.codes[name] = step.code
            del machine.steps[job.id]
            if len(job.codes) == len(job.nodes):
                code = max(job.codes.values())
                self.end(job, "FAILED" if code else "COMPLETED", code)

    def _cancels(self, job: Job, view: NodeView, reason: str) -> None:
        """slurmd cannot start it."""
        view.drained, view.reason = True, reason
        self.end(job, "CANCELLED")

    def take_down(self, name: str, reason: str) -> None:
        view = self.views[name]
        view.down, view.reason, view.registered = True, reason, False
        for job in self.jobs.values():
            if name in job.parts:
                self.end(job, "NODE_FAIL")
                del job.parts[name]

    def power_cut(self, name: str) -> None:
        machine = self.machines[name]
        machine.powered = False
        for step in machine.steps.values():
            step.power_cut()
        machine.steps.clear()

    def power_on(self, name: str) -> None:
        self.machines[name].powered = True

    # --- what commands do ---

    def submit(self, **fields: object) -> int:
        job = Job(id=self.next_id, submit_s=self.now_s, **fields)  # type: ignore[arg-type]
        self.next_id += 1
        self.jobs[job.id] = job
        return job.id

    def cancel(self, number: int, name: str, by: int) -> None:
        job = self.jobs.get(number)
        if job is None:
            raise Refusal(f"scancel: error: Kill job error on job id {number}: Invalid job id specified")
        if not name or job.name == name:
            self.end(job, "CANCELLED", by=by)

    def preempt(self, job: Job) -> None:
        self.preempted[job.id] = None
        job.preempt_s = self.now_s
        if self.sends_term:
            for name in job.nodes:
                step = self.machines[name].steps.get(job.id)
                if step is not None and self._reaches(self.machines[name]):
                    step.kill()

    def drain(self, name: str, reason: str) -> None:
        view = self.views[name]
        view.drained, view.reason = True, reason

    def resume(self, name: str) -> None:
        view = self.views[name]
        if not view.drained and not view.down:
            raise Refusal("slurm_update error: Invalid node state specified")
        if view.down:
            view.silent, view.registered = SILENT, False
        view.drained, view.down, view.reason = False, False, ""

    def state_of(self, name: str) -> str:
        """As `sinfo` prints it."""
        view = self.views[name]
        jobs = [job for job in self.jobs.values() if name in job.parts]
        if view.down:
            state = "down"
        elif view.drained:
            state = "draining" if jobs else "drained"
        elif jobs:
            state = "allocated" if any(job.lives for job in jobs) else "completing"
        else:
            state = "idle"
        return state + ("*" if view.silent >= SILENT else "")

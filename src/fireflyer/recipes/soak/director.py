"""Decides what is done next in the soak. Pure: `Director.handle(now_ns, seen) -> actions`.

    START ── all nodes train, every chain is whole, each writer writes ──> FAULTS ── the time is over, no fault is left
      ──> FINISH ── every task has finished, every chain is whole ──> DONE

In FAULTS each lane of `faults` goes round by itself:

    idle ── the pause is over, and there is a target ──> HELD ── its hold is over ──> RELEASED ── recovered ──> idle

Tasks are submitted so that `plan.width` of them are unfinished, until the time is over. Whether a fault was recovered
from is decided by what was seen, and was asked after it had been taken back. Each wait has a limit, which ends the soak
with a sentence: what did not come back in time is a fault of the product.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.recipes.soak.facts import FaultFact
from fireflyer.recipes.soak.faults import Hold, Kind, Lane, PlannedFault, Target, kind_named, schedule
from fireflyer.recipes.soak.plan import SoakPlan
from fireflyer.recipes.soak.seen import Seen, TaskSeen, finished, missing_of, serves, task_on
from fireflyer.recipes.testbed.plan import TaskPlan

__all__ = [
    "LIMIT_NS",
    "Action",
    "Director",
    "GiveUp",
    "Inject",
    "Phase",
    "Recovered",
    "Release",
    "Submit",
]

LIMIT_NS: Final = 300 * SECOND
"""Of the beginning and of the end, for a target to come up, and for a task to do something."""


class Submit(msgspec.Struct, frozen=True):
    task: TaskPlan


class Inject(msgspec.Struct, frozen=True):
    """Also again, of one that is repeated while it is held."""

    fault: FaultFact
    choice: float = 0.0
    """In [0, 1): which of several processes."""


class Release(msgspec.Struct, frozen=True):
    fault: FaultFact


class Recovered(msgspec.Struct, frozen=True):
    fault: FaultFact


class GiveUp(msgspec.Struct, frozen=True):
    reason: str


Action: TypeAlias = Submit | Inject | Release | Recovered | GiveUp


class Phase(enum.Enum):
    """The value says what is waited for."""

    START = "all nodes to train, every chain to be whole and each writer to write"
    FAULTS = "the end of the time"
    FINISH = "all tasks to finish and every chain to be whole"
    DONE = "nothing"


@dataclass(slots=True)
class _LaneState:
    plans: Iterator[PlannedFault]
    next: PlannedFault | None = None
    since_ns: int = 0
    """Since it is idle."""
    fault: FaultFact | None = None
    held: PlannedFault | None = None
    incarnation: int | None = None
    """Of the storage node before the fault."""
    before: Mapping[str, TaskSeen] = field(default_factory=dict)
    """Tasks that must go on, as they were before the fault."""


class Director:
    def __init__(self, plan: SoakPlan) -> None:
        self.phase = Phase.START
        self.plans: list[TaskPlan] = []
        """Tasks that were submitted."""
        self.faults: dict[int, FaultFact] = {}
        """By number, from 1."""
        self.begin_ns = 0
        """Of `FAULTS`."""
        self._plan = plan
        self._since_ns: int | None = None
        self._lanes = {lane: _LaneState(schedule(plan.seed, lane, plan.kinds)) for lane in Lane}
        self._number = 0
        self._moved: dict[str, tuple[int, object]] = {}
        """Since when each task is as it is."""

    def handle(self, now_ns: int, seen: Seen) -> list[Action]:
        """`now_ns`: of the clock of all that was seen."""
        if self._since_ns is None:
            self._since_ns = now_ns
        before = self.phase
        actions = [*self._submit(now_ns, seen), *self._act(now_ns, seen)]
        if self.phase is not before:
            self._since_ns = now_ns
        elif self.phase in (Phase.START, Phase.FINISH) and now_ns - self._since_ns > LIMIT_NS * seen.busy:
            actions.append(GiveUp(f"waited {(now_ns - self._since_ns) // SECOND} s for {self.phase.value}"))
        actions += self._standing_still(now_ns, seen)
        if any(isinstance(action, GiveUp) for action in actions):
            self.phase = Phase.DONE
        return actions

    def injected(self, number: int, reached: int, now_ns: int) -> None:
        """What `Inject` did, when it was done. A fault that reached nothing was none: its target had just ended."""
        fault = self.faults[number]
        if fault.reached + reached:
            over = kind_named(fault.kind).hold is Hold.NONE
            self._note(fault, reached=fault.reached + reached, released_ns=now_ns if over else fault.released_ns)
            return
        del self.faults[number]
        for lane in self._lanes.values():
            if lane.fault is not None and lane.fault.number == number:
                lane.fault, lane.held = None, None

    def released(self, number: int, now_ns: int) -> None:
        """`Release` was done."""
        self._note(self.faults[number], released_ns=now_ns)

    def _note(self, fault: FaultFact, **values: object) -> FaultFact:
        changed = msgspec.structs.replace(self.faults[fault.number], **values)
        self.faults[fault.number] = changed
        for lane in self._lanes.values():
            if lane.fault is not None and lane.fault.number == fault.number:
                lane.fault = changed
        return changed

    # --- tasks ---

    def _submit(self, now_ns: int, seen: Seen) -> list[Action]:
        over = self.phase in (Phase.FINISH, Phase.DONE) or (
            self.phase is Phase.FAULTS and now_ns - self.begin_ns >= self._plan.duration_ns
        )
        wanted = 0 if over else self._plan.width
        unfinished = sum(not finished(seen, task.name) for task in self.plans)
        actions: list[Action] = []
        while unfinished < wanted:
            task = self._plan.task(len(self.plans) + 1)
            self.plans.append(task)
            actions.append(Submit(task))
            unfinished += 1
        return actions

    def _standing_still(self, now_ns: int, seen: Seen) -> list[Action]:
        for task in self.plans:
            look = None if seen.platform is None else seen.platform.tasks.get(task.name)
            since_ns, before = self._moved.setdefault(task.name, (now_ns, look))
            if look != before or finished(seen, task.name):
                self._moved[task.name] = (now_ns, look)
            elif now_ns - since_ns > LIMIT_NS * seen.busy and self.phase is not Phase.DONE:
                how = "was never seen" if look is None else f"has been {look.state} at step {look.step}"
                return [GiveUp(f"task {task.name} {how} for {(now_ns - since_ns) // SECOND} s")]
        return []

    # --- phases ---

    def _act(self, now_ns: int, seen: Seen) -> list[Action]:
        match self.phase:
            case Phase.START if self._all_well(seen):
                self.phase, self.begin_ns = Phase.FAULTS, now_ns
                for lane in self._lanes.values():
                    lane.since_ns = now_ns
            case Phase.FAULTS:
                actions = [action for lane in self._lanes.values() for action in self._go(now_ns, seen, lane)]
                over = now_ns - self.begin_ns >= self._plan.duration_ns
                if over and all(lane.fault is None for lane in self._lanes.values()):
                    self.phase = Phase.FINISH
                return actions
            case Phase.FINISH if serves(seen, self._plan, 0) and all(finished(seen, task.name) for task in self.plans):
                self.phase = Phase.DONE
        return []

    def _all_well(self, seen: Seen) -> bool:
        platform = seen.platform
        trains = platform is not None and all(
            task.name in platform.tasks and platform.tasks[task.name].step >= 1 for task in self.plans
        )
        return trains and serves(seen, self._plan, 0)

    # --- one lane ---

    def _go(self, now_ns: int, seen: Seen, lane: _LaneState) -> list[Action]:
        if lane.fault is None or lane.held is None:
            return self._next(now_ns, seen, lane)
        kind, fault = lane.held.kind, lane.fault
        if kind.target in (Target.STORAGE_NODE, Target.MARKED_STORAGE_NODE) and not fault.failed:
            sample = seen.storage
            if sample is not None and sample.at_ns > fault.at_ns and int(fault.target) not in sample.alive:
                fault = self._note(fault, failed=True)
        if fault.released_ns is None:
            if self._hold_is_over(now_ns, seen, lane.held, fault):
                return [Release(self._note(fault, released_ns=now_ns))]
            if now_ns - fault.at_ns > kind.limit_ns * seen.busy:
                return [GiveUp(f"fault {fault.number}, {_named(fault)}: waited {(now_ns - fault.at_ns) // SECOND} s "
                               f"{kind.hold.value.partition(';')[0]}")]  # fmt: skip
            return [Inject(fault)] if kind.hold is Hold.FAILED else []
        allowed_ns = round(kind.limit_ns * seen.busy)
        missing = missing_of(seen, self._plan, kind, fault, incarnation=lane.incarnation, before=lane.before)
        if not missing:
            lane.fault, lane.held, lane.since_ns = None, None, now_ns
            return [Recovered(self._note(fault, recovered_ns=now_ns, allowed_ns=allowed_ns))]
        if now_ns - fault.released_ns > allowed_ns:
            return [
                GiveUp(f"fault {fault.number}, {_named(fault)}: not recovered {allowed_ns // SECOND} s later: "
                       f"{missing}")
            ]  # fmt: skip
        return []

    def _next(self, now_ns: int, seen: Seen, lane: _LaneState) -> list[Action]:
        if now_ns - self.begin_ns >= self._plan.duration_ns:
            return []
        if lane.next is None:
            lane.next = next(lane.plans, None)
        planned = lane.next
        if planned is None or now_ns - lane.since_ns < planned.pause_ns or self._excluded(planned.kind):
            return []
        found = self._target(planned, seen)
        if found is None:
            return []
        target, task = found
        self._number += 1
        look = None if seen.platform is None else seen.platform.tasks.get(task)
        fault = FaultFact(
            number=self._number,
            kind=planned.kind.name,
            target=target,
            at_ns=now_ns,
            task=task,
            step=0 if look is None else look.step,
            released_ns=now_ns if planned.kind.hold is Hold.NONE else None,
        )
        self.faults[fault.number] = fault
        lane.fault, lane.held, lane.next = fault, planned, None
        lane.before = self._must_go_on(planned.kind, seen, task)
        if planned.kind.target is Target.STORAGE_NODE and seen.storage is not None:
            lane.incarnation = seen.storage.incarnations[int(target) - 1]
        return [Inject(fault, planned.choice)]

    def _excluded(self, kind: Kind) -> bool:
        active = {lane.fault.kind for lane in self._lanes.values() if lane.fault is not None}
        return bool(active.intersection(kind.excludes))

    def _target(self, planned: PlannedFault, seen: Seen) -> tuple[str, str] | None:
        """The target, and the task that it belongs to; None: there is none at the moment."""
        plan, kind = self._plan, planned.kind
        match kind.target:
            case Target.STORAGE_NODE:
                return str(1 + int(planned.choice * plan.storage_nodes)), ""
            case Target.MARKED_STORAGE_NODE:
                # A task that ends while a disk is full could not save its last state, and would end with that error.
                room = planned.hold_ns // (SECOND // 5) + plan.room_steps
                if kind.excludes and not self._all_have_room(seen, room):
                    return None
                return str(plan.storage_nodes), ""
            case Target.FILE_MANAGER | Target.MANAGER:
                return "", ""
            case Target.AGENT | Target.MARKED_AGENT:
                number = plan.nodes if kind.target is Target.MARKED_AGENT else 1 + int(planned.choice * plan.nodes)
                return f"agent-{number}", task_on(seen, f"agent-{number}")
            case Target.TASK_NODE | Target.TASK:
                return self._training(planned, seen)

    def _training(self, planned: PlannedFault, seen: Seen) -> tuple[str, str] | None:
        tasks = {} if seen.platform is None else seen.platform.tasks
        last = self._plan.steps - self._plan.room_steps
        found = sorted(name for name, task in tasks.items() if task.state == "running" and 1 <= task.step <= last)
        if not found:
            return None
        if planned.kind.target is Target.TASK:
            name = found[int(planned.choice * len(found))]
            return name, name
        nodes = [(node, name) for name in found for node in tasks[name].nodes]
        return nodes[int(planned.choice * len(nodes))]

    def _all_have_room(self, seen: Seen, steps: int) -> bool:
        if seen.platform is None:
            return False
        states = [seen.platform.tasks.get(task.name) for task in self.plans]
        return all(
            task is not None and (task.state == "finished" or 1 <= task.step <= self._plan.steps - steps)
            for task in states
        )

    def _must_go_on(self, kind: Kind, seen: Seen, task: str) -> dict[str, TaskSeen]:
        """Tasks that must have done more when the fault is recovered from."""
        if kind.lane is Lane.STORAGE or seen.platform is None:
            return {}
        everybody = kind.target is Target.MANAGER
        return {
            name: look
            for name, look in seen.platform.tasks.items()
            if look.state == "running" and (everybody or name == task)
        }

    def _hold_is_over(self, now_ns: int, seen: Seen, planned: PlannedFault, fault: FaultFact) -> bool:
        match planned.kind.hold:
            case Hold.NONE:
                return True
            case Hold.TIME:
                return now_ns - fault.at_ns >= planned.hold_ns
            case Hold.FAILED:
                return fault.failed
            case Hold.SUSPENDED:
                look = None if seen.platform is None else seen.platform.tasks.get(fault.target)
                asked_after = seen.platform is not None and seen.platform.at_ns > fault.at_ns
                return asked_after and look is not None and look.state in ("suspended", "finished")


def _named(fault: FaultFact) -> str:
    return f"{kind_named(fault.kind).text}{f' ({fault.target})' if fault.target else ''}"

"""The rules for one task in its turn, given what those before it have got.

`schedule`, the definition, asks them for every task that waits; the machine only for those that may not just wait, in
the same order. What both have in common is here: what is free, what is leaving, who has claims, who is the head.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from fireflyer.base.errors import InvariantViolation
from fireflyer.base.units import MS, format_duration
from fireflyer.cluster.core.scheduler.limits import Limits
from fireflyer.cluster.core.scheduler.model import Decision, Interrupt, Request, Start, Task, Wait
from fireflyer.cluster.core.scheduler.node_sets import NodeSets, union
from fireflyer.cluster.core.scheduler.order import Standing
from fireflyer.cluster.core.scheduler.placement import fits, place
from fireflyer.cluster.core.scheduler.victims import Victim, cheapest

__all__ = ["Candidates", "Outcome", "RunCost", "Runs", "Turns", "Verdict"]

MAX_NAMED = 4
"""Reservations that a reason names."""
_PLACE = operator.attrgetter("submitted_ns", "id")


class Outcome(enum.Enum):
    STARTS = "starts"
    KEEPS = "keeps"
    """Nodes are kept for it that are not all free yet."""
    BARRED = "barred"
    """Held, or paused."""
    LIMIT = "limit"
    TOO_FEW = "too few"
    """Too few nodes are open that it may use, whoever has them."""
    HEAD = "head"
    """Nothing helps it; it has become the head."""
    BEHIND = "behind"
    """It comes behind the head and does not fit."""
    YIELDS = "yields"
    """It comes behind the head, fits, and would keep what the head needs."""


class Verdict(NamedTuple):
    outcome: Outcome
    decisions: tuple[Decision, ...]
    """Of the head none: see `Turns.head_waits`."""


class Candidates(NamedTuple):
    """Runs that a task may interrupt, and all of their nodes."""

    tasks: Mapping[int, Task]
    nodes: int


class RunCost(NamedTuple):
    """Where a run lies, and what its interruption loses."""

    nodes: int
    each_ns: int
    """Of each of its nodes, whenever it is interrupted."""
    unsaved_since_ns: int | None
    zones: tuple[tuple[str, int], ...]

    @staticmethod
    def of(task: Task, nodes: int, sets: NodeSets) -> RunCost:
        return RunCost(nodes.bit_count(), 0, None, sets.by_zone(nodes)).as_of(task)

    def as_of(self, task: Task) -> RunCost:
        """The same nodes."""
        since_ns = task.run.unsaved_since_ns if task.run is not None else None
        return self._replace(each_ns=task.request.interrupt_cost_ns, unsaved_since_ns=since_ns)

    def loss(self, now_ns: int) -> int:
        """In milliseconds of nodes: those of a thousand nodes in a month, added up, still fit 64 bits."""
        unsaved_ns = max(0, now_ns - self.unsaved_since_ns) if self.unsaved_since_ns is not None else 0
        return self.nodes * ((self.each_ns + unsaved_ns) // MS)


class Runs(Protocol):
    """What runs, of one group of nodes."""

    leaving: int
    """Nodes whose runs leave."""
    crossing: int
    """How many runs lie in several zones."""

    def nodes_of(self, task: int) -> int: ...
    def spreads(self) -> Mapping[int, RunCost]: ...

    def candidates(self, task: Task, now_ns: int) -> Candidates: ...
    def declared_ends(self) -> Sequence[tuple[int, int]]:
        """(when, task) of those that declared how long they take; ascending."""
        ...


class _Chosen(NamedTuple):
    """Nodes for a task: in the order of its ranks, and as a set."""

    names: tuple[str, ...]
    nodes: int


class _Head(NamedTuple):
    task: Task
    least: Request
    eligible: int
    soon: int
    free: int
    crossing: int


class Turns:
    """One group of nodes at one instant: each task that waits has its turn, in the order of the queue."""

    def __init__(
        self,
        runs: Runs,
        free: int,
        sets: NodeSets,
        standing: Standing,
        limits: Limits,
        claims: Mapping[int, int],
        now_ns: int,
    ) -> None:
        """`claims`: of all tasks that wait and have one."""
        self._runs, self._sets, self._standing, self._now_ns = runs, sets, standing, now_ns
        self.free, self._leaving, self.crossing = free, runs.leaving, runs.crossing
        self._limits = limits
        self._taken: list[tuple[Request, int]] = []
        self._claims = {task: nodes for task, nodes in claims.items() if nodes}
        self._claimed: int | None = None
        """By those whose turn comes later; None if that must be summed up again."""
        self._kept = 0
        """How many tasks whose turn is over have a claim."""
        self._interrupted: set[int] = set()
        self._head: _Head | None = None
        self._head_starts: int | None = None
        self._head_asked = False

    @property
    def has_head(self) -> bool:
        return self._head is not None

    def undo_limits(self) -> None:
        """What was taken of the limits in these turns is given back: for whoever does not throw them away."""
        for request, nodes in self._taken:
            self._limits.take(request, -nodes)
        self._taken.clear()

    def one(self, task: Task) -> Verdict:
        request = task.request
        claim = self._claims.pop(task.id, 0)
        if claim:
            self._claimed = None
        if task.held:
            return _waits(Outcome.BARRED, task, task.held)
        if self._now_ns < task.not_before_ns:
            words = "it failed and is started again after a pause"
            return Verdict(Outcome.BARRED, (Wait(task.id, words, task.not_before_ns),))
        room, words = self._limits.room(request)
        if room < request.least_nodes:
            return _waits(Outcome.LIMIT, task, words)
        eligible = self.open_to(task)
        if eligible.bit_count() < request.least_nodes:
            return _waits(Outcome.TOO_FEW, task, self._too_few(task, eligible))
        if claim and self._holds(request, claim, eligible, room):
            kept = _Chosen(self._named(task.claim, claim), claim)
            if claim & ~self.free:
                return self._keep(task, kept, "the tasks on its nodes are leaving")
            return self._start(task, kept, self.free & eligible)
        wanted = _with_most(request, min(request.most_nodes, room))
        placed = self._place_kindly(wanted, self.free & eligible)
        if placed is not None:
            return self._start(task, placed, self.free & eligible)
        if self._head is not None:
            words = f"task {self._head.task.id} comes first and does not fit either"
            return _waits(Outcome.BEHIND, task, words)
        return self._make_room(task, eligible)

    def _holds(self, request: Request, claim: int, eligible: int, room: int) -> bool:
        """Whether a task may still run on what it claimed, as soon as that is free."""
        if claim & ~((self.free | self._leaving) & eligible):
            return False
        if not request.least_nodes <= claim.bit_count() <= min(request.most_nodes, room):
            return False
        policy = self._standing.policy
        may_cross = request.least_nodes >= policy.cross_zone_nodes and self.crossing < policy.cross_zone_tasks
        return may_cross or self._sets.zones_of(claim) <= 1

    def open_to(self, task: Task) -> int:
        """The nodes that it may use and that are open for as long as it takes."""
        admitted = self._sets.admitting(task)
        return self._sets.eligible(task.request) & self._sets.open_for(task.request.span_ns, self._now_ns, admitted)

    def open_at_all(self, task: Task) -> int:
        """The nodes that it may use and that are open, however long it takes."""
        admitted = self._sets.admitting(task)
        return self._sets.eligible(task.request) & self._sets.open_for(0, self._now_ns, admitted)

    def unclaimed(self) -> int:
        """What is free, without what is claimed by those whose turn comes later."""
        return self.free & ~self._later() if self._claims else self.free

    def _later(self) -> int:
        if self._claimed is None:
            self._claimed = union(self._claims.values())
        return self._claimed

    def _named(self, claim: tuple[str, ...], nodes: int) -> tuple[str, ...]:
        """Without those that are no nodes."""
        if len(claim) == nodes.bit_count():
            return claim
        return tuple(name for name in claim if name in self._sets.number)

    def _place(self, request: Request, free: int, crossing: int | None = None) -> _Chosen | None:
        """`crossing`: how many runs cross zones; None: as many as do."""
        if free.bit_count() < request.least_nodes:
            return None
        crossing = self.crossing if crossing is None else crossing
        numbers = place(request, free, self._sets, self._standing.policy, crossing)
        if numbers is None:
            return None
        return _Chosen(self._sets.names(numbers), union(1 << number for number in numbers))

    def _place_kindly(self, request: Request, free: int) -> _Chosen | None:
        """Without what is claimed by those who come later, where that is enough; the head, too, goes before them."""
        later = self._later()
        kind = self._place(request, free & ~later)
        return kind if kind is not None or not later or self._head is not None else self._place(request, free)

    def _keep(self, task: Task, chosen: _Chosen, reason: str, first: Sequence[Decision] = ()) -> Verdict:
        self._take(task, chosen)
        self._kept += 1
        return Verdict(Outcome.KEEPS, (*first, Wait(task.id, reason, claim=chosen.names)))

    def _start(self, task: Task, chosen: _Chosen, free: int) -> Verdict:
        """`free`: where else it may be placed, if these nodes would keep what the head needs."""
        head = self._head
        if head is None or self._gone_before(head, task, chosen.nodes):
            return self._start_on(task, chosen, backfilled=False, reason="it is its turn")
        beside = chosen if self._leaves_room(head, task, chosen) else self._place_beside(head, task, free)
        if beside is None:
            return _waits(Outcome.YIELDS, task, f"it would keep what task {head.task.id} needs, which comes first")
        return self._start_on(task, beside, backfilled=True, reason=f"backfilled: task {head.task.id} does not fit")

    def _start_on(self, task: Task, chosen: _Chosen, *, backfilled: bool, reason: str) -> Verdict:
        self._take(task, chosen)
        return Verdict(Outcome.STARTS, (Start(task.id, chosen.names, backfilled, reason),))

    def _leaves_room(self, head: _Head, task: Task, chosen: _Chosen) -> bool:
        """Whether the head keeps enough of its limits, and of the runs that may cross zones, beside this one."""
        return self._sets.zones_of(chosen.nodes) <= 1 and len(chosen.names) <= self._room_beside(head, task)

    def _room_beside(self, head: _Head, task: Task) -> int:
        """How many nodes the task may take, so that the limits of the head leave it as many as it needs."""
        most = task.request.most_nodes
        self._limits.take(task.request, most)
        room, _ = self._limits.room(head.least)
        self._limits.take(task.request, -most)
        return most - max(0, head.least.least_nodes - room)

    def _place_beside(self, head: _Head, task: Task, free: int) -> _Chosen | None:
        """In one zone, on as many nodes as leave the head its limits: otherwise a task that comes later and asks for
        fewer would be placed where this one could run."""
        room, _ = self._limits.room(task.request)
        most = min(task.request.most_nodes, room, self._room_beside(head, task))
        if most < task.request.least_nodes:
            return None
        wanted = _with_most(task.request, most)
        return self._place(wanted, free & ~self._later(), self._standing.policy.cross_zone_tasks)

    def _gone_before(self, head: _Head, task: Task, nodes: int) -> bool:
        """Whether a run on these nodes is nothing to the head."""
        if not nodes & self._sets.eligible(head.least):
            return True
        time_ns = task.request.time_ns
        if time_ns is None:
            return False
        starts_ns = self.head_starts_ns()
        return starts_ns is not None and self._now_ns + time_ns <= starts_ns

    def _take(self, task: Task, chosen: _Chosen) -> None:
        self.free &= ~chosen.nodes
        self._leaving &= ~chosen.nodes
        self._limits.take(task.request, len(chosen.names))
        self._taken.append((task.request, len(chosen.names)))
        self.crossing += self._sets.zones_of(chosen.nodes) > 1

    def _make_room(self, task: Task, eligible: int) -> Verdict:
        least = _with_most(task.request, task.request.least_nodes)
        soon = (self.free | self._leaving) & eligible
        chosen = self._place_kindly(least, soon)
        if chosen is not None:
            return self._keep(task, chosen, "the tasks on its nodes are leaving")
        victims = self._victims(task, eligible, soon)
        if victims is not None:
            freed = union(self._runs.nodes_of(victim) for victim in victims)
            self._interrupted.update(victims)
            self._leaving |= freed
            chosen = self._place(least, (soon | freed) & eligible)
            if chosen is None:
                raise InvariantViolation(f"task {task.id} does not fit on what was freed for it")
            interrupts = [Interrupt(victim, task.id, f"task {task.id} comes first") for victim in victims]
            return self._keep(task, chosen, f"it interrupts {', '.join(map(str, victims))}", interrupts)
        self._head = _Head(task, least, eligible, soon, self.free, self.crossing)
        return Verdict(Outcome.HEAD, ())

    def _victims(self, task: Task, eligible: int, soon: int) -> tuple[int, ...] | None:
        """The cheapest set in one zone, or in all."""
        if self._kept + len(self._claims) >= self._standing.policy.most_claims:
            return None
        candidates = self._runs.candidates(task, self._now_ns)
        most = (soon | candidates.nodes) & eligible
        policy, least = self._standing.policy, task.request.least_nodes
        scopes: list[tuple[str, ...]] = [
            (zone,) for zone, nodes in self._sets.of_zone.items() if (most & nodes).bit_count() >= least
        ]
        if least >= policy.cross_zone_nodes and self.crossing < policy.cross_zone_tasks and most.bit_count() >= least:
            scopes.append(tuple(self._sets.of_zone))
        if not scopes:
            return None
        found = []
        in_zone = self._victims_by_zone(candidates, eligible)
        for number, scope in enumerate(scopes):
            here = sum((soon & self._sets.of_zone[zone]).bit_count() for zone in scope)
            victims = in_zone[scope[0]] if len(scope) == 1 else _joined(in_zone, scope)
            cheapest_here = cheapest(victims, least - here)
            if cheapest_here is not None:
                found.append((cheapest_here[0], number, cheapest_here[1]))
        return min(found)[2] if found else None

    def _victims_by_zone(self, candidates: Candidates, eligible: int) -> dict[str, list[Victim]]:
        """Who was submitted last comes first: of sets that lose the same, it is taken."""
        found: dict[str, list[Victim]] = {zone: [] for zone in self._sets.of_zone}
        spreads = self._runs.spreads()
        for other in sorted(candidates.tasks.values(), key=_PLACE, reverse=True):
            if other.id not in self._interrupted:
                cost = spreads[other.id]
                loss = cost.loss(self._now_ns)
                for zone, nodes in cost.zones:
                    found[zone].append(Victim(other.id, loss, (nodes & eligible).bit_count()))
        return found

    def head_waits(self) -> Wait:
        """What the head is told."""
        if self._head is None:
            raise InvariantViolation("no task is the head")
        task, least, eligible, _, free, _ = self._head
        words, found = f"needs {least.least_nodes} of {eligible.bit_count()} nodes", (free & eligible).bit_count()
        reason = f"{words} that it may use; {found} {'is' if found == 1 else 'are'} free"
        return Wait(task.id, reason, self.head_starts_ns())

    def head_starts_ns(self) -> int | None:
        """When the head fits, if every run takes as long as was declared."""
        if not self._head_asked and self._head is not None:
            self._head_asked = True
            self._head_starts = self._earliest_ns(self._head)
        return self._head_starts

    def _earliest_ns(self, head: _Head) -> int | None:
        soon, needed = head.soon, head.least.least_nodes
        for end_ns, ended in self._runs.declared_ends():
            more = self._runs.nodes_of(ended) & head.eligible & ~soon
            if more:
                soon |= more
                if fits(needed, soon, self._sets, self._standing.policy, head.crossing):
                    return max(end_ns, self._now_ns)
        return None

    def _too_few(self, task: Task, eligible: int) -> str:
        request = task.request
        may = self._sets.eligible(request)
        missing = may & ~eligible
        closed = f", of which {missing.bit_count()} are down, drained, closed or reserved" if missing else ""
        needs = f"needs {request.least_nodes} nodes of {request.node_group}; {may.bit_count()} have what it asks for"
        if may.bit_count() < request.least_nodes:
            needs += ", and it waits until there are as many"
        unknown = self._sets.unknown(request)
        nowhere = f"; there is no {', no '.join(unknown[:3])}" if unknown else ""
        return f"{needs}{closed}{nowhere}{self._reserved(task, missing)}"

    def _reserved(self, task: Task, missing: int) -> str:
        """Names the reservations that keep these nodes from the task."""
        if not missing or not self._sets.has_reservations():
            return ""
        admitted = self._sets.admitting(task)
        found = self._sets.closing(missing, task.request.span_ns, self._now_ns, admitted)
        meets = "before it would end" if task.request.time_ns is not None else "before it could leave"
        words = [
            f"{'maintenance' if one.maintenance else 'reservation'} {one.name} "
            + (
                f"begins in {format_duration(one.begin_ns - self._now_ns)}, {meets}, and lasts "
                if one.begin_ns > self._now_ns
                else "lasts "
            )
            + f"{format_duration(one.until_ns - max(self._now_ns, one.begin_ns))}"
            + ("" if one.begin_ns > self._now_ns else " more")
            for one in found[:MAX_NAMED]
        ]
        more = f" and {len(found) - MAX_NAMED} others" if len(found) > MAX_NAMED else ""
        return f": {', '.join(words)}{more}" if words else ""


def _with_most(request: Request, nodes: int) -> Request:
    return request if request.most_nodes == nodes else msgspec.structs.replace(request, most_nodes=nodes)


def _joined(in_zone: Mapping[str, Sequence[Victim]], scope: Sequence[str]) -> list[Victim]:
    """What they leave in all of these zones together."""
    found: dict[int, Victim] = {}
    for zone in scope:
        for victim in in_zone[zone]:
            known = found.get(victim.task)
            gains = victim.gains + (known.gains if known is not None else 0)
            found[victim.task] = victim._replace(gains=gains)
    return list(found.values())


def _waits(outcome: Outcome, task: Task, words: str) -> Verdict:
    return Verdict(outcome, (Wait(task.id, words),))

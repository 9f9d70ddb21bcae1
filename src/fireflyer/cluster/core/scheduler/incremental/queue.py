"""Tasks that wait for one group of nodes, kept so that a pass need not look at most of them.

Tasks whose requests are the same, except for what only matters once they run, are an *equivalence class*: one of them
that does not fit speaks for all behind it. Classes that want equally many of the same nodes are a *family*: while fewer
are free, none of them is looked at. A family keeps its classes by the aged priority of their first tasks, its *levels*;
one level at a time is sorted by usage and age, when a pass comes to it. So when usage is added up anew, what is sorted
again is mostly the highest level, which is small. When the first task of a class gets a step older, its class moves.

Inside a class the user and the priority are the same. Where no task was ever requeued, who came first is also oldest,
and the order never changes. Requeued ones are classes of their own, sorted again when one of them gets a step older.

*Parked* is a class that cannot start whatever is free: its limits leave too little room, or the cluster has too few
nodes for it. Tasks with a claim are in no class: each of them is always looked at. Held and paused ones wait outside.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from fireflyer.cluster.core.scheduler.limits import LimitKey, Limits
from fireflyer.cluster.core.scheduler.model import Request, Task
from fireflyer.cluster.core.scheduler.node_sets import NodeSets
from fireflyer.cluster.core.scheduler.order import (
    QueueKey,
    Standing,
    aged_priority,
    ages_next_ns,
    queue_key,
    usage_over_share,
)

__all__ = ["Entry", "EqualTasks", "Family", "Queue"]

_NodesKey: TypeAlias = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[int, ...]]
_Place: TypeAlias = tuple[int, int]
"""When a task was first submitted, and its number."""
Entry: TypeAlias = tuple[QueueKey, "EqualTasks"]


class EqualTasks:
    """An equivalence class."""

    __slots__ = (
        "_places",
        "_sorted_until_ns",
        "_tasks",
        "due_ns",
        "entry",
        "family",
        "key",
        "level",
        "parked",
        "requeued",
        "user",
    )

    def __init__(
        self, key: tuple[object, ...], family: Family, tasks: Mapping[int, Task], user: str, requeued: bool
    ) -> None:
        self.key, self.family, self.user, self.requeued = key, family, user, requeued
        self._tasks = tasks
        self._places: list[_Place] = []
        self._sorted_until_ns = 0
        self.level: Level | None = None
        """Where it stands in its family."""
        self.entry: Entry | None = None
        """And where in that, if that is sorted."""
        self.due_ns = -1
        """When that changes by itself."""
        self.parked: tuple[LimitKey, ...] | None = None
        """Until one of these limits has more room; without any, until there are other nodes."""

    def __len__(self) -> int:
        return len(self._places)

    def __lt__(self, other: EqualTasks) -> bool:
        return False  # entries differ in their keys

    def add(self, task: Task) -> None:
        if self.requeued:
            self._places.append((task.submitted_ns, task.id))
            self._sorted_until_ns = 0
        else:
            insort(self._places, (task.submitted_ns, task.id))

    def remove(self, task: Task) -> None:
        if self.requeued:
            self._places.remove((task.submitted_ns, task.id))
        else:
            del self._places[bisect_left(self._places, (task.submitted_ns, task.id))]

    def sort(self, now_ns: int, standing: Standing) -> None:
        if self.requeued and now_ns >= self._sorted_until_ns:
            self._places.sort(key=lambda place: queue_key(self._tasks[place[1]], now_ns, standing))
            self._sorted_until_ns = min(
                ages_next_ns(self._tasks[task], now_ns, standing.policy) for _, task in self._places
            )

    def next_change_ns(self, now_ns: int, standing: Standing) -> int:
        return self._sorted_until_ns if self.requeued else ages_next_ns(self.at(0), now_ns, standing.policy)

    def at(self, position: int) -> Task:
        return self._tasks[self._places[position][1]]

    @property
    def first(self) -> _Place:
        return self._places[0]

    def after(self, key: QueueKey, now_ns: int, standing: Standing) -> int:
        """The position of the first task behind that place in the queue."""
        return bisect_right(self._places, key, key=lambda place: queue_key(self._tasks[place[1]], now_ns, standing))

    def shorter(self, position: int, limit_ns: int) -> int:
        """The first position from there on of a task that needs its nodes for at most so long."""
        for at in range(position, len(self._places)):
            if self._tasks[self._places[at][1]].request.span_ns <= limit_ns:
                return at
        return len(self._places)

    def declared_shorter(self, position: int, limit_ns: int) -> int:
        """The same, of one that says so."""
        for at in range(position, len(self._places)):
            time_ns = self._tasks[self._places[at][1]].request.time_ns
            if time_ns is not None and time_ns <= limit_ns:
                return at
        return len(self._places)


class Level:
    """Classes of a family whose first tasks have the same aged priority."""

    __slots__ = ("aged", "classes", "order", "version")

    def __init__(self, aged: int) -> None:
        self.aged = aged
        self.classes: dict[EqualTasks, None] = {}
        self.order: list[Entry] = []
        self.version = -1
        """Of the usage by which `order` is sorted."""


class Family:
    """Classes that want equally many of the same nodes."""

    __slots__ = ("admitted", "classes", "eligible", "key", "layout", "least", "levels", "request")

    def __init__(self, key: tuple[int, _NodesKey], request: Request) -> None:
        self.key, self.request = key, request
        self.least, (_, _, _, self.admitted) = key
        self.classes = 0
        """With those that are parked."""
        self.levels: dict[int, Level] = {}
        """Without them."""
        self.eligible, self.layout = 0, -1
        """Kept here by those who compute it: for which layout of the nodes."""


class Queue:
    """All tasks that wait for one group of nodes."""

    def __init__(self, tasks: Mapping[int, Task], sets: NodeSets, standing: Standing) -> None:
        """`tasks`: all that are known, by number; kept by the caller."""
        self._tasks, self._sets, self._standing = tasks, sets, standing
        self._classes: dict[tuple[object, ...], EqualTasks] = {}
        self._families: dict[tuple[int, _NodesKey], Family] = {}
        self._class_of: dict[int, EqualTasks] = {}
        self._timers: list[tuple[int, int, EqualTasks]] = []
        self._timers_set = 0
        self._paused: list[tuple[int, int, tuple[int, ...]]] = []
        self._parked: dict[LimitKey | None, dict[EqualTasks, None]] = {}
        self._version = 0
        self._ratios: dict[str, float] = {}
        self._waiting: dict[int, None] = {}
        self.claimants: dict[int, int] = {}
        """Task → the nodes that it claims."""

    def __len__(self) -> int:
        return len(self._waiting)

    def families(self) -> Iterator[Family]:
        """Those with a class that may start."""
        return (family for family in self._families.values() if family.levels)

    def in_order(self, family: Family, below: int | None = None) -> Iterator[Entry]:
        """The classes of a family, by their first tasks; only those of lower aged priority than `below`."""
        # Most families have one level, and the generator is asked for one class of most.
        for aged in sorted(family.levels, reverse=True) if len(family.levels) > 1 else list(family.levels):
            if below is None or aged < below:
                level = family.levels[aged]
                if level.version != self._version:
                    self._sort(level)
                yield from level.order

    def add(self, task: Task, admitted: tuple[int, ...], now_ns: int) -> None:
        self._waiting[task.id] = None
        if task.claim:
            self.claimants[task.id] = self._sets.named(task.claim)
        elif task.held:
            return
        elif task.not_before_ns > now_ns:
            heapq.heappush(self._paused, (task.not_before_ns, task.id, admitted))
        else:
            self._into_class(task, admitted, now_ns)

    def remove(self, task: Task, now_ns: int) -> None:
        del self._waiting[task.id]
        self.claimants.pop(task.id, None)
        its = self._class_of.pop(task.id, None)
        if its is None:
            return
        first = its.at(0) is task
        its.remove(task)
        if not len(its):
            self._unpark(its)
            self._unlist(its)
            del self._classes[its.key]
            its.family.classes -= 1
            if not its.family.classes:
                del self._families[its.family.key]
        elif its.parked is None and (first or its.requeued):
            self._list(its, now_ns)

    def advance(self, now_ns: int) -> None:
        """Classes whose first task has got older move, and pauses end."""
        while self._timers and self._timers[0][0] <= now_ns:
            due_ns, _, its = heapq.heappop(self._timers)
            if due_ns == its.due_ns:
                its.due_ns = -1
                if its.level is not None:
                    self._list(its, now_ns)
        while self._paused and self._paused[0][0] <= now_ns:
            at_ns, number, admitted = heapq.heappop(self._paused)
            if number in self._waiting and number not in self._class_of and number not in self.claimants:
                task = self._tasks[number]
                if task.not_before_ns == at_ns and not task.held:
                    self._into_class(task, admitted, now_ns)

    def name_claims(self) -> None:
        """There are other nodes."""
        for number in self.claimants:
            self.claimants[number] = self._sets.named(self._tasks[number].claim)

    def next_pause_ns(self) -> int | None:
        """When the next pause may end."""
        return self._paused[0][0] if self._paused else None

    def before(self, asked: Task, now_ns: int) -> int:
        """How many tasks that may start, as far as they are concerned, come before one that waits; whether there is
        room for them is not asked. `advance` has been called for this time."""
        key = queue_key(asked, now_ns, self._standing)
        claimants = (self._tasks[number] for number in self.claimants if number != asked.id)
        count = sum(queue_key(task, now_ns, self._standing) < key for task in claimants)
        own = self._class_of.get(asked.id)
        for its in self._classes.values():
            if its.level is None or its.level.aged >= -key[0]:
                its.sort(now_ns, self._standing)
                count += its.after(key, now_ns, self._standing) - (its is own)
        return count

    def resort(self) -> None:
        """Usage or shares are others now."""
        self._version += 1
        self._ratios.clear()

    def park(self, its: EqualTasks, until: tuple[LimitKey, ...]) -> None:
        """Until `unpark` of one of these limits, or of the nodes if there are none."""
        self._unlist(its)
        its.parked = until
        for key in until or (None,):
            self._parked.setdefault(key, {})[its] = None

    def unpark(self, key: LimitKey | None, limits: Limits, now_ns: int) -> None:
        """A limit has more room, or the nodes are others."""
        for its in list(self._parked.get(key, ())):
            request = its.at(0).request
            if key is None or limits.room(request)[0] >= request.least_nodes:
                self._unpark(its)
                self._list(its, now_ns)

    def _unpark(self, its: EqualTasks) -> None:
        if its.parked is not None:
            for key in its.parked or (None,):
                del self._parked[key][its]
                if not self._parked[key]:
                    del self._parked[key]
            its.parked = None

    def _into_class(self, task: Task, admitted: tuple[int, ...], now_ns: int) -> None:
        asked, requeued = task.request, task.queued_ns != task.submitted_ns
        nodes = asked.labels, asked.only, asked.never, admitted
        key = asked.user, asked.user_group, asked.priority, asked.least_nodes, asked.most_nodes, nodes, requeued
        its = self._classes.get(key)
        if its is None:
            family = self._families.get((asked.least_nodes, nodes))
            if family is None:
                family = Family((asked.least_nodes, nodes), asked)
                self._families[family.key] = family
            family.classes += 1
            its = self._classes[key] = EqualTasks(key, family, self._tasks, asked.user, requeued)
        its.add(task)
        self._class_of[task.id] = its
        if its.parked is None and (requeued or its.at(0) is task):
            self._list(its, now_ns)

    def _list(self, its: EqualTasks, now_ns: int) -> None:
        """In its family, at its place."""
        self._unlist(its)
        its.sort(now_ns, self._standing)
        aged = aged_priority(its.at(0), now_ns, self._standing.policy)
        level = its.family.levels.get(aged)
        if level is None:
            level = its.family.levels[aged] = Level(aged)
        level.classes[its] = None
        its.level = level
        if level.version == self._version:
            its.entry = self._entry(its, level)
            insort(level.order, its.entry)
        due_ns = its.next_change_ns(now_ns, self._standing)
        if due_ns != its.due_ns:
            its.due_ns = due_ns
            self._timers_set += 1
            heapq.heappush(self._timers, (due_ns, self._timers_set, its))

    def _unlist(self, its: EqualTasks) -> None:
        level = its.level
        if level is None:
            return
        del level.classes[its]
        if level.version == self._version and its.entry is not None:
            del level.order[bisect_left(level.order, its.entry)]
        its.level = its.entry = None
        if not level.classes:
            del its.family.levels[level.aged]

    def _sort(self, level: Level) -> None:
        ratios, first = self._ratios, -level.aged
        order: list[Entry] = []
        for its in level.classes:
            ratio = ratios.get(its.user)
            if ratio is None:
                ratio = self._ratio(its.user)
            its.entry = (first, ratio, *its.first), its
            order.append(its.entry)
        order.sort()
        level.order, level.version = order, self._version

    def _entry(self, its: EqualTasks, level: Level) -> Entry:
        return (-level.aged, self._ratio(its.user), *its.first), its

    def _ratio(self, user: str) -> float:
        ratio = self._ratios.get(user)
        if ratio is None:
            ratio = self._ratios[user] = usage_over_share(user, self._standing.usage, self._standing.share)
        return ratio

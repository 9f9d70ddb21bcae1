"""Suspension under random histories: ranks that write through store buffers, collectives that wait for all, supervisors
and ranks that die, messages that are late and doubled, a launcher that is stopped meanwhile.

The real `Gang`, `NodeCells` and `RankCells`; the rest is simulated. The checker knows at which points ranks went on."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, overload

import pytest
from tests.sim.test_gang import CALM, Chaos, Cluster, Incarnation, spec_of
from tests.support.campaigns.known_seeds import search
from tests.support.campaigns.seeds import more_seeds

from fireflyer.base import suspension as cells_of_base
from fireflyer.base.events import AttemptStarted, JobFinished, RankExited, Suspended, SuspendRequested
from fireflyer.base.suspension import CELLS, SUSPENDED_EXIT_CODE, Answer, NodeCells, RankCells
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core import judgement
from fireflyer.cluster.core import suspension as core
from fireflyer.cluster.core.messages import (
    AskPoints,
    Effect,
    NameHorizon,
    PointsCollected,
    RankEnded,
    RanksGone,
    SuspendAsked,
)
from fireflyer.cluster.core.states import NodeState
from fireflyer.cluster.schema.job import JobSpec
from fireflyer.cluster.schema.wire import Points, RankEnd

GRACE_NS = 8 * SECOND
MIN_STEP_NS = 5 * MS
BUFFER_NS = 4 * MS
"""A write is seen by others so much later, at most."""
ANSWER_PERIOD_NS = MS
SAVE_NS = 300 * MS

Asking = Literal["all", "steps", "rank 0", "none"]
"""Which ranks ask: every one at each step, or giving the number of each third step; rank 0 alone; nobody."""


class Buffered(MutableSequence[int]):
    """A rank's view of its cells: what it writes is on its way for a while, what it reads is not."""

    def __init__(self, cluster: Job, memory: list[int]) -> None:
        self._cluster, self._memory = cluster, memory
        self._writes: dict[int, int] = {}

    def flush(self) -> None:
        for index, value in self._writes.items():
            self._memory[index] = value
        self._writes.clear()

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._writes.get(index, self._memory[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self._writes[index] = value
        self._cluster.world.call_after(self._cluster._upto(BUFFER_NS), self.flush)

    def __len__(self) -> int:
        return len(self._memory)

    def __delitem__(self, index: Any) -> None:
        raise NotImplementedError

    def insert(self, index: int, value: int) -> None:
        raise NotImplementedError


@dataclass
class Node:
    """The shared memory of an incarnation's ranks."""

    buffers: list[Buffered] = field(default_factory=list)
    cells: NodeCells = field(default_factory=lambda: NodeCells(()))
    barrier: bool = True
    told_ns: int = 0


@dataclass
class Rank:
    one: Incarnation
    attempt: int
    number: int
    cells: RankCells
    step: int = 0


class Job(Cluster):
    """One job; `asking` and the lengths of steps are drawn by the seed."""

    rank_cells = RankCells
    barriers = True
    holds_first = True

    def __init__(self, seed: int, spec: JobSpec, chaos: Chaos, asking: Asking) -> None:
        super().__init__(seed, spec, chaos)
        self.asking = asking
        random = self.world.random
        self.step_ns = random.choice([2 * MS, 20 * MS, 150 * MS])
        self.last_step = random.randint(3, 60) * (5 if self.step_ns < 100 * MS else 1)
        self.collective_every = random.randint(1, 3)
        self.memory: dict[tuple[int, int], Node] = {}
        self.waiting: dict[tuple[int, str, int], list[Callable[[], None]]] = {}
        self.went_on: list[tuple[int, int, int]] = []
        """(attempt, rank, point) at which a rank asked and went on."""
        self.left: list[tuple[int, int, int]] = []
        self.horizon: int | None = None
        self.asked_ns: int | None = None
        self.finished_ns = 0
        if random.random() < 0.85:
            for _ in range(random.choice([1, 1, 2])):
                self.world.call_after(self._upto(6 * SECOND), self._ask_to_suspend)

    def _ask_to_suspend(self) -> None:
        if self.asked_ns is None and self.finish is None:
            self.asked_ns = self.world.now_ns
        self._feed(SuspendAsked())

    # -- the supervisor ------------------------------------------------------------------------------------------------

    def _node_of(self, one: Incarnation) -> Node:
        return self.memory.setdefault((one.node, one.number), Node())

    def _tell(self, one: Incarnation, command: Callable[[], None]) -> None:
        """Commands to a supervisor keep their order."""
        node = self._node_of(one)
        node.told_ns = max(node.told_ns + 1, self.world.now_ns + self._upto(self.chaos.max_delay_ns))
        self.world.call_at(node.told_ns, command)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, AskPoints):
            one = self._find(effect.node, effect.incarnation)
            self._tell(one, partial(self._hold, one, effect.attempt))
        elif isinstance(effect, NameHorizon):
            self.horizon = effect.horizon
            one = self._find(effect.node, effect.incarnation)
            self._tell(one, partial(self._set_horizon, one, effect))
        else:
            super()._perform(effect)
        if self.finish is not None and not self.finished_ns:
            self.finished_ns = self.world.now_ns

    def _hold(self, one: Incarnation, attempt: int) -> None:
        node = self._node_of(one)
        if not one.alive or one.hung or one.attempt != attempt:
            return
        if self.holds_first:
            node.cells.hold()
            self.world.call_after(self._upto(5 * MS), partial(self._collect, one, attempt))
        else:
            self._collect(one, attempt)
            self.world.call_after(self._upto(5 * MS), node.cells.hold)

    def _collect(self, one: Incarnation, attempt: int) -> None:
        node = self._node_of(one)
        if not one.alive or one.attempt != attempt:
            return
        if node.barrier and self.barriers:
            for buffer in node.buffers:
                buffer.flush()
        points = node.cells.points(exact=node.barrier)
        self._say(PointsCollected(one.node, one.number, Points(attempt, points)))

    def _set_horizon(self, one: Incarnation, effect: NameHorizon) -> None:
        if one.alive and not one.hung and one.attempt == effect.attempt:
            self._node_of(one).cells.set_horizon(effect.horizon)

    def _end_ranks(self, one: Incarnation, attempt: int, grace_ns: int) -> None:
        if one.alive and not one.hung and one.attempt == attempt:
            self._node_of(one).cells.release()
        super()._end_ranks(one, attempt, grace_ns)

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def _start_ranks(self, one: Incarnation, attempt: int) -> None:
        for other in self.incarnations:
            assert other.node != one.node or not other.living(), "two attempts alive in one node"
        if not one.alive or one.hung:
            return
        numbers = self.gang.layout.ranks(one.node)
        one.attempt, one.told, one.ends = attempt, False, {}
        one.ranks = dict.fromkeys(numbers, True)
        memories = [[0] * CELLS for _ in numbers]
        node = self._node_of(one)
        node.cells, node.buffers = NodeCells(memories), [Buffered(self, memory) for memory in memories]
        node.barrier = not self._rng(0.2)
        for number, buffer in zip(numbers, node.buffers, strict=True):
            rank = Rank(one, attempt, number, self.rank_cells(buffer))
            self.world.call_after(self._upto(2 * SECOND if self._rng(0.3) else 200 * MS), partial(self._train, rank))
            if self._rng(self.chaos.rank_crashes):
                code = self.world.random.choice([1, 7, 137])
                self.world.call_after(self._upto(4 * SECOND), partial(self._end, one, attempt, number, code))

    def _lives(self, rank: Rank) -> bool:
        return rank.one.attempt == rank.attempt and rank.one.ranks.get(rank.number, False)

    def _train(self, rank: Rank) -> None:
        if not self._lives(rank):
            return
        rank.step += 1
        if rank.step > self.last_step:
            self._end(rank.one, rank.attempt, rank.number, 0)
            return
        compute_ns = MIN_STEP_NS + self._upto(self.step_ns)
        after = partial(self._point, rank)
        if rank.step % self.collective_every == 0:
            after = partial(self._meet, rank, "sum", after)
        self.world.call_after(compute_ns, after)

    def _meet(self, rank: Rank, what: str, then: Callable[[], None]) -> None:
        """A collective: none goes on before all are there."""
        if not self._lives(rank):
            return
        here = self.waiting.setdefault((rank.attempt, what, rank.step), [])
        here.append(then)
        if len(here) == self.gang.world_size:
            for call in here:
                self.world.call_after(self._upto(MS), call)

    def _point(self, rank: Rank) -> None:
        if not self._lives(rank):
            return
        asks = self.asking in ("all", "steps") or (self.asking == "rank 0" and rank.number == 0)
        if not asks or (self.asking == "steps" and rank.step % 3) or rank.step == self.last_step:
            self._train(rank)
        else:
            self._answered(rank, rank.cells.enter(100 + rank.step if self.asking == "steps" else None))

    def _answered(self, rank: Rank, answer: Answer) -> None:
        point = rank.step + 100 if self.asking == "steps" else rank.step
        if answer is Answer.WAIT:
            self.world.call_after(ANSWER_PERIOD_NS, partial(self._look, rank))
        elif answer is Answer.GO_ON:
            if not rank.one.told:  # of ranks that are being stopped none waits any more
                self.went_on.append((rank.attempt, rank.number, point))
            self._train(rank)
        else:
            self.left.append((rank.attempt, rank.number, point))
            leave = partial(self._leave, rank)
            self.world.call_after(
                self._upto(SAVE_NS), leave if self.asking == "rank 0" else partial(self._meet, rank, "save", leave)
            )

    def _look(self, rank: Rank) -> None:
        if self._lives(rank):
            self._answered(rank, rank.cells.look())

    def _leave(self, rank: Rank) -> None:
        """As `_end`, with the exit code that was agreed."""
        one = rank.one
        if not self._lives(rank):
            return
        rank.cells.leave()
        one.ranks[rank.number] = False
        end = one.ends[rank.number] = RankEnd(rank.attempt, rank.number, SUSPENDED_EXIT_CODE, one.told, suspended=True)
        if one.alive and not one.hung:
            self._say(RankEnded(one.node, one.number, end))
            if not one.living():
                self._say(RanksGone(one.node, one.number, rank.attempt, tuple(one.ends.values())))
        if self.asking == "rank 0":  # the others notice in a collective that it is gone
            for other in self.incarnations:
                for number in other.living():
                    if self._rng(0.5):
                        fails = partial(self._end, other, rank.attempt, number, 1, of_another=True)
                        self.world.call_after(self._upto(50 * MS), fails)


def check(job: Job) -> None:
    finish, log = job.finish, job.log
    assert finish is not None, "the job never ended"
    assert isinstance(log[-1], JobFinished)
    if "processes" not in finish.reason:
        assert not [one for one in job.incarnations if one.alive or one.living()], "somebody is left"
    check_points(job)
    asked = [number for number, event in enumerate(log) if isinstance(event, SuspendRequested)]
    suspended = [event for event in log if isinstance(event, Suspended)]
    assert len(asked) <= 1
    if asked:
        assert not [event for event in log[asked[0] :] if isinstance(event, AttemptStarted)], "started after all"
    assert finish.suspended == (finish.exit_code == SUSPENDED_EXIT_CODE)
    assert len(suspended) == 1 or not finish.suspended
    assert asked or not finish.suspended
    if finish.exit_code == 0:
        exits = [event for event in log if isinstance(event, RankExited) and event.attempt == job.gang.attempt]
        assert [event.exit_code for event in exits] == [0] * job.gang.world_size


def check_points(job: Job) -> None:
    """All that left did so at one point, the first at the horizon or after it; and none went on there."""
    points = {point for _, _, point in job.left}
    assert len(points) <= 1, f"ranks left at {sorted(points)}"
    if job.horizon is not None:
        beyond = [entry for entry in job.went_on if entry[0] == job.gang.attempt and entry[2] >= job.horizon]
        assert not beyond, f"the horizon is {job.horizon}, but {beyond} went on"
    stopped = job.gang._judgement.ends_job
    left = [event for event in job.log if isinstance(event, RankExited) and event.exit_code == SUSPENDED_EXIT_CODE]
    assert not left or stopped or (job.finish is not None and job.finish.suspended), (
        "ranks left, and it is no suspension"
    )


def check_calm(job: Job) -> None:
    """Nothing broke: who asks leaves by itself, and soon; who does not is stopped."""
    finish = job.finish
    assert finish is not None
    if job.asked_ns is None:
        assert finish.exit_code == 0, finish.reason
        return
    assert finish.suspended or finish.exit_code == 0, finish.reason
    took_ns = job.finished_ns - job.asked_ns
    ended = [event.ended_ranks for event in job.log if isinstance(event, Suspended)]
    if job.asking in ("all", "steps"):
        assert ended in ([], [0]), "ranks had to be stopped"
        start_ns, steps = 2 * SECOND, (3 if job.asking == "steps" else 1) + job.collective_every
        assert took_ns <= start_ns + steps * (MIN_STEP_NS + job.step_ns) + SAVE_NS + SECOND, (
            f"took {took_ns / SECOND} s"
        )
    else:
        assert took_ns <= GRACE_NS + job.spec.timeouts.stop_grace_ns + SECOND


CHAOS = replace(Chaos(), rank_crashes=0.05, supervisor_dies=0.08, forgetful=0.0)


def history(seed: int, job_type: type[Job] = Job) -> Job:
    calm = seed % 2 == 0
    kinds: tuple[Asking, ...] = ("all", "steps", "all", "rank 0", "all", "none")
    asking = kinds[seed // 2 % len(kinds)]
    spec = spec_of(seed, nodes=1 + seed % 3, on_failure=(), suspend_grace_ns=GRACE_NS)
    job = job_type(seed, spec, CALM if calm else CHAOS, asking)
    job.run()
    check(job)
    if calm:
        check_calm(job)
    return job


@pytest.mark.parametrize("block", range(2))
def test_ranks_leave_at_one_point_or_the_job_ends_in_order(block: int) -> None:
    ends = [history(seed).finish for seed in range(block * 60, block * 60 + 60)]
    codes = {finish.exit_code for finish in ends if finish is not None}
    assert {0, SUSPENDED_EXIT_CODE} < codes, "the schedules are too tame to mean anything"


@pytest.mark.parametrize("seeds", more_seeds(1000, 1500, blocks=1, wide=2000, seed_s=0.004))
def test_in_many_histories_ranks_leave_at_one_point_or_the_job_ends_in_order(seeds: range) -> None:
    for seed in seeds:
        history(seed)


@pytest.mark.parametrize("seed", [2, 5, 9])
def test_a_seed_gives_one_history(seed: int) -> None:
    assert history(seed).world.trace.to_bytes() == history(seed).world.trace.to_bytes()


class _AsksBeforeItWrites(RankCells):
    __slots__ = ()

    def enter(self, step: int | None = None) -> Answer:
        cells, before = self._cells, self._cells[cells_of_base._WORD]
        assert isinstance(cells, Buffered)
        point = self._point = self._point + 1 if step is None else step
        write = partial(cells.__setitem__, cells_of_base._POINT, point)
        cells._cluster.world.call_after(MS, write)
        return Answer.GO_ON if before == cells_of_base._GO_ON else self.look()


class _DoesNotWait(RankCells):
    __slots__ = ()

    def look(self) -> Answer:
        answer = super().look()
        return Answer.GO_ON if answer is Answer.WAIT else answer


class _LeavesAtTheHorizonOnly(RankCells):
    __slots__ = ()

    def look(self) -> Answer:
        answer, word = super().look(), self._cells[cells_of_base._WORD]
        return Answer.GO_ON if answer is Answer.LEAVE and word != self._point else answer


class _AskingFirst(Job):
    rank_cells = _AsksBeforeItWrites


class _NotWaiting(Job):
    rank_cells = _DoesNotWait


class _Exact(Job):
    rank_cells = _LeavesAtTheHorizonOnly


class _WithoutBarrier(Job):
    barriers = False


class _ReadsFirst(Job):
    holds_first = False


MUTANTS: dict[str, type[Job]] = {
    "a rank reads the word before it writes its point": _AskingFirst,
    "a rank goes on while the horizon is not known": _NotWaiting,
    "a rank leaves at the horizon only": _Exact,
    "there is no memory barrier": _WithoutBarrier,
    "points are read before the ranks are held": _ReadsFirst,
}


def _first_answer(self: core.Suspension, nodes: Any) -> Any:
    busy = [node for node in nodes if node.state is NodeState.BUSY]
    if not self._collecting or not self._points:
        return []
    self._collecting = False
    self.horizon = cells_of_base.horizon_of([point for points in self._points.values() for point in points])
    return [NameHorizon(node.number, node.incarnation, self._attempt, self.horizon) for node in busy]


def _of_busy_nodes(self: core.Suspension, nodes: Any) -> Any:
    return _ADVANCE(self, [node for node in nodes if node.state is NodeState.BUSY])


_ADVANCE = core.Suspension.advance

PATCHES: dict[str, tuple[object, str, object]] = {
    "the horizon is the highest point": (core, "horizon_of", lambda points: max(0, *points, 0)),
    "the horizon is named after the first answer": (core.Suspension, "advance", _first_answer),
    "the points of ranks that have ended do not count": (core.Suspension, "advance", _of_busy_nodes),
    "what fails after a rank has left counts": (
        judgement.Judgement,
        "any_left",
        property(lambda _: False, lambda *_: None),
    ),
    "an attempt follows a suspension": (
        judgement.Judgement,
        "restarting",
        property(lambda one: one._decision.restart and not one.ends_job),
    ),
    "a suspension has no end": (core.Suspension, "overdue", lambda *_: False),
    "a missing barrier costs no point": (
        NodeCells,
        "points",
        lambda self, exact: tuple(cells[cells_of_base._POINT] for cells in self._ranks),
    ),
}


def found_by(seed: int, job_type: type[Job] = Job) -> str | None:
    try:
        history(seed, job_type)
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_ranks_and_supervisors_is_found(mutant: str) -> None:
    print(mutant, *search("suspension", mutant, 2000, lambda seed: found_by(seed, MUTANTS[mutant])))


@pytest.mark.parametrize("mutant", PATCHES)
def test_a_mutant_of_the_launcher_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PATCHES[mutant], raising=False)
    print(mutant, *search("suspension", mutant, 2000, found_by))

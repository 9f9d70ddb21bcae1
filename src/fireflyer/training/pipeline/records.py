"""What a step of a pipeline did and when, and how that compares with what the simulator says. Pure but for `Recorder`'s
clock, which is given."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.codesign.schedule.actions import Action, Kind, Pair, Schedule, passes
from fireflyer.codesign.schedule.costs import Costs
from fireflyer.codesign.schedule.program import Program, compile_schedule
from fireflyer.codesign.schedule.timing import simulate
from fireflyer.training.overlap import Interval, Overlap, measure_overlap
from fireflyer.training.pipeline.programs import Key, needs

__all__ = [
    "Comparison",
    "PhaseEvent",
    "Recorder",
    "Span",
    "StepRecord",
    "compare",
    "measured_costs",
    "measured_overlap",
]

MAX_PHASE_EVENTS: Final = 1 << 16


class Span(NamedTuple):
    """One pass or pair of a row, in ns. `begin_ns` is when its inputs were there, `end_ns` when its outputs were."""

    begin_ns: int
    end_ns: int


class PhaseEvent(NamedTuple):
    """A phase of a pass begins or has ended, e.g. of `F` of stage 2 on micro-batch 5."""

    at_ns: int
    kind: str
    stage: int
    micro_batch: int
    phase: str
    begins: bool


class StepRecord(msgspec.Struct, frozen=True):
    """One step of one rank."""

    rank: int
    begin_ns: int
    end_ns: int
    spans: tuple[Span, ...]
    """Begin and end of each item of the rank's row, in order."""
    waited_ns: int
    """Time of waiting for messages and, at the end, for sends, shared gradients and replicas."""
    phases: tuple[PhaseEvent, ...]
    """The first ones, in order; none unless asked for."""

    @property
    def passes_ns(self) -> int:
        return sum(span.end_ns - span.begin_ns for span in self.spans)

    @property
    def overhead_ns(self) -> float:
        """Processor time for each item outside passes and waits: packing, sending, posting, looking up."""
        return (self.end_ns - self.begin_ns - self.passes_ns - self.waited_ns) / max(1, len(self.spans))


class Recorder:
    """Of one rank and one step at a time."""

    def __init__(self, rank: int, now_ns: Callable[[], int], *, phases: bool = False) -> None:
        self.now_ns = now_ns
        self.last: StepRecord | None = None
        self._rank = rank
        self._keeps_phases = phases
        self._begin_ns = 0
        self._spans: list[Span] = []
        self._phases: list[PhaseEvent] = []
        self.waited_ns = 0

    def begin(self) -> None:
        self._spans, self._phases, self.waited_ns = [], [], 0
        self._begin_ns = self.now_ns()

    def span(self, begin_ns: int, end_ns: int) -> None:
        self._spans.append(Span(begin_ns, end_ns))

    def phase_hook(self, stage: int) -> Callable[[str, int, str, bool], None] | None:
        """For `StagePasses`."""
        if not self._keeps_phases:
            return None

        def on_phase(kind: str, micro_batch: int, phase: str, begins: bool) -> None:
            if len(self._phases) < MAX_PHASE_EVENTS:
                self._phases.append(PhaseEvent(self.now_ns(), kind, stage, micro_batch, phase, begins))

        return on_phase

    def end(self) -> None:
        self.last = StepRecord(
            self._rank, self._begin_ns, self.now_ns(), tuple(self._spans), self.waited_ns, tuple(self._phases)
        )


class Comparison(msgspec.Struct, frozen=True):
    """Times from the first pass of all ranks to the last, in seconds."""

    predicted_s: float
    measured_s: float
    predicted_bubble_s: float
    """Predicted waiting time of the rank that waits longest."""
    measured_bubble_s: float

    @property
    def ratio(self) -> float:
        return self.measured_s / self.predicted_s

    def __str__(self) -> str:
        return (
            f"step {self.measured_s * 1e3:.2f} ms measured, {self.predicted_s * 1e3:.2f} ms predicted "
            f"({self.ratio:.3f}); bubble {self.measured_bubble_s * 1e3:.2f} ms measured, "
            f"{self.predicted_bubble_s * 1e3:.2f} ms predicted"
        )


def measured_costs(schedule: Schedule, records: Sequence[StepRecord], *, latency_s: float | None = None) -> Costs:
    """Costs by stage from what a step took: medians of the passes of each kind. Where a stage has none of a kind it is
    derived: B is I and W, and I and W are halves of B.

    `latency_s` of a message; None: the median over messages that were waited for, from the end of the pass that made
    them. That compares clocks of ranks, so it is for ranks of one machine. Raises `UsageError` where records do not fit
    the schedule.
    """
    _check(schedule, records)
    found: dict[tuple[Kind, int], list[float]] = {}
    pairs: list[tuple[int, int, float]] = []
    for row, record in zip(schedule.rows, records, strict=True):
        for item, span in zip(row, record.spans, strict=True):
            took_s = (span.end_ns - span.begin_ns) / SECOND
            if isinstance(item, Pair):
                pairs.append((item.forward.stage, item.backward.stage, took_s))
            else:
                found.setdefault((item.kind, item.stage), []).append(took_s)
    medians = {key: statistics.median(values) for key, values in found.items()}
    stages = range(schedule.placement.stages)
    forward = [_one_of(medians, Kind.FORWARD, stage) for stage in stages]
    parts = [[medians.get((kind, stage)) for kind in (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)] for stage in stages]
    backward, inputs, weights = [], [], []
    for whole, for_input, for_weights in parts:
        if for_input is None or for_weights is None:
            for_input = for_weights = (whole or 0.0) / 2
        inputs.append(for_input)
        weights.append(for_weights)
        backward.append(for_input + for_weights if whole is None else whole)
    alone = sum(forward[f] + backward[b] for f, b, _ in pairs)
    return Costs(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        input_s=tuple(inputs),
        weights_s=tuple(weights),
        pair_ratio=sum(took for _, _, took in pairs) / alone if alone else 1.0,
        latency_s=_latency_s(schedule, records) if latency_s is None else latency_s,
    )


def compare(
    schedule: Schedule, records: Sequence[StepRecord], *, latency_s: float | None = None, each_pass: bool = False
) -> Comparison:
    """The step that was measured beside the one that the simulator computes from `measured_costs`. `records` of all
    ranks, in their order, of ranks of one machine: their clocks are compared. `each_pass`: every pass takes what it
    took, not the median of its kind, so that only messages and what lies between passes make a difference. Raises as
    `measured_costs`."""
    costs = measured_costs(schedule, records, latency_s=latency_s)
    program = compile_schedule(schedule)
    taken_s = _taken_s(program, records) if each_pass else None
    timeline = simulate(program, costs, taken_s=taken_s)
    begin = min(record.spans[0].begin_ns for record in records)
    end = max(record.spans[-1].end_ns for record in records)
    return Comparison(
        predicted_s=timeline.total_s,
        measured_s=(end - begin) / SECOND,
        predicted_bubble_s=timeline.bubble_s,
        measured_bubble_s=max(end - begin - record.passes_ns for record in records) / SECOND,
    )


def _taken_s(program: Program, records: Sequence[StepRecord]) -> list[float]:
    taken = [0.0] * len(program.items)
    for row, record in zip(program.rows, records, strict=True):
        for item, span in zip(row, record.spans, strict=True):
            taken[item] = (span.end_ns - span.begin_ns) / SECOND
    return taken


def measured_overlap(records: Sequence[StepRecord], transfers: Collection[str]) -> tuple[Overlap, ...]:
    """Transfers that each rank has hidden: the time in which a phase of `transfers`, by name, was under way, and the
    part of it in which another phase of the rank computed. `records` need phases (`record_phases`).

    A transfer counts from its start to the end of the wait for it. Raises `UsageError` for records without phases, or
    with too many to be whole.
    """
    found = []
    for record in records:
        if not record.phases:
            raise UsageError(f"rank {record.rank} has recorded no phases; make its pipeline with record_phases=True")
        if len(record.phases) == MAX_PHASE_EVENTS:
            raise UsageError(
                f"rank {record.rank} has recorded only the first {MAX_PHASE_EVENTS} begins and ends of phases of a "
                "step; use fewer micro-batches"
            )
        communication, computing = _phase_intervals(record, transfers)
        found.append(measure_overlap(communication, computing))
    return tuple(found)


def _phase_intervals(record: StepRecord, transfers: Collection[str]) -> tuple[list[Interval], list[Interval]]:
    begun: dict[tuple[str, int, int, str], int] = {}
    communication: list[Interval] = []
    computing: list[Interval] = []
    for event in record.phases:
        key = (event.kind, event.stage, event.micro_batch, event.phase)
        if event.begins:
            begun[key] = event.at_ns
        else:
            (communication if event.phase in transfers else computing).append((begun.pop(key), event.at_ns))
    return communication, computing


def _check(schedule: Schedule, records: Sequence[StepRecord]) -> None:
    if [record.rank for record in records] != list(range(len(schedule.rows))):
        raise UsageError(
            f"schedule {schedule.name!r} has {len(schedule.rows)} ranks; give the record of each, in order"
        )
    for row, record in zip(schedule.rows, records, strict=True):
        if len(row) != len(record.spans):
            raise UsageError(
                f"rank {record.rank} has recorded {len(record.spans)} passes, the schedule {schedule.name!r} has "
                f"{len(row)}"
            )


def _one_of(medians: Mapping[tuple[Kind, int], float], kind: Kind, stage: int) -> float:
    """Of that stage, else the mean of the others: a stage may run a kind in pairs alone."""
    own = medians.get((kind, stage))
    if own is not None:
        return own
    others = [value for (one, _), value in medians.items() if one is kind]
    return statistics.fmean(others) if others else 0.0


def _latency_s(schedule: Schedule, records: Sequence[StepRecord]) -> float:
    made: dict[Key, tuple[int, int]] = {}
    for rank, row in enumerate(schedule.rows):
        for item, span in zip(row, records[rank].spans, strict=True):
            for action in passes(item):
                if action.kind is not Kind.WEIGHT:
                    made[_output(action)] = rank, span.end_ns
    found = []
    for rank, row in enumerate(schedule.rows):
        free_ns = 0
        for item, span in zip(row, records[rank].spans, strict=True):
            for action in passes(item):
                key = needs(action, schedule.placement.stages)
                source, made_ns = made[key] if key is not None else (rank, 0)
                if source != rank and free_ns and made_ns > free_ns:  # the rank was there first, and waited
                    found.append((span.begin_ns - made_ns) / SECOND)
            free_ns = span.end_ns
    return max(0.0, statistics.median(found)) if found else 0.0


def _output(action: Action) -> Key:
    forward = action.kind is Kind.FORWARD
    return not forward, action.stage if forward else action.stage - 1, action.micro_batch

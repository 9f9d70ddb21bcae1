"""The rows of GPipe, 1F1B, interleaved 1F1B and the zero-bubble schedules, from their definitions.

Sources: GPipe (Huang et al., 2019); 1F1B and interleaved 1F1B (Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters", 2021); ZB-H1 and ZB-H2 (Qi et al., "Zero Bubble Pipeline Parallelism", 2023); ZBV (Qi et al.,
"Pipeline Parallelism with Controllable Memory", 2024).

All but ZBV have one form. A rank runs some forwards (the warm-up), then alternates forwards and backwards, then runs
the backwards that are left. Where the backward is split, W of a backward comes `delay` backwards after its I: a rank
that waits for W sends its gradients upstream earlier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from fireflyer.codesign.schedule.actions import Action, Kind, Row, Schedule, looped, v_shaped

__all__ = ["gpipe", "interleaved", "interleaved_zero_bubble", "one_f_one_b", "zb_h1", "zb_h2", "zbv"]

_Pass = tuple[int, int]
"""Stage and micro-batch."""


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards."""
    return _linear("gpipe", ranks, micro_batches, lambda _: micro_batches)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """At most `ranks` - r micro-batches are in flight on rank r."""
    return _linear("1f1b", ranks, micro_batches, lambda rank: ranks - 1 - rank)


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B with a split backward, and W of rank r delayed by r backwards: the activations of 1F1B, and a third of its
    bubble where F, I and W take the same time."""
    return _linear("zb-h1", ranks, micro_batches, lambda rank: ranks - 1 - rank, lambda rank: rank)


def zb_h2(ranks: int, micro_batches: int) -> Schedule:
    """ZB-H1 with twice the warm-up and the delay: no bubble between the first and the last pass of a rank where F, I
    and W take the same time, with 2 `ranks` - 1 micro-batches in flight."""
    return _linear("zb-h2", ranks, micro_batches, lambda rank: 2 * (ranks - 1 - rank), lambda rank: 2 * rank)


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int) -> Schedule:
    """1F1B over several stages a rank, with a bubble that is that many times shorter."""
    return _interleaved("interleaved", ranks, micro_batches, stages_per_rank, split=False)


def interleaved_zero_bubble(ranks: int, micro_batches: int, stages_per_rank: int) -> Schedule:
    """Interleaved 1F1B with a split backward; W of rank r is delayed by r backwards."""
    return _interleaved("interleaved-zb", ranks, micro_batches, stages_per_rank, split=True)


def _interleaved(name: str, ranks: int, micro_batches: int, stages_per_rank: int, *, split: bool) -> Schedule:
    groups = _groups(micro_batches, ranks)
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * stages_per_rank, ranks)
        forwards = [(stage, one) for group in groups for stage in stages for one in group]
        backwards = [(stage, one) for group in groups for stage in reversed(stages) for one in group]
        # A forward of the whole group on each stage but the last, and then as far ahead of the next rank as its
        # gradient takes to come back: two passes a rank, or one where the backward is split.
        warm_up = (stages_per_rank - 1) * len(groups[0]) + (1 if split else 2) * (ranks - 1 - rank)
        rows.append(_row(forwards, backwards, warm_up=warm_up, delay=rank if split else None))
    return Schedule(name, looped(ranks, stages_per_rank), micro_batches, tuple(rows))


def _linear(
    name: str,
    ranks: int,
    micro_batches: int,
    warm_up: Callable[[int], int],
    delay: Callable[[int], int] | None = None,
) -> Schedule:
    """One stage a rank; `warm_up` and `delay` of a rank."""
    rows = []
    for rank in range(ranks):
        order = [(rank, micro_batch) for micro_batch in range(micro_batches)]
        rows.append(_row(order, order, warm_up=warm_up(rank), delay=None if delay is None else delay(rank)))
    return Schedule(name, looped(ranks), micro_batches, tuple(rows))


def _groups(micro_batches: int, ranks: int) -> list[range]:
    """Runs of at least `ranks` micro-batches where there are as many, the longer ones first: each passes all stages of
    a rank before the next run begins."""
    count = max(1, micro_batches // ranks)
    size, longer = divmod(micro_batches, count)
    ends = [(index + 1) * size + min(index + 1, longer) for index in range(count)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _row(forwards: Sequence[_Pass], backwards: Sequence[_Pass], *, warm_up: int, delay: int | None = None) -> Row:
    """`delay` None: the backward is not split."""
    kind = Kind.BACKWARD if delay is None else Kind.INPUT
    row = [Action(Kind.FORWARD, *one) for one in forwards[:warm_up]]
    for index, one in enumerate(backwards):
        row += [Action(Kind.FORWARD, *next_one) for next_one in forwards[warm_up + index : warm_up + index + 1]]
        row.append(Action(kind, *one))
        if delay is not None and index >= delay:
            row.append(Action(Kind.WEIGHT, *backwards[index - delay]))
    if delay:
        row += [Action(Kind.WEIGHT, *one) for one in backwards[-delay:]]
    return tuple(row)


def zbv(ranks: int, micro_batches: int) -> Schedule:
    """Two stages a rank in the shape of a V: activations of 1F1B; no bubble between the first and the last pass of a
    rank where F, I and W take the same time.

    The order is defined for at least 2 `ranks` - 1 micro-batches; for fewer it is that order without the passes of the
    micro-batches that are not there.
    """
    rows = [
        tuple(
            action
            for action in _zbv_row(rank, ranks, max(micro_batches, 2 * ranks - 1))
            if action.micro_batch < micro_batches
        )
        for rank in range(ranks)
    ]
    return Schedule("zbv", v_shaped(ranks), micro_batches, tuple(rows))


def _zbv_row(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    done: Counter[tuple[Kind, int]] = Counter()
    row: list[Action] = []

    def run(stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            row.append(Action(kind, stage, done[kind, stage]))
            done[kind, stage] += 1

    for _ in range(2 * (ranks - rank) - 1):
        run(down, Kind.FORWARD)
    for _ in range(rank):
        run(up, Kind.FORWARD)
        run(down, Kind.FORWARD)
    for _ in range(ranks - rank):
        run(up, Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
    while done[Kind.FORWARD, up] < micro_batches:
        if done[Kind.FORWARD, down] < micro_batches:
            run(down, Kind.FORWARD)
        run(down, Kind.INPUT, Kind.WEIGHT)
        run(up, Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
    for _ in range(rank):
        run(down, Kind.INPUT)
        run(up, Kind.INPUT)
    for _ in range(ranks - rank):
        run(down, Kind.INPUT, Kind.WEIGHT)
    for stage in (up, down):
        while done[Kind.WEIGHT, stage] < micro_batches:
            run(stage, Kind.WEIGHT)
    return row

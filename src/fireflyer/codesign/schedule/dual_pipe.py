"""DualPipe and DualPipeV: rows whose steady part is pairs of a forward and a backward of different micro-batches.

Source: the eight steps of DualPipe (DeepSeek-V3 report, 2024, and its published schedule). DualPipeV is one half of it
on half the ranks. One function serves both: it knows a rank by its distance from the end of the pipeline, and has two
lanes. Lane 0 is the one whose first stage is nearer, lane 1 the one whose last stage is nearer:

- DualPipe, P ranks: the lanes are the two directions, P/2 different distances, each with half of the micro-batches;
- DualPipeV, p ranks: the lanes are the two stages of a rank in a V of 2p stages, with the same micro-batches.
"""

from __future__ import annotations

from collections import Counter, deque

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule.actions import Action, Kind, Pair, Row, Schedule, bidirectional, v_shaped

__all__ = ["dual_pipe", "dual_pipe_v"]


def dual_pipe(ranks: int, micro_batches: int) -> Schedule:
    """Each rank holds two stages, one of each direction: twice the parameters, `ranks` + 1 activations.

    Raises `UsageError` unless `ranks` and `micro_batches` are even and there are two micro-batches a rank.
    """
    if ranks % 2 or micro_batches % 2 or micro_batches < 2 * ranks:
        raise UsageError(
            f"dualpipe needs an even number of ranks P, and an even number of micro-batches, at least 2 P; "
            f"not P = {ranks} and {micro_batches} micro-batches"
        )
    half = micro_batches // 2
    rows = []
    for rank in range(ranks):
        other = ranks - 1 - rank
        lanes = ((rank, 0), (other, half)) if rank < other else ((other, half), (rank, 0))
        rows.append(_Steps(lanes).run(min(rank, other), ranks // 2, half))
    return Schedule("dualpipe", bidirectional(ranks), micro_batches, tuple(rows))


def dual_pipe_v(ranks: int, micro_batches: int) -> Schedule:
    """Each rank holds two stages of 2 `ranks`, in the shape of a V; `ranks` + 1/2 activations.

    Raises `UsageError` for fewer than two micro-batches a rank.
    """
    if micro_batches < 2 * ranks:
        raise UsageError(f"dualpipev needs at least two micro-batches a rank; not {micro_batches} on {ranks} ranks")
    rows = [_Steps(((rank, 0), (2 * ranks - 1 - rank, 0))).run(rank, ranks, micro_batches) for rank in range(ranks)]
    return Schedule("dualpipev", v_shaped(ranks), micro_batches, tuple(rows))


class _Steps:
    """The row of one rank while it grows. `lanes`: stage, and first micro-batch, of lanes 0 and 1."""

    def __init__(self, lanes: tuple[tuple[int, int], tuple[int, int]]) -> None:
        self._lanes = lanes
        self._done: Counter[tuple[bool, int]] = Counter()
        self._row: list[Action | Pair] = []
        self._weights: deque[Action] = deque()

    def run(self, rank: int, ranks: int, micro_batches: int) -> Row:
        """`rank` counts from the end of the pipeline to its middle, `ranks` - 1; `micro_batches` are of one lane."""
        middle = rank == ranks - 1
        for _ in range(2 * (ranks - rank - 1)):
            self._forward(0)
        for _ in range(rank + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(ranks - rank - 1):
            self._input(1)
            self._weight()
            self._forward(1)
        for index in range(micro_batches - 2 * ranks + rank + 1):
            if middle and index == 0:  # its input comes from the other lane of the same rank: nothing to hide
                self._forward(0)
                self._backward(1)
            else:
                self._pair(0, 1)
            self._pair(1, 0)
        for _ in range(ranks - rank - 1):
            self._backward(1)
            self._pair(1, 0)
        for index in range(rank + 1):  # from its middle on the backward is split: W fills what follows
            turn, odd = (rank + 1) // 2, rank % 2
            (self._input if index > turn or (index == turn and odd) else self._backward)(1)
            (self._input if index >= turn else self._backward)(0)
        for _ in range(ranks - rank - 1):
            self._weight()
            self._input(0)
        while self._weights:
            self._weight()
        return tuple(self._row)

    def _next(self, kind: Kind, lane: int) -> Action:
        stage, first = self._lanes[lane]
        key = (kind is Kind.FORWARD, lane)
        self._done[key] += 1
        return Action(kind, stage, first + self._done[key] - 1)

    def _forward(self, lane: int) -> None:
        self._row.append(self._next(Kind.FORWARD, lane))

    def _backward(self, lane: int) -> None:
        self._row.append(self._next(Kind.BACKWARD, lane))

    def _input(self, lane: int) -> None:
        action = self._next(Kind.INPUT, lane)
        self._row.append(action)
        self._weights.append(action._replace(kind=Kind.WEIGHT))

    def _weight(self) -> None:
        self._row.append(self._weights.popleft())

    def _pair(self, forward: int, backward: int) -> None:
        self._row.append(Pair(self._next(Kind.FORWARD, forward), self._next(Kind.BACKWARD, backward)))

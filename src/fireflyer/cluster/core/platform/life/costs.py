"""What an interruption of each run costs, from what the node of its launcher says of its checkpoints.

A run that asks `should_suspend()` saves when it is told to go: it loses the time to save and to start again. Any other
is killed after its grace period, and loses beside that all since its last checkpoint, or since it was scheduled.

Kept in memory alone, and compared coarsely: a checkpoint is no transaction, and the scheduler hears of it once in
`COARSE_NS` at most. A new leader has heard of all nodes before it interrupts anything (`settle_ns`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.store.rows import RunRow
from fireflyer.cluster.schema.sync import Saving

__all__ = ["COARSE_NS", "UNKNOWN_NS", "Cost", "RunCosts"]

COARSE_NS: Final = 30 * SECOND
STEP_NS: Final = 5 * SECOND
"""What is measured is rounded up to a multiple of it."""
UNMEASURED_NS: Final = 30 * SECOND
"""To save, or to start, of a run of which that is not known."""
UNKNOWN_NS: Final = 2 * UNMEASURED_NS


class Cost(NamedTuple):
    """As the scheduler has it: see `model.Request` and `model.Run`."""

    interrupt_cost_ns: int
    unsaved_since_ns: int | None


class _Known(NamedTuple):
    each_ns: int
    asks: bool
    saved_ns: int | None
    """Cluster time of the last checkpoint."""


_NOTHING: Final = _Known(UNKNOWN_NS, False, None)


class RunCosts:
    def __init__(self) -> None:
        self._known: dict[tuple[int, int], _Known] = {}

    def hear(self, run: RunRow, saving: Saving | None, time_ns: int) -> bool:
        """Whether it costs something else than before. `time_ns`: cluster time, when it was said."""
        key = run.task, run.number
        before = self._known.get(key, _NOTHING)
        if saving is None:
            return False
        each_ns = _rounded(saving.save_ns) + _rounded(saving.start_ns)
        saved_ns = time_ns - saving.age_ns if saving.age_ns is not None else before.saved_ns
        if saved_ns is not None and before.saved_ns is not None and abs(saved_ns - before.saved_ns) < COARSE_NS:
            saved_ns = before.saved_ns
        self._known[key] = _Known(each_ns, saving.asks, saved_ns)
        return self._known[key] != before

    def of(self, run: RunRow) -> Cost:
        known = self._known.get((run.task, run.number), _NOTHING)
        since_ns = None if known.asks else max(run.scheduled_ns, known.saved_ns or 0)
        return Cost(known.each_ns, since_ns)

    def saved_ns(self, run: tuple[int, int]) -> int | None:
        """Cluster time of its last checkpoint, at most `COARSE_NS` too early; None: nobody has told of one."""
        return self._known.get(run, _NOTHING).saved_ns

    def forget(self, run: tuple[int, int]) -> None:
        self._known.pop(run, None)


def _rounded(measured_ns: int | None) -> int:
    return UNMEASURED_NS if measured_ns is None else -(-measured_ns // STEP_NS) * STEP_NS

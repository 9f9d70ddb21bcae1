"""What was committed since this manager began to lead, counted for metrics.

Counts start at 0 with each lead, as counters of Prometheus do after a restart. A draft that the store did not take is
not counted, and none is counted twice: rows of the draft are compared with those that were committed before.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from fireflyer.base.histogram import Histogram
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.records import RepairState
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import RunRow, TaskRow, Wish
from fireflyer.cluster.schema.tasks import Cause, Outcome

__all__ = ["Tally"]

WAIT_BOUNDS_S: Final = (1, 10, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86_400, 3 * 86_400, 7 * 86_400)


class Tally:
    def __init__(self) -> None:
        self.submitted = 0
        self.finished: Counter[Outcome] = Counter()
        self.requeued: Counter[Cause | None] = Counter()
        self.scheduled = 0
        self.started = 0
        self.ended: Counter[Cause | None] = Counter()
        """None: nobody knows of its end but that it has."""
        self.told_to_leave: Counter[Wish] = Counter()
        self.moved: Counter[RepairState] = Counter()
        """Of nodes, into each state of repair."""
        self.waits_s = Histogram(WAIT_BOUNDS_S)
        """Of runs, from when their task was queued for them until they got nodes."""

    def take(self, ledger: Ledger) -> None:
        """What the draft changes; it is about to be committed."""
        health = ledger.health.committed
        for name, row in ledger.health.changes().items():
            before = health.get(name)
            if row is not None and row.state is not (RepairState.HEALTHY if before is None else before.state):
                self.moved[row.state] += 1
        tasks, runs = ledger.tasks.committed, ledger.runs.committed
        for number, task in ledger.tasks.changes().items():
            if task is not None:
                self._task(tasks.get(number), task)
        for key, run in ledger.runs.changes().items():
            if run is not None:
                self._run(runs.get(key), run)

    def _task(self, before: TaskRow | None, task: TaskRow) -> None:
        if before is None:
            self.submitted += 1
        if task.outcome is not None and (before is None or before.outcome is None):
            self.finished[task.outcome] += 1
        if task.requeues > (0 if before is None else before.requeues):
            self.requeued[task.cause] += 1

    def _run(self, before: RunRow | None, run: RunRow) -> None:
        if before is None:
            self.scheduled += 1
            self.waits_s.observe(max(0, run.scheduled_ns - run.queued_ns) / SECOND)
        if run.started_ns is not None and (before is None or before.started_ns is None):
            self.started += 1
        if run.wish is not (Wish.NONE if before is None else before.wish) and run.wish is not Wish.ENDED:
            self.told_to_leave[run.wish] += 1
        if run.ended_ns is not None and (before is None or before.ended_ns is None):
            self.ended[run.ended.cause if run.ended is not None else None] += 1

"""How much of their time jobs trained: effective training time ratio and goodput, from accounting alone.

Accounting does not say what a job did. An attempt is taken to train from its start to its end, but for the work since
its last checkpoint where it failed or was preempted by the restart of one that had. Where its source does not say when
that was, it is half an hour, or all of a shorter attempt (paper, figure 8).

ETTR      time that was trained, over the time from the first start of a job to the end of its last attempt: a wait
          before the first start is no fault of the cluster, a wait between attempts is
goodput   GPU-hours that were trained, over those that were allocated
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from fireflyer.base.units import SECOND

__all__ = ["TrainingTime", "training_time"]

_HOUR_NS: Final = 3600 * SECOND


class TrainingTime(msgspec.Struct, frozen=True):
    """Of all jobs that have started, weighted by their GPUs."""

    jobs: int
    attempts: int
    gpu_hours: float
    """That were allocated."""
    lost_gpu_hours: float
    """By failures, and by preemptions that failures caused."""
    ettr: float
    goodput: float


def training_time(connection: Any) -> TrainingTime | None:
    """None where no job has run. `prepare` has made its tables. An attempt without an end runs for as long as is
    known."""
    ((jobs, attempts, gpu_hours, lost, wall),) = connection.execute(
        f"""
        WITH attempts AS (
          SELECT job, start_ns, until_ns AS end_ns, gpus
          FROM sized WHERE start_ns IS NOT NULL
        ), runs AS (
          SELECT job, count(*) AS attempts, max(gpus) * ((max(end_ns) - min(start_ns)) / {_HOUR_NS}) AS wall,
                 sum(gpus * ((end_ns - start_ns) / {_HOUR_NS})) AS gpu_hours
          FROM attempts GROUP BY job
        ), broke AS (
          SELECT job, sum(lost_s / 3600 * gpus) AS lost FROM failures GROUP BY job
        ), pushed AS (
          SELECT job, sum(lost_s / 3600 * gpus) AS lost FROM cascades GROUP BY job
        )
        SELECT count(*), sum(attempts), sum(gpu_hours), sum(coalesce(broke.lost, 0) + coalesce(pushed.lost, 0)),
               sum(wall)
        FROM runs LEFT JOIN broke USING (job) LEFT JOIN pushed USING (job)
        """
    ).fetchall()
    if not gpu_hours or not wall:
        return None
    trained = gpu_hours - lost
    return TrainingTime(jobs, int(attempts), gpu_hours, lost, trained / wall, trained / gpu_hours)

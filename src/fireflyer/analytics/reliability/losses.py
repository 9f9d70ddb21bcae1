"""What failures cost, by what the jobs failed of: by cause, by node, and by cause and size of job.

    work      since the last checkpoint, where the source says when that was; else half an hour, or all of a shorter
              attempt: half of the hour between checkpoints (paper, figure 8)
    wait      from the end of the attempt to the start of the next one of its job (the queue time of the
              paper's ETTR); the job's GPUs times that time: others may have used them meanwhile
    restart   of the next attempt, until it trained: as its source measured it, else 5 minutes (the paper's u0 for
              observed runs, figure 9), or all of a shorter attempt. Where the next attempt fails, too, these minutes
              are none of its own work
    pushed    work of jobs that the next attempt preempted (paper, figure 8)

The first three add up to what the ETTR of the job lacks for this failure; work, restart and what was pushed lack in the
goodput of the cluster. A failure without another attempt has no wait and no restart.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from fireflyer.base.units import SECOND

__all__ = [
    "MAX_NODES_SHOWN",
    "RESTART_S",
    "SIZE_OF_JOB",
    "CauseLoss",
    "CauseSizeLoss",
    "Losses",
    "NodeLoss",
    "losses_of",
]

RESTART_S: Final = 300
MAX_NODES_SHOWN: Final = 1000
SIZE_OF_JOB: Final = "if(gpus = 0, 0, CAST(pow(2, ceil(log2(greatest(gpus, 1)))) AS BIGINT))"
"""The power of two that is not below the GPUs of a job."""
_MAX_CAUSES: Final = 10_000


class CauseLoss(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours of all failures of one cause."""

    symptom: str
    """Key in `SYMPTOMS`; empty: no node reported anything."""
    cause: str
    failures: int
    work: float
    wait: float
    restart: float
    pushed: float
    lost: float
    """All of these."""


class NodeLoss(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours of the failures that one node reported the reason of; `pushed` is in `lost`."""

    node: str
    """Empty: no node reported anything."""
    failures: int
    lost: float


class CauseSizeLoss(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours by cause and size of job."""

    symptom: str
    cause: str
    gpus: int
    """As `SizeClass.gpus`."""
    failures: int
    lost: float


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """In each the greatest loss comes first. They have the same sum, where no row was left out."""

    causes: tuple[CauseLoss, ...]
    nodes: tuple[NodeLoss, ...]
    """At most `MAX_NODES_SHOWN`."""
    sizes: tuple[CauseSizeLoss, ...]
    nodes_left_out: int
    """Further nodes, of which each lost less."""


def losses_of(connection: Any) -> Losses:
    """`prepare` has made its tables."""
    _make_losses(connection)
    total = "work + wait + restart + pushed"
    causes = connection.execute(
        f"""SELECT symptom, cause, count(*), sum(work), sum(wait), sum(restart), sum(pushed),
                   sum({total}) FROM losses
            GROUP BY symptom, cause ORDER BY sum({total}) DESC, symptom, cause LIMIT {_MAX_CAUSES}"""
    ).fetchall()
    nodes = connection.execute(
        f"""SELECT culprit, count(*), sum({total}), count(*) OVER () FROM losses
            GROUP BY culprit ORDER BY 3 DESC, culprit LIMIT {MAX_NODES_SHOWN}"""
    ).fetchall()
    sizes = connection.execute(
        f"""SELECT symptom, cause, {SIZE_OF_JOB} AS size, count(*), sum({total}) FROM losses
            GROUP BY symptom, cause, size ORDER BY 5 DESC, symptom, cause, size LIMIT {_MAX_CAUSES}"""
    ).fetchall()
    return Losses(
        causes=tuple(
            CauseLoss(
                symptom=symptom,
                cause=cause,
                failures=count,
                work=work,
                wait=wait,
                restart=restart,
                pushed=pushed,
                lost=lost,
            )
            for symptom, cause, count, work, wait, restart, pushed, lost in causes
        ),
        nodes=tuple(NodeLoss(node=node, failures=count, lost=lost) for node, count, lost, _ in nodes),
        nodes_left_out=nodes[0][-1] - len(nodes) if nodes else 0,
        sizes=tuple(
            CauseSizeLoss(symptom=symptom, cause=cause, gpus=size, failures=count, lost=lost)
            for symptom, cause, size, count, lost in sizes
        ),
    )


def _make_losses(connection: Any) -> None:
    """Makes `losses`: GPU-hours of each failure."""
    hours = f"/ {3600 * SECOND} * gpus"
    connection.execute(
        f"""
        CREATE TABLE losses AS
        WITH attempts AS (
          SELECT job, start_ns, lag(start_ns) OVER one AS former_ns, lead(start_ns) OVER one AS next_ns,
                 least(coalesce(overhead_ns, {RESTART_S * SECOND}), coalesce(end_ns - start_ns, {1 << 62})) AS begin_ns,
                 lead(begin_ns) OVER one AS next_begin_ns
          FROM sized WHERE job IN (SELECT job FROM failures) AND start_ns IS NOT NULL
          WINDOW one AS (PARTITION BY job ORDER BY start_ns)
        ), named AS (
          SELECT * FROM failures JOIN (SELECT DISTINCT ON (job, start_ns) * FROM attempts) USING (job, start_ns)
        ), own AS (
          SELECT named.*, if(former.start_ns IS NULL, lost_s, least(lost_s, (named.end_ns - named.start_ns - begin_ns)
                             / {SECOND})) AS work_s
          FROM named LEFT JOIN (SELECT DISTINCT job, start_ns FROM failures) AS former
               ON former.job = named.job AND former.start_ns = named.former_ns
        ), moved AS (
          SELECT named.id, sum(cascades.lost_s / 3600 * cascades.gpus) AS pushed
          FROM cascades ASOF JOIN named
               ON cascades.instigator = named.job AND cascades.restart_ns > named.start_ns
          GROUP BY named.id
        )
        SELECT symptom, cause, culprit, gpus, work_s / 3600 * gpus AS work,
               coalesce(greatest(next_ns - end_ns, 0) {hours}, 0) AS wait,
               coalesce(next_begin_ns {hours}, 0) AS restart,
               coalesce(pushed, 0) AS pushed
        FROM own LEFT JOIN moved USING (id)
        """
    )

"""What rates do not count, or count in a way that must be known: incidents and node-days come from other sources, which
may tell of other times, other names of nodes, or of the same time twice. One sentence each."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from fireflyer.analytics.reliability.failures import DAY_NS
from fireflyer.analytics.reliability.node_names import strangers
from fireflyer.base.units import SECOND

__all__ = ["coverage_notes", "name_notes"]

_GAP_SHARE: Final = 0.1
"""Of the whole time: for so long, and a day, nodes may report nothing without a note."""


def coverage_notes(connection: Any, *, of_jobs: bool) -> tuple[str, ...]:
    """`of_jobs`: rates are per node-day of running jobs. `prepare` has made its tables."""
    return (
        *(_outside(connection) if of_jobs else ()),
        *_silent_times(connection),
        *_twice(connection),
        *name_notes(connection),
    )


def name_notes(connection: Any) -> tuple[str, ...]:
    """Where no node both reported and ran a job."""
    names = strangers(connection)
    if names is None:
        return ()
    return (
        f"No node that reported is in the node list of a job, as {names[0]} and {names[1]} show: nothing that nodes "
        "reported explains a failure. Import their logs again with NODE=FILE, where NODE is its name in Slurm.",
    )


def _outside(connection: Any) -> tuple[str, ...]:
    ((all_of_them, beside, begin_ns, end_ns),) = connection.execute(
        "SELECT sum(count)::BIGINT, sum(beside)::BIGINT, any_value(begin_ns), any_value(end_ns) "
        "FROM of_symptoms, job_time"
    ).fetchall()
    if all_of_them is None or all_of_them == beside:
        return ()
    return (
        f"{all_of_them - beside:,} of {all_of_them:,} incidents were before or after the jobs that are known, which "
        f"ran from {_day(begin_ns)} to {_day(end_ns)}: rates do not count them.",
    )


def _silent_times(connection: Any) -> tuple[str, ...]:
    """Of logs that cover a part of the time: what did not report then may have been well, or was not imported."""
    ((first_ns, last_ns, begin_ns, end_ns),) = connection.execute(
        "SELECT min(time_ns), max(time_ns), any_value(begin_ns), any_value(end_ns) FROM events, job_time"
    ).fetchall()
    if first_ns is None or begin_ns is None:
        return ()
    allowed_ns = max(DAY_NS, _GAP_SHARE * (end_ns - begin_ns))
    if first_ns - begin_ns <= allowed_ns and end_ns - last_ns <= allowed_ns:
        return ()
    return (
        f"The first report of a node is of {_day(first_ns)} and the last of {_day(last_ns)}, and jobs ran from "
        f"{_day(begin_ns)} to {_day(end_ns)}: if logs of the rest were not imported, rates are too low.",
    )


def _twice(connection: Any) -> tuple[str, ...]:
    """A run in a job of Slurm, or of the platform, is the same time on the same nodes."""
    if not connection.execute("SELECT count(*) FROM jobs WHERE source = 'run'").fetchall()[0][0]:
        return ()
    ((runs,),) = connection.execute(
        """
        WITH others AS (
          SELECT min(start_ns) AS begin_ns, max(until_ns) AS end_ns FROM sized WHERE source <> 'run'
        )
        SELECT count(*) FROM sized, others
        WHERE source = 'run' AND start_ns < others.end_ns AND until_ns > others.begin_ns
        """
    ).fetchall()
    if not runs:
        return ()
    return (
        f"{runs:,} attempts of `ff run` are of the time of jobs from other sources: where a run was inside of such a "
        "job, its node-days and GPU-hours count twice; import one of both into a directory.",
    )


def _day(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns // SECOND, UTC).strftime("%Y-%m-%d")

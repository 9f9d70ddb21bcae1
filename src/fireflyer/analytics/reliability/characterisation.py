"""What happened in a cluster, from its two tables: rates with their intervals, failures by size of job, what they cost.

Definitions are the reliability paper's (arXiv:2410.21680, III). Rates are per node-day: of running jobs where there are
any, else of all nodes that reported something, or of as many nodes as are given. Rates per node-day of jobs count
incidents of the time in which jobs are known to have run. What the figures leave out stands in `notes`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from fireflyer.analytics.reliability.coverage import coverage_notes
from fireflyer.analytics.reliability.failures import DAY_NS, prepare
from fireflyer.analytics.reliability.intervals import Rate, rate_of
from fireflyer.analytics.reliability.known_time import table_span
from fireflyer.analytics.reliability.losses import SIZE_OF_JOB, Losses, losses_of
from fireflyer.analytics.reliability.rolling import RollingRates, rolling_rates
from fireflyer.analytics.reliability.training_time import TrainingTime, training_time
from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND

__all__ = [
    "Cascade",
    "Characterisation",
    "CheckIntroduction",
    "DayCount",
    "LargeJobs",
    "MonthCount",
    "SizeClass",
    "StateShare",
    "SymptomRate",
    "XidCount",
    "characterise",
]

LARGE_JOB_GPUS: Final = 128
"""Jobs of more count for the failure rate of the cluster (paper, III)."""
CRASH_LOOP_FAILURES: Final = 3
MAX_DAYS: Final = 36_600
MAX_CASCADES: Final = 1000
_MAX_ROWS: Final = 10_000
_OF_JOBS: Final = "running jobs"


class StateShare(msgspec.Struct, frozen=True):
    state: str
    attempts: int
    """That have started."""
    gpu_hours: float


class SymptomRate(msgspec.Struct, frozen=True):
    symptom: str
    rate: Rate


class SizeClass(msgspec.Struct, frozen=True):
    """Jobs of more than half of `gpus` and up to it; 0: of those without any."""

    gpus: int
    attempts: int
    node_days: float
    failures: int
    mttf_h: float | None
    """Hours of a job of this class until a failure: observed; None without one."""
    mttf_low_h: float | None
    mttf_high_h: float | None
    lost_gpu_hours: float
    """Work since the last checkpoint, or since the last of hourly ones, of jobs that failed."""
    lost_by_preemption_gpu_hours: float
    """Of jobs of this class, preempted by restarts of jobs that had failed."""


class LargeJobs(msgspec.Struct, frozen=True):
    """The failure rate of the cluster."""

    more_than_gpus: int
    rate: Rate
    unattributed: int
    """Failures while no node reported anything."""


class Cascade(msgspec.Struct, frozen=True):
    """A job that failed again and again, and what its restarts preempted."""

    job: str
    failures: int
    gpus: int
    preempted_jobs: int
    preempted_gpus: int


class CheckIntroduction(msgspec.Struct, frozen=True):
    check: str
    day: int
    """Since 1970: of its first event. Rates may rise then because something is seen that was not before."""


class MonthCount(msgspec.Struct, frozen=True):
    month: str
    symptom: str
    cause: str
    incidents: int


class XidCount(msgspec.Struct, frozen=True):
    xid: int
    incidents: int
    share: float
    """Of all Xids."""


class DayCount(msgspec.Struct, frozen=True):
    day: int
    """Since 1970."""
    symptom: str
    incidents: int
    """Severe ones, whatever their cause."""


class Characterisation(msgspec.Struct, frozen=True, kw_only=True):
    begin_ns: int
    end_ns: int
    jobs: int
    """That have started, each once, however often it was queued again."""
    attempts: int
    never_started: int
    """Rows of jobs that were cancelled before they began, or that wait, as `123_[4-99]` does for many."""
    events: int
    nodes_seen: int
    """That reported anything."""
    node_days: float
    node_days_of: str
    """What `node_days` is: of jobs, of nodes that reported, or of nodes that were given."""
    states: tuple[StateShare, ...]
    symptoms: tuple[SymptomRate, ...]
    large_jobs: LargeJobs | None
    """None where no job was that large."""
    sizes: tuple[SizeClass, ...]
    failure_symptoms: tuple[tuple[str, int], ...]
    """Failures by the symptom that they are counted under."""
    cascades: tuple[Cascade, ...]
    lost_gpu_hours: float
    lost_by_preemption_gpu_hours: float
    losses: Losses
    """By what the jobs failed of."""
    training: TrainingTime | None
    """None where no job has run."""
    rolling: tuple[RollingRates, ...]
    introductions: tuple[CheckIntroduction, ...]
    months: tuple[MonthCount, ...]
    xids: tuple[XidCount, ...]
    """The most frequent first."""
    days: tuple[DayCount, ...]
    """Those with an incident."""
    complete: bool
    """False: there were too many preemptions to look at all."""
    left_out: dict[str, int]
    """How many further rows there are of `days` and `months` (older ones), `introductions` (newer ones), and of `xids`,
    `cascades` and the nodes of `losses` (those that count less)."""
    notes: tuple[str, ...]
    """What the rates do not count, or count in a way that must be known."""


def characterise(connection: Any, *, nodes: int | None = None, gpus_per_node: int = 8) -> Characterisation:
    """Of the tables that `open_tables` opened. Raises `UsageError` where they hold nothing that has a time, or span
    more than a century."""
    complete = prepare(connection, gpus_per_node=gpus_per_node)
    begin_ns, end_ns = _span(connection)
    _sum_jobs(connection)
    listed, attempts = _rows(connection, "SELECT coalesce(sum(listed), 0), coalesce(sum(attempts), 0) FROM summed")[0]
    events, seen = _rows(connection, "SELECT count(*), count(DISTINCT node) FROM events")[0]
    node_days, of = _exposure(connection, nodes, seen, begin_ns, end_ns)
    counted = "beside" if of == _OF_JOBS else "count"
    sizes, training, losses = _sizes(connection), training_time(connection), losses_of(connection)
    lists = {
        "days": _rows(connection, _DAYS), "months": _rows(connection, _MONTHS), "xids": _rows(connection, _XIDS),
        "introductions": _introductions(connection, begin_ns), "cascades": _cascades(connection),
    }  # fmt: skip
    shown = {name: tuple(row[:-1] for row in found) for name, found in lists.items()}
    return Characterisation(
        begin_ns=begin_ns,
        end_ns=end_ns,
        jobs=_jobs_of(connection) if training is None else training.jobs,
        attempts=int(attempts),
        never_started=int(listed - attempts),
        events=events,
        nodes_seen=seen,
        node_days=node_days,
        node_days_of=of,
        states=tuple(StateShare(*row) for row in _rows(connection, _STATES)),
        symptoms=_symptoms(connection, node_days, counted),
        large_jobs=_large_jobs(connection),
        sizes=sizes,
        failure_symptoms=_rows(
            connection, "SELECT symptom, count(*) FROM failures GROUP BY symptom ORDER BY 2 DESC, 1"
        ),
        cascades=tuple(Cascade(*row) for row in shown["cascades"]),
        lost_gpu_hours=sum(one.lost_gpu_hours for one in sizes),
        lost_by_preemption_gpu_hours=sum(one.lost_by_preemption_gpu_hours for one in sizes),
        losses=losses,
        training=training,
        rolling=rolling_rates(connection, 0 if of == _OF_JOBS else nodes or seen, begin_ns, end_ns, counted),
        introductions=tuple(CheckIntroduction(*row) for row in shown["introductions"]),
        months=tuple(MonthCount(*row) for row in shown["months"]),
        xids=tuple(XidCount(*row) for row in shown["xids"]),
        days=tuple(DayCount(*row) for row in shown["days"]),
        complete=complete,
        left_out={
            **{name: found[0][-1] - len(found) for name, found in lists.items() if found},
            "nodes": losses.nodes_left_out,
        },
        notes=coverage_notes(connection, of_jobs=of == _OF_JOBS),
    )


_MONTHS: Final = f"""
SELECT strftime(make_timestamp_ns(day * {DAY_NS}), '%Y-%m') AS month, symptom, cause, sum(count)::BIGINT,
       count(*) OVER ()
FROM incidents GROUP BY month, symptom, cause ORDER BY month DESC, symptom, cause LIMIT {_MAX_ROWS}
"""
_XIDS: Final = f"""
SELECT CAST(substr(cause, 5) AS INTEGER) AS xid, sum(count)::BIGINT AS found, found / sum(found) OVER (),
       count(*) OVER ()
FROM incidents WHERE regexp_full_match(cause, 'xid_[0-9]{{1,4}}') GROUP BY xid ORDER BY found DESC, xid
LIMIT {_MAX_ROWS}
"""
_DAYS: Final = f"""
SELECT day, symptom, sum(count)::BIGINT, count(*) OVER ()
FROM of_symptoms GROUP BY day, symptom ORDER BY day DESC, symptom LIMIT {_MAX_ROWS}
"""
"""The newest first, so that what is cut is the oldest; the last column is how many rows there are."""
_STATES: Final = """
SELECT state, sum(attempts)::BIGINT, coalesce(sum(gpu_hours), 0) FROM summed GROUP BY state
HAVING sum(attempts) > 0 ORDER BY 2 DESC, 1
"""


def _rows(connection: Any, query: str) -> tuple[Any, ...]:
    return tuple(connection.execute(query).fetchall())


def _one(connection: Any, query: str) -> Any:
    return connection.execute(query).fetchall()[0][0]


def _span(connection: Any) -> tuple[int, int]:
    begin, end = table_span(connection)
    if end - begin > MAX_DAYS * DAY_NS:
        raise UsageError("the tables span more than a century: a clock was wrong; import without its file")
    return begin, max(end, begin + 1)


def _sum_jobs(connection: Any) -> None:
    """Makes `summed`: all that is summed over attempts, by state and number of GPUs, in one pass."""
    connection.execute(
        f"""
        CREATE TABLE summed AS
        SELECT state, gpus, count(*) AS listed, count(start_ns) AS attempts, sum(hours) AS hours,
               sum(hours * gpus) AS gpu_hours, sum(hours / 24 * parts / parts_of_node) AS node_days
        FROM (SELECT *, (until_ns - start_ns) / {3600 * SECOND} AS hours FROM sized)
        GROUP BY state, gpus
        """
    )


def _jobs_of(connection: Any) -> int:
    """Where none has trained; else `training_time` has counted them."""
    return int(_one(connection, "SELECT count(DISTINCT job) FROM sized WHERE start_ns IS NOT NULL"))


def _exposure(connection: Any, nodes: int | None, seen: int, begin_ns: int, end_ns: int) -> tuple[float, str]:
    days = (end_ns - begin_ns) / DAY_NS
    if nodes is not None:
        return nodes * days, "nodes that were given"
    of_jobs = _one(connection, "SELECT sum(node_days) FROM summed")
    return (of_jobs, _OF_JOBS) if of_jobs else (max(seen, 1) * days, "nodes that reported")


def _symptoms(connection: Any, node_days: float, counted: str) -> tuple[SymptomRate, ...]:
    rows = _rows(
        connection,
        f"SELECT symptom, sum({counted})::BIGINT FROM of_symptoms GROUP BY symptom ORDER BY 2 DESC, 1",
    )
    return tuple(SymptomRate(symptom, rate_of(count, node_days)) for symptom, count in rows)


def _sizes(connection: Any) -> tuple[SizeClass, ...]:
    size = f"{SIZE_OF_JOB} AS size"
    rows = _rows(
        connection,
        f"""
        WITH ran AS (
          SELECT {size}, sum(attempts)::BIGINT AS attempts, sum(hours) AS hours, sum(node_days) AS days FROM summed
          WHERE attempts > 0 GROUP BY size
        ), broke AS (
          SELECT {size}, count(*) AS failures,
                 sum(lost_s / 3600 * gpus) AS lost
          FROM failures GROUP BY size
        ), pushed AS (
          SELECT {size}, sum(lost_s / 3600 * gpus) AS lost FROM cascades GROUP BY size
        )
        SELECT size, attempts, days, hours, coalesce(failures, 0), coalesce(broke.lost, 0), coalesce(pushed.lost, 0)
        FROM ran LEFT JOIN broke USING (size) LEFT JOIN pushed USING (size) ORDER BY size
        """,
    )
    found = []
    for gpus, attempts, days, hours, failures, lost, pushed in rows:
        rate = rate_of(failures, hours) if hours > 0 else None  # of jobs, per hour
        known = rate is not None and failures > 0
        found.append(
            SizeClass(
                gpus,
                attempts,
                days,
                failures,
                1 / rate.per_node_day if known and rate else None,
                1 / rate.high if rate else None,
                1 / rate.low if known and rate else None,
                lost,
                pushed,
            )
        )
    return tuple(found)


def _large_jobs(connection: Any) -> LargeJobs | None:
    days = _one(connection, f"SELECT sum(node_days) FROM summed WHERE gpus > {LARGE_JOB_GPUS}")
    if not days:
        return None
    ((failures, unattributed),) = _rows(
        connection,
        f"SELECT count(*), count(*) FILTER (symptom = '') FROM failures WHERE gpus > {LARGE_JOB_GPUS}",
    )
    return LargeJobs(LARGE_JOB_GPUS, rate_of(failures, days), unattributed)


def _cascades(connection: Any) -> tuple[Any, ...]:
    return _rows(
        connection,
        f"""
        SELECT failures.job, count(*) AS failed, max(failures.gpus),
               coalesce(any_value(pushed.jobs), 0) AS jobs, coalesce(any_value(pushed.gpus), 0)::BIGINT,
               count(*) OVER ()
        FROM failures LEFT JOIN (
          SELECT instigator, count(*) AS jobs, sum(gpus) AS gpus FROM cascades GROUP BY instigator
        ) AS pushed ON pushed.instigator = failures.job
        GROUP BY failures.job HAVING failed >= {CRASH_LOOP_FAILURES} OR jobs > 0
        ORDER BY jobs DESC, failed DESC, failures.job LIMIT {MAX_CASCADES}
        """,
    )


def _introductions(connection: Any, begin_ns: int) -> tuple[Any, ...]:
    """Those after the first day: what was there from the beginning has not been introduced."""
    return _rows(
        connection,
        f"""SELECT "check", min(time_ns) // {DAY_NS} AS day, count(*) OVER ()
            FROM events WHERE "check" <> '' GROUP BY "check"
            HAVING min(time_ns) >= {begin_ns + DAY_NS} ORDER BY day, "check" LIMIT {_MAX_ROWS}""",
    )

"""What the tables hold about the end of one job, for `diagnose`."""

from __future__ import annotations

from typing import Any, Final

from fireflyer.analytics.reliability.attribution import FlightFinding, JobEvidence, Observation
from fireflyer.analytics.reliability.failures import AFTER_NS, BEFORE_NS
from fireflyer.analytics.reliability.node_lists import expand_node_list
from fireflyer.base.errors import NotFound, UsageError
from fireflyer.base.units import SECOND

__all__ = ["MAX_OBSERVATIONS", "evidence_of"]

MAX_OBSERVATIONS: Final = 2000
"""Of the highest severity first, then of those nearest to the end."""


def evidence_of(
    connection: Any, job: str, *, source: str | None = None, attempt: int | None = None,
    flight: tuple[FlightFinding, ...] = (),
) -> JobEvidence:  # fmt: skip
    """Of an attempt that has ended, counted from 1; by default the last one that did not complete, else the last.
    `source`: of the job, where several have its number. Raises `NotFound` for a job that the tables do not have or that
    still runs, and `UsageError` for an attempt that it did not have, a number of several sources, or nodes that cannot
    be read."""
    found = connection.execute(
        "SELECT state, start_ns, end_ns, exit_code, signal, node_list, coalesce(source, '') FROM jobs "
        "WHERE job = ? AND end_ns IS NOT NULL ORDER BY end_ns",
        [job],
    ).fetchall()
    attempts = [tuple(one) for *one, its in found if source is None or its == source]
    if not attempts:
        which = job if source is None else f"{job} of {source}"
        raise NotFound(f"the tables have no job {which!r} that has ended; import its accounting, or its run directory")
    sources = sorted({one[-1] for one in found})
    if source is None and len(sources) > 1:
        raise UsageError(f"{job} is a job of {' and one of '.join(sources)}; say which with --source")
    if attempt is not None and not 1 <= attempt <= len(attempts):
        raise UsageError(f"job {job} has {len(attempts)} attempts that have ended; there is no attempt {attempt}")
    failed = [one for one in attempts if one[0] not in ("COMPLETED", "CANCELLED")]
    chosen = attempts[attempt - 1] if attempt is not None else (failed or attempts)[-1]
    state, start_ns, end_ns, exit_code, signal, node_list = chosen
    nodes = expand_node_list(node_list)
    rows = connection.execute(
        f"""SELECT time_ns, node, symptom, cause, severity, source, user_made, words, count(*) OVER () FROM events
            WHERE time_ns BETWEEN ? AND ? AND severity <> 'ok' AND (job = ? OR node IN (SELECT unnest(?)))
            ORDER BY list_position(['high', 'low', 'warn'], severity), abs(time_ns - ?), node, symptom, cause
            LIMIT {MAX_OBSERVATIONS}""",
        [max(end_ns - BEFORE_NS, start_ns or 0), end_ns + AFTER_NS, job, list(nodes), end_ns],
    ).fetchall()
    observations = tuple(
        Observation(
            after_end_s=(time_ns - end_ns) / SECOND, node=node, symptom=symptom, cause=cause, severity=severity,
            source=source, user_made=user_made, words=words,
        )
        for time_ns, node, symptom, cause, severity, source, user_made, words, _ in sorted(rows)
    )  # fmt: skip
    return JobEvidence(
        job=job, state=state, exit_code=exit_code, signal=signal, nodes=nodes, observations=observations, flight=flight,
        start_ns=start_ns, end_ns=end_ns, attempt=attempts.index(chosen) + 1, attempts=len(attempts),
        left_out=rows[0][-1] - len(rows) if rows else 0,
    )  # fmt: skip

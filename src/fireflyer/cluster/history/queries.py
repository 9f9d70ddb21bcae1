"""What can be asked of the tables. Each function is one bounded piece of work on a connection."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Literal

from sqlalchemy import ColumnElement, Connection, Row, and_, case, cast, func, or_, select
from sqlalchemy.types import Double

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.reports import RunSpan, Span, utilisation
from fireflyer.cluster.core.platform.store.history import ClusterTotals
from fireflyer.cluster.core.platform.store.retention import DAY_NS
from fireflyer.cluster.core.platform.store.rows import Account
from fireflyer.cluster.core.platform.store.tables import PARTS
from fireflyer.cluster.core.platform.views import (
    AuditEntry,
    AuditPage,
    PastRun,
    PastTask,
    PastTaskAnswer,
    PastTaskPage,
    UsageLine,
    UsageReport,
)
from fireflyer.cluster.history.schema import AUDIT, REMOVED, RUN_PARTS, RUNS, TASKS, TOTALS, USAGE_DAYS
from fireflyer.cluster.schema.api import UtilisationReport

__all__ = ["MAX_LINES", "audit_page", "past_task", "past_tasks", "usage_report", "utilisation_report"]

MAX_RUNS: Final = 200_000
"""Whose productive time is spread over a span; with more, it counts when its run ended."""
MAX_RUNS_SHOWN: Final = 200
"""Of one task, the newest."""
MAX_LINES: Final = 10_000
_PIECE: Final = 400


# --- tasks ---


def past_task(connection: Connection, task: int) -> PastTaskAnswer:
    """Raises `NotFound`."""
    row = connection.execute(select(TASKS).where(TASKS.c.id == task)).one_or_none()
    if row is None:
        raise NotFound(f"the history has no task {task}")
    shown = select(RUNS).where(RUNS.c.task == task).order_by(RUNS.c.number.desc()).limit(MAX_RUNS_SHOWN)
    runs = tuple(_past_run(run) for run in reversed(connection.execute(shown).all()))
    first = runs[0].number if runs else 0
    asked = select(RUN_PARTS.c.run, RUN_PARTS.c.part, RUN_PARTS.c.ns)
    asked = asked.where(RUN_PARTS.c.task == task, RUN_PARTS.c.run >= first).order_by(RUN_PARTS.c.run)
    parts: dict[str, dict[str, int]] = {}
    for run, part, ns in connection.execute(asked):
        parts.setdefault(str(run), {})[f"{part}_ns"] = ns
    accounts = {run: Account(**of_run) for run, of_run in parts.items()}
    return PastTaskAnswer(task=_past_task(row), runs=runs, parts=accounts)


def past_tasks(
    connection: Connection,
    *,
    user: str,
    outcome: str,
    name: str,
    since_ns: int | None,
    until_ns: int | None,
    after: str,
    limit: int,
) -> PastTaskPage:
    """Tasks that ended in [`since_ns`, `until_ns`). Raises `UsageError` for an `after` that no page had."""
    query = select(TASKS).where(TASKS.c.ended_ns.is_not(None))
    for column, value in ((TASKS.c.user_name, user), (TASKS.c.outcome, outcome), (TASKS.c.name, name)):
        if value:
            query = query.where(column == value)
    if since_ns is not None:
        query = query.where(TASKS.c.ended_ns >= since_ns)
    if until_ns is not None:
        query = query.where(TASKS.c.ended_ns < until_ns)
    if after:
        ended_ns, task = _cursor(after)
        query = query.where(or_(TASKS.c.ended_ns < ended_ns, and_(TASKS.c.ended_ns == ended_ns, TASKS.c.id < task)))
    rows = connection.execute(query.order_by(TASKS.c.ended_ns.desc(), TASKS.c.id.desc()).limit(limit + 1)).all()
    shown = tuple(_past_task(row) for row in rows[:limit])
    return PastTaskPage(shown, f"{shown[-1].ended_ns}-{shown[-1].id}" if len(rows) > limit else "")


def _cursor(after: str) -> tuple[int, int]:
    first, _, second = after.partition("-")
    if not (first.isdecimal() and second.isdecimal() and len(after) <= 40):
        raise UsageError(f"after {after[:80]!r} is not the `next` of a page; begin without it")
    numbers = int(first), int(second)
    if max(numbers) >= 1 << 63:
        raise UsageError(f"after {after[:80]!r} is not the `next` of a page; begin without it")
    return numbers


def _past_task(row: Row[Any]) -> PastTask:
    found = row._mapping  # noqa: SLF001  (SQLAlchemy's documented name)
    account = Account(**{part: found[part] for part in PARTS})
    return PastTask(
        id=found["id"],
        name=found["name"],
        user=found["user_name"],
        group=found["user_group"],
        node_group=found["node_group"],
        nodes=found["nodes"],
        priority=found["priority"],
        state=found["state"],
        outcome=found["outcome"],
        cause=found["cause"],
        exit_code=found["exit_code"],
        reason=found["reason"],
        submitted_ns=found["submitted_ns"],
        ended_ns=found["ended_ns"],
        runs=found["runs"],
        requeues=found["requeues"],
        account=account,
        ettr=account.productive_ns / account.total_ns if account.productive_ns else None,
    )


def _past_run(row: Row[Any]) -> PastRun:
    found = row._mapping  # noqa: SLF001
    names = ("number", "state", "reason", "leave_reason", "scheduled_ns", "started_ns", "ended_ns", "over_ns",
             "cause", "exit_code", "end_reason")  # fmt: skip
    return PastRun(nodes=tuple(json.loads(found["node_names"])), **{name: found[name] for name in names})


# --- audit ---


def audit_page(
    connection: Connection,
    *,
    user: str,
    command: str,
    target: str,
    since_ns: int | None,
    until_ns: int | None,
    after: str,
    limit: int,
) -> AuditPage:
    """Raises `UsageError` for an `after` that no page had."""
    query = select(AUDIT)
    for column, value in ((AUDIT.c.user_name, user), (AUDIT.c.command, command), (AUDIT.c.target, target)):
        if value:
            query = query.where(column == value)
    if since_ns is not None:
        query = query.where(AUDIT.c.at_ns >= since_ns)
    if until_ns is not None:
        query = query.where(AUDIT.c.at_ns < until_ns)
    if after:
        at, _, entry = after.partition("-")
        if not at.isdecimal() or len(at) > 18 or not entry:
            raise UsageError(f"after {after[:80]!r} is not the `next` of a page; begin without it")
        query = query.where(or_(AUDIT.c.at_ns < int(at), and_(AUDIT.c.at_ns == int(at), AUDIT.c.entry < entry)))
    rows = connection.execute(query.order_by(AUDIT.c.at_ns.desc(), AUDIT.c.entry.desc()).limit(limit + 1)).all()
    entries = tuple(
        AuditEntry(user=row.user_name, **{name: getattr(row, name) for name in _AUDIT_NAMES}) for row in rows[:limit]
    )
    return AuditPage(entries, f"{entries[-1].at_ns}-{entries[-1].entry}" if len(rows) > limit else "")


_AUDIT_NAMES: Final = ("entry", "at_ns", "command", "target", "text", "address", "outcome")


# --- utilisation ---


def utilisation_report(connection: Connection, span: Span, now: ClusterTotals) -> UtilisationReport:
    """`now`: the counters of the leader."""
    readings = [*_totals(connection, span), now]
    return utilisation(span, readings, _run_spans(connection, span))


def _totals(connection: Connection, span: Span) -> list[ClusterTotals]:
    """The first and the last reading of each step, and those next to the span: what its bounds lie between."""
    step_ns = max(1, span.length_ns // span.steps)
    step = (TOTALS.c.at_ns - span.start_ns) // step_ns
    inside = TOTALS.c.at_ns.between(span.start_ns, span.end_ns)
    grouped = select(func.min(TOTALS.c.at_ns), func.max(TOTALS.c.at_ns)).where(inside).group_by(step)
    times: list[int] = [at_ns for pair in connection.execute(grouped) for at_ns in pair]
    before = select(func.max(TOTALS.c.at_ns)).where(TOTALS.c.at_ns < span.start_ns)
    after = select(func.min(TOTALS.c.at_ns)).where(TOTALS.c.at_ns > span.end_ns)
    times += [at_ns for query in (before, after) if (at_ns := connection.execute(query).scalar()) is not None]
    found: dict[int, ClusterTotals] = {}
    for piece in _pieces(sorted(set(times))):
        rows = connection.execute(select(TOTALS).where(TOTALS.c.at_ns.in_(piece)).order_by(TOTALS.c.change))
        for row in rows:
            found[row.at_ns] = ClusterTotals(
                row.at_ns, row.node_ns, row.healthy_ns, row.allocated_ns, row.productive_ns
            )
    return list(found.values())


def _run_spans(connection: Connection, span: Span) -> list[RunSpan] | None:
    """None: they are too many, or some of them were removed."""
    gone = select(func.max(REMOVED.c.until_ns)).where(REMOVED.c.table_name == TASKS.name)
    if (connection.execute(gone).scalar() or 0) > span.start_ns:
        return None
    begun_ns = func.coalesce(RUNS.c.started_ns, RUNS.c.scheduled_ns)
    query = select(begun_ns, RUNS.c.ended_ns, RUNS.c.nodes, RUNS.c.productive_ns).where(
        RUNS.c.ended_ns > span.start_ns, begun_ns < span.end_ns, RUNS.c.productive_ns > 0
    )
    rows = connection.execute(query.limit(MAX_RUNS + 1)).all()
    if len(rows) > MAX_RUNS:
        return None
    return [
        RunSpan(begin_ns, max(end_ns, begin_ns + 1), nodes * productive_ns / SECOND)
        for begin_ns, end_ns, nodes, productive_ns in rows
    ]


def _pieces(keys: Sequence[int]) -> list[Sequence[int]]:
    return [keys[place : place + _PIECE] for place in range(0, len(keys), _PIECE)]


# --- usage ---


def usage_report(
    connection: Connection, cluster: str, start_ns: int, end_ns: int, by: Literal["user", "group"], now_ns: int
) -> UsageReport:
    """`cluster`: its word; runs of another one that never ended were lost with a store that was restored."""
    name = TASKS.c.user_name if by == "user" else TASKS.c.user_group
    lines: dict[str, dict[str, Any]] = {}
    for row in connection.execute(_time_of(name, cluster, start_ns, min(end_ns, now_ns)).limit(MAX_LINES)):
        lines[row.name] = {"runs": row.runs, "node_seconds": row.node_seconds, "productive": row.productive}
    for row in connection.execute(_ends_of(name, start_ns, end_ns).limit(MAX_LINES)):
        counts = {outcome: getattr(row, outcome) for outcome in ("tasks", *_OUTCOMES)}
        lines.setdefault(row.name, {}).update(counts)
    for row in connection.execute(_time_removed(by, start_ns, end_ns).limit(MAX_LINES)):
        line = lines.setdefault(row.name, {})
        for what, nothing in _NOTHING.items():
            line[what] = line.get(what, nothing) + type(nothing)(getattr(row, what))  # PostgreSQL gives decimals
    found = [UsageLine(name=name, **{**_NOTHING, **line}) for name, line in lines.items()]
    found.sort(key=lambda line: (-line.node_seconds, line.name))
    return UsageReport(start_ns, end_ns, by, tuple(found[:MAX_LINES]))


_OUTCOMES: Final = ("succeeded", "failed", "stopped")
_NOTHING: Final[dict[str, float]] = {
    "tasks": 0,
    "runs": 0,
    "node_seconds": 0.0,
    "productive": 0.0,
    **dict.fromkeys(_OUTCOMES, 0),
}


def _seconds(ns: ColumnElement[Any]) -> ColumnElement[Any]:
    """As a floating-point number: node-time in nanoseconds does not fit into 64 bits."""
    return cast(ns, Double) / float(SECOND)


def _time_of(name: ColumnElement[str], cluster: str, start_ns: int, end_ns: int) -> Any:
    over_ns = func.coalesce(RUNS.c.over_ns, end_ns)
    until_ns = case((over_ns < end_ns, over_ns), else_=end_ns)
    since_ns = case((RUNS.c.scheduled_ns > start_ns, RUNS.c.scheduled_ns), else_=start_ns)
    length_ns = case((RUNS.c.ended_ns > RUNS.c.scheduled_ns, RUNS.c.ended_ns - RUNS.c.scheduled_ns), else_=1)
    inside_ns = case((RUNS.c.ended_ns < until_ns, RUNS.c.ended_ns), else_=until_ns) - since_ns
    share = case((inside_ns > 0, cast(inside_ns, Double) / cast(length_ns, Double)), else_=0.0)
    return (
        select(
            name.label("name"),
            func.count().label("runs"),
            func.sum(RUNS.c.nodes * _seconds(until_ns - since_ns)).label("node_seconds"),
            func.sum(RUNS.c.nodes * _seconds(RUNS.c.productive_ns) * share).label("productive"),
        )
        .join_from(RUNS, TASKS, RUNS.c.task == TASKS.c.id)
        .where(
            RUNS.c.scheduled_ns < end_ns,
            or_(RUNS.c.over_ns > start_ns, and_(RUNS.c.over_ns.is_(None), RUNS.c.cluster == cluster)),
        )
        .group_by(name)
        .order_by(func.count().desc(), name)
    )


def _ends_of(name: ColumnElement[str], start_ns: int, end_ns: int) -> Any:
    counts = [func.sum(case((TASKS.c.outcome == outcome, 1), else_=0)).label(outcome) for outcome in _OUTCOMES]
    ended = TASKS.c.ended_ns.between(start_ns, end_ns - 1)
    return select(name.label("name"), func.count().label("tasks"), *counts).where(ended).group_by(name).order_by(name)


def _time_removed(by: Literal["user", "group"], start_ns: int, end_ns: int) -> Any:
    """Of tasks that were removed: the days whose middle lies in the span. Of two spans that adjoin, one has a day."""
    name = USAGE_DAYS.c.user_name if by == "user" else USAGE_DAYS.c.user_group
    middle_ns = USAGE_DAYS.c.day_ns + DAY_NS // 2
    counts = [func.sum(USAGE_DAYS.c[count]).label(count) for count in ("tasks", "runs", *_OUTCOMES)]
    return (
        select(
            name.label("name"),
            func.sum(_seconds(USAGE_DAYS.c.node_ns)).label("node_seconds"),
            func.sum(_seconds(USAGE_DAYS.c.productive_ns)).label("productive"),
            *counts,
        )
        .where(middle_ns >= start_ns, middle_ns < end_ns)
        .group_by(name)
        .order_by(name)
    )

"""Pages of runs and of changes of nodes, in the order of changes. Each function is one bounded piece of work."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, select, tuple_

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.cluster.core.health.findings import Finding
from fireflyer.cluster.core.platform.history_pages import NodeEntry, NodePage, RunEntry, RunPage
from fireflyer.cluster.history.schema import COPIED, NODE_STATES, RUN_PARTS, RUNS, TASKS

__all__ = ["MAX_PAGE_NODES", "node_page", "run_page"]

MAX_PAGE_NODES: Final = 50_000
"""Names of nodes of one page of runs, beyond those of its first run."""
_MAX_CLUSTERS: Final = 100
_OVERHEAD: Final = ("platform", "start")
_PIECE: Final = 400


def run_page(connection: Connection, *, current: str, cluster: str, since: int, limit: int) -> RunPage:
    """Runs whose last change has the number `since` or a later one. `cluster`: its word; empty: `current`."""
    word = cluster or current
    chosen, more = _changes_of_page(connection, word, since, limit)
    rows: list[Row[Any]] = []
    if chosen:
        query = (
            select(RUNS, TASKS.c.user_name, TASKS.c.submitted_ns)
            .join_from(RUNS, TASKS, RUNS.c.task == TASKS.c.id)
            .where(RUNS.c.cluster == word, RUNS.c.change >= since, RUNS.c.change <= chosen[-1])
            .order_by(RUNS.c.change)
        )
        rows = list(connection.execute(query))
    overhead = _overhead(connection, [(row.task, row.number) for row in rows])
    entries = tuple(_run(row, overhead.get((row.task, row.number), {})) for row in rows)
    return RunPage(cluster=word, clusters=_clusters(connection, current), entries=entries, more=more)


def _changes_of_page(connection: Connection, word: str, since: int, limit: int) -> tuple[list[int], bool]:
    """Of the runs of a page, in their order, and whether there are more. Lists of nodes are not read yet: those of all
    `limit` runs may be far longer than what a page has."""
    query = (
        select(RUNS.c.change, RUNS.c.nodes)
        .join_from(RUNS, TASKS, RUNS.c.task == TASKS.c.id)
        .where(RUNS.c.cluster == word, RUNS.c.change >= since)
        .order_by(RUNS.c.change)
        .limit(limit + 1)
    )
    chosen: list[int] = []
    names = 0
    for change, nodes in connection.execute(query):
        names += nodes
        if len(chosen) == limit or (chosen and names > MAX_PAGE_NODES):
            return chosen, True
        chosen.append(change)
    return chosen, False


def _overhead(connection: Connection, keys: Sequence[tuple[int, int]]) -> dict[tuple[int, int], dict[str, int]]:
    """Nanoseconds of each part of `_OVERHEAD`."""
    found: dict[tuple[int, int], dict[str, int]] = {}
    for place in range(0, len(keys), _PIECE):
        query = (
            select(RUN_PARTS.c.task, RUN_PARTS.c.run, RUN_PARTS.c.part, RUN_PARTS.c.ns)
            .where(tuple_(RUN_PARTS.c.task, RUN_PARTS.c.run).in_(keys[place : place + _PIECE]))
            .where(RUN_PARTS.c.part.in_(_OVERHEAD))
        )
        for task, run, part, ns in connection.execute(query):
            found.setdefault((task, run), {})[part] = int(ns)
    return found


def _run(row: Row[Any], overhead: Mapping[str, int]) -> RunEntry:
    """`started_ns` is when the manager heard of the launcher, whose own clock has measured the rest."""
    ready_ns = None
    if row.started_ns is not None:
        ready_ns = max(0, row.started_ns - row.scheduled_ns) + overhead.get("start", 0)
    return RunEntry(
        change=row.change, task=row.task, number=row.number, user=row.user_name, submitted_ns=row.submitted_ns,
        state=row.state, nodes=tuple(json.loads(row.node_names)), scheduled_ns=row.scheduled_ns,
        started_ns=row.started_ns, ended_ns=row.ended_ns, wish=row.wish or "", leave_reason=row.leave_reason,
        cause=row.cause, exit_code=row.exit_code, saved_ns=row.saved_ns, overhead_ns=sum(overhead.values()),
        ready_ns=ready_ns,
    )  # fmt: skip


def node_page(connection: Connection, *, current: str, cluster: str, since: int, limit: int) -> NodePage:
    """Changes of nodes from the number `since` on. `cluster`: as in `run_page`."""
    word = cluster or current
    query = select(NODE_STATES).where(NODE_STATES.c.cluster == word, NODE_STATES.c.change >= since)
    rows = connection.execute(query.order_by(NODE_STATES.c.change).limit(limit + 1)).all()
    entries = tuple(
        NodeEntry(
            change=row.change, at_ns=row.at_ns, node=row.node, state=row.state, reason=row.reason,
            fault=_fault(row.fault), ticket=row.ticket or 0,
        )
        for row in rows[:limit]
    )  # fmt: skip
    return NodePage(
        cluster=word, clusters=_clusters(connection, current), entries=entries, more=len(rows) > len(entries)
    )


def _fault(text: str | None) -> Finding | None:
    """None also for what a newer release wrote and this one does not read."""
    try:
        return None if text is None else decode_json(text, Finding)
    except DECODE_ERRORS:
        return None


def _clusters(connection: Connection, current: str) -> tuple[str, ...]:
    words = connection.execute(select(COPIED.c.cluster).order_by(COPIED.c.cluster).limit(_MAX_CLUSTERS)).scalars()
    return tuple(sorted({*words, current}))

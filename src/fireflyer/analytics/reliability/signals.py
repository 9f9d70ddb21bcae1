"""The signals of every node over a window, from the tables, for `find_lemons`.

What more than a few nodes report at the same time is a fault of what they share, as a switch or a file system, and
counts against none of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from fireflyer.analytics.reliability.failures import DAY_NS, prepare_failures
from fireflyer.analytics.reliability.known_time import table_span
from fireflyer.analytics.reliability.lemons import WINDOW_DAYS, NodeSignals
from fireflyer.analytics.reliability.node_lists import names_of
from fireflyer.analytics.reliability.observed_days import MAX_FLEET, fleet_days
from fireflyer.analytics.reliability.rows import TICKET
from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND

__all__ = ["node_signals"]

HOUR_NS: Final = 3600 * SECOND
TOGETHER_NS: Final = 600 * SECOND
TOGETHER_NODES: Final = 5
TOGETHER_SHARE: Final = 0.01
"""Of the fleet, at least `TOGETHER_NODES`: more nodes than these within `TOGETHER_NS` share the fault."""


def node_signals(
    connection: Any, *, days: int = WINDOW_DAYS, nodes: int | None = None, gpus_per_node: int = 8
) -> list[NodeSignals]:
    """Of all nodes that jobs ran on or that reported anything, in the last `days` that the tables have, or in all of
    their time where that is shorter; a node that has joined or left since counts for its own time. Nodes beyond those,
    up to `nodes`, had nothing. Tickets are those of the platform's repairs. Raises `UsageError` for empty tables, and
    for more than `MAX_FLEET` nodes."""
    first_ns, end_ns = table_span(connection)
    begin_ns = max(end_ns - days * DAY_NS, first_ns)
    prepare_failures(connection, gpus_per_node=gpus_per_node, since_ns=begin_ns)
    there = fleet_days(connection, begin_ns, end_ns)
    if len(there) > MAX_FLEET:
        raise UsageError(f"the tables name more than {MAX_FLEET:,} nodes")
    fleet = sorted(there)
    if nodes is not None:
        fleet += [f"(node {number} without jobs or events)" for number in range(len(fleet), nodes)]
    together = max(TOGETHER_NODES, int(TOGETHER_SHARE * len(fleet)))
    _find_observations(connection, begin_ns, together)
    counts = _counts(connection, begin_ns, len(fleet))
    whole = max(end_ns - begin_ns, HOUR_NS) / DAY_NS
    own = {node: min(whole, span[1] - span[0] + 1.0) for node, span in there.items() if span is not None}
    return [NodeSignals(node=node, days=own.get(node, whole), **counts.get(node, {"incidents": 0})) for node in fleet]


def _find_observations(connection: Any, begin_ns: int, together: int) -> None:
    """Makes `observations`: what counts against one node, and the failures that its jobs had. What more nodes report,
    or fail of, in any ten minutes that begin at half of them is shared, and so is a failure that is seen by it."""
    connection.execute(
        f"""
        CREATE TABLE observations AS
        WITH severe AS (
          SELECT node, symptom, cause, time_ns, time_ns AS seen_ns,
                 (severity = 'high' AND source = 'health') OR (source = 'platform' AND symptom <> 'node_lost')
                 AS taken_out, '' AS job, 0 AS nodes
          FROM events WHERE severity IN ('low', 'high') AND NOT user_made AND time_ns >= {begin_ns}
        ), failing AS (
          SELECT if(culprit = '', node_list, culprit) AS node, symptom, '' AS cause, end_ns AS time_ns, seen_ns,
                 false AS taken_out, job, nodes
          FROM failures WHERE culprit <> '' OR nodes = 1
        ), found AS (
          SELECT *, seen_ns // {TOGETHER_NS // 2} AS half FROM (FROM severe UNION ALL FROM failing)
        ), windows AS (
          SELECT DISTINCT symptom, node, unnest([half - 1, half]) AS first FROM found
        ), shared AS (
          SELECT DISTINCT symptom, unnest([first, first + 1]) AS half
          FROM (SELECT symptom, first FROM windows GROUP BY symptom, first HAVING count(*) > {together})
        )
        SELECT node, cause, taken_out, time_ns, job, nodes FROM found ANTI JOIN shared USING (symptom, half)
        """
    )


def _counts(connection: Any, begin_ns: int, fleet: int) -> dict[str, dict[str, int]]:
    rows = connection.execute(
        f"""
        WITH gaps AS (
          SELECT *, time_ns - lag(time_ns) OVER (PARTITION BY node ORDER BY time_ns) AS gap_ns FROM observations
        )
        SELECT node, count(*) FILTER (gap_ns IS NULL OR gap_ns > {HOUR_NS}),
               count(DISTINCT cause) FILTER (starts_with(cause, 'xid_')),
               count(DISTINCT time_ns // {HOUR_NS}) FILTER (taken_out),
               count(*) FILTER (job <> '' AND nodes > 1), count(*) FILTER (job <> '' AND nodes = 1)
        FROM gaps GROUP BY node
        """
    ).fetchall()
    keys = ("incidents", "xid_cnt", "out_count", "multi_node_node_fails", "single_node_node_fails")
    counts = {node: dict(zip(keys, values, strict=True)) for node, *values in rows}
    jobs = connection.execute(
        f"SELECT node_list, count(*) FROM sized WHERE nodes = 1 AND start_ns IS NOT NULL "
        f"AND until_ns >= {begin_ns} GROUP BY node_list"
    ).fetchall()
    for node, count in jobs:
        counts.setdefault(node, {"incidents": 0})["single_node_jobs"] = count
    tickets = connection.execute(
        f"SELECT node, count(DISTINCT part) FROM events WHERE source = '{TICKET}' AND time_ns >= {begin_ns} "
        "GROUP BY node"
    ).fetchall()
    for node, count in tickets:
        counts.setdefault(node, {"incidents": 0})["tickets"] = count
    # once for each job; the platform does not name it, but tells once of each, at its end
    differing = connection.execute(
        "SELECT node, count(DISTINCT (source, job, if(job = '', time_ns, 0))) FROM events "
        "WHERE symptom = 'corruption' AND node <> '' AND severity <> 'ok' "
        f"AND source IN ('run', 'platform') AND time_ns >= {begin_ns} GROUP BY node"
    ).fetchall()
    for node, count in differing:
        counts.setdefault(node, {"incidents": 0})["corruptions"] = count
    for node, count in _exclusions(connection, begin_ns, fleet).items():
        counts.setdefault(node, {"incidents": 0})["excl_jobid_count"] = count
    return counts


def _exclusions(connection: Any, begin_ns: int, fleet: int) -> Counter[str]:
    lists = connection.cursor().execute(
        "SELECT excluded, count(DISTINCT job) FROM sized WHERE excluded <> '' "
        f"AND coalesce(until_ns, end_ns, submit_ns) >= {begin_ns} GROUP BY excluded"
    )
    found: Counter[str] = Counter()
    for excluded, count in iter(lists.fetchone, None):
        for node in names_of(excluded, limit=fleet):
            found[node] += count
    return found

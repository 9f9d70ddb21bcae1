"""What a manager tells Prometheus. docs/how-to/metrics.md has the table.

Labels are states, causes, outcomes, routes, tables and at most 64 names of checks. Users, tasks and nodes are never
labels.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.records import RepairState
from fireflyer.cluster.core.platform.store.rows import Wish
from fireflyer.cluster.manager.changes import Changes
from fireflyer.cluster.manager.history import History
from fireflyer.cluster.manager.platform import Platform
from fireflyer.cluster.manager.web.measured import RequestFigures
from fireflyer.cluster.schema.tasks import Cause, Outcome
from fireflyer.runtime.metrics import HistogramSeries, Series

__all__ = ["manager_series"]

_UNKNOWN: Final = "unknown"


def manager_series(
    platform: Platform, changes: Changes, requests: RequestFigures, history: History
) -> Sequence[Series | HistogramSeries]:
    """Of the cluster only as leader: else each manager would tell it."""
    own: list[Series | HistogramSeries] = [
        Series.one("fireflyer_platform_leader", "gauge", "1 if this manager leads, else 0", platform.leads),
        Series.one("fireflyer_platform_leads_begun_total", "counter", "How often this manager began to lead",
                   platform.figures.leads_begun),
        Series.one("fireflyer_platform_waiting", "gauge", "Requests that wait for a transaction", platform.waiting),
        Series.one("fireflyer_platform_followers", "gauge", "Clients that follow changes", changes.followers),
        Series("fireflyer_platform_transactions_total", "counter", "Transactions with the store, by outcome",
               [({"outcome": outcome}, count) for outcome, count in sorted(platform.figures.transactions.items())]),
        HistogramSeries("fireflyer_platform_transaction_seconds", "How long transactions with the store took",
                        [({}, platform.figures.transaction_s)]),
        Series("fireflyer_platform_requests_total", "counter", "HTTP requests answered", [
            ({"method": method, "route": route, "status": str(status)}, count)
            for (method, route, status), count in sorted(requests.answered.items())
        ]),
        HistogramSeries("fireflyer_platform_request_seconds", "Until the answer to an HTTP request began",
                        [({"route": route}, times_s) for route, times_s in sorted(requests.times_s.items())]),
    ]  # fmt: skip
    if not platform.leads:
        return own
    return [
        *own,
        *_cluster_series(platform),
        *_health_series(platform),
        *_flow_series(platform),
        *_history_series(history),
    ]


def _cluster_series(platform: Platform) -> Sequence[Series]:
    """How things stand."""
    cluster, totals = platform.cluster(), platform.totals()
    states = [({"state": state}, float(count)) for state, count in sorted(cluster.tasks.items())]
    nodes = [({"state": "known"}, cluster.nodes), ({"state": "healthy"}, cluster.healthy)]
    node_time = [
        ({"kind": "known"}, totals.node_ns / SECOND),
        ({"kind": "healthy"}, totals.healthy_ns / SECOND),
        ({"kind": "allocated"}, totals.allocated_ns / SECOND),
        ({"kind": "productive"}, totals.productive_ns / SECOND),
    ]
    return [
        Series.one("fireflyer_platform_term", "gauge", "Number of the lead", cluster.term),
        Series("fireflyer_platform_tasks", "gauge", "Tasks in each state", states),
        Series("fireflyer_platform_nodes", "gauge", "Nodes", [*nodes, ({"state": "busy"}, cluster.busy)]),
        Series("fireflyer_platform_node_states", "gauge", "Nodes in each state; each node is in one",
               [({"state": state}, count) for state, count in sorted(platform.node_states().items())]),
        Series.one("fireflyer_platform_agents_heard", "gauge", "Agents that this leader has heard and not lost",
                   platform.agents_heard),
        Series("fireflyer_platform_node_seconds", "gauge", "Node-time since the cluster began", node_time),
        Series.one("fireflyer_platform_utilisation_ratio", "gauge",
                   "Allocated over healthy node-time, since the cluster began", cluster.utilisation or 0.0),
        Series.one("fireflyer_platform_goodput_ratio", "gauge",
                   "Productive over healthy node-time, since the cluster began", cluster.goodput or 0.0),
        Series.one("fireflyer_platform_changes_total", "counter", "Changes that were committed", cluster.changes),
        Series.one("fireflyer_platform_outbox", "gauge", "Changes that the history has not yet",
                   cluster.outbox_next - cluster.outbox_first),
    ]  # fmt: skip


def _health_series(platform: Platform) -> Sequence[Series]:
    """Of the loop from checks to repairs."""
    figures, moved = platform.health_figures(), platform.tally().moved
    age_s = max(0.0, time.time() - figures.oldest_ticket_ns / SECOND) if figures.open_tickets else 0.0
    return [
        Series("fireflyer_platform_node_health", "gauge", "Nodes in each state of repair; `held`: by the breaker",
               [({"state": state}, count) for state, count in sorted(platform.health_states().items())]),
        Series("fireflyer_platform_findings", "gauge", "Nodes with a fault or warning that is not settled",
               [({"check": check, "severity": severity}, count)
                for (check, severity), count in sorted(figures.findings.items())]),
        Series.one("fireflyer_platform_repair_tickets", "gauge", "Repairs that are not settled", figures.open_tickets),
        Series.one("fireflyer_platform_oldest_ticket_seconds", "gauge", "Age of the oldest of them; 0: there is none",
                   age_s),
        Series("fireflyer_platform_node_moves_total", "counter",
               "Moves of nodes into each state of repair; `drained`: by checks",
               [({"state": state.value}, moved[state]) for state in RepairState]),
    ]  # fmt: skip


def _flow_series(platform: Platform) -> Sequence[Series | HistogramSeries]:
    """What was committed since this manager began to lead."""
    tally = platform.tally()
    wishes = [one for one in Wish if one not in (Wish.NONE, Wish.ENDED)]
    causes = [*((one, one.value) for one in Cause), (None, _UNKNOWN)]
    return [
        Series.one("fireflyer_platform_tasks_submitted_total", "counter", "Tasks submitted", tally.submitted),
        Series("fireflyer_platform_tasks_finished_total", "counter", "Tasks that have finished",
               [({"outcome": one.value}, tally.finished[one]) for one in Outcome]),
        Series("fireflyer_platform_requeues_total", "counter", "Tasks queued again after a failure, by its cause",
               [({"cause": name}, tally.requeued[one]) for one, name in causes]),
        Series.one("fireflyer_platform_runs_scheduled_total", "counter", "Runs that got nodes", tally.scheduled),
        Series.one("fireflyer_platform_runs_started_total", "counter", "Runs whose ranks have started", tally.started),
        Series("fireflyer_platform_runs_ended_total", "counter", "Runs that have ended, by cause",
               [({"cause": name}, tally.ended[one]) for one, name in causes]),
        Series("fireflyer_platform_runs_told_to_leave_total", "counter", "Runs that were told to leave, by reason",
               [({"reason": one.value}, tally.told_to_leave[one]) for one in wishes]),
        HistogramSeries("fireflyer_platform_queue_wait_seconds", "From queued to scheduled, of each run",
                        [({}, tally.waits_s)]),
    ]  # fmt: skip


def _history_series(history: History) -> Sequence[Series]:
    """Its tables at the last sweep; nothing before the first one."""
    failing = Series.one("fireflyer_platform_history_failing", "gauge",
                         "1 if rows cannot be copied to the history, or removed from it, else 0",
                         bool(history.failing))  # fmt: skip
    sizes = history.sizes
    if sizes is None:
        return [failing]
    tables = sorted(sizes.tables.items())
    return [
        failing,
        Series("fireflyer_platform_history_rows", "gauge", "Rows of each table of the history",
               [({"table": name}, size.rows) for name, size in tables]),
        Series("fireflyer_platform_history_removed_total", "counter", "Rows that were removed because they were old",
               [({"table": name}, size.removed) for name, size in tables]),
        Series.one("fireflyer_platform_history_bytes", "gauge", "Size of the history, with its indices",
                   sizes.size_bytes),
    ]  # fmt: skip

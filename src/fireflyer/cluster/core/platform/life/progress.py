"""How runs go on: by what nodes say, and by time.

*When a node is free.* A run T has a node N from the commit that scheduled it. N is free, and may be given away, when

1. N's agent says that T is `gone` there, which is final; or
2. N is the node of the launcher and was silent for E; or
3. N is another node, was silent for E, and the launcher ended E ago or longer, certainly: its agent said so, or 2.

E is `stop_after_ns` + `stop_slack_ns`. Why this is safe, and what agents must keep, is in docs/design/0046.
"""

from __future__ import annotations

from collections.abc import Collection

from fireflyer.cluster.core.platform.heard import Heard
from fireflyer.cluster.core.platform.life.tasks import Tasks
from fireflyer.cluster.core.platform.messages import Settings
from fireflyer.cluster.core.platform.orders import OrderBook
from fireflyer.cluster.core.platform.store.index import RunKey
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import RunRow, RunState, Wish
from fireflyer.cluster.schema.sync import EndedRun, RunStatus
from fireflyer.cluster.schema.tasks import Cause

__all__ = ["Progress"]


class Progress:
    def __init__(self, ledger: Ledger, heard: Heard, orders: OrderBook, tasks: Tasks, settings: Settings) -> None:
        self._ledger, self._heard, self._orders, self._tasks = ledger, heard, orders, tasks
        self._settings = settings
        self._ended_after_ns = settings.stop_after_ns + settings.stop_slack_ns

    # --- what a node says ---

    def observe(self, node: str, now_ns: int) -> None:
        """`now_ns`: monotonic."""
        sync = self._heard.sync(node)
        for status in sync.runs if sync is not None else ():
            key = self._ledger.index.tokens.get(status.token)
            if key is not None:
                self._status(node, key, status, now_ns)
        place = self._ledger.places.get(node)
        if place is not None:
            self._missing(node, self._ledger.runs.known((place.task, place.run)))

    def _status(self, node: str, key: RunKey, status: RunStatus, now_ns: int) -> None:
        run = self._ledger.runs.known(key)
        if node not in run.nodes:
            return
        if node == run.nodes[0]:
            if status.state == "gone":
                self._lead_ended(run, status.ended, now_ns)
            elif status.state == "running":
                self._tasks.started(run)
                if self._heard.costs.hear(run, status.saving, self._tasks.now_ns):
                    self._tasks.touched[run.task] = None
            else:
                self._tasks.prepared(run)
        if status.state == "gone":
            self._tasks.freed(self._ledger.runs.known(key), node)
            self._over_if_free(key)

    def _lead_ended(self, run: RunRow, ended: EndedRun | None, now_ns: int, at_ns: int | None = None) -> None:
        if run.state in (RunState.SCHEDULED, RunState.RUNNING):
            self._heard.lead_ended((run.task, run.number), now_ns)
            self._tasks.ended(run, ended, at_ns)

    def job_ended(self, key: RunKey, free: Collection[str], ended: EndedRun, at_ns: int, now_ns: int) -> None:
        """The batch system's job of a run has ended, at `at_ns` by its clock: nothing of it is left on the nodes
        `free`."""
        run = self._ledger.runs.known(key)
        if run.nodes[0] in free:
            self._lead_ended(run, ended, now_ns, at_ns)
        for node in free:
            self._tasks.freed(self._ledger.runs.known(key), node)
        self._over_if_free(key, at_ns)

    def _missing(self, node: str, run: RunRow) -> None:
        """The first node was told of the run, had it, and does not list it: nobody knows of the launcher. It is told
        to stop, so that its agent makes sure."""
        if node != run.nodes[0] or run.prepared_ns is None or run.state not in (RunState.SCHEDULED, RunState.RUNNING):
            return
        if self._heard.status(node, run.token) is None and self._orders.has_followed(node, run.token):
            self._tasks.leave(run, "stop", Wish.LOST, f"{node} has lost the run")

    def _over_if_free(self, key: RunKey, at_ns: int | None = None) -> None:
        run = self._ledger.runs.known(key)
        if run.state is RunState.ENDED and not self._ledger.index.places.get(key):
            self._tasks.over(run, at_ns)

    # --- time ---

    def sweep(self, now_ns: int) -> None:
        """What time alone does to runs. `now_ns`: monotonic."""
        for key in list(self._ledger.index.open_runs):
            run = self._ledger.runs.known(key)
            if run.state in (RunState.SCHEDULED, RunState.RUNNING):
                self._deadlines(run)
                self._lost_launcher(self._ledger.runs.known(key), now_ns)
            if self._ledger.runs.known(key).state is RunState.ENDED:
                self._silent_nodes(key, now_ns)

    def _deadlines(self, run: RunRow) -> None:
        """On cluster time: nothing that must be safe depends on it."""
        tasks, settings, now_ns = self._tasks, self._settings, self._tasks.now_ns
        spec = tasks.spec(self._ledger.tasks.known(run.task))
        if run.wanted == "stop":
            return
        if run.wanted == "suspend":
            if now_ns - (run.wanted_ns or 0) >= spec.grace_ns + settings.suspend_slack_ns:
                tasks.leave(run, "stop", run.wish, "it did not leave within its grace period")
        elif run.started_ns is not None:
            if spec.time_ns is not None and now_ns - run.started_ns >= spec.time_ns:
                tasks.leave(run, "stop", Wish.TIME_LIMIT, "its declared time is over")
        elif run.prepared_ns is None:
            if now_ns - run.scheduled_ns >= settings.start_timeout_ns:
                tasks.leave(run, "stop", Wish.NO_START, f"{run.nodes[0]} did not start it in time")
        elif now_ns - run.prepared_ns >= settings.prepare_timeout_ns:
            tasks.leave(run, "stop", Wish.NO_START, "its ranks did not start in time")

    def _lost_launcher(self, run: RunRow, now_ns: int) -> None:
        lead = run.nodes[0]
        if self._heard.silent_ns(lead, now_ns) < self._ended_after_ns:
            return
        ended = EndedRun(
            cause=Cause.INFRASTRUCTURE,
            exit_code=1,
            reason=f"nothing was heard of {lead}, where its launcher was, until its lease had ended",
            bad_nodes=(lead,),
        )
        self._lead_ended(run, ended, now_ns)
        self._tasks.freed(self._ledger.runs.known((run.task, run.number)), lead)
        self._over_if_free((run.task, run.number))

    def _silent_nodes(self, key: RunKey, now_ns: int) -> None:
        since_ns = self._heard.since_lead_ended_ns(key, now_ns)
        run = self._ledger.runs.known(key)
        for node in list(self._ledger.index.places.get(key, {})):
            if min(since_ns, self._heard.silent_ns(node, now_ns)) >= self._ended_after_ns:
                self._tasks.freed(run, node)
        self._over_if_free(key)

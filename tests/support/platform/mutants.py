"""Mutants of the platform's protocol: a machine of managers, agents or launchers with one bug each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fireflyer.cluster.core import runs
from fireflyer.cluster.core.platform import submissions
from fireflyer.cluster.core.platform.heard import Heard
from fireflyer.cluster.core.platform.leading import Leading
from fireflyer.cluster.core.platform.life import accounts, tasks
from fireflyer.cluster.core.platform.life.progress import Progress
from fireflyer.cluster.core.platform.life.tasks import Tasks
from fireflyer.cluster.core.platform.orders import OrderBook
from fireflyer.cluster.core.platform.store import tables
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import RunRow, TaskRow
from fireflyer.cluster.core.runs import Remember, RenewLease, RunsMachine
from fireflyer.cluster.core.scheduler import order
from fireflyer.cluster.core.scheduler.incremental import queue, running
from fireflyer.cluster.core.scheduler.incremental.running import GroupRuns
from fireflyer.cluster.core.scheduler.limits import Limits
from fireflyer.cluster.core.scheduler.model import Policy, Request, Reservation, Task
from fireflyer.cluster.runner import ending
from fireflyer.cluster.schema.sync import RunOrder
from fireflyer.cluster.schema.tasks import Cause, RunParts
from fireflyer.kvstore.core import fenced
from fireflyer.kvstore.core.leadership import Leadership

__all__ = ["MUTANTS"]

Patch = pytest.MonkeyPatch


def lost_means_free(patch: Patch) -> None:
    """The launcher of a silent node counts as ended before its lease has."""
    original = Progress._lost_launcher

    def lost(self: Progress, run: RunRow, now_ns: int) -> None:
        patch.setattr(self, "_ended_after_ns", self._settings.lost_ns)
        original(self, run, now_ns)

    patch.setattr(Progress, "_lost_launcher", lost)


def new_leader_counts_from_long_ago(patch: Patch) -> None:
    original = Heard.__init__

    def init(self: Heard, now_ns: int) -> None:
        original(self, now_ns - (1 << 40))

    patch.setattr(Heard, "__init__", init)


def orders_leave_before_the_commit(patch: Patch) -> None:
    original = OrderBook._own

    def of(self: OrderBook, node: str) -> Any:
        self.refresh(node)
        return self._orders[node]

    def runs(self: OrderBook, node: str) -> list[RunOrder]:
        place = self._ledger.places.get(node)
        if place is None:
            return listed(self, node)
        run = self._ledger.runs.known((place.task, place.run))
        first = RunOrder(run_token=run.token, wanted=run.wanted)
        if (place.task, place.run) in self._ledger.runs.committed:
            first = original(self, node, place)
        return [first, *(order for order in listed(self, node) if order.run_token != run.token)]

    listed = OrderBook._runs
    patch.setattr(OrderBook, "of", of)
    patch.setattr(OrderBook, "_runs", runs)


def forgets_at_once(patch: Patch) -> None:
    patch.setattr(OrderBook, "_is_open", lambda _self, _token: False)


def commits_without_the_lease(patch: Patch) -> None:
    patch.setattr(fenced, "_holds", lambda _key, _lease, _held: True)


def unknown_is_failed(patch: Patch) -> None:
    original = Leadership._settle

    def settle(self: Leadership, now_ns: int, writing: Any, outcome: Any) -> Any:
        if isinstance(outcome, fenced.OutcomeUnknown):
            outcome = fenced.Failed(outcome.number, outcome.reason)
        return original(self, now_ns, writing, outcome)

    patch.setattr(Leadership, "_settle", settle)


def submissions_are_not_recognised(patch: Patch) -> None:
    patch.setattr(submissions, "_repeated", lambda _ledger, _asked, _digest: None)


def tokens_without_the_run(patch: Patch) -> None:
    original = Tasks._token
    patch.setattr(Tasks, "_token", lambda self, task, _run: original(self, task, 0))


def release_is_not_counted(patch: Patch) -> None:
    def until_now(self: Tasks, row: TaskRow) -> TaskRow:
        return msgspec.structs.replace(row, counted_ns=self.now_ns)

    patch.setattr(Tasks, "_until_now", until_now)


def parts_are_believed(patch: Patch) -> None:
    """What the launcher says is taken as it is, also where it does not fit."""

    def run_account(task: TaskRow, run: RunRow, until_ns: int) -> Any:
        parts = run.ended.parts if run.ended is not None else RunParts()
        return accounts._plus(task.account, platform_ns=until_ns - task.counted_ns, productive_ns=parts.productive_ns)

    patch.setattr(tasks, "run_account", run_account)


def foreign_runs_do_not_matter(patch: Patch) -> None:
    """What a node lists that is not its own is no order to stop it."""
    original = OrderBook._runs
    patch.setattr(
        OrderBook,
        "_runs",
        lambda self, node: [one for one in original(self, node) if one.launch or one.wanted == "run"],
    )


def scheduler_is_not_told_of_a_dropped_draft(patch: Patch) -> None:
    original = Leading.rollback

    def rollback(self: Leading, now_ns: int) -> None:
        patch.setattr(self._engine, "rebuild", lambda _time_ns, _now_ns: None)
        original(self, now_ns)

    patch.setattr(Leading, "rollback", rollback)


def agent_grants_leases_on_its_own(patch: Patch) -> None:
    """It renews the lease of its node without an answer of a manager."""
    original = RunsMachine._on_tick

    def tick(self: RunsMachine) -> None:
        if self._stop_after_ns:
            self.lease_ends_ns = self._now_ns + self._stop_after_ns
            self._effects.append(RenewLease(self.lease_ends_ns))
        original(self)

    patch.setattr(RunsMachine, "_on_tick", tick)


def agent_does_not_remember_unknown_stops(patch: Patch) -> None:
    original = RunsMachine._follow

    def follow(self: RunsMachine, order: RunOrder) -> None:
        if order.wanted != "stop" or order.run_token in self._runs:
            original(self, order)

    patch.setattr(RunsMachine, "_follow", follow)


def agent_says_gone_too_early(patch: Patch) -> None:
    patch.setattr(runs._Run, "gone", property(lambda run: run.record.stopped and run.on_disk))


def agent_does_not_write_down_that_a_run_is_stopped(patch: Patch) -> None:
    original = RunsMachine._change

    def change(self: RunsMachine, run: Any, **changes: Any) -> None:
        original(self, run, **changes)
        self._effects[-1] = Remember(msgspec.structs.replace(run.record, stopped=False))
        run.on_disk = True

    patch.setattr(RunsMachine, "_change", change)


def agent_takes_tickets_of_stopped_runs(patch: Patch) -> None:
    original = RunsMachine.refusal
    patch.setattr(
        RunsMachine,
        "refusal",
        lambda self, now_ns, token: None if token in self._runs else original(self, now_ns, token),
    )


def agent_does_not_count_guards(patch: Patch) -> None:
    """A run whose launcher is over, or never was here, counts as gone while ranks of it live."""
    original = RunsMachine._on_guards
    patch.setattr(RunsMachine, "_on_guards", lambda self, token, _count: original(self, token, 0))


def what_has_left_is_done(patch: Patch) -> None:
    """The launcher takes a suspension for the end of its program."""
    original = ending._cause

    def cause(result: Any, last: Any, **asked: bool) -> Cause:
        found = original(result, last, **asked)
        return Cause.SUCCEEDED if found is Cause.SUSPENDED else found

    patch.setattr(ending, "_cause", cause)


def rows_are_copied_twice(patch: Patch) -> None:
    """What the tables have already is taken for new."""
    patch.setattr(tables.Stamp, "older_than", lambda _self, _cluster, _change: True)


def all_is_cleared_that_is_there(patch: Patch) -> None:
    """Also what was not copied."""
    original = Ledger.clear_outbox
    patch.setattr(Ledger, "clear_outbox", lambda self, _until: original(self, self.draft_state.outbox_next))


def nobody_is_asked_for_maintenance(patch: Patch) -> None:
    patch.setattr(GroupRuns, "for_maintenance", lambda _self, _now_ns: [])


def starts_shortly_before_maintenance(patch: Patch) -> None:
    """What declares no time starts until the nodes close."""
    patch.setattr(Request, "span_ns", property(lambda request: request.time_ns or 0))


def reservations_admit_everybody(patch: Patch) -> None:
    patch.setattr(Reservation, "admits", lambda _self, _task: True)


def limits_of_groups_do_not_count(patch: Patch) -> None:
    original = Limits.of
    patch.setattr(Limits, "of", lambda self, user, _group: original(self, user, ""))


def nobody_gets_older(patch: Patch) -> None:
    """Who waits is passed by all who are more important, for ever."""
    for module in (order, queue):
        patch.setattr(module, "aged_priority", lambda task, _now_ns, _policy: task.request.priority)


def who_is_interrupted_waits_anew(patch: Patch) -> None:
    """Behind all who came meanwhile."""
    patch.setattr(tasks, "waits_since_ns", lambda _queued_ns, _started_ns, now_ns: now_ns)


def what_runs_keeps_its_age(patch: Patch) -> None:
    """Who waited for long once never gives its nodes to others."""

    def counts_as(task: Task, _now_ns: int, policy: Policy) -> tuple[int, int | None]:
        assert task.run is not None
        return order.aged_priority(task, task.run.started_ns, policy) + 1000, None

    for module in (order, running):
        patch.setattr(module, "counts_as", counts_as)


MUTANTS: dict[str, Callable[[Patch], None]] = {
    mutant.__name__: mutant
    for mutant in (
        lost_means_free,
        new_leader_counts_from_long_ago,
        orders_leave_before_the_commit,
        forgets_at_once,
        commits_without_the_lease,
        unknown_is_failed,
        submissions_are_not_recognised,
        tokens_without_the_run,
        release_is_not_counted,
        parts_are_believed,
        foreign_runs_do_not_matter,
        scheduler_is_not_told_of_a_dropped_draft,
        agent_grants_leases_on_its_own,
        agent_does_not_remember_unknown_stops,
        agent_says_gone_too_early,
        agent_does_not_write_down_that_a_run_is_stopped,
        agent_takes_tickets_of_stopped_runs,
        agent_does_not_count_guards,
        what_has_left_is_done,
        rows_are_copied_twice,
        all_is_cleared_that_is_there,
        nobody_is_asked_for_maintenance,
        starts_shortly_before_maintenance,
        reservations_admit_everybody,
        limits_of_groups_do_not_count,
        nobody_gets_older,
        who_is_interrupted_waits_anew,
        what_runs_keeps_its_age,
    )
}

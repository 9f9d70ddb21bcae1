"""What is looked up often, from the rows: kept with each row that is put into a draft, and made anew when one is
dropped."""

from __future__ import annotations

from collections.abc import Iterable

from fireflyer.cluster.core.platform.life.accused import accused_nodes
from fireflyer.cluster.core.platform.store.rows import (
    NotificationRow,
    PlaceRow,
    RunRow,
    RunState,
    SubmissionRow,
    TaskRow,
    WebhookRow,
)
from fireflyer.cluster.schema.tasks import FINISHED, TaskSpec

__all__ = ["Index", "RunKey"]

RunKey = tuple[int, int]


class Index:
    """Dictionaries whose values are None are sets that keep their order."""

    def __init__(self) -> None:
        self.unfinished: dict[int, None] = {}
        self.finished: dict[int, None] = {}
        """The one that finished first is first."""
        self.of_user: dict[str, dict[int, None]] = {}
        """Unfinished tasks."""
        self.named: dict[tuple[str, str], int] = {}
        """(user, name) of unfinished tasks."""
        self.dependents: dict[int, dict[int, None]] = {}
        """Unfinished tasks that wait for the end of this one, or waited."""
        self.open_runs: dict[RunKey, None] = {}
        """That are not over."""
        self.tokens: dict[str, RunKey] = {}
        """Of these."""
        self.accusing: dict[str, dict[RunKey, None]] = {}
        """Node -> runs that accuse it of their end."""
        self.places: dict[RunKey, dict[str, None]] = {}
        """Nodes that a run still has."""
        self.keys: dict[tuple[str, str], dict[int, None]] = {}
        """(user, idempotency key) of submissions."""
        self._tasks_of: dict[int, int] = {}
        self.webhooks_of: dict[str, dict[int, None]] = {}
        """By user."""
        self.node_webhooks: dict[int, None] = {}
        """That are told of nodes."""
        self.pending: dict[int, dict[int, None]] = {}
        """Webhook -> notifications that were not delivered yet, the oldest first."""
        self.pending_of: dict[str, int] = {}
        """User -> how many these are."""

    @staticmethod
    def of(
        tasks: Iterable[TaskRow],
        runs: Iterable[RunRow],
        places: Iterable[PlaceRow],
        submissions: Iterable[SubmissionRow],
        webhooks: Iterable[WebhookRow] = (),
        notifications: Iterable[NotificationRow] = (),
    ) -> Index:
        index = Index()
        by_id = {row.id: row for row in submissions}
        ordered = sorted(tasks, key=lambda row: (row.ended_ns or 0, row.id))
        for task in ordered:
            index.task(None, task, by_id[task.submission].spec)
        users = {row.submission: row.user for row in ordered}
        for row in by_id.values():
            index.submission(None, row, users[row.id])
        for run in runs:
            index.run(None, run)
        for place in places:
            index.place(None, place)
        for webhook in sorted(webhooks, key=lambda row: row.id):
            index.webhook(webhook, keep=True)
        for notification in sorted(notifications, key=lambda row: row.number):
            index.notification(notification, keep=True)
        return index

    def webhook(self, row: WebhookRow, *, keep: bool) -> None:
        mine = self.webhooks_of.setdefault(row.user, {})
        if keep:
            mine[row.id] = None
            if "node.lost" in row.events:
                self.node_webhooks[row.id] = None
            return
        mine.pop(row.id, None)
        self.node_webhooks.pop(row.id, None)
        if not mine:
            del self.webhooks_of[row.user]

    def notification(self, row: NotificationRow, *, keep: bool) -> None:
        """One that is new, or goes."""
        mine = self.pending.setdefault(row.webhook, {})
        if keep:
            mine[row.number] = None
        else:
            mine.pop(row.number, None)
        if not mine:
            del self.pending[row.webhook]
        left = self.pending_of.get(row.user, 0) + (1 if keep else -1)
        self.pending_of[row.user] = left
        if not left:
            del self.pending_of[row.user]

    def task(self, old: TaskRow | None, new: TaskRow | None, spec: TaskSpec) -> None:
        if old is not None and (new is None or new.state is not old.state):
            self._without(old, spec)
        if new is not None and (old is None or new.state is not old.state):
            self._with(new, spec)
        if (old is None) != (new is None):
            row = new or old
            count = self._tasks_of.get(row.submission, 0) + (1 if old is None else -1) if row is not None else 0
            if row is not None:
                self._tasks_of[row.submission] = count
                if not count:
                    del self._tasks_of[row.submission]

    def _without(self, row: TaskRow, spec: TaskSpec) -> None:
        if row.state is FINISHED:
            self.finished.pop(row.id, None)
            return
        self.unfinished.pop(row.id, None)
        mine = self.of_user.get(row.user, {})
        mine.pop(row.id, None)
        if not mine:
            self.of_user.pop(row.user, None)
        self.named.pop((row.user, row.name), None)
        for after in spec.after:
            waiting = self.dependents.get(after.task, {})
            waiting.pop(row.id, None)
            if not waiting:
                self.dependents.pop(after.task, None)

    def _with(self, row: TaskRow, spec: TaskSpec) -> None:
        if row.state is FINISHED:
            self.finished[row.id] = None
            return
        self.unfinished[row.id] = None
        self.of_user.setdefault(row.user, {})[row.id] = None
        self.named[row.user, row.name] = row.id
        for after in spec.after:
            self.dependents.setdefault(after.task, {})[row.id] = None

    def submission(self, old: SubmissionRow | None, new: SubmissionRow | None, user: str) -> None:
        row = new or old
        if row is None or not row.key:
            return
        known = self.keys.setdefault((user, row.key), {})
        if new is not None:
            known[row.id] = None
        else:
            known.pop(row.id, None)
        if not known:
            del self.keys[user, row.key]

    def run(self, old: RunRow | None, new: RunRow) -> None:
        key = new.task, new.number
        if new.state is RunState.OVER:
            self.open_runs.pop(key, None)
            self.tokens.pop(new.token, None)
        elif old is None:
            self.open_runs[key] = None
            self.tokens[new.token] = key
        for node in accused_nodes(new):
            self.accusing.setdefault(node, {})[key] = None

    def run_dropped(self, row: RunRow) -> None:
        """It is remembered no longer."""
        for node in accused_nodes(row):
            runs = self.accusing.get(node, {})
            runs.pop((row.task, row.number), None)
            if not runs:
                self.accusing.pop(node, None)

    def place(self, old: PlaceRow | None, new: PlaceRow | None) -> None:
        if old is not None:
            nodes = self.places.get((old.task, old.run), {})
            nodes.pop(old.name, None)
            if not nodes:
                self.places.pop((old.task, old.run), None)
        if new is not None:
            self.places.setdefault((new.task, new.run), {})[new.name] = None

    def tasks_of_submission(self, submission: int) -> int:
        return self._tasks_of.get(submission, 0)

    def open_run(self, task: TaskRow) -> RunKey | None:
        """Its last run, unless that is over."""
        key = task.id, task.runs - 1
        return key if key in self.open_runs else None

"""Notifications of users by webhooks: a durable queue for each webhook, of which the leader sends one after another.

    change of a task ──> put         a row of the queue, in the transaction of the change itself
    committed, due   ──> Deliver     to the shell, which sends it and answers each one
    Delivered        ──> apply       the next transaction removes the row, or says when it is tried again

A manager that is killed between sending and recording finds the row and sends it again, with the same event id: at
least once. Of a webhook one notification at a time is under way, in the order of the events. After a failure it rests,
for longer each time; what could not be delivered for `GIVE_UP_NS` is given up and counted. A user has so many webhooks
and so many notifications that wait: those that are one too many are dropped and counted.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Final, TypeAlias

import msgspec

from fireflyer.base.errors import Busy, Exists, NotFound, PermissionDenied, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.access import OPERATOR, is_operator
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import NotificationRow, TaskRow, WebhookRow
from fireflyer.cluster.schema.tasks import FINISHED, TaskSpec, TaskState
from fireflyer.cluster.schema.webhooks import EventKind, NewWebhook, Notification, NotificationData, WebhookView

__all__ = [
    "GIVE_UP_NS",
    "AddWebhook",
    "Deliver",
    "Delivered",
    "RemoveWebhook",
    "SendTest",
    "WebhookChange",
    "Webhooks",
    "retry_pause_ns",
]

MAX_WEBHOOKS: Final = 4096
MAX_WEBHOOKS_OF_USER: Final = 8
MAX_PENDING_OF_USER: Final = 1000
"""Notifications that wait."""
MAX_UNDER_WAY: Final = 32
GIVE_UP_NS: Final = 24 * 3600 * SECOND
FIRST_PAUSE_NS: Final = 5 * SECOND
LONGEST_PAUSE_NS: Final = 3600 * SECOND
_MAX_REASON: Final = 500


class AddWebhook(msgspec.Struct, frozen=True):
    webhook: NewWebhook
    nonce: bytes
    """Drawn at random: the secret is computed from it."""


class RemoveWebhook(msgspec.Struct, frozen=True):
    id: int


class SendTest(msgspec.Struct, frozen=True):
    id: int


WebhookChange: TypeAlias = AddWebhook | RemoveWebhook | SendTest


class Deliver(msgspec.Struct, frozen=True, kw_only=True, tag="Deliver"):
    """Send it, and answer with `Delivered`, once. `event_id`: the same in each attempt."""

    webhook: int
    number: int
    event_id: str
    user: str
    url: str
    nonce: bytes
    for_operator: bool
    """Only while the user is one."""
    body: bytes


class Delivered(msgspec.Struct, frozen=True, kw_only=True, tag="Delivered"):
    """`final`: another attempt would not help."""

    webhook: int
    number: int
    ok: bool
    text: str
    final: bool = False


def retry_pause_ns(failures: int) -> int:
    """After so many in a row."""
    return min(LONGEST_PAUSE_NS, FIRST_PAUSE_NS << min(failures - 1, 20))


class Webhooks:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._under_way: dict[int, int] = {}
        """Webhook -> the notification that the shell has."""
        self._heard: dict[int, Delivered] = {}
        """By webhook: what the rows do not say yet."""
        self._applied: dict[int, None] = {}
        """Of these, those in the draft."""

    # --- what users ask ---

    def change(self, change: WebhookChange, user: str, roles: tuple[str, ...], now_ns: int) -> tuple[int, str]:
        """The webhook's number, and a line that says what was done. Raises an error that says what to do."""
        if isinstance(change, AddWebhook):
            return self._add(change, user, roles, now_ns)
        row = self._ledger.webhooks.get(change.id)
        if row is None or (row.user != user and not is_operator(roles)):
            raise NotFound(f"you have no webhook {change.id}; `ff webhook list` shows yours")
        if isinstance(change, RemoveWebhook):
            for number in list(self._ledger.index.pending.get(row.id, {})):
                self._ledger.put_notification(self._ledger.notifications.known(number), keep=False)
            self._ledger.put_webhook(row, keep=False)
            return row.id, f"webhook {row.id} is removed; what it had not been told is dropped"
        if not self._put(row, "test", NotificationData(user=row.user), now_ns):
            raise Busy(f"{MAX_PENDING_OF_USER} notifications of {row.user} wait already; try again later")
        return row.id, f"a test is on its way to webhook {row.id}; `ff webhook list` says how it went"

    def _add(self, change: AddWebhook, user: str, roles: tuple[str, ...], now_ns: int) -> tuple[int, str]:
        new, mine = change.webhook, self._of(user)
        if "node.lost" in new.events and not is_operator(roles):
            raise PermissionDenied(f"node.lost is for operators; leave it out, or ask for the role {OPERATOR}")
        if any(row.url == new.url for row in mine):
            raise Exists("you have a webhook of this URL already; `ff webhook remove` removes it")
        if len(mine) >= MAX_WEBHOOKS_OF_USER:
            raise UsageError(f"you have {len(mine)} webhooks, the maximum; remove one: ff webhook remove")
        if len(self._ledger.webhooks) >= MAX_WEBHOOKS:
            raise Busy(f"the platform has {MAX_WEBHOOKS} webhooks, the maximum; ask an operator")
        number = self._ledger.new_webhook()
        events = tuple(dict.fromkeys(new.events))
        row = WebhookRow(
            id=number, user=user, url=new.url, events=events, named=new.named, nonce=change.nonce, created_ns=now_ns
        )
        self._ledger.put_webhook(row)
        return number, f"webhook {number} is added"

    def check_notify(self, user: str, url: str) -> None:
        """Raises `UsageError` where the user has registered no webhook of this URL, whose secret could sign."""
        if url and all(row.url != url for row in self._of(user)):
            raise UsageError(f"you have no webhook of {url[:200]}; add it first: ff webhook add --named URL")

    def views(self, user: str, time_ns: int) -> tuple[WebhookView, ...]:
        """Of one user, or of all where that is empty. As it is committed."""
        rows = [row for row in self._ledger.webhooks.committed.values() if not user or row.user == user]
        pending = Counter(one.webhook for one in self._ledger.notifications.committed.values())
        return tuple(self._view(row, pending[row.id], time_ns) for row in sorted(rows, key=lambda row: row.id))

    def _view(self, row: WebhookRow, pending: int, time_ns: int) -> WebhookView:
        return WebhookView(
            id=row.id,
            user=row.user,
            url=row.url,
            events=row.events,
            named=row.named,
            pending=pending,
            delivered=row.delivered,
            given_up=row.given_up,
            dropped=row.dropped,
            last=row.last,
            retry_in_ns=max(0, row.retry_ns - time_ns) if row.failures else None,
        )

    def _of(self, user: str) -> list[WebhookRow]:
        return [self._ledger.webhooks.known(number) for number in self._ledger.index.webhooks_of.get(user, {})]

    # --- what happens ---

    def task(self, row: TaskRow, spec: TaskSpec, now_ns: int) -> None:
        """It has entered a state."""
        kind = _kind_of(row)
        if kind is None or row.user not in self._ledger.index.webhooks_of:
            return
        data = NotificationData(
            user=row.user,
            task=row.id,
            name=row.name,
            run=row.runs - 1 if row.runs else None,
            outcome="" if row.outcome is None else row.outcome.value,
            exit_code=row.exit_code,
            reason=row.reason[:_MAX_REASON],
        )
        for webhook in self._of(row.user):
            if kind in webhook.events and (not webhook.named or spec.notify == webhook.url):
                self._put(webhook, kind, data, now_ns)

    def node_lost(self, node: str, now_ns: int) -> None:
        for number in list(self._ledger.index.node_webhooks):
            webhook = self._ledger.webhooks.known(number)
            self._put(webhook, "node.lost", NotificationData(node=node), now_ns)

    def _put(self, webhook: WebhookRow, kind: EventKind, data: NotificationData, now_ns: int) -> bool:
        """Whether there was room."""
        if self._ledger.index.pending_of.get(webhook.user, 0) >= MAX_PENDING_OF_USER:
            self._ledger.put_webhook(msgspec.structs.replace(webhook, dropped=webhook.dropped + 1))
            return False
        number = self._ledger.new_notification()
        words = f"{self._ledger.draft_state.cluster}/notification/{number}"
        row = NotificationRow(
            number=number,
            webhook=webhook.id,
            user=webhook.user,
            event_id="msg_" + hashlib.blake2b(words.encode(), digest_size=16).hexdigest(),
            kind=kind,
            at_ns=now_ns,
            data=data,
        )
        self._ledger.put_notification(row)
        return True

    # --- deliveries ---

    def due(self, time_ns: int) -> list[Deliver]:
        """After a commit: what is to be sent now. Each is under way until the rows say how it went."""
        orders = []
        for number, pending in self._ledger.index.pending.items():
            if len(self._under_way) >= MAX_UNDER_WAY:
                break
            row = self._ledger.webhooks.committed[number]
            if number not in self._under_way and row.retry_ns <= time_ns:
                first = next(iter(pending))
                self._under_way[number] = first
                orders.append(_order(row, self._ledger.notifications.committed[first]))
        return orders

    def hear(self, delivered: Delivered) -> None:
        if self._under_way.get(delivered.webhook) == delivered.number:
            self._heard[delivered.webhook] = delivered

    def apply(self, now_ns: int) -> None:
        """What was heard, into the draft."""
        for delivered in self._heard.values():
            self._applied[delivered.webhook] = None
            webhook = self._ledger.webhooks.get(delivered.webhook)
            row = self._ledger.notifications.get(delivered.number)
            if webhook is None or row is None:
                continue
            text = delivered.text[:_MAX_REASON]
            if delivered.ok:
                self._ledger.put_notification(row, keep=False)
                webhook = msgspec.structs.replace(
                    webhook, delivered=webhook.delivered + 1, failures=0, retry_ns=0, last=text
                )
            else:
                webhook = self._failed(webhook, row, text, now_ns, final=delivered.final)
            self._ledger.put_webhook(webhook)

    def _failed(
        self, webhook: WebhookRow, first: NotificationRow, text: str, now_ns: int, *, final: bool
    ) -> WebhookRow:
        failures, given_up = webhook.failures + 1, 0
        for number in list(self._ledger.index.pending.get(webhook.id, {})):
            row = self._ledger.notifications.known(number)
            if now_ns - row.at_ns >= GIVE_UP_NS or (final and row is first):
                self._ledger.put_notification(row, keep=False)
                given_up += 1
        return msgspec.structs.replace(
            webhook,
            failures=failures,
            given_up=webhook.given_up + given_up,
            retry_ns=now_ns + retry_pause_ns(failures),
            last=text,
        )

    def committed(self) -> None:
        for webhook in self._applied:
            self._under_way.pop(webhook, None)
            self._heard.pop(webhook, None)
        self._applied.clear()

    def rollback(self) -> None:
        """The draft never was: what was heard is applied to the next one."""
        self._applied.clear()


def _kind_of(row: TaskRow) -> EventKind | None:
    if row.state is TaskState.RUNNING:
        return "task.started" if row.runs <= 1 else "task.resumed"
    if row.state is TaskState.SUSPENDED:
        return "task.suspended"
    return "task.ended" if row.state is FINISHED else None


def _order(webhook: WebhookRow, row: NotificationRow) -> Deliver:
    return Deliver(
        webhook=webhook.id,
        number=row.number,
        event_id=row.event_id,
        user=webhook.user,
        url=webhook.url,
        nonce=webhook.nonce,
        for_operator=row.kind == "node.lost",
        body=msgspec.json.encode(Notification(row.kind, row.at_ns // SECOND, row.data)),
    )

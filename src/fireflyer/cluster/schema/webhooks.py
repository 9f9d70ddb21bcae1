"""Webhooks: what users register, what is sent to their URLs, and what they are shown."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

__all__ = [
    "MAX_URL_CHARS",
    "TASK_EVENTS",
    "EventKind",
    "NewWebhook",
    "Notification",
    "NotificationData",
    "ShownWebhook",
    "WebhookEvent",
    "WebhookView",
]

MAX_URL_CHARS: Final = 2048
WebhookEvent = Literal["task.started", "task.suspended", "task.resumed", "task.ended", "node.lost"]
EventKind = Literal[WebhookEvent, "test"]
TASK_EVENTS: Final[tuple[WebhookEvent, ...]] = ("task.started", "task.suspended", "task.resumed", "task.ended")
_Events = Annotated[
    tuple[WebhookEvent, ...],
    msgspec.Meta(min_length=1, max_length=8),
]
WebhookUrl = Annotated[str, msgspec.Meta(pattern=r"^https?://[!-~]{1,2000}$")]


class NewWebhook(msgspec.Struct, frozen=True, kw_only=True):
    url: WebhookUrl
    events: _Events = TASK_EVENTS
    """`node.lost` is for operators."""
    named: bool = False
    """Only of tasks that name the URL (`TaskSpec.notify`); else of all tasks of the user."""


class ShownWebhook(msgspec.Struct, frozen=True):
    """`secret` is shown this once: it signs what is sent."""

    id: int
    secret: str

    def __repr__(self) -> str:
        return f"ShownWebhook({self.id})"


class NotificationData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happened to a task of `user`, or to a node."""

    user: str = ""
    task: int | None = None
    name: str = ""
    run: int | None = None
    outcome: str = ""
    exit_code: int | None = None
    reason: str = ""
    node: str = ""


class Notification(msgspec.Struct, frozen=True):
    """The body of what is sent, as JSON. `time_s`: of the event, Unix time."""

    type: EventKind
    time_s: int
    data: NotificationData


class WebhookView(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    user: str
    url: str
    events: tuple[str, ...]
    named: bool
    pending: int
    """Notifications that wait to be sent."""
    delivered: int
    given_up: int
    """That could not be delivered for too long."""
    dropped: int
    """That were one too many."""
    last: str
    """Outcome of the newest attempt; empty: there was none."""
    retry_in_ns: int | None = None
    """Until the next attempt, where the newest has failed."""

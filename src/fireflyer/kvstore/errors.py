"""What a transaction can end with, beside the errors of `fireflyer.base.errors`.

They keep the wire codes of their bases: on the other side of a connection they are what the base says.
"""

from __future__ import annotations

from fireflyer.base.errors import Timeout, TransientError, Unreachable

__all__ = ["CommitUnknown", "Conflict", "Disconnected", "TransactionTimeout"]


class Conflict(TransientError):
    """Another transaction was first, or this one is too old to tell. Nothing of it happened; run it again."""


class CommitUnknown(Timeout):
    """The commit was under way when the connection broke, the deadline passed or the task was cancelled: it may have
    happened, or may still happen. Repeat only what is idempotent (`transact_once`)."""


class TransactionTimeout(Timeout):
    """The deadline passed before the commit was sent. Nothing of it happened."""


class Disconnected(Unreachable):
    """The connection to the server broke before the commit was sent. Nothing of the transaction happened."""

"""What PostgreSQL's errors mean for a transaction.

By SQLSTATE (the server's documentation, appendix "PostgreSQL Error Codes"); what the driver raises by itself is a lost
connection. The same loss means `Disconnected` before COMMIT was sent and `CommitUnknown` after.
"""

from __future__ import annotations

from typing import Final

import asyncpg

from fireflyer.base.errors import (
    Busy,
    DataCorruption,
    FireflyerError,
    NoSpace,
    NotFound,
    PermanentError,
    PermissionDenied,
)
from fireflyer.kvstore.errors import CommitUnknown, Conflict, Disconnected, TransactionTimeout

__all__ = ["translate"]

_CONFLICTS: Final = ("40001", "40P01", "55P03")
"""Serialization failure, deadlock, lock not available: the server has rolled back."""
_LOST: Final = ("08", "57P", "25P03", "40003", "53300", "25006")
"""Connection exceptions; shutdown, crash, starting up; idle for too long; completion unknown; too many
connections; a standby that only reads."""
_CLASSES: Final[tuple[tuple[str, type[FireflyerError], str], ...]] = (
    ("57014", TransactionTimeout, "the server cancelled a statement that took too long; nothing was committed"),
    ("53100", NoSpace, "the server's disk is full; free some space"),
    ("53", Busy, "the server is short of a resource"),
    ("28", PermissionDenied, "the server refused the user; check name, password and pg_hba.conf"),
    ("42501", PermissionDenied, "the user lacks a privilege; grant it"),
    ("3D000", NotFound, "no such database; create it with `createdb`"),
    ("XX001", DataCorruption, "the server found damaged data"),
    ("XX002", DataCorruption, "the server found a damaged index"),
)


def translate(error: Exception, what: str, *, committing: bool = False) -> FireflyerError:
    """The error to raise instead; `what` says what was attempted. `committing`: COMMIT had been sent."""
    if isinstance(error, FireflyerError):
        return error
    text = f"PostgreSQL, {what}"
    said = " ".join(str(error).split()) or type(error).__name__
    state = getattr(error, "sqlstate", None)
    lost = isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError | OSError | EOFError)
    if state in _CONFLICTS:
        return Conflict(f"{text}: transaction not committed ({said}); run it again", retry_ns=0)
    if lost or (state or "").startswith(_LOST) or (committing and state == "57014"):
        if committing:
            return CommitUnknown(
                f"{text}: the connection broke during the commit ({said}); the transaction may or may not be committed"
            )
        return Disconnected(f"{text}: {said}; check that the server runs and accepts writes")
    for prefix, cls, advice in _CLASSES:
        if (state or "").startswith(prefix):
            return cls(f"{text}: {advice} ({said})")
    return PermanentError(f"{text}: {said}")

"""Errors say what the caller must do: callers match on the class, never on the text.

A message is one line: what happened, to what, and what to do about it. Every class has a stable wire `code`, so an
error crosses the network as a code and a message and comes out as the same class on the other side.
"""

from __future__ import annotations

import errno
from typing import ClassVar

__all__ = [
    "Aborted",
    "Busy",
    "DataCorruption",
    "Exists",
    "Fenced",
    "FireflyerError",
    "InvariantViolation",
    "JobFailed",
    "NoSpace",
    "NotFound",
    "PeerFailed",
    "PermanentError",
    "PermissionDenied",
    "StaleVersion",
    "Timeout",
    "TransientError",
    "Unreachable",
    "UsageError",
    "error_from_wire",
    "error_to_wire",
]


class FireflyerError(Exception):
    """Base of every error that this package raises on purpose."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class UsageError(FireflyerError, ValueError):
    """The caller's fault; never retried. The message names the argument, its value and what is allowed."""

    code = "usage"


class TransientError(FireflyerError):
    """Worth retrying after `retry_ns` nanoseconds."""

    code = "transient"

    def __init__(self, message: str, *, retry_ns: int = 100_000_000) -> None:
        super().__init__(message)
        self.retry_ns = retry_ns


class Timeout(TransientError, TimeoutError):
    """A deadline passed. The operation may or may not have happened."""

    code = "timeout"


class Unreachable(TransientError, ConnectionError):
    """The other side cannot be reached, or the connection broke."""

    code = "unreachable"


class Busy(TransientError):
    """A bounded resource (queue, connection limit, lock) is full or held."""

    code = "busy"


class StaleVersion(TransientError):
    """The caller acted on an old version of something; read it again, then retry."""

    code = "stale_version"


class PermanentError(FireflyerError):
    """Will not succeed by being repeated."""

    code = "permanent"


class NotFound(PermanentError, FileNotFoundError):
    """Something that was named is not there."""

    code = "not_found"
    errno = errno.ENOENT


class Exists(PermanentError, FileExistsError):
    """Something that was to be made is there already."""

    code = "exists"
    errno = errno.EEXIST


class NoSpace(PermanentError, OSError):
    """No space is left, or a quota is used up."""

    code = "no_space"
    errno = errno.ENOSPC


class PermissionDenied(PermanentError, PermissionError):
    """The caller may not do this, or was not recognised."""

    code = "permission_denied"
    errno = errno.EACCES


class JobFailed(PermanentError):
    """A training job ended without success; `exit_code` is what the launcher exits with."""

    code = "job_failed"

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class PeerFailed(PermanentError):
    """A collective cannot complete because `rank` died, hung or broke the protocol; the group is unusable."""

    code = "peer_failed"

    def __init__(self, message: str, *, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class Aborted(PermanentError):
    """The operation was given up on request (`abort()`, shutdown)."""

    code = "aborted"


class Fenced(PermanentError):
    """Another process has taken this one's place and begun: whatever this one holds is no longer its own. Stop."""

    code = "fenced"


class DataCorruption(FireflyerError):
    """Bytes are not what was written: leave this replica and repair it from another."""

    code = "data_corruption"


class InvariantViolation(FireflyerError):
    """Our own bug: dump the flight recorder and stop this node."""

    code = "invariant_violation"


_CLASSES: tuple[type[FireflyerError], ...] = (
    UsageError,
    TransientError,
    Timeout,
    Unreachable,
    Busy,
    StaleVersion,
    PermanentError,
    NotFound,
    Exists,
    NoSpace,
    PermissionDenied,
    JobFailed,
    PeerFailed,
    Aborted,
    Fenced,
    DataCorruption,
    InvariantViolation,
)
_BY_CODE = {cls.code: cls for cls in _CLASSES}


def error_to_wire(error: BaseException) -> tuple[str, str]:
    """`(code, message)` of any exception. What is not ours crosses as an invariant violation without its traceback, and
    what UTF-8 cannot hold (of a path that is not UTF-8) as an escape."""
    if isinstance(error, FireflyerError):
        code, message = error.code, error.message
    else:
        code, message = InvariantViolation.code, f"unexpected {type(error).__name__}: {error}"
    return code, message.encode(errors="backslashreplace").decode()


def error_from_wire(code: str, message: str) -> FireflyerError:
    """The exception that `error_to_wire` described. An unknown code (a newer peer) becomes a `PermanentError`."""
    cls = _BY_CODE.get(code)
    if cls is None:
        return PermanentError(f"{message} (unknown error code {code!r})")
    return cls(message)

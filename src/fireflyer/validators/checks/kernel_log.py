"""Reads the kernel's log: all that is in it, or from now on what is added."""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from fireflyer.validators.core.checks.evidence import KernelRecord, Output
from fireflyer.validators.core.checks.kernel_log import has_fault, parse_journal, parse_kmsg, sequence_of
from fireflyer.validators.core.checks.sources import Command

__all__ = ["JOURNAL", "KMSG", "KernelLogRead", "follow_kmsg", "from_journal", "open_kmsg", "read_kmsg"]

KMSG: Final = "/dev/kmsg"
JOURNAL: Final = Command(
    name="journal",
    argv=(
        "journalctl", "-q", "-b", "-o", "json", "--no-pager", "--since", "-2h", "-n", "20000", "_TRANSPORT=kernel",
        "SYSLOG_FACILITY=0",
    ),
    limit_s=20,
)  # fmt: skip
"""Where /dev/kmsg may not be read; a member of the group systemd-journal may read this."""
_RECORD_BYTES: Final = 8192
"""The kernel gives a record for each read, and none is longer."""
_MAX_RECORDS: Final = 500_000
_MAX_FAULTS: Final = 20_000
_LIMIT_S: Final = 5.0


class KernelLogRead(NamedTuple):
    faults: tuple[KernelRecord, ...] = ()
    """Records of the kernel that may tell of a fault."""
    oldest: int = 0
    sequence: int = 0
    """Of the first and the last record; 0: not known."""
    lost: int = 0
    """Records that were overwritten while the log was read."""
    problem: str = ""
    late: bool = False
    """With a problem: it was not read in time."""


def open_kmsg(path: str = KMSG, *, from_now: bool = False) -> int:
    """A descriptor, not blocking. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if from_now:
        os.lseek(fd, 0, os.SEEK_END)
    return fd


def read_kmsg(fd: int, started_ns: int) -> KernelLogRead:
    """All records that are there. `started_ns`: when the kernel's clock was 0."""
    faults: list[KernelRecord] = []
    first = last = b""
    lost, overwritten = 0, False
    problem, late = "the kernel's log grew faster than it was read", True
    ends_s = time.monotonic() + _LIMIT_S
    for _ in range(_MAX_RECORDS):
        try:
            record = os.read(fd, _RECORD_BYTES)
        except BlockingIOError:
            problem, late = "", False
            break
        except OSError as error:
            if error.errno == errno.EPIPE:  # overwritten while we read; the next read gives the oldest that is left
                overwritten = True
                continue
            problem, late = f"{KMSG}: {os.strerror(error.errno or 0)}", False
            break
        if not record:
            problem, late = "", False
            break
        if overwritten and last:
            lost += _between(last, record)
        first, last, overwritten = first or record, record, False
        if has_fault(record) and (parsed := parse_kmsg(record, started_ns)) is not None:
            faults.append(parsed)
            del faults[:-_MAX_FAULTS]
        if time.monotonic() > ends_s:
            break
    return KernelLogRead(tuple(faults), sequence_of(first) or 0, sequence_of(last) or 0, lost, problem, late)


def _between(last: bytes, record: bytes) -> int:
    """How many records the kernel has overwritten between two that were read."""
    return max((sequence_of(record) or 0) - (sequence_of(last) or 0) - 1, 1)


def from_journal(output: Output) -> KernelLogRead:
    if output.problem:
        return KernelLogRead(problem=f"/dev/kmsg needs root, and {output.problem}", late=output.hung)
    if output.exit_code:
        said = " ".join(output.text.split())[:200]
        return KernelLogRead(problem=f"/dev/kmsg needs root, and journalctl failed: {said}")
    found = (parse_journal(line) for line in output.text.encode().splitlines())
    return KernelLogRead(tuple(record for record in found if record is not None)[-_MAX_FAULTS:])


def follow_kmsg(
    fd: int, started_ns: int, wake_fd: int, on_fault: Callable[[KernelRecord], None], on_lost: Callable[[int], None],
    *, on_read: Callable[[int], None] = lambda _: None, after: int = 0,
) -> None:  # fmt: skip
    """Gives each record that may tell of a fault, until something can be read from `wake_fd` or the log ends.
    `on_lost`: the kernel has overwritten so many records before they were read. `on_read`: all is read that there is,
    up to the record with this number. `after`: that of the last record that was read before; 0: not known."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.register(wake_fd, select.POLLIN)
    last, lost = b"", False
    while True:
        try:
            record = os.read(fd, _RECORD_BYTES)
        except BlockingIOError:
            if last:
                on_read(sequence_of(last) or 0)
            if any(ready == wake_fd for ready, _ in poll.poll()):
                return
            continue
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            lost = True
            continue
        if not record:
            return
        if after and not last and (missed := (sequence_of(record) or 0) - after - 1) > 0:
            on_lost(missed)
        elif lost:
            on_lost(_between(last, record))
        lost = False
        last = record
        if has_fault(record) and (parsed := parse_kmsg(record, started_ns)) is not None:
            on_fault(parsed)

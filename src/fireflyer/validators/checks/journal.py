"""Follows the kernel's records in the journal, where /dev/kmsg may not be read."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable
from typing import Final

from fireflyer.base.errors import NotFound
from fireflyer.runtime.processes.guarded import start_with_parent_death_signal
from fireflyer.validators.checks.commands import SEARCH_PATH, TOOL_ENVIRONMENT
from fireflyer.validators.core.checks.evidence import KernelRecord
from fireflyer.validators.core.checks.kernel_log import has_fault, parse_journal

__all__ = ["NO_RECORD", "Journal", "follow_journal"]

_ARGV: Final = ("-q", "-b", "-f", "-n", "2000", "-o", "json", "--no-pager", "_TRANSPORT=kernel", "SYSLOG_FACILITY=0")
"""What has been looked at before is known by its time since the start of the node."""
_READ_BYTES: Final = 1 << 16
_MAX_LINE_BYTES: Final = 1 << 16
"""A record of the kernel has 1 KiB, and the journal adds as much; what is longer is passed over."""
_FIRST_S: Final = 20.0
NO_RECORD: Final = "the journal shows no record of the kernel: its reader must be root or in the group systemd-journal"


class Journal:
    """`journalctl`, which prints the newest records of the kernel, and then what is added. It dies with the thread that
    has made this."""

    def __init__(self, path: str = SEARCH_PATH) -> None:
        """`path`: where it is looked for. Raises `FireflyerError`."""
        tool = shutil.which("journalctl", path=path)
        if tool is None:
            raise NotFound("journalctl is not installed")
        self.fd, writer = os.pipe()
        try:
            self._process = start_with_parent_death_signal(
                (tool, *_ARGV), environment=TOOL_ENVIRONMENT, stdout=writer, stderr=subprocess.DEVNULL, directory="/"
            )
        except BaseException:
            os.close(self.fd)
            raise
        finally:
            os.close(writer)
        os.set_blocking(self.fd, False)

    def end(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except OSError:
            pass  # it has ended
        self._process.wait()
        os.close(self.fd)


def follow_journal(
    fd: int, wake_fd: int, on_fault: Callable[[KernelRecord], None], *, on_read: Callable[[int], None] = lambda _: None,
    first_s: float = _FIRST_S,
) -> str:  # fmt: skip
    """Gives each record of the kernel that may tell of a fault, until something can be read from `wake_fd`, or there is
    no more: why; else empty.
    `on_read`: all is read that there is, up to the record with this `journal_us`. `first_s`: within so long there must
    be a record, for each start of a node logs some. `fd`: not blocking."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.register(wake_fd, select.POLLIN)
    rest, newest, any_record, too_long = b"", 0, False, False
    while True:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            if newest:
                on_read(newest)
            ready = [at for at, _ in poll.poll(None if any_record else first_s * 1000)]
            if wake_fd in ready:
                return ""
            if not ready:
                return NO_RECORD
            continue
        if not data:
            return "journalctl has ended" if any_record else NO_RECORD
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            record = None if too_long or len(line) > _MAX_LINE_BYTES else parse_journal(line)
            too_long = False
            if record is not None:
                any_record, newest = True, max(newest, record.journal_us)
                if has_fault(b";" + record.text.encode()):
                    on_fault(record)
        if len(rest) > _MAX_LINE_BYTES:
            rest, too_long = b"", True

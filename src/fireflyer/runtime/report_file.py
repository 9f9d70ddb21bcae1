"""What a rank reports where no launcher collects it: a file of its own, one JSON line per event.

No rank waits for another, and a rank that is killed leaves all that it had written. The lines are those of the event
log, with the wall clock's time instead of the launcher's: `JobStarted`, `AttemptStarted`, the reports, and `RankExited`
when the process ends by itself. `analytics.rank_reports` puts the files of a run together.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence

from fireflyer.base.events import (
    AttemptStarted,
    JobEvent,
    JobStarted,
    Logged,
    RankExited,
    Report,
    encode_log_line,
)
from fireflyer.base.launch import REPORTS_NAME, RankEnvironment
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND

__all__ = ["ReportFile", "open_report_file"]

_log = logging.getLogger(__name__)


def open_report_file(run_dir: str, env: RankEnvironment) -> ReportFile | None:
    """A new file in `run_dir`, which is made if it is missing. None where that fails, with a line in the log."""
    directory = os.path.join(os.path.abspath(run_dir), REPORTS_NAME)
    started_ns = time.time_ns()
    path = os.path.join(directory, f"rank-{env.rank:05d}-{env.attempt:05d}-{started_ns:020d}-{os.getpid()}.jsonl")
    try:
        os.makedirs(directory, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        _log.warning("steps are not reported reason=%s", translate_os_error(error, f"create {path}"))
        return None
    return ReportFile(fd, path, env, started_ns)


class ReportFile:
    """After a write that failed nothing more is written."""

    def __init__(self, fd: int, path: str, env: RankEnvironment, started_ns: int) -> None:
        self.failed = False
        """The process is ending by an exception."""
        self._fd, self._path, self._env = fd, path, env
        self._offset_ns = started_ns - time.monotonic_ns()
        command = tuple(sys.argv)
        ranks = max(1, env.local_world_size)
        even = env.nodes * ranks == env.world_size
        started = JobStarted(
            env.job, command, env.nodes, ranks, env.max_restarts, started_ns / SECOND,
            node_ranks=() if even else (env.world_size,),
        )  # fmt: skip
        self._write([started, AttemptStarted(env.attempt)])

    def append(self, reports: Sequence[Report]) -> bool:
        """False when nothing more will be written."""
        return self._write(reports)

    def close(self) -> None:
        failed = self.failed or getattr(sys, "last_value", None) is not None  # an exception that nobody caught
        self._write([RankExited(self._env.rank, self._env.attempt, 1 if failed else 0)])
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, events: Sequence[JobEvent]) -> bool:
        if self._fd < 0:
            return False
        at_ns = time.monotonic_ns() + self._offset_ns
        data = b"".join(encode_log_line(Logged(at_ns, event)) for event in events)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            _log.warning("reporting stopped, the script goes on reason=%s", translate_os_error(error, self._path))
            os.close(self._fd)
            self._fd = -1
            return False
        return True

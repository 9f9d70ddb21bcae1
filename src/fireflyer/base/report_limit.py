"""How many lines of a log, of one kind, others may cause: some in each interval, and then their number."""

from __future__ import annotations

from typing import Final

__all__ = ["REPORTS", "REPORT_INTERVAL_NS", "ReportLimit"]

REPORTS: Final = 20
REPORT_INTERVAL_NS: Final = 10_000_000_000


class ReportLimit:
    """At most `REPORTS` in `REPORT_INTERVAL_NS`, counted from the first one of each interval."""

    def __init__(self) -> None:
        self._from_ns: int | None = None
        self._reported = 0
        self._left_out = 0

    def ask(self, now_ns: int) -> int | None:
        """None: leave this one out. Else how many were left out since the last one that was not."""
        if self._from_ns is None or now_ns - self._from_ns >= REPORT_INTERVAL_NS:
            self._from_ns, self._reported = now_ns, 0
        if self._reported >= REPORTS:
            self._left_out += 1
            return None
        self._reported += 1
        left_out, self._left_out = self._left_out, 0
        return left_out

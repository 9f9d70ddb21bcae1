"""Lines that peers can cause: of each kind some in a while, and with the next one how many were left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from fireflyer.base.report_limit import ReportLimit

__all__ = ["LimitedLog"]


class LimitedLog:
    """`log`, of which each format is a kind. Formats are literals, so there are few."""

    def __init__(self, log: logging.Logger, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._log = log
        self._clock = clock
        self._limits: dict[str, ReportLimit] = {}

    def info(self, text: str, *values: object) -> None:
        self._say(logging.INFO, text, values)

    def warning(self, text: str, *values: object) -> None:
        self._say(logging.WARNING, text, values)

    def _say(self, level: int, text: str, values: tuple[object, ...]) -> None:
        left_out = self._limits.setdefault(text, ReportLimit()).ask(self._clock())
        if left_out:
            self._log.log(level, f"{text} left_out=%d", *values, left_out)
        elif left_out is not None:
            self._log.log(level, text, *values)

"""How far long work on a data set is, on standard error where that is a terminal; nothing otherwise."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Final, Self

from fireflyer.cli.fs.files.common import clean

__all__ = ["Progress"]

_EVERY: Final = 256
"""Records, or a mebibyte, between two updates."""
_EVERY_BYTES: Final = 1 << 20


class Progress:
    """A `fireflyer.data.packing.Observer`."""

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self._what = what
        self._shown = not quiet and sys.stderr.isatty()
        self._bars: Any = None
        self._task: Any = None
        self._records = 0
        self._new_records = 0
        self._new_bytes = 0

    def __enter__(self) -> Self:
        if self._shown:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.progress import Progress as Bars

            self._bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TextColumn("{task.fields[records]} records"),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(file=sys.stderr, highlight=False, markup=False, emoji=False),
                transient=True,
            )
            self._bars.start()
            self._task = self._bars.add_task(self._what, total=None, records=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begun(self, total_bytes: int, done_bytes: int, records: int) -> None:
        self._records = records
        if self._bars is not None:
            self._bars.update(self._task, total=total_bytes, completed=done_bytes, records=records)

    def advanced(self, source_bytes: int, records: int) -> None:
        self._new_bytes += source_bytes
        self._new_records += records
        if self._bars is None or (self._new_records < _EVERY and self._new_bytes < _EVERY_BYTES):
            return
        self._records += self._new_records
        self._bars.update(self._task, advance=self._new_bytes, records=self._records)
        self._new_bytes = self._new_records = 0

    def skipped(self, problem: str) -> None:
        self.say(f"left out: {problem}")

    def say(self, text: str) -> None:
        """A line on standard error, above the bar."""
        if self._bars is not None:
            self._bars.console.print(clean(text), soft_wrap=True)
        else:
            sys.stderr.write(f"{clean(text)}\n")

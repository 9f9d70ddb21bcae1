"""The live view of a job: rank output and notices as lines, the status below them (terminal) or among them (a pipe).

The launcher calls `on_entry` and `on_line` on its event loop, where nothing may block; a terminal that is paused or a
pipe that nobody reads blocks its writer. So lines are only queued (bounded; what does not fit is counted and said, the
rank's log file has it all), and a thread of the view's own does the writing.

A rank's line is written whole, behind its rank. Where the output is no terminal it is passed on as it came; on a
terminal control sequences other than colours are taken out, so that no rank can move the cursor or retitle the window.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from fireflyer.base.events import AttemptStarted, JobFinished, Logged
from fireflyer.cli.jobs.progress import JobProgress
from fireflyer.cli.jobs.tracebacks import TracebackFolder
from fireflyer.cluster.schema.job import RankLine

__all__ = ["JobView", "PlainPrinter", "Printer", "TerminalPrinter", "printer_for", "tame"]

QUEUE_ITEMS = 10_000
BATCH_ITEMS = 500
REFRESH_S = 0.2
PLAIN_STATUS_S = 2.0
CLOSE_S = 5.0
MARK = "ff"

_ESCAPES = re.compile(
    r"\x1b\[(?P<sgr>[0-9;:]*m)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]?", re.DOTALL
)
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f\x80-\x9f]")
_RANK_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_green")


def tame(text: str) -> str:
    """`text` with colours (SGR) kept and every other control sequence removed. Of a line that was overwritten by
    carriage returns the last version remains."""
    visible = text.rstrip("\r").rpartition("\r")[2]
    kept = _ESCAPES.sub(lambda match: match[0] if match["sgr"] is not None else "", visible)
    return _CONTROLS.sub("", kept).expandtabs()


class Printer(Protocol):
    """Where the view's thread writes."""

    live: bool
    """The status is drawn in place, so it may change all the time."""

    def start(self) -> None: ...
    def lines(self, items: list[RankLine | str]) -> None:
        """Rank lines, and notices of ours."""

    def status(self, line: str, *, final: bool) -> None:
        """The present status. Called a few times a second, and once more at the end."""

    def stop(self) -> None: ...


class TerminalPrinter:
    """Lines scroll by above a status line that is redrawn in place."""

    live = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner = Spinner("dots", text=Text("starting"), style="cyan")
        self._live = Live(
            self._spinner,
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def start(self) -> None:
        self._live.start()

    def lines(self, items: list[RankLine | str]) -> None:
        block = Text("\n").join(self._line(item) for item in items)
        self._console.print(block, soft_wrap=True, highlight=False)

    def _line(self, item: RankLine | str) -> Text:
        if isinstance(item, str):
            return Text.assemble((f"{MARK:<6} │ ", "bold"), item)
        style = _RANK_STYLES[item.rank % len(_RANK_STYLES)]
        text = Text.from_ansi(tame(item.text))
        return Text.assemble((f"rank {item.rank} │ ", style), text, (" …" if item.cut else "", "dim"))

    def status(self, line: str, *, final: bool) -> None:
        if not final:
            self._spinner.update(text=Text(line, style="bold", no_wrap=True, overflow="ellipsis"))
            self._live.refresh()

    def stop(self) -> None:
        self._live.stop()


class PlainPrinter:
    """Lines only; the status is one of them, when it has changed and not more often than every `PLAIN_STATUS_S`."""

    live = False

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._said = ""
        self._said_at = 0.0

    def start(self) -> None:
        return None

    def lines(self, items: list[RankLine | str]) -> None:
        self._write([f"{MARK:<6} | {item}" if isinstance(item, str) else self._line(item) for item in items])

    def _line(self, item: RankLine) -> str:
        return f"rank {item.rank} | {item.text}{' …' if item.cut else ''}"

    def status(self, line: str, *, final: bool) -> None:
        now = time.monotonic()
        if line == self._said or not (final or now - self._said_at >= PLAIN_STATUS_S):
            return
        self._said, self._said_at = line, now
        self._write([f"{MARK:<6} | {line}"])

    def _write(self, lines: list[str]) -> None:
        self._out.write("".join(f"{line}\n" for line in lines))
        self._out.flush()

    def stop(self) -> None:
        return None


def printer_for(console: Console, *, plain_out: TextIO) -> Printer:
    """Redrawing where the console is a terminal that can do it, plain lines everywhere else."""
    return TerminalPrinter(console) if console.is_terminal and not console.is_dumb_terminal else PlainPrinter(plain_out)


class _Flush:
    """In the queue: what is held back is to be shown before what follows."""


class JobView:
    """Context manager around a job. `on_entry`, `on_line` and `say` never block and may be called from any thread."""

    def __init__(
        self,
        printer: Printer,
        *,
        ranks_only: bool = False,
        hidden: Callable[[RankLine], bool] = lambda _line: False,
    ) -> None:
        """`hidden` lines of ranks are not shown; `ranks_only` leaves out our own."""
        self._printer = printer
        self._ranks_only = ranks_only
        self._hidden = hidden
        self._items: queue.Queue[RankLine | str | _Flush | None] = queue.Queue(QUEUE_ITEMS)
        self._folder = TracebackFolder()
        self._lock = threading.Lock()
        self._dropped = 0
        self._started_ns = time.monotonic_ns()
        self.progress = JobProgress()
        """What the job has come to; to be read when the job has ended."""
        self._thread = threading.Thread(target=self._work, name="ff-view", daemon=True)

    def on_entry(self, entry: Logged) -> None:
        if isinstance(entry.event, AttemptStarted | JobFinished):
            self._put(_Flush())
        with self._lock:
            self._started_ns = time.monotonic_ns() - entry.at_ns
            notices = self.progress.feed(entry)
        for notice in notices:
            self.say(notice)

    def on_line(self, line: RankLine) -> None:
        with self._lock:
            self.progress.printed(line.attempt)
        if not self._hidden(line):
            self._put(line)

    def say(self, text: str) -> None:
        if not self._ranks_only:
            self._put(text)

    def _put(self, item: RankLine | str | _Flush) -> None:
        try:
            self._items.put_nowait(item)
        except queue.Full:
            with self._lock:
                self._dropped += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._items.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        try:
            self._printer.start()
            try:
                self._pump()
            finally:
                self._printer.stop()
        except OSError:
            # Nobody reads our output any more: the job goes on, its logs and its report are in the run directory.
            self._discard()

    def _pump(self) -> None:
        more = True
        while more:
            batch, more = self._batch()
            items = self._fold(batch, last=not more)
            with self._lock:
                dropped, self._dropped = self._dropped, 0
                status = self.progress.status(time.monotonic_ns() - self._started_ns, live=self._printer.live)
            if dropped:
                items.append(f"{dropped:,} lines came too fast to be shown; the log files of the ranks have them")
            if items:
                self._printer.lines(items)
            if status and not self._ranks_only:
                self._printer.status(status, final=not more)

    def _fold(self, batch: list[RankLine | str | _Flush], *, last: bool) -> list[RankLine | str]:
        """Equal tracebacks of several ranks become one."""
        items: list[RankLine | str] = []
        for item in batch:
            if isinstance(item, str):
                items.append(item)
            else:
                now_ns = time.monotonic_ns()
                items += self._folder.flush() if isinstance(item, _Flush) else self._folder.feed(item, now_ns)
        items += self._folder.flush() if last else self._folder.due(time.monotonic_ns())
        return items

    def _batch(self) -> tuple[list[RankLine | str | _Flush], bool]:
        """What has come within a refresh period, at most `BATCH_ITEMS`; False with the last of it."""
        batch: list[RankLine | str | _Flush] = []
        deadline = time.monotonic() + REFRESH_S
        while len(batch) < BATCH_ITEMS:
            try:
                item = self._items.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if item is None:
                return batch, False
            batch.append(item)
        return batch, True

    def _discard(self) -> None:
        while self._items.get() is not None:
            pass

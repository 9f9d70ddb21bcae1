"""A traceback that all ranks print is shown once."""

from __future__ import annotations

from fireflyer.base.units import MS
from fireflyer.cli.jobs.tracebacks import MAX_AFTER, QUIET_NS, TracebackFolder
from fireflyer.cluster.schema.job import RankLine

ERROR = ["Traceback (most recent call last):", '  File "a.py", line 3, in <module>', "    fail()", "ValueError: bad {}"]


class Screen:
    def __init__(self) -> None:
        self.folder = TracebackFolder()
        self.now_ns = 0
        self.shown: list[str] = []

    def prints(self, rank: int, *texts: str, stream: str = "stderr", attempt: int = 0) -> None:
        for text in texts:
            line = RankLine(rank, 0, attempt, stream, text)  # type: ignore[arg-type]
            self._show(self.folder.feed(line, self.now_ns))

    def wait(self, span_ns: int) -> None:
        self.now_ns += span_ns
        self._show(self.folder.due(self.now_ns))

    def flush(self) -> None:
        self._show(self.folder.flush())

    def _show(self, lines: list[RankLine]) -> None:
        self.shown += [f"{line.rank} {line.text}" for line in lines]


def error(number: int, *, prefix: str = "") -> list[str]:
    return [prefix + line.format(number) for line in ERROR]


def test_eight_equal_tracebacks_are_one_and_a_count() -> None:
    screen = Screen()
    for at in range(4):  # as they come: line by line of all ranks
        for rank in range(8):
            screen.prints(rank, error(rank)[at])
    assert screen.shown == []
    screen.flush()
    assert screen.shown == [f"0 {line}" for line in error(0)] + ["0 (and 7 more ranks)"]


def test_the_prefix_of_torch_does_not_make_them_different() -> None:
    screen = Screen()
    for rank in range(3):
        screen.prints(rank, *error(rank, prefix=f"[rank{rank}]: "))
    screen.flush()
    assert screen.shown[0] == "0 [rank0]: Traceback (most recent call last):"
    assert screen.shown[-1] == "0 (and 2 more ranks)"
    assert len(screen.shown) == 5


def test_other_errors_are_shown_and_lines_of_stdout_are_not_delayed() -> None:
    screen = Screen()
    screen.prints(0, *error(1))
    screen.prints(0, "step 1", stream="stdout")
    assert screen.shown == ["0 step 1"]
    screen.prints(1, *error(1)[:3], "KeyError: 1")
    screen.wait(QUIET_NS)
    assert len(screen.shown) == 9
    screen.flush()
    assert len(screen.shown) == 9, "nobody raised the same"


def test_a_script_that_prints_tracebacks_and_goes_on_is_shown_soon_and_completely() -> None:
    screen = Screen()
    screen.prints(0, *error(1))
    screen.wait(QUIET_NS - MS)
    assert screen.shown == []
    screen.wait(MS)
    assert screen.shown == [f"0 {line}" for line in error(1)]
    screen.prints(0, *error(2), *(f"line {n}" for n in range(3 * MAX_AFTER)))
    screen.flush()
    assert [text for text in screen.shown if "line 2" in text] != [], "what follows is never lost"
    assert screen.shown[-1] == f"0 line {3 * MAX_AFTER - 1}"


def test_chained_tracebacks_are_one() -> None:
    screen = Screen()
    for rank in (0, 1):
        screen.prints(rank, *error(1), "", "During handling of the above exception, another exception occurred:", "")
        screen.prints(rank, *error(2))
    screen.flush()
    assert len(screen.shown) == 12
    assert screen.shown[-1] == "0 (and 1 more rank)"


def test_interrupted_ranks_print_nothing() -> None:
    screen = Screen()
    for rank in range(4):
        screen.prints(rank, *error(1)[:3], "KeyboardInterrupt")
    screen.flush()
    assert screen.shown == []


def test_the_next_attempt_shows_its_traceback_again() -> None:
    screen = Screen()
    screen.prints(0, *error(1))
    screen.flush()
    screen.prints(0, *error(1), attempt=1)
    screen.flush()
    assert len(screen.shown) == 8

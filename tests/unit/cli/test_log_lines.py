"""Lines of ranks as they are printed: what a terminal may get, and what everything else gets as it is."""

from __future__ import annotations

import pytest

from fireflyer.cli.platform.log_lines import LogPrinter, shown_on_terminal
from fireflyer.cluster.schema.logs import LogText


def printed(*events: LogText, terminal: bool = False, several: bool = False) -> str:
    written: list[str] = []
    printer = LogPrinter(written.append, terminal=terminal, several=several)
    for event in events:
        printer.text(event)
    printer.end_line()
    return "".join(written)


def said(text: str, *, rank: int = 0, attempt: int = 0) -> LogText:
    return LogText(run=0, attempt=attempt, rank=rank, offset=0, text=text)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("step 1\tloss 0.5", "step 1\tloss 0.5"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("\x1b[1;38;2;1;2;3mrgb", "\x1b[1;38;2;1;2;3mrgb\x1b[0m"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[1A\x1b[2K", "\\x1b[1A\\x1b[2K"),
        ("\x9b31m", "\\x9b31m"),
        ("a\x08b\x00", "a\\x08b\\x00"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("größe 人", "größe 人"),
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
        ("\x1b[" + "1;" * 40 + "m", "\\x1b[" + "1;" * 40 + "m"),
    ],
)
def test_a_terminal_gets_colours_and_no_other_control(line: str, shown: str) -> None:
    assert shown_on_terminal(line) == shown


def test_what_is_no_terminal_gets_the_bytes_as_they_are() -> None:
    text = "\x1b[2J\r 10%\r 20%\nend"
    assert printed(said(text)) == text + "\n"


def test_ranks_are_named_before_each_line() -> None:
    events = (said("a\n\nb\n", rank=0), said("c\n", rank=12))
    assert printed(*events, several=True) == "[0] a\n[0] \n[0] b\n[12] c\n"
    assert printed(*events, several=True, terminal=True) == "[0] a\n[0] \n[0] b\n[12] c\n"


def test_a_progress_bar_is_one_line_for_each_of_its_states_on_a_terminal() -> None:
    assert printed(said("\r 10%\r 20%\n"), terminal=True) == " 10%\n 20%\n"


def test_half_a_line_of_one_rank_is_ended_before_another_ones() -> None:
    assert printed(said("half", rank=0), said("c\n", rank=1)) == "half\nc\n"
    assert printed(said("half"), said("again\n", attempt=1)) == "half\nagain\n"
    assert printed(said("ha"), said("lf\n")) == "half\n"

"""What ranks printed, printed again: with the rank before each line, and nothing that could rule a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fireflyer.cluster.schema.logs import LogText

__all__ = ["LogPrinter", "shown_on_terminal"]

_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]{0,64}m")
_RESET: Final = "\x1b[0m"
_LINE: Final = re.compile(r"([^\r\n]*)(\r\n|\n|\r|$)")


def shown_on_terminal(line: str) -> str:
    """Colours stay, and end with the line; other control characters are shown as text."""
    shown, at, coloured = [], 0, False
    while at < len(line):
        colour = _COLOUR.match(line, at)
        if colour:
            shown.append(colour[0])
            at, coloured = colour.end(), True
            continue
        char = line[at]
        plain = char.isprintable() or char == "\t"
        shown.append(char if plain else char.encode("unicode_escape").decode())
        at += 1
    return "".join(shown) + _RESET * coloured


class LogPrinter:
    """`several`: ranks are named before their lines. `terminal`: `write` goes to one."""

    def __init__(self, write: Callable[[str], object], *, terminal: bool, several: bool) -> None:
        self._write = write
        self._terminal = terminal
        self._several = several
        self._open_line = False
        self._last: tuple[int, int, int] | None = None

    def text(self, event: LogText) -> None:
        log = (event.run, event.attempt, event.rank)
        if log != self._last:
            self.end_line()
        self._last = log
        prefix = f"[{event.rank}] " if self._several else ""
        text = self._rendered(event.text, prefix)
        if text:
            self._open_line = not text.endswith("\n")
            self._write(text)

    def end_line(self) -> None:
        """What comes next begins a line."""
        if self._open_line:
            self._write("\n")
        self._open_line = False

    def _rendered(self, text: str, prefix: str) -> str:
        if not self._terminal:
            return re.sub(r"^(?=.|\n)", prefix, text, flags=re.MULTILINE) if prefix else text
        lines = []
        for match in _LINE.finditer(text):
            line, end = match[1], match[2]
            if line or "\n" in end:  # a progress bar begins with a carriage return
                lines.append(prefix + shown_on_terminal(line) + ("\n" if end else ""))
        return "".join(lines)

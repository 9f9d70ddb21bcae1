"""From what a rank wrote to the error that ended it: its traceback on stderr, or the error file of torch's `@record`.

Both come from the rank's process and are hostile until checked: bounded, parsed by patterns or as typed JSON, never
evaluated. What is not understood gives None, and the rank is then described by its exit code.

A traceback counts as the end of the process when nothing but a few lines follow it: notes of the exception, a warning
at shutdown. A script that prints a traceback and goes on printing has not ended by it. Tracebacks that do not end the
process (of a thread, of a destructor, of a log record that could not be formatted) are passed over.

Formats: https://docs.python.org/3/library/traceback.html; `torch.distributed.elastic.multiprocessing.errors`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.cluster.schema.wire import MAX_ERROR_TEXT, RankError

__all__ = ["MAX_ERROR_FILE_BYTES", "MAX_LINES_AFTER", "MAX_TAIL_BYTES", "parse_error_file", "parse_traceback"]

MAX_TAIL_BYTES = 64 << 10
"""Of the end of stderr that is searched for a traceback."""
MAX_ERROR_FILE_BYTES = 256 << 10
MAX_LINES_AFTER = 20
"""More lines than these after a traceback: the script went on, and ended of something else."""
_MAX_LINE = 4096

_HEADER = "Traceback (most recent call last):"
_GROUP_HEADER = "  + Exception Group " + _HEADER
_MARGIN = "  | "
_FRAME = re.compile(r'  File "(?P<file>.{1,1024})", line (?P<line>[0-9]{1,9})(?:, in .*)?')
_SYNTAX_FRAME = re.compile(r'  File "(?P<file>.{1,1024})", line (?P<line>[0-9]{1,9})')
_EXCEPTION = re.compile(r"(?P<type>[^\W\d][\w.<>]{0,199})(?:: ?(?P<message>.*))?")
_SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")
_NOT_FATAL = ("Exception in thread ", "Exception ignored ", "--- Logging error ---", "Error in sys.excepthook")
_DECORATION = re.compile(r"\x1b\[[0-9;]*m|(?m:^\[rank[0-9]{1,9}\]: ?)")
"""Colours, and what torch puts before each line of a process that is in a process group."""

IsLibrary = Callable[[str], bool]


def parse_traceback(stderr: bytes, is_library: IsLibrary) -> RankError | None:
    """The error whose traceback is the end of `stderr` (its last `MAX_TAIL_BYTES` count). Its place is the innermost
    frame whose file is not of a library; where all are, the innermost. None where there is no such traceback."""
    text = _DECORATION.sub("", stderr[-MAX_TAIL_BYTES:].decode(errors="replace"))
    lines = [line[:_MAX_LINE].rstrip("\r") for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    for start in range(len(lines) - 1, -1, -1):
        if _fatal_header(lines, start):
            return _read(lines, start, is_library)
    return _syntax_error_of_script(lines, is_library)


def _fatal_header(lines: Sequence[str], at: int) -> bool:
    if lines[at] not in (_HEADER, _GROUP_HEADER):
        return False
    return at == 0 or not lines[at - 1].startswith(_NOT_FATAL)


def _read(lines: Sequence[str], start: int, is_library: IsLibrary) -> RankError | None:
    margin = _MARGIN if lines[start] == _GROUP_HEADER else ""
    frames: list[tuple[str, int]] = []
    for at in range(start + 1, len(lines)):
        if not lines[at].startswith(margin):
            return None
        line = lines[at][len(margin) :]
        if frame := _FRAME.fullmatch(line):
            frames.append((frame["file"], int(frame["line"])))
        elif not line.startswith(" "):
            return _error(lines, at, margin, frames, is_library)
    return None


def _syntax_error_of_script(lines: Sequence[str], is_library: IsLibrary) -> RankError | None:
    """Python shows one of the script itself without a header."""
    for start in range(len(lines) - 1, -1, -1):
        frame = _SYNTAX_FRAME.fullmatch(lines[start])
        if frame is None:
            continue
        for at in range(start + 1, len(lines)):
            if not lines[at].startswith(" "):
                if not lines[at].startswith(_SYNTAX_ERRORS):
                    return None
                return _error(lines, at, "", [(frame["file"], int(frame["line"]))], is_library)
        return None
    return None


def _error(
    lines: Sequence[str], at: int, margin: str, frames: Sequence[tuple[str, int]], is_library: IsLibrary
) -> RankError | None:
    exception = _EXCEPTION.fullmatch(lines[at][len(margin) :])
    if exception is None or (not margin and len(lines) - at - 1 > MAX_LINES_AFTER + _lines_of_message(lines, at)):
        return None
    message = exception["message"] or ""
    if exception["message"] is not None and not message.strip() and at + 1 < len(lines):
        message = lines[at + 1]  # a message that begins with an empty line
    return _bounded(exception["type"], message, frames, is_library)


def _lines_of_message(lines: Sequence[str], at: int) -> int:
    """Tracebacks inside of a message (torch quotes those of its workers) are part of it, however long."""
    quoted = [n for n in range(at + 1, len(lines)) if lines[n].startswith(" ") or lines[n].startswith("Original ")]
    return len(quoted)


def _bounded(kind: str, message: str, frames: Sequence[tuple[str, int]], is_library: IsLibrary) -> RankError:
    users = [frame for frame in frames if not is_library(frame[0])]
    file, line = (users or frames or [("", 0)])[-1]
    return RankError(_one_line(kind), _one_line(message), file[:MAX_ERROR_TEXT], line)


def _one_line(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:_MAX_LINE]).split())
    return line if len(line) <= MAX_ERROR_TEXT else line[: MAX_ERROR_TEXT - 1] + "…"


# -- the error file ----------------------------------------------------------------------------------------------------


class _ExtraInfo(msgspec.Struct):
    py_callstack: str = ""


class _Message(msgspec.Struct):
    message: str = ""
    extra_info: _ExtraInfo = msgspec.field(default_factory=_ExtraInfo, name="extraInfo")


class _ErrorFile(msgspec.Struct):
    message: _Message | str


def parse_error_file(content: bytes, is_library: IsLibrary) -> RankError | None:
    """What torch's `@record` wrote to TORCHELASTIC_ERROR_FILE; None where it is anything else, or too long."""
    if len(content) > MAX_ERROR_FILE_BYTES:
        return None
    try:
        told = decode_json(content, _ErrorFile).message
    except DECODE_ERRORS:
        return None
    if isinstance(told, str):
        told = _Message(told)
    stack = told.extra_info.py_callstack.encode(errors="replace")
    if (error := parse_traceback(stack, is_library)) is not None:
        return error
    first, *_ = told.message.split("\n")
    exception = _EXCEPTION.fullmatch(first)
    if exception is None or exception["message"] is None:
        return _bounded("Error", told.message, (), is_library) if told.message.strip() else None
    return _bounded(exception["type"], exception["message"], (), is_library)

"""What is said of the end of a rank that printed a traceback: real ones, from real interpreters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fireflyer.cluster.core.tracebacks import (
    MAX_ERROR_FILE_BYTES,
    MAX_LINES_AFTER,
    MAX_TAIL_BYTES,
    parse_error_file,
    parse_traceback,
)
from fireflyer.cluster.schema.wire import MAX_ERROR_TEXT, RankError

HEADER = b"Traceback (most recent call last):\n"
LIBRARY = "lib_of_somebody.py"
PLACE = "job.py"

CASES: dict[str, tuple[str, RankError | None]] = {
    "plain": (
        "x = 1\nraise ValueError(f'bad batch shape {(3, 4)}')",
        RankError("ValueError", "bad batch shape (3, 4)", PLACE, 2),
    ),
    "no message": ("raise KeyError", RankError("KeyError", "", PLACE, 1)),
    "several lines": ("raise ValueError('first\\nsecond')", RankError("ValueError", "first", PLACE, 1)),
    "empty first line": ("raise ValueError('\\nsecond')", RankError("ValueError", "second", PLACE, 1)),
    "in a library": (
        "import lib_of_somebody\n\nlib_of_somebody.fail()",
        RankError("lib_of_somebody.Broken", "inside", PLACE, 3),
    ),
    "chained": (
        "try:\n    raise KeyError('inner')\nexcept KeyError as error:\n    raise RuntimeError('outer') from error",
        RankError("RuntimeError", "outer", PLACE, 4),
    ),
    "while handled": (
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['gone']",
        RankError("KeyError", "'gone'", PLACE, 4),
    ),
    "with notes": (
        "error = ValueError('told')\nerror.add_note('a note: of this')\nerror.add_note('x\\ny')\nraise error",
        RankError("ValueError", "told", PLACE, 4),
    ),
    "a group": (
        "raise ExceptionGroup('several', [ValueError('a'), ExceptionGroup('more', [TypeError('b')])])",
        RankError("ExceptionGroup", "several (2 sub-exceptions)", PLACE, 1),
    ),
    "recursion": ("def f(): f()\nf()", RankError("RecursionError", "maximum recursion depth exceeded", PLACE, 1)),
    "syntax": ("x = (1,\ny = 2", RankError("SyntaxError", "'(' was never closed", PLACE, 1)),
    "syntax of an import": ("import broken_module", RankError("SyntaxError", "invalid syntax", "broken_module.py", 2)),
    "local class": (
        "def f():\n    class Odd(Exception): pass\n    raise Odd('x')\nf()",
        RankError("f.<locals>.Odd", "x", PLACE, 3),
    ),
    "interrupted": ("raise KeyboardInterrupt", RankError("KeyboardInterrupt", "", PLACE, 1)),
    "noise at the end": (
        "class Noisy:\n    def __del__(self): raise TypeError('ignored')\nkeep = Noisy()\nraise ValueError('told')",
        RankError("ValueError", "told", PLACE, 4),
    ),
    "goes on": (
        "import sys, traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\n"
        f"for n in range({MAX_LINES_AFTER + 1}): print('step', n, file=sys.stderr)\nsys.exit(1)",
        None,
    ),
    "of a thread": (
        "import sys, threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()\nsys.exit(1)",
        None,
    ),
    "only an exit code": ("import sys\nsys.exit(1)", None),
    "an exit message": ("import sys\nsys.exit('Error: bad config')", None),
}


def short(error: RankError | None) -> RankError | None:
    return None if error is None else RankError(error.type, error.message, Path(error.file).name, error.line)


def is_library(path: str) -> bool:
    return path.startswith(("<", sys.base_prefix)) or path.endswith(LIBRARY)


@pytest.mark.processes
def test_what_python_prints_is_understood(tmp_path: Path) -> None:
    """One interpreter for each, as the real thing; all at a time."""
    (tmp_path / LIBRARY).write_text("class Broken(Exception): pass\n\ndef fail():\n    raise Broken('inside')\n")
    (tmp_path / "broken_module.py").write_text("x = 1\ny = = 2\n")
    started = {}
    for name, (script, _) in CASES.items():
        (tmp_path / name).mkdir()
        path = tmp_path / name / PLACE
        path.write_text(script)
        started[name] = subprocess.Popen(
            [sys.executable, "-S", str(path)], stderr=subprocess.PIPE, env={"PYTHONPATH": str(tmp_path)}
        )
    found = {name: process.communicate()[1] for name, process in started.items()}
    parsed = {name: short(parse_traceback(stderr, is_library)) for name, stderr in found.items()}
    assert parsed == {name: expected for name, (_, expected) in CASES.items()}


def test_where_all_frames_are_of_libraries_the_innermost_is_named() -> None:
    stderr = HEADER + b'  File "<frozen x>", line 1, in a\n  File "<frozen y>", line 2, in b\nE: m'
    assert parse_traceback(stderr, is_library) == RankError("E", "m", "<frozen y>", 2)


def test_colours_and_carriage_returns_do_not_hide_an_error() -> None:
    stderr = HEADER + b'  File "a.py", line 1, in <module>\n\x1b[1;35mE\x1b[0m: \x1b[31mm\x1b[0m\n'
    stderr = stderr.replace(b"\n", b"\r\n")
    assert parse_traceback(stderr, is_library) == RankError("E", "m", "a.py", 1)


def test_the_prefix_of_torch_is_no_part_of_an_error() -> None:
    lines = [b"Traceback (most recent call last):", b'  File "a.py", line 1, in <module>', b"    f()", b"E: m"]
    stderr = b"\n".join(b"[rank3]: " + line for line in lines) + b"\n"
    assert parse_traceback(stderr, is_library) == RankError("E", "m", "a.py", 1)


def test_texts_are_bounded_and_of_one_line() -> None:
    stderr = HEADER + b'  File "a.py", line 1, in f\nE: ' + b"\x07x" * 9000
    error = parse_traceback(stderr, is_library)
    assert error is not None
    assert len(error.message) == MAX_ERROR_TEXT
    assert error.message.isprintable()
    assert parse_traceback(b"x\n" * MAX_TAIL_BYTES + stderr[:80] + b"E: m", is_library) is not None


def test_the_file_of_torchs_record_is_read() -> None:
    stack = 'Traceback (most recent call last):\n  File "a.py", line 7, in main\nValueError: bad\n'
    told = {"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": stack, "timestamp": "1"}}}
    assert parse_error_file(json.dumps(told).encode(), is_library) == RankError("ValueError", "bad", "a.py", 7)
    del told["message"]["extraInfo"]
    assert parse_error_file(json.dumps(told).encode(), is_library) == RankError("ValueError", "bad")
    assert parse_error_file(b'{"message": "went wrong"}', is_library) == RankError("Error", "went wrong")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b'{"message": 3}', b'{"message": {"message": []}}', b"\xff", b"[" * 5000, b'{"message": ""}',
     b'{"message": "x"}' + b" " * MAX_ERROR_FILE_BYTES],
)  # fmt: skip
def test_an_error_file_that_is_something_else_says_nothing(content: bytes) -> None:
    assert parse_error_file(content, is_library) is None

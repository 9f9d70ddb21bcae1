"""The parser of tracebacks reads what Python's own formatter writes, and survives anything else."""

from __future__ import annotations

import traceback

from hypothesis import given
from hypothesis import strategies as st

from fireflyer.cluster.core.tracebacks import parse_error_file, parse_traceback
from fireflyer.cluster.schema.wire import MAX_ERROR_TEXT, RankError

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
FILES = st.from_regex(r"/[a-z]{1,8}/(lib|user)[0-9]\.py", fullmatch=True)
FRAMES = st.lists(st.tuples(FILES, st.integers(1, 10**6), NAMES), min_size=1, max_size=12)
MESSAGES = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=80)
LINES = st.sampled_from(
    [
        "Traceback (most recent call last):",
        "  + Exception Group Traceback (most recent call last):",
        "  | ValueError: x",
        '  File "a.py", line 3, in f',
        '  File "a.py", line 3',
        "    x = 1",
        "ValueError: bad",
        "SyntaxError: bad",
        "E",
        "",
        "During handling of the above exception, another exception occurred:",
        "Exception ignored in: <f>",
        "step 1",
    ]
)


def is_library(path: str) -> bool:
    return "/lib" in path


@given(
    frames=FRAMES, kind=NAMES, message=MESSAGES, before=st.lists(LINES, max_size=5), notes=st.lists(NAMES, max_size=5)
)
def test_the_innermost_frame_of_the_user_is_found(
    frames: list[tuple[str, int, str]], kind: str, message: str, before: list[str], notes: list[str]
) -> None:
    shown = traceback.StackSummary.from_list([(file, line, name, "code()") for file, line, name in frames]).format()
    text = "".join([*(f"{line}\n" for line in before), "step 2\nTraceback (most recent call last):\n", *shown])
    text += f"{kind}: {message}\n" + "".join(f"{note}\n" for note in notes)
    users = [frame for frame in frames if not is_library(frame[0])]
    file, line, _ = (users or frames)[-1]
    assert parse_traceback(text.encode(), is_library) == RankError(kind, message, file, line)


@given(lines=st.lists(LINES | st.text(max_size=20), max_size=40), cut=st.integers(0, 200))
def test_any_order_of_lines_gives_a_bounded_answer_or_none(lines: list[str], cut: int) -> None:
    error = parse_traceback("\n".join(lines).encode(errors="replace")[cut:], is_library)
    if error is not None:
        assert error.type
        assert max(map(len, (error.type, error.message, error.file))) <= MAX_ERROR_TEXT
        assert (error.type + error.message).isprintable()


@given(st.binary(max_size=400))
def test_any_bytes_are_survived(content: bytes) -> None:
    parse_traceback(content, is_library)
    parse_error_file(content, is_library)

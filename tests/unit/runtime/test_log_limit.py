"""What ranks print on a node is bounded: of all logs of a run together."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.support.loops import on_loop

from fireflyer.runtime.log_writer import LogLimit, LogWriter

NOTICE: Final = "[fireflyer] logs of this run have reached 1000 B: no more is kept\n"


async def write(directory: Path, *pieces: tuple[str, bytes]) -> None:
    """As the supervisor of an attempt does."""
    problems: list[str] = []
    limit = LogLimit(str(directory), 1000)
    writer = LogWriter(full=lambda: None, free=lambda: None, on_log_error=problems.append, limit=limit)
    files = {name: writer.open(str(directory / name)) for name, _ in pieces}
    for name, data in pieces:
        writer.write(files[name], data)
    for file in files.values():
        writer.close(file)
    await writer.drained()
    writer.stop()
    assert problems == []


@on_loop
async def test_logs_are_cut_at_the_limit_of_their_run_and_say_so_in_one_line(tmp_path: Path) -> None:
    await write(
        tmp_path,
        ("attempt-0/rank-0.log", b"a" * 399 + b"\n"),
        ("attempt-0/rank-1.log", b"b" * 499 + b"\n"),
        ("attempt-0/rank-0.log", b"c" * 300),
        ("attempt-0/rank-0.log", b"d" * 300),
        ("attempt-0/rank-1.log", b"e" * 300),
    )
    assert (tmp_path / "attempt-0/rank-0.log").read_text() == "a" * 399 + "\n" + "c" * 100 + "\n" + NOTICE
    assert (tmp_path / "attempt-0/rank-1.log").read_text() == "b" * 499 + "\n" + NOTICE


@on_loop
async def test_logs_of_earlier_attempts_count(tmp_path: Path) -> None:
    await write(tmp_path, ("attempt-0/rank-0.log", b"a" * 999))
    await write(tmp_path, ("attempt-1/rank-0.log", b"bcd"), ("attempt-1/rank-0.log", b"e"))
    assert (tmp_path / "attempt-1/rank-0.log").read_text() == "b\n" + NOTICE
    await write(tmp_path, ("attempt-2/rank-0.log", b"f\n"))
    assert (tmp_path / "attempt-2/rank-0.log").read_text() == NOTICE


@on_loop
async def test_stacks_of_hung_ranks_are_kept_all_the_same(tmp_path: Path) -> None:
    await write(tmp_path, ("rank-0.log", b"a" * 2000), ("rank-0.stacks", b"Thread 1"))
    assert (tmp_path / "rank-0.stacks").read_bytes() == b"Thread 1"

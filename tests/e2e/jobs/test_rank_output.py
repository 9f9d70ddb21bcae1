"""What ranks print arrives in order, bounded, whatever it is; the log files have every byte of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from tests.support.jobs.launching import JobRun, run, write_script

from fireflyer.cluster.schema.job import JobSpec
from fireflyer.cluster.schema.wire import MAX_LINE_BYTES

pytestmark = pytest.mark.processes


def output_of(tmp_path: Path, script: str, *, ranks: int = 1) -> JobRun:
    job = run(JobSpec(script=write_script(tmp_path, script), ranks_per_node=ranks, run_dir=str(tmp_path / "run")))
    assert job.result.exit_code == 0, job.lines[-5:]
    return job


def log_of(job: JobRun, rank: int) -> bytes:
    return Path(job.result.logs_dir, "attempt-0", f"rank-{rank}.log").read_bytes()


def test_lines_of_each_rank_keep_their_order(tmp_path: Path) -> None:
    job = output_of(tmp_path, "for n in range(2000): print(rank, n, flush=n % 7 == 0)", ranks=3)
    for rank in range(3):
        assert job.texts(rank) == [f"{rank} {n}" for n in range(2000)]
        assert log_of(job, rank) == "".join(f"{rank} {n}\n" for n in range(2000)).encode()


def test_more_output_than_any_buffer_holds_arrives_whole(tmp_path: Path) -> None:
    """Ranks that print faster than the launcher takes it are held up: nothing is lost."""
    job = output_of(tmp_path, "for n in range(60000): print(f'{n:08d}', 'x' * 100)", ranks=2)
    for rank in range(2):
        assert [text[:8] for text in job.texts(rank)] == [f"{n:08d}" for n in range(60000)]
        assert log_of(job, rank).count(b"\n") == 60000


def test_both_streams_and_a_last_line_without_end(tmp_path: Path) -> None:
    job = output_of(tmp_path, "print('out', end=''); print('err', file=sys.stderr, end='')")
    assert job.texts(0, "stdout") == ["out"]
    assert job.texts(0, "stderr") == ["err"]
    assert sorted(log_of(job, 0)) == sorted(b"outerr")


def test_huge_lines_are_cut_and_binary_garbage_is_replaced(tmp_path: Path) -> None:
    script = """
out = sys.stdout.buffer
out.write(b'x' * (3 << 20) + b'\\n')
out.write(bytes(range(256)) * 4000 + b'\\n')
out.write(b'after\\n')
"""
    job = output_of(tmp_path, script)
    huge, *_, last = [line for line in job.lines if line.stream == "stdout"]
    assert (huge.cut, huge.text) == (True, "x" * MAX_LINE_BYTES)
    assert (last.cut, last.text) == (False, "after")
    expected = b"x" * (3 << 20) + b"\n" + bytes(range(256)) * 4000 + b"\nafter\n"
    assert hashlib.sha256(log_of(job, 0)).digest() == hashlib.sha256(expected).digest()

"""What `ff run` says of each way in which a job fails: transcripts of real runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.jobs.launching import run, write_script
from tests.support.jobs.transcripts import ff_run, notices

from fireflyer.base.events import AttemptFailed
from fireflyer.cluster.schema.job import JobSpec

pytestmark = pytest.mark.processes

RAISES = """
import os, time
rank = int(os.environ["RANK"])

def shape(batch):
    raise ValueError(f"bad batch shape {batch}")

if rank == 2:
    shape((3, 4))
time.sleep(60)
"""


def test_an_exception_is_quoted_with_its_place(tmp_path: Path) -> None:
    shown = ff_run(tmp_path, "--ranks-per-node", "4", "job.py", script=RAISES)
    assert shown.code == 1
    assert shown.err == [
        "error: rank 2: ValueError: bad batch shape (3, 4), at job.py:6; its log is out/logs/attempt-0/rank-2.log"
    ]
    assert "ff     | rank 2: ValueError: bad batch shape (3, 4), at job.py:6" in shown.out
    assert "ff     | attempt 0 failed: rank 2: ValueError: bad batch shape (3, 4), at job.py:6" in shown.out


@pytest.mark.slow
def test_the_same_exception_twice_ends_the_job_though_restarts_are_left(tmp_path: Path) -> None:
    shown = ff_run(tmp_path, "--ranks-per-node", "4", "--max-restarts", "5", "job.py", script=RAISES)
    assert shown.code == 1
    assert shown.err == [
        "error: rank 2: ValueError: bad batch shape (3, 4), at job.py:6; not restarted: attempt 0 failed in the same "
        "way, and no newer step or checkpoint was reported; its log is out/logs/attempt-1/rank-2.log"
    ]
    assert shown.out.count('rank 2 |     raise ValueError(f"bad batch shape {batch}")') == 2


def test_a_traceback_that_all_ranks_print_is_shown_once(tmp_path: Path) -> None:
    script = "import os, time\nrank = int(os.environ['RANK'])\nraise ValueError(f'bad shape of rank {rank}')\n"
    shown = ff_run(tmp_path, "--ranks-per-node", "4", "--quiet", "job.py", script=script)
    first = shown.out[0].split(" |")[0]
    assert shown.out[:3] == [
        f"{first} | Traceback (most recent call last):",
        f'{first} |   File "job.py", line 3, in <module>',
        f"{first} |     raise ValueError(f'bad shape of rank {{rank}}')",
    ]
    assert shown.out[3:] == [
        f"{first} | ValueError: bad shape of {first}",
        f"{first} | (and 3 more ranks)",
    ]
    logs = sorted((tmp_path / "out" / "logs" / "attempt-0").glob("rank-*.log"))
    assert all("ValueError: bad shape of rank" in log.read_text() for log in logs)
    assert len(logs) == 4


@pytest.mark.slow
@pytest.mark.parametrize("case", ["link", "file", "mode", "used"])
def test_a_run_directory_that_is_not_the_users_own_and_new_is_refused_before_anything_is_started(
    tmp_path: Path, case: str
) -> None:
    out = tmp_path / "out"
    match case:
        case "link":
            (tmp_path / "elsewhere").mkdir()
            out.symlink_to("elsewhere")
            reason = (
                "is a symbolic link; give the directory that it leads to (elsewhere); choose another one with --run-dir"
            )
        case "file":
            out.touch()
            reason = "is not a directory; choose another one with --run-dir"
        case "mode":
            out.mkdir()
            out.chmod(0o777)
            reason = (
                "can be written by other users (mode 0777); run: chmod go-w out, or choose another one with --run-dir"
            )
        case _:
            out.mkdir(mode=0o700)
            (out / "events.jsonl").touch()
            reason = "holds another run; choose another one with --run-dir"
    shown = ff_run(tmp_path, "job.py", script="open('started', 'w')")
    assert (shown.code, shown.out) == (1 if case in ("mode", "used") else 2, [])
    assert shown.err == [f"error: run directory out {reason}"]
    assert not (tmp_path / "started").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_run_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o700)
    os.chown(tmp_path / "out", 4321, 4321)
    shown = ff_run(tmp_path, "job.py", script="print('up')")
    assert (shown.code, shown.out) == (1, [])
    assert shown.err == [
        "error: run directory out belongs to uid 4321; it must belong to you (uid 0), or choose another one with "
        "--run-dir"
    ]


OVERFLOWS = """
import numpy as np
from fireflyer.collectives import Communicator
from fireflyer.runtime import read_environment

with Communicator.from_environment(read_environment()) as comm:
    values = np.full(1000, 0x7E, np.uint8)  # 448, the largest number of f8e4m3
    comm.allreduce(values, dtype="f8e4m3")
"""


@pytest.mark.slow
def test_sums_of_fp8_numbers_that_are_too_large_are_told_while_the_job_runs(tmp_path: Path) -> None:
    shown = ff_run(tmp_path, "--ranks-per-node=2", "job.py", script=OVERFLOWS)
    assert (shown.code, shown.err) == (0, [])
    advice = "scale the numbers down before the sum, or sum them in bf16"
    assert [line for line in shown.out if line.startswith("rank ")] == [
        "rank 0 | fp8_saturation=1000 values=1000 rank=0: so many results of fp8 sums did not fit and were clipped "
        f"or made infinite; {advice}"
    ]
    assert notices(shown) == [
        "job job: 1 node x 2 ranks",
        "fp8 overflow: 1,000 of 1,000 results of fp8 sums so far were too large and were clipped or made infinite "
        f"(rank 0 noticed first); {advice}",
        "job ended after TIME: all ranks exited with code 0",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("import os; os.abort()", 134, "rank 0 was killed by SIGABRT"),
        ("import ctypes; ctypes.string_at(0)", 139, "rank 0 was killed by SIGSEGV"),
        (
            "import os; os.kill(os.getpid(), 9)",
            137,
            "rank 0 was killed by SIGKILL; not restarted (--max-restarts is 0)",
        ),
        ("x = (1,\ny = 2", 1, "rank 0: SyntaxError: '(' was never closed, at job.py:1"),
        ("import sys; sys.exit('Error: no data')", 1, "rank 0 exited with code 1"),
    ],
)
def test_other_ends_are_named(tmp_path: Path, script: str, code: int, reason: str) -> None:
    shown = ff_run(tmp_path, "--quiet", "job.py", script=script)
    assert (shown.code, shown.err) == (code, [f"error: {reason}; its log is out/logs/attempt-0/rank-0.log"])


RECORD = """
import json, traceback
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    os.close(2)  # nothing on stderr says what it was
    raise LookupError("no tokens")

main()
"""


@pytest.mark.slow
def test_the_error_file_of_torchs_record_is_read(tmp_path: Path) -> None:
    script = write_script(tmp_path, RECORD)
    job = run(JobSpec(script=script, run_dir=str(tmp_path / "run")))
    assert job.result.reason == f"rank 0: LookupError: no tokens, at {script}:{_line_of(script, 'raise')}"
    assert [event.kind for event in job.of(AttemptFailed)] == ["user"]


@pytest.mark.slow
def test_an_error_file_that_is_a_pipe_or_nonsense_does_not_stop_the_supervisor(tmp_path: Path) -> None:
    script = """
path = os.environ["TORCHELASTIC_ERROR_FILE"]
os.mkfifo(path) if rank == 0 else open(path, "w").write("[" * 100000)
raise ValueError("told")
"""
    job = run(JobSpec(script=write_script(tmp_path, script), ranks_per_node=2, run_dir=str(tmp_path / "run")))
    assert "ValueError: told, at " in job.result.reason


def _line_of(script: str, word: str) -> int:
    lines = Path(script).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if word in line)


@pytest.mark.slow
def test_streams_are_hidden_and_kept_in_files_as_torchrun_does(tmp_path: Path) -> None:
    script = "import os, sys\nprint('out', os.environ['ROLE_NAME'])\nprint('err', file=sys.stderr)\n"
    asked = (
        "--nproc_per_node=2",
        "--log-dir",
        "kept",
        "-r",
        "0:3,1:2",
        "-t",
        "0:1",
        "--role",
        "trainer",
        "--rdzv-id=7",
    )
    shown = ff_run(tmp_path, "--quiet", *asked, "job.py", script=script)
    assert shown.code == 0, shown.err
    assert sorted(shown.out) == ["rank 0 | out trainer", "rank 1 | out trainer"]
    (job,) = (tmp_path / "kept").iterdir()
    assert job.name.startswith("7_")
    kept = {str(path.relative_to(job)): path.read_text() for path in job.rglob("*.log")}
    assert kept == {
        "attempt_0/0/stdout.log": "out trainer\n",
        "attempt_0/0/stderr.log": "err\n",
        "attempt_0/1/stderr.log": "err\n",
    }
    assert sorted((tmp_path / "out/logs/attempt-0/rank-0.log").read_text().splitlines()) == ["err", "out trainer"]

"""Ranks that the kernel kills because a control group has no memory left: what `ff run` says of it, line by line, and
that the job is restarted as after every failure of the infrastructure."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.jobs.memory_limit import limited_memory
from tests.support.jobs.transcripts import FF, Transcript, ff_environment, ff_run, notices
from tests.support.patience import allowed_s

from fireflyer.base.events import AttemptFailed, decode_log

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MIB = 1 << 20
EATS = """
def eat():
    kept = []
    while True:
        kept.append(bytearray(b"x") * (1 << 20))
"""
EATS_IN_ITS_OWN_GROUP = f"""
import os
{EATS}
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
    with open(os.environ["GROUP"], "w") as file:
        file.write(str(os.getpid()))
    eat()
print("had enough")
"""


def test_a_job_whose_group_has_no_memory_left_says_which_limit_it_was(tmp_path: Path) -> None:
    """All of the job is in the group, as in a Slurm job or a container."""
    (tmp_path / "job.py").write_text(f"{EATS}\neat()\n")
    with limited_memory(384 * MIB) as procs:
        command = ["sh", "-c", f'echo $$ > {procs}; exec "$@"', "sh", *FF, "run", "--run-dir", "out", "job.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=ff_environment(), capture_output=True, text=True, timeout=allowed_s(60),
            check=False,
        )  # fmt: skip
    shown = Transcript(done.returncode, done.stdout, done.stderr, tmp_path)
    killed = "rank 0 was killed: out of memory (cgroup limit 384 MiB)"
    assert shown.code == 137
    assert shown.err == [
        f"error: {killed}; not restarted (--max-restarts is 0); its log is out/logs/attempt-0/rank-0.log"
    ]
    assert notices(shown) == [
        "job job: 1 node x 1 rank",
        killed,
        f"attempt 0 failed: {killed}",
        f"job ended after TIME: {killed}; not restarted (--max-restarts is 0)",
    ]


def test_one_rank_in_a_group_of_its_own_is_found_in_the_kernels_log_and_the_job_is_restarted_each_time(
    tmp_path: Path,
) -> None:
    """A user's error that comes twice would end the job."""
    with limited_memory(64 * MIB) as procs:
        shown = ff_run(
            tmp_path, "--ranks-per-node=1", "--max-restarts=2", f"--env=GROUP={procs}", "job.py",
            script=EATS_IN_ITS_OWN_GROUP,
        )  # fmt: skip
    if "rank 0 was killed by SIGKILL" in notices(shown) and not _kernel_log_tells():
        pytest.skip("the kernel's log cannot be read, or names processes by other numbers")
    killed = "rank 0 was killed: out of memory (cgroup limit)"
    assert (shown.code, shown.err) == (0, [])
    assert notices(shown) == [
        "job job: 1 node x 1 rank",
        killed,
        f"attempt 0 failed: {killed}; restarting",
        "attempt 1 starts",
        killed,
        f"attempt 1 failed: {killed}; restarting",
        "attempt 2 starts",
        "job ended after TIME: all ranks exited with code 0",
    ]
    with open(tmp_path / "out" / "events.jsonl", "rb") as file:
        failed = [entry.event for entry in decode_log(file) if isinstance(entry.event, AttemptFailed)]
    assert [event.kind for event in failed] == ["infrastructure", "infrastructure"]


def _kernel_log_tells() -> bool:
    """Of a process that is killed here and now."""
    with limited_memory(16 * MIB) as procs:
        eats = [sys.executable, "-S", "-c", f"{EATS}\neat()"]
        process = subprocess.Popen(["sh", "-c", f'echo $$ > {procs}; exec "$@"', "sh", *eats])
        process.wait(allowed_s(30))
    said = b""
    with contextlib.suppress(OSError):
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            with contextlib.suppress(BlockingIOError):
                while record := os.read(log, 8192):
                    said += record
        finally:
            os.close(log)
    return f"Killed process {process.pid} ".encode() in said

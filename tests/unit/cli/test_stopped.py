"""The one line that a job ends with when somebody stopped it."""

from __future__ import annotations

import pytest

from fireflyer.cli.jobs.progress import JobProgress
from fireflyer.cli.jobs.run import _stopped
from fireflyer.cluster.schema.job import JobResult


def stopped(signal: int = 2, *, step: int, saved_step: int | None, own_run_dir: bool = False) -> str:
    result = JobResult(
        exit_code=128 + signal,
        reason="",
        attempts=1,
        culprit=None,
        run_dir="runs/a",
        events_path="runs/a/events.jsonl",
        logs_dir="runs/a/logs",
        signal=signal,
    )
    return _stopped(result, JobProgress(step=step, saved_step=saved_step), own_run_dir=own_run_dir)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (stopped(step=240, saved_step=240), "stopped by Ctrl-C after step 240; resume with the same command"),
        (
            stopped(step=240, saved_step=200),
            "stopped by Ctrl-C after step 240 (saved: step 200); resume with the same command",
        ),
        (
            stopped(15, step=240, saved_step=240, own_run_dir=True),
            "stopped by SIGTERM after step 240; resume with the same command and another --run-dir",
        ),
        (stopped(step=240, saved_step=None), "stopped by Ctrl-C after step 240; logs are in runs/a/logs"),
        (stopped(1, step=0, saved_step=None), "stopped by SIGHUP; logs are in runs/a/logs"),
    ],
)
def test_it_says_what_was_reached_and_how_to_go_on(line: str, said: str) -> None:
    assert line == said

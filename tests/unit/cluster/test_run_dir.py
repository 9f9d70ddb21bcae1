"""What is left of a job that never began."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.support.loops import on_loop

from fireflyer.cluster import run_job
from fireflyer.cluster.schema.job import JobSpec, Rendezvous
from fireflyer.identity.secrets import new_secret, save_secret


def content(directory: Path) -> list[str] | None:
    return sorted(os.listdir(directory)) if directory.exists() else None


@on_loop
async def test_a_job_that_is_stopped_while_it_waits_for_machines_leaves_no_run_directory(tmp_path: Path) -> None:
    """The same command would be refused: the directory would hold another run."""
    script, secret, run_dir = tmp_path / "train.py", tmp_path / "secret", tmp_path / "run"
    script.write_text("")
    save_secret(new_secret(), str(secret))
    spec = JobSpec(
        script=str(script), run_dir=str(run_dir), nodes=2, hosts=("machine 0", "machine 1"), topology=b"{}",
        rendezvous=Rendezvous(host="127.0.0.1", port=0, secret_file=str(secret)),
    )  # fmt: skip
    cases: list[list[str] | None] = [None, None, []]
    for left in cases:
        if left is not None:
            run_dir.mkdir(mode=0o700)  # by the user
        waiting: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        job = asyncio.create_task(run_job(spec, on_waiting=waiting.set_result))
        assert await waiting == [1]
        assert "events.jsonl" in (content(run_dir) or [])
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert content(run_dir) == left

"""A job beside others: many ranks on one node, and processes that only look like the job's."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest
from tests.support.jobs.launching import run, wait_until, write_script
from tests.support.patience import allowed_s

from fireflyer.base.events import NodeLost
from fireflyer.cluster.schema.job import JobSpec
from fireflyer.runtime.processes.guarded import MARKER

pytestmark = pytest.mark.processes


@pytest.mark.slow
def test_a_node_of_many_ranks_beats_while_it_starts_them(tmp_path: Path) -> None:
    """Starting them takes longer than a node may be silent."""
    done = run(JobSpec(script="true", kind="program", ranks_per_node=400, run_dir=str(tmp_path / "run")))
    assert done.result.exit_code == 0, done.result.reason
    assert done.of(NodeLost) == []


def test_a_job_spares_those_who_only_inherited_its_mark(tmp_path: Path) -> None:
    """A batch system runs what a rank submits with the environment of the rank."""
    token, go = tmp_path / "token", tmp_path / "go"
    script = write_script(
        tmp_path,
        f"""
with open({str(token)!r}, "w") as file: file.write(os.environ["FF_JOB_TOKEN"] + "\\n")
while not os.path.exists({str(go)!r}): time.sleep(0.01)
""",
    )
    submitted: list[subprocess.Popen[bytes]] = []

    def batch_system() -> None:
        wait_until(lambda: token.exists() and token.read_text().endswith("\n"), allowed_s(30))
        submitted.append(subprocess.Popen(["sleep", "1000"], env={MARKER: token.read_text().strip()}))
        go.touch()

    thread = threading.Thread(target=batch_system)
    thread.start()
    try:
        assert run(JobSpec(script=script, run_dir=str(tmp_path / "run"))).result.exit_code == 0
        assert submitted[0].poll() is None
    finally:
        thread.join()
        for job in submitted:
            job.kill()
            job.wait()

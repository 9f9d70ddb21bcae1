"""A script that works under torchrun works under the launcher: the same variables, and a real process group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.jobs.launching import run, write_script
from tests.support.patience import allowed_s

from fireflyer.cluster.schema.job import JobSpec

pytestmark = pytest.mark.processes

PRINT_ENVIRONMENT = """
import json
json.dump(dict(os.environ), open(os.path.join(sys.argv[1], f'env-{rank}.json'), 'w'))
"""
DIFFERENT = {
    "MASTER_PORT",  # free ports
    "TORCHELASTIC_RUN_ID",  # the name of the job
    "TORCHELASTIC_USE_AGENT_STORE",  # torchrun's agent serves the store itself, here rank 0 does
    "TORCHELASTIC_ERROR_FILE",  # a file of torchrun's own
    "TORCHELASTIC_SIGNALS_TO_HANDLE",  # for torchrun's agent
    "LINES",  # left by torchrun's own imports
    "COLUMNS",
    "LC_CTYPE",  # set by a Python that was started with another locale
}
GLOO = """
import torch
import torch.distributed as dist
dist.init_process_group('gloo')
mine = torch.full((4,), float(dist.get_rank()))
dist.all_reduce(mine)
print(int(mine[0]), dist.get_rank(), dist.get_world_size(), os.environ['GROUP_RANK'])
if attempt == 0 and rank == 1:
    os._exit(9)
dist.barrier()
dist.destroy_process_group()
"""


def environments(directory: Path) -> list[dict[str, str]]:
    return [json.loads((directory / f"env-{rank}.json").read_text()) for rank in range(2)]


def test_the_environment_is_that_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = write_script(tmp_path, PRINT_ENVIRONMENT)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3"]
    torchrun += [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        f"--log-dir={tmp_path}/log",
    ]
    subprocess.run([*torchrun, script, str(theirs)], check=True, capture_output=True, timeout=allowed_s(100))
    job = run(JobSpec(script=script, args=(str(ours),), ranks_per_node=2, max_restarts=3, run_dir=str(tmp_path / "r")))
    assert job.result.exit_code == 0
    for expected, got in zip(environments(theirs), environments(ours), strict=True):
        missing = {name: value for name, value in expected.items() if got.get(name) != value}
        assert set(missing) <= DIFFERENT, missing
        for name in (
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_USE_AGENT_STORE",
            "TORCHELASTIC_ERROR_FILE",
        ):
            assert name in got
        extra = {name for name in got if name not in expected}
        assert all(name.startswith("FF_") or name == "PYTHONFAULTHANDLER" for name in extra), extra


def test_omp_num_threads_of_the_user_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = write_script(tmp_path, "print(os.environ.get('OMP_NUM_THREADS'))")

    def seen(name: str, ranks: int, omp: int | None = None) -> str:
        spec = JobSpec(script=script, ranks_per_node=ranks, omp_num_threads=omp, run_dir=str(tmp_path / name))
        return run(spec).texts(0)[0]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert seen("alone", 1) == "None"
    assert seen("asked", 2, omp=3) == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert seen("kept", 2) == "5"


def test_a_gloo_process_group_forms_across_nodes_and_forms_again(tmp_path: Path) -> None:
    script = write_script(tmp_path, GLOO)
    job = run(JobSpec(script=script, nodes=2, max_restarts=1, run_dir=str(tmp_path / "run")), limit_s=100)
    assert (job.result.exit_code, job.result.attempts) == (0, 2), job.lines
    for rank in range(2):
        assert job.texts(rank)[-1] == f"1 {rank} 2 {rank}"

"""What the hfreduce group does beyond what gloo does, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs.launching import run, write_script
from tests.support.patience import allowed_s
from tests.support.torch_ranks.processes import run_torch_ranks

from fireflyer.cluster.schema.job import JobSpec

pytestmark = pytest.mark.processes


@cache
def found() -> list[dict[str, Any]]:
    ended = run_torch_ranks("tests.support.torch_ranks.extras", (0, 0))
    assert [rank.code for rank in ended] == [0, 0], [rank.errors[-3000:] for rank in ended]
    return [rank.result for rank in ended]


@pytest.mark.parametrize(
    "name",
    [
        "types_that_are_only_moved",
        "booleans",
        "bits_of_narrow_integers",
        "averages_of_integers",
        "uneven_lists",
        "messages_with_gaps",
        "strided_broadcast",
        "fp8_sums",
        "split_groups",
        "monitored_barriers",
    ],
)
def test_more_than_gloo(name: str) -> None:
    assert [rank[name] for rank in found()] == [True, True]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("overlapping_split", "each of the ranks 0 to 1 may be in one part, once"),
        ("cuda_tensor", "is on meta, but the hfreduce group takes tensors on cpu"),
        ("sparse_tensor", "pass a dense one"),
        ("unknown_op", "is not supported; the hfreduce group has SUM, AVG"),
        ("short_list", "all_gather got a list of 1 tensors; pass one for each of 2 ranks"),
        ("uneven_gather", "all_gather got a tensor of 3 elements for rank 1 beside one of 2"),
        ("bad_splits", "output_split_sizes [1, 1] add up to 2, but the tensor has 4 rows"),
        ("wrong_options", "pg_options is a int; the hfreduce backend takes HfreduceOptions"),
    ],
)
def test_refusals_say_what_to_do(name: str, text: str) -> None:
    for rank in found():
        assert text in rank[name]


def test_different_calls_are_an_error_on_all_ranks_and_not_a_hang() -> None:
    for rank in found():
        assert rank["mismatch"].startswith("HfreduceError")
        assert "broadcast" in rank["mismatch"]
        assert "allreduce" in rank["mismatch"]


def test_after_a_failure_every_operation_of_the_group_fails_and_others_go_on() -> None:
    for rank in found():
        assert rank["after"].startswith("HfreduceError")
        assert rank["other_group"] == 2


def test_a_future_fails_with_one_line() -> None:
    for rank in found():
        assert rank["future"].startswith("RuntimeError")
        assert "HfreduceError: rank" in rank["future"]
        assert "\n" not in rank["future"]


def test_a_part_asks_for_the_transport_of_its_world() -> None:
    assert [rank["asked_of_a_part"] for rank in found()] == ["auto", "auto"]


JOB = """
import torch, torch.distributed as dist

assert not [name for name in sys.modules if name.startswith("fireflyer.collectives")]  # nothing before it is needed
dist.init_process_group("hfreduce")
half = dist.new_group([0, 1])
tensor = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
dist.all_reduce(tensor, group=half)
dist.destroy_process_group()
secret = "file" if os.environ.get("FF_SECRET_FILE") else "store"
os.write(1, f"SUM {tensor[0].item()} {secret}\\n".encode())  # one write: torchrun gives both ranks one pipe
"""


def test_a_job_of_ff_run_uses_the_launchers_secret(tmp_path: Path) -> None:
    script = write_script(tmp_path, JOB)
    spec = JobSpec(script=script, run_dir=str(tmp_path / "run"), nodes=2, ranks_per_node=1, devices="cpu")
    job = run(spec)
    assert job.result.exit_code == 0, job.lines[-20:]
    assert [job.texts(rank) for rank in range(2)] == [["SUM 6.0 file"]] * 2


@pytest.mark.slow
def test_a_job_of_torchrun_needs_no_launcher_of_ours(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--log-dir", str(tmp_path / "log")]
    ended = subprocess.run(
        [*command, write_script(tmp_path, JOB)], capture_output=True, text=True, timeout=allowed_s(110), check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert sorted(line for line in ended.stdout.splitlines() if "SUM" in line) == ["SUM 6.0 store"] * 2

"""The scripts of docs/how-to/accelerate.md, literally, on two ranks under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.patience import allowed_s

from fireflyer.checkpoint import describe, verify

TEXT = (Path(__file__).parents[3] / "docs/how-to/accelerate.md").read_text()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def run(directory: Path, name: str) -> str:
    (script,) = re.findall(rf"```python\n(# {name}\n.*?)```", TEXT, re.DOTALL)
    (directory / name).write_text(script)
    assert f"torchrun --standalone --nproc-per-node 2 {name}" in TEXT
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*TORCHRUN, name],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=allowed_s(200),
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


def test_accelerate_trains_on_our_group(tmp_path: Path) -> None:
    printed = run(tmp_path, "fit.py")
    match = re.fullmatch(r"hfreduce, 2 processes, loss ([0-9.]+)\n", printed)
    assert match is not None, printed
    assert float(match[1]) < 1.0


@pytest.mark.campaign(expected_s=30)
@pytest.mark.rotates
@pytest.mark.timeout(900)
def test_trainer_trains_saves_and_resumes_on_our_group(tmp_path: Path) -> None:
    assert "hfreduce, 2 processes, equal weights: True" in run(tmp_path, "tune.py")
    checkpoints = str(tmp_path / "checkpoints")
    assert [info.step for info in describe(checkpoints)] == [4, 2]
    assert all(info.problem is None and info.world_size == 2 for info in verify(checkpoints))
    script = tmp_path / "tune.py"
    script.write_text(script.read_text().replace("max_steps=4", "max_steps=6"))
    done = subprocess.run(
        [*TORCHRUN, "tune.py"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert describe(checkpoints)[0].step == 6

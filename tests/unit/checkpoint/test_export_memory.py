"""`ff ckpt export` takes as much memory for a large checkpoint as for a small one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.patience import allowed_s

from fireflyer.base.units import MIB
from fireflyer.checkpoint.importing import import_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.processes]
EXPORT = """\
import re, sys
from pathlib import Path
from fireflyer.checkpoint.exporting import export
export(sys.argv[1], sys.argv[2])
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def peak_bytes(tmp_path: Path, size_bytes: int) -> int:
    """Of a process that exports a checkpoint of this size: half of it in one tensor, half in many."""
    source, checkpoints = tmp_path / f"{size_bytes}.safetensors", tmp_path / f"{size_bytes}"
    tensors = {f"t{number}": torch.zeros(4 * MIB, dtype=torch.uint8) for number in range(size_bytes // (8 * MIB))}
    save_file({**tensors, "large": torch.zeros(size_bytes // 2 // 1024, 1024, dtype=torch.uint8)}, source)
    del tensors
    import_checkpoint(str(source), checkpoints, step=1)
    source.unlink()
    done = subprocess.run(
        [sys.executable, "-P", "-c", EXPORT, str(checkpoints), str(tmp_path / f"out-{size_bytes}")],
        capture_output=True,
        text=True,
        timeout=allowed_s(120),
        check=True,
    )
    return int(done.stdout) * 1024


def test_four_times_the_tensors_are_exported_in_the_same_memory(tmp_path: Path) -> None:
    """128 MiB: one tensor alone fills the band of 64 MiB."""
    small, large = peak_bytes(tmp_path, 128 * MIB), peak_bytes(tmp_path, 512 * MIB)
    assert large - small < 48 * MIB, (small, large)

"""`ff ckpt export` takes as much memory for a large checkpoint as for a small one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.patience import allowed_s

from fireflyer.base.units import MIB
from fireflyer.checkpoint.core.manifest import Manifest, version_of
from fireflyer.checkpoint.core.names import shard_name
from fireflyer.checkpoint.core.safetensors import TensorSpec, place
from fireflyer.checkpoint.core.slices import Box, Slice, slice_name
from fireflyer.checkpoint.engine.image import header_of
from fireflyer.checkpoint.engine.stream import write_stream
from fireflyer.checkpoint.fresh import commit_manifest
from fireflyer.checkpoint.importing import import_checkpoint
from fireflyer.runtime.disk import RealDisk

pytestmark = [pytest.mark.slow, pytest.mark.processes]
EXPORT = """\
import re, sys
from pathlib import Path
from fireflyer.checkpoint.exporting import export
export(sys.argv[1], sys.argv[2])
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def many(directory: Path, size_bytes: int) -> None:
    """Half of it in one tensor, half in many."""
    tensors = {f"t{number}": torch.zeros(4 * MIB, dtype=torch.uint8) for number in range(size_bytes // (8 * MIB))}
    whole(directory, {**tensors, "large": torch.zeros(size_bytes // 2 // 1024, 1024, dtype=torch.uint8)})


def one_row(directory: Path, size_bytes: int) -> None:
    """The first dim that is cut is the third."""
    whole(directory, {"kernel": torch.zeros(1, 1, size_bytes // 16384, 16384, dtype=torch.uint8)})


def whole(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    source = directory.with_suffix(".safetensors")
    save_file(tensors, source)
    import_checkpoint(str(source), directory, step=1)
    source.unlink()


def columns(directory: Path, size_bytes: int) -> None:
    """A table whose columns four ranks have shared: each row is four runs."""
    rows, disk = size_bytes // 256, RealDisk()
    (directory / "t").mkdir(parents=True)
    boxes = [Box((0, 16 * rank), (rows, 16)) for rank in range(4)]
    specs = [TensorSpec(slice_name("w", box), "F32", box.shape, Slice("w", (rows, 64), box.offset)) for box in boxes]
    placed = place(specs)
    shard = f"{directory}/t/{shard_name(0, 1)}"
    record = write_stream(
        disk, shard, header_of(placed, step=1, rank=0), placed, lambda spec: [memoryview(bytes(spec.size_bytes))]
    )
    manifest = Manifest(version_of([record]), 1, 0, 1, (record,), {})
    commit_manifest(disk, str(directory), "step-00000001", "t", manifest)


def peak_bytes(tmp_path: Path, write: Callable[[Path, int], None], size_bytes: int) -> int:
    """Of a process that exports a checkpoint of this size."""
    checkpoints = tmp_path / f"{size_bytes}"
    write(checkpoints, size_bytes)
    done = subprocess.run(
        [sys.executable, "-P", "-c", EXPORT, str(checkpoints), str(tmp_path / f"out-{size_bytes}")],
        capture_output=True,
        text=True,
        timeout=allowed_s(120),
        check=True,
    )
    return int(done.stdout) * 1024


@pytest.mark.parametrize(
    ("write", "sizes"),
    [(many, (128 * MIB, 512 * MIB)), (one_row, (64 * MIB, 256 * MIB)), (columns, (24 * MIB, 48 * MIB))],
)
def test_several_times_the_tensors_are_exported_in_the_same_memory(
    tmp_path: Path, write: Callable[[Path, int], None], sizes: tuple[int, int]
) -> None:
    """Of `many` one tensor alone fills the band of 64 MiB; of `columns` the band has 24 MiB more, and nothing for each
    of 800,000 runs."""
    small, large = (peak_bytes(tmp_path, write, size_bytes) for size_bytes in sizes)
    assert large - small < 48 * MIB, (small, large)

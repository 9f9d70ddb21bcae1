"""How many ranks a machine can hold: found without importing torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.cluster.schema.job import JobSpec

__all__ = ["RANKS_PER_CORE", "Devices", "check_devices", "find_devices"]

RANKS_PER_CORE = 16
"""More ranks than this on one core make no progress worth waiting for."""

_GPU_NODE = re.compile(r"nvidia[0-9]+")


class Devices(msgspec.Struct, frozen=True):
    gpus: int
    cores: int


def find_devices(environ: Mapping[str, str], *, dev_dir: str = "/dev") -> Devices:
    """GPUs are the device files of the NVIDIA driver, less what CUDA_VISIBLE_DEVICES hides; cores those we may use."""
    try:
        gpus = sum(1 for name in os.listdir(dev_dir) if _GPU_NODE.fullmatch(name))
    except OSError:
        gpus = 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = min(gpus, _visible_count(visible))
    return Devices(gpus=gpus, cores=len(os.sched_getaffinity(0)))


def _visible_count(visible: str) -> int:
    """CUDA reads the list up to the first entry that is no device (an empty one, -1, NoDevFiles)."""
    count = 0
    for entry in visible.split(","):
        name = entry.strip()
        if not name.isdecimal() and not name.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return count


def check_devices(spec: JobSpec, devices: Devices) -> None:
    """Raises `UsageError` where a node would get more ranks than it can hold. Nodes share this machine's devices."""
    kind = spec.devices if spec.devices != "auto" else ("gpu" if devices.gpus else "cpu")
    if kind == "gpu":
        if spec.ranks_per_node > devices.gpus:
            raise UsageError(
                f"--ranks-per-node {spec.ranks_per_node} is more than the {devices.gpus} GPUs of this machine; "
                f"use at most {devices.gpus}, or --devices cpu to run without GPUs"
                if devices.gpus
                else "--devices gpu: this machine has no GPU; use --devices cpu"
            )
        return
    limit = devices.cores * RANKS_PER_CORE
    if spec.world_size > limit:
        raise UsageError(
            f"{spec.world_size} ranks are more than this machine can hold: {devices.cores} cores x {RANKS_PER_CORE} "
            f"ranks per core = {limit}; use fewer --nodes or --ranks-per-node"
        )

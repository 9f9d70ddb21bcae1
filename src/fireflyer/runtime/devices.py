"""How many ranks a machine can hold: found without importing torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import msgspec

__all__ = ["Devices", "find_devices"]

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

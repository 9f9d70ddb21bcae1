"""Every implementation of the `Disk` port, each with an empty directory to work in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fireflyer.base.ports import Disk
from fireflyer.runtime.disk import RealDisk
from fireflyer.sim import SimDisk

__all__ = ["DISKS"]


def _real(directory: Path) -> tuple[Disk, str]:
    return RealDisk(), str(directory)


def _simulated(directory: Path) -> tuple[Disk, str]:
    disk = SimDisk().mount("test")
    disk.mkdir("/work")
    return disk, "/work"


DISKS: dict[str, Callable[[Path], tuple[Disk, str]]] = {"real": _real, "sim": _simulated}

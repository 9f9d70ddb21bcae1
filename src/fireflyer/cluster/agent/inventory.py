"""What this node is, for the managers of the platform."""

from __future__ import annotations

import glob
import importlib
import os
import socket
from typing import Final

import fireflyer
from fireflyer.base.errors import FireflyerError
from fireflyer.cluster.agent.records import Membership
from fireflyer.cluster.schema.sync import Gpu, Inventory
from fireflyer.runtime.interfaces import own_addresses
from fireflyer.runtime.processes.identity import boot_id

__all__ = ["inventory_of"]

_MAX_LISTED: Final = 64
_MAX_TEXT: Final = 1000


def inventory_of(membership: Membership) -> Inventory:
    return Inventory(
        address=membership.address,
        port=membership.port,
        version=fireflyer.__version__,
        boot_id=boot_id(),
        hostname=socket.gethostname()[:_MAX_TEXT],
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=(_gpus_by_nvml() or _gpus_of_driver())[:_MAX_LISTED],
        interfaces=_interfaces()[:_MAX_LISTED],
    )


def _interfaces() -> tuple[str, ...]:
    try:
        return tuple(f"{name} {address}" for name, address in own_addresses() if name != "lo")
    except FireflyerError:
        return ()


def _gpus_by_nvml() -> tuple[Gpu, ...]:
    """Where the package nvidia-ml-py is installed and the driver answers."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        found = []
        for number in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(number)
            name = nvml.nvmlDeviceGetName(device)
            text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
            found.append(Gpu(text[:_MAX_TEXT], int(nvml.nvmlDeviceGetMemoryInfo(device).total)))
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()
    return tuple(found)


def _gpus_of_driver() -> tuple[Gpu, ...]:
    """Without memory: the driver's files do not say it."""
    found = []
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = dict(line.partition(":")[::2] for line in file.read(4096).splitlines())
        except OSError:
            continue
        found.append(Gpu(lines.get("Model", "NVIDIA GPU").strip()[:_MAX_TEXT], 0))
    return tuple(found)

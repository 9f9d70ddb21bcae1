"""What this node is, for the managers of the platform: from NVML, and from files of the kernel and of drivers below
`/proc` and `/sys`."""

from __future__ import annotations

import glob
import importlib
import os
import socket
from collections.abc import Iterator
from typing import Any, Final

import fireflyer
from fireflyer.base.errors import FireflyerError
from fireflyer.cluster.agent.records import Membership
from fireflyer.cluster.schema.sync import Gpu, Inventory
from fireflyer.runtime.interfaces import own_addresses
from fireflyer.runtime.processes.identity import boot_id

__all__ = ["gpus_of", "inventory_of", "network_of"]

_MAX_LISTED: Final = 64
_MAX_TEXT: Final = 1000
_MAX_FILE_BYTES: Final = 4096


def inventory_of(membership: Membership) -> Inventory:
    return Inventory(
        address=membership.address,
        port=membership.port,
        version=fireflyer.__version__,
        boot_id=boot_id(),
        hostname=socket.gethostname()[:_MAX_TEXT],
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus_of("/", _nvml()),
        interfaces=network_of("/", _addresses()),
    )


# --- GPUs ---


def _nvml() -> Any:
    """The module of the package nvidia-ml-py; None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def gpus_of(root: str, nvml: Any) -> tuple[Gpu, ...]:
    """As NVML says, or, where there is none or it does not answer, as the driver's files below `root` say."""
    found = () if nvml is None else tuple(_gpus_by_nvml(nvml))
    return (found or tuple(_gpus_of_driver(root)))[:_MAX_LISTED]


def _gpus_by_nvml(nvml: Any) -> Iterator[Gpu]:
    """A GPU that does not answer, as one that is lost, is left out, and does not hide the others."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return
    try:
        for number in range(nvml.nvmlDeviceGetCount()):
            try:
                device = nvml.nvmlDeviceGetHandleByIndex(number)
                name = nvml.nvmlDeviceGetName(device)
            except nvml.NVMLError:
                continue
            text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
            yield Gpu(text[:_MAX_TEXT], _memory(nvml, device))
    except nvml.NVMLError:
        return
    finally:
        nvml.nvmlShutdown()


def _memory(nvml: Any, device: Any) -> int:
    """0 where it is not told: GPUs that share the processor's memory have none of their own."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(device).total)
    except nvml.NVMLError:
        return 0


def _gpus_of_driver(root: str) -> Iterator[Gpu]:
    """Without memory: the driver's files do not say it."""
    for path in sorted(glob.glob(os.path.join(root, "proc/driver/nvidia/gpus/*/information"))):
        lines = dict(line.partition(":")[::2] for line in _text(path).splitlines())
        if lines:
            yield Gpu(lines.get("Model", "").strip()[:_MAX_TEXT] or "NVIDIA GPU", 0)


# --- network ---


def _addresses() -> list[tuple[str, str]]:
    try:
        return own_addresses()
    except FireflyerError:
        return []


def network_of(root: str, addresses: list[tuple[str, str]]) -> tuple[str, ...]:
    """`eth0 10.0.0.1 100 Gb/s` for each address, then `mlx5_0 port 1 InfiniBand 200 Gb/sec (4X HDR)` for each port of
    an RDMA device that is up; a speed only where the kernel below `root` knows it."""
    found = [f"{name} {address}{_speed(root, name)}" for name, address in addresses if name != "lo"]
    return (*found, *_rdma_ports(root))[:_MAX_LISTED]


def _speed(root: str, interface: str) -> str:
    """The kernel gives Mb/s; -1 or an error where a virtual interface has none, or no cable is there."""
    text = _text(os.path.join(root, "sys/class/net", interface, "speed")).strip()
    if not text.isdecimal() or int(text) == 0:
        return ""
    return f" {int(text) / 1000:g} Gb/s" if int(text) >= 1000 else f" {int(text)} Mb/s"


def _rdma_ports(root: str) -> Iterator[str]:
    for port in sorted(glob.glob(os.path.join(root, "sys/class/infiniband/*/ports/*"))):
        if _text(os.path.join(port, "state")).partition(":")[2].strip() != "ACTIVE":
            continue
        device, number = port.split(os.sep)[-3], port.split(os.sep)[-1]
        words = (_text(os.path.join(port, name)).strip() for name in ("link_layer", "rate"))
        yield " ".join([device, "port", number, *filter(None, words)])[:_MAX_TEXT]


def _text(path: str) -> str:
    """Empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_FILE_BYTES)
    except OSError:
        return ""

"""Reads a `Machine` from sysfs through a `Disk`: the real one on a node, a simulated one or a directory in tests.

Everything read is checked and bounded, for a container or a hypervisor may show anything: a file that is missing,
unreadable or nonsense counts as absent, a processor claimed by two groups belongs to the first, a group never reaches
beyond the processors that are switched on. What remains is always a usable `Machine`, at worst one of a single node
with one cache. Groups are read once for each group, not once for each processor, so that 512 processors cost some
hundred small reads.

Formats: the kernel's Documentation/ABI/{stable/sysfs-devices-node, stable/sysfs-devices-system-cpu,
testing/sysfs-bus-pci, testing/sysfs-class-net} and the list format of Documentation/admin-guide/cputopology.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from fireflyer.base.errors import FireflyerError
from fireflyer.base.ports import Disk
from fireflyer.topology.machine import Device, DeviceKind, Machine, NumaNode

__all__ = ["format_list", "memory_nodes", "parse_list", "read_machine"]

MAX_CPUS: Final = 8192
MAX_NODES: Final = 1024
MAX_DEVICES: Final = 4096
MAX_FILE_BYTES: Final = 64 * 1024
"""A list of every other one of 8192 processors has 20 KiB."""
MAX_CACHES: Final = 8
MAX_INTERFACES: Final = 16

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NAME = re.compile(r"[A-Za-z0-9_.:@-]{1,64}")
_ENCODED_BITS: Final = {2.5: 8 / 10, 5.0: 8 / 10, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130, 64.0: 242 / 256}
_DISPLAY, _DISPLAY_3D, _ACCELERATOR = 0x0300, 0x0302, 0x1200
_GPU_VENDORS: Final = (0x10DE, 0x1002, 0x8086)
"""Display controllers of other makers are the console of a server's management controller."""


def parse_list(text: bytes | None, limit: int) -> tuple[int, ...]:
    """`0-3,8,10-11` as numbers below `limit`, ascending; empty for what is no such list."""
    found: set[int] = set()
    for part in (text or b"").decode("ascii", "replace").strip().split(",")[: 2 * limit]:
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            return ()
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        found.update(range(first, min(last + 1, limit)))
    return tuple(sorted(number for number in found if number < limit))


def format_list(numbers: Sequence[int]) -> str:
    """`0-3,8`: ascending numbers as the kernel writes them."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)


def memory_nodes(disk: Disk, *, root: str = "/sys") -> tuple[int, ...]:
    """The numbers of the NUMA nodes: one small read, where `read_machine` makes many."""
    return parse_list(_Sysfs(disk, root).read("devices/system/node/online"), MAX_NODES)


def read_machine(disk: Disk, *, root: str = "/sys", status: str = "/proc/self/status") -> Machine:
    """The node that `root` describes, as far as the process that `status` describes may use it. Never raises for what
    it reads there."""
    sysfs = _Sysfs(disk, root)
    limits = _Sysfs(disk, "").fields(status)
    allowed = parse_list(limits.get("Cpus_allowed_list"), MAX_CPUS)
    usable = frozenset(allowed)
    cpus = parse_list(sysfs.read("devices/system/cpu/online"), MAX_CPUS) or allowed or (0,)
    packages = _groups(sysfs, cpus, ("topology/package_cpus_list", "topology/core_siblings_list"))
    numa_nodes = _read_nodes(sysfs, cpus)
    nodes = tuple(node.node for node in numa_nodes)
    allowed_nodes = parse_list(limits.get("Mems_allowed_list"), MAX_NODES)
    return Machine(
        cpus=cpus,
        allowed_cpus=tuple(cpu for cpu in cpus if cpu in usable) or cpus,
        allowed_nodes=tuple(node for node in nodes if node in allowed_nodes) or nodes,
        packages=packages,
        cores=_groups(sysfs, cpus, ("topology/core_cpus_list", "topology/thread_siblings_list")),
        l3_groups=_read_l3_groups(sysfs, cpus, packages),
        numa_nodes=numa_nodes,
        devices=_read_devices(sysfs, nodes),
    )


class _Sysfs:
    """Bounded reads under a root; what cannot be read is absent."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk = disk
        self._root = root.rstrip("/")

    def read(self, path: str) -> bytes | None:
        try:
            file = self._disk.open(f"{self._root}/{path.lstrip('/')}")
            try:
                data = file.pread(MAX_FILE_BYTES + 1, 0)
            finally:
                file.close()
        except FireflyerError:
            return None
        return data if len(data) <= MAX_FILE_BYTES else None

    def list(self, path: str, limit: int) -> Sequence[str]:
        try:
            return self._disk.list(f"{self._root}/{path}")[:limit]
        except FireflyerError:
            return ()

    def number(self, path: str, base: int = 10) -> int | None:
        try:
            return int((self.read(path) or b"")[:32], base)
        except ValueError:
            return None

    def fields(self, path: str) -> dict[str, bytes]:
        """Lines of `name: value`."""
        lines = (self.read(path) or b"").split(b"\n")
        pairs = (line.split(b":", 1) for line in lines if b":" in line)
        return {name.decode("ascii", "replace").strip(): value.strip() for name, value in pairs}


def _groups(sysfs: _Sysfs, cpus: Sequence[int], files: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Partition of `cpus` by the first of `files` that the processor has; one that has none is alone."""
    left = dict.fromkeys(cpus)
    groups = []
    while left:
        first = next(iter(left))
        members: tuple[int, ...] = ()
        for file in files:
            members = parse_list(sysfs.read(f"devices/system/cpu/cpu{first}/{file}"), MAX_CPUS)
            if first in members:
                break
        group = tuple(cpu for cpu in members if cpu in left) if first in members else (first,)
        groups.append(group)
        for cpu in group:
            del left[cpu]
    return tuple(groups)


def _read_l3_groups(
    sysfs: _Sysfs, cpus: Sequence[int], packages: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """By the outermost cache that the first processor has; the same index is used for all, read where it exists."""
    caches = f"devices/system/cpu/cpu{cpus[0]}/cache"
    levels = [(sysfs.number(f"{caches}/index{index}/level") or 0, index) for index in range(MAX_CACHES)]
    level, index = max(levels)
    if level < 3:
        return packages
    return _groups(sysfs, cpus, (f"cache/index{index}/shared_cpu_list",))


def _read_nodes(sysfs: _Sysfs, cpus: tuple[int, ...]) -> tuple[NumaNode, ...]:
    left = dict.fromkeys(cpus)
    nodes = []
    for node in parse_list(sysfs.read("devices/system/node/online"), MAX_NODES):
        directory = f"devices/system/node/node{node}"
        listed = parse_list(sysfs.read(f"{directory}/cpulist"), MAX_CPUS)
        mine = tuple(cpu for cpu in listed if cpu in left)
        for cpu in mine:
            del left[cpu]
        nodes.append(
            NumaNode(
                node=node,
                cpus=mine,
                memory_bytes=_memory_bytes(sysfs.fields(f"{directory}/meminfo"), node),
                distances=_distances(sysfs.read(f"{directory}/distance")),
            )
        )
    with_memory = [node for node in nodes if node.memory_bytes]
    if not with_memory or not any(node.cpus for node in nodes):
        return (NumaNode(node=0, cpus=cpus),)
    return tuple(nodes)


def _memory_bytes(meminfo: dict[str, bytes], node: int) -> int:
    words = meminfo.get(f"Node {node} MemTotal", b"").split()
    if len(words) != 2 or words[1] != b"kB" or not words[0].isdigit() or len(words[0]) > 15:
        return 0
    return int(words[0]) * 1024


def _distances(text: bytes | None) -> tuple[int, ...]:
    words = (text or b"").split()[:MAX_NODES]
    return tuple(int(word) for word in words) if all(word.isdigit() and len(word) < 6 for word in words) else ()


def _read_devices(sysfs: _Sysfs, nodes: Sequence[int]) -> tuple[Device, ...]:
    devices = []
    for address in sysfs.list("bus/pci/devices", MAX_DEVICES):
        kind = _device_kind(sysfs, address) if _ADDRESS.fullmatch(address) else None
        if kind is None:
            continue
        directory = f"bus/pci/devices/{address}"
        numa_node = sysfs.number(f"{directory}/numa_node")
        interfaces, rate = _network_side(sysfs, directory) if kind == "nic" else ((), None)
        devices.append(
            Device(
                address=address,
                kind=kind,
                vendor=sysfs.number(f"{directory}/vendor", 16) or 0,
                numa_node=numa_node if numa_node in nodes else None,
                link_bytes_per_s=_pcie_bytes_per_s(sysfs, f"{directory}/current_link"),
                max_link_bytes_per_s=_pcie_bytes_per_s(sysfs, f"{directory}/max_link"),
                network_bytes_per_s=rate,
                interfaces=interfaces,
            )
        )
    return tuple(devices)


def _device_kind(sysfs: _Sysfs, address: str) -> DeviceKind | None:
    code = (sysfs.number(f"bus/pci/devices/{address}/class", 16) or 0) >> 8
    if code >> 8 == 0x02:
        return "nic"
    vendor = sysfs.number(f"bus/pci/devices/{address}/vendor", 16)
    if code in (_DISPLAY_3D, _ACCELERATOR) or (code == _DISPLAY and vendor in _GPU_VENDORS):
        return "gpu"
    return None


def _pcie_bytes_per_s(sysfs: _Sysfs, prefix: str) -> int | None:
    """Of `16.0 GT/s PCIe` and the number of lanes, after the line code (PCI Express Base Specification)."""
    words = (sysfs.read(f"{prefix}_speed") or b"").split()
    lanes = sysfs.number(f"{prefix}_width")
    try:
        transfers = float(words[0]) if len(words) > 1 and words[1] == b"GT/s" else 0.0
    except ValueError:
        return None
    share = _ENCODED_BITS.get(transfers)
    return round(transfers * 1e9 * share / 8 * lanes) if share and lanes and 1 <= lanes <= 32 else None


def _network_side(sysfs: _Sysfs, directory: str) -> tuple[tuple[str, ...], int | None]:
    """Interfaces of a card, and the sum of the rates of its ports."""
    names, rate = [], 0
    for name in sysfs.list(f"{directory}/infiniband", MAX_INTERFACES):
        if _NAME.fullmatch(name):
            names.append(name)
            for port in sysfs.list(f"{directory}/infiniband/{name}/ports", MAX_INTERFACES):
                rate += _gigabits(sysfs.read(f"{directory}/infiniband/{name}/ports/{port}/rate"))
    counted = rate > 0  # the same ports again, as IP over InfiniBand or RoCE
    for name in sysfs.list(f"{directory}/net", MAX_INTERFACES):
        if _NAME.fullmatch(name):
            names.append(name)
            megabits = sysfs.number(f"{directory}/net/{name}/speed") or 0
            rate += 0 if counted or not 0 < megabits < 10**8 else megabits * 10**6 // 8
    return tuple(names), rate or None


def _gigabits(text: bytes | None) -> int:
    """Bytes per second of `200 Gb/sec (4X HDR)`."""
    words = (text or b"").split()
    if len(words) < 2 or words[1] != b"Gb/sec" or not re.fullmatch(rb"[0-9]{1,5}(\.[0-9])?", words[0]):
        return 0
    return round(float(words[0]) * 1e9 / 8)

"""Reads what the kernel of this node has counted, from /sys and /proc; what is not there counts as nothing."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from fireflyer.base.node_counters import MAX_NAMED, LinkCounters, NodeCounters

__all__ = ["Mount", "read_counters", "read_meminfo", "read_mounts"]

_ON_A_DISK: Final = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs")
_MAX_BYTES: Final = 1 << 20
_MAX_COUNT: Final = (1 << 63) - 1


class Mount(NamedTuple):
    point: str
    kind: str
    """As `ext4`."""
    options: frozenset[str]
    """Of this mount."""
    super_options: frozenset[str]
    """Of the file system."""


def read_counters(sys_root: str = "/sys", proc_root: str = "/proc") -> NodeCounters:
    return NodeCounters(
        boot=_text(f"{proc_root}/sys/kernel/random/boot_id")[:300],
        uncorrected=_counts(f"{sys_root}/devices/system/edac/mc", "ue_count"),
        corrected=_counts(f"{sys_root}/devices/system/edac/mc", "ce_count"),
        poisoned_kib=read_meminfo(proc_root).get("HardwareCorrupted", 0),
        file_system_errors=_counts(f"{sys_root}/fs/ext4", "errors_count"),
        turned_read_only=tuple(mount.point[:300] for mount in read_mounts(proc_root) if _turned_read_only(mount))[
            :MAX_NAMED
        ],
        links=_links(f"{sys_root}/class/net"),
    )


def read_meminfo(proc_root: str = "/proc") -> dict[str, int]:
    """Of each line its number, which is in KiB for all that is memory."""
    found: dict[str, int] = {}
    for line in _text(f"{proc_root}/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found


def read_mounts(proc_root: str = "/proc") -> list[Mount]:
    """In the order in which they were mounted; see proc(5), mountinfo."""
    found = []
    for line in _text(f"{proc_root}/self/mountinfo").splitlines():
        ours, _, theirs = line.partition(" - ")
        first, last = ours.split(" "), theirs.split(" ")
        if len(first) > 5 and len(last) > 2:
            point = first[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
            found.append(Mount(point, last[0], frozenset(first[5].split(",")), frozenset(last[-1].split(","))))
    return found


def _turned_read_only(mount: Mount) -> bool:
    """The kernel does so after an error; an administrator who asks for it changes both options."""
    return mount.kind in _ON_A_DISK and "ro" in mount.super_options and "rw" in mount.options


def _counts(directory: str, name: str) -> dict[str, int]:
    found = {entry: _number(f"{directory}/{entry}/{name}") for entry in _entries(directory)}
    return {entry: count for entry, count in found.items() if count is not None}


def _links(directory: str) -> dict[str, LinkCounters]:
    """Interfaces of hardware, also of a virtual machine, and bonds of them; not those that containers come and go
    with, nor loopback."""
    names = [
        name
        for name in _entries(directory)
        if os.path.exists(f"{directory}/{name}/device") or os.path.exists(f"{directory}/{name}/bonding")
    ]
    return {name: _link(f"{directory}/{name}") for name in names}


def _link(directory: str) -> LinkCounters:
    def total(*names: str) -> int:
        return sum(_number(f"{directory}/statistics/{name}") or 0 for name in names)

    return LinkCounters(
        carrier=_number(f"{directory}/carrier") == 1,
        speed_mbps=_number(f"{directory}/speed") or 0,
        packets=total("rx_packets", "tx_packets"),
        errors=total("rx_errors", "tx_errors"),
        drops=total("rx_dropped", "tx_dropped"),
    )


def _entries(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))[:MAX_NAMED]
    except OSError:
        return []


def _number(path: str) -> int | None:
    text = _text(path)
    return min(int(text), _MAX_COUNT) if text.isdecimal() and text.isascii() and len(text) <= 20 else None


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace").strip()
    except OSError:  # a counter that this kernel or this driver does not have
        return ""

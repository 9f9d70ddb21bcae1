"""What a record of the kernel's log says of the hardware: Xid and SXid of NVIDIA's drivers, errors of devices.

Whether the kernel wrote the record is known from where it was read (its facility, `_TRANSPORT` of the journal, the tag
of syslog): the caller looks at that. Yet a few records of the kernel begin with the name of a process, of at most 15
characters, which users choose, as `NAME[PID]: segfault at ...` or `NAME invoked oom-killer: ...`: `is_of_a_process`
tells them. Texts are matched from their beginning through words of the kernel that lie beyond the first 15 characters,
so no such name makes one, whatever the kernel writes behind it.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

from fireflyer.base.health_event import Severity
from fireflyer.base.xids import xid_of

__all__ = ["BEGINNINGS", "DeviceCause", "DeviceError", "GpuError", "device_error", "gpu_error", "is_of_a_process"]

DeviceCause = Literal[
    "block_io", "file_system", "nvme", "machine_check", "machine_check_log", "memory", "pcie", "adapter",
    "out_of_memory", "hung_task",
]  # fmt: skip


class GpuError(NamedTuple):
    """An Xid of a GPU or an SXid of an NVSwitch."""

    cause: str
    """`xid_79` or `sxid_20034`."""
    part: str
    """`gpu:0000:3b:00.0`, with four digits for the domain and a function; or `nvswitch:1`."""
    severity: Severity
    user_made: bool
    words: str


class DeviceError(NamedTuple):
    cause: DeviceCause
    part: str
    severity: Severity
    user_made: bool


_XID: Final = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9])?)\): ([0-9]{1,4})\b"
)
_SXID: Final = re.compile(
    r"nvidia-nvswitch([0-9]{1,3}): SXid \((?:PCI:)?([0-9a-fA-F:.]{7,16})\): ([0-9]{1,6}), (Fatal|Non-fatal)"
)
_TEXTS: Final[tuple[tuple[str, DeviceCause, Severity, bool], ...]] = (
    (
        r"(?:blk_update_request: )?(?:critical medium|I/O) error, dev (\S{1,60}), sector [0-9]",
        "block_io",
        "high",
        False,
    ),
    (r"EXT4-fs error \(device ([^)]{1,60})\)", "file_system", "high", False),
    (
        r"XFS \(([^)\s\[]{1,60})\): (?:Corruption |Metadata (?:corruption|CRC error|I/O Error)|Log I/O Error"
        r"|Internal error |Filesystem has been shut ?down|User initiated shutdown|xfs_do_force_shutdown)",
        "file_system",
        "high",
        False,
    ),
    (r"nvme (nvme[0-9]+): (?:controller is down|Device not ready|Removing after probe)", "nvme", "high", False),
    (r"mce: \[Hardware Error\]: CPU ([0-9]{1,5}): Machine Check", "machine_check", "high", False),
    (r"mce: \[Hardware Error\]: Machine check events logged", "machine_check_log", "warn", False),
    (
        r"EDAC MC([0-9]{1,3}): [0-9]{1,10} UE (?:.{1,200} )?on .{1,400}page:0x[0-9a-f]+ offset:0x[0-9a-f]+ grain:",
        "memory",
        "high",
        False,
    ),
    (
        r"(?:pcieport|nvidia|mlx5_core|nvme) ([0-9a-f:.]{7,12}): "
        r"(?:AER: .*[Uu]ncorrect|PCIe Bus Error: severity=Uncorrect)",
        "pcie",
        "high",
        False,
    ),
    (r"mlx5_core ([0-9a-f:.]{7,12}).{0,40}(?:health compromised|device's health)", "adapter", "high", False),
    (r"Out of memory: Killed process [0-9]+", "out_of_memory", "warn", True),
    (r"INFO: task .{1,40} blocked for more than", "hung_task", "warn", True),
)
_FAULTS: Final = tuple((re.compile(text), cause, severity, user_made) for text, cause, severity, user_made in _TEXTS)
_KINDS: Final[dict[DeviceCause, str]] = {
    "block_io": "disk", "file_system": "disk", "nvme": "nvme", "machine_check": "cpu", "memory": "memory",
    "pcie": "pcie", "adapter": "infiniband",
}  # fmt: skip
"""Of the part that the first group names."""
BEGINNINGS: Final = (
    b"NVRM: Xid", b"nvidia-nvswitch", b"I/O error", b"critical medium error,", b"blk_update_request: ",
    b"EXT4-fs error", b"XFS (", b"nvme ", b"mce: [Hardware Error]", b"EDAC MC", b"pcieport ", b"nvidia ",
    b"mlx5_core ", b"Out of memory", b"INFO: task ",
)  # fmt: skip
"""Of all texts that `gpu_error` and `device_error` take."""
_OF_NO_DISK: Final = re.compile(r"(?:sr|fd|loop|nbd|ram|zram)[0-9]")
"""Block devices that are drives of removable media, which are empty or taken out, or images, which users make."""
_OF_A_PROCESS: Final = re.compile(
    r"(?s).{0,16}(?:\[[0-9]{1,10}\]:? | invoked oom-killer: |: page allocation (?:failure|stall)|: vmalloc )"
)


def is_of_a_process(text: str) -> bool:
    """Whether a record begins with the name of a process: what follows is none of the kernel's words."""
    return _OF_A_PROCESS.match(text) is not None


def gpu_error(text: str) -> GpuError | None:
    if (xid := _XID.match(text)) is not None:
        number = int(xid[2])
        known = xid_of(number)
        words = f"Xid {number}: {known.meaning}; remedy: {known.remedy.replace('_', ' ')}"
        return GpuError(f"xid_{number}", f"gpu:{_address(xid[1])}", known.severity, known.user_made, words)
    if (sxid := _SXID.match(text)) is not None:
        fatal = sxid[4] == "Fatal"
        words = f"SXid {sxid[3]} ({sxid[4].lower()}){'; remedy: restart node' if fatal else ''}"
        return GpuError(f"sxid_{sxid[3]}", f"nvswitch:{sxid[1]}", "high" if fatal else "warn", False, words)
    return None


def device_error(text: str) -> DeviceError | None:
    for pattern, cause, severity, user_made in _FAULTS:
        if (found := pattern.match(text)) is not None:
            part = f"{_KINDS[cause]}:{found[1]}" if pattern.groups else ""
            if part and _OF_NO_DISK.match(found[1]) is not None:
                return DeviceError(cause, part, "warn", True)
            return DeviceError(cause, part, severity, user_made)
    return None


def _address(text: str) -> str:
    """With four digits for the domain and a function, as elsewhere in the kernel."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}{'' if '.' in rest else '.0'}"

"""Which symptom a health event tells of. Pure.

The cause decides where it is a word of the kernel: an Xid, or what the check of the kernel's log has found, which mean
what they mean in a log. Else a check of ours has one symptom. Programs of a site choose their names: words in them
decide, of which each begins a part of the name, as `eth` in `eth0_rate` and not in `method`.
"""

from __future__ import annotations

from typing import Final

from fireflyer.analytics.reliability.taxonomy import SYMPTOM_OF_DEVICE, SYMPTOMS, symptom_of_cause
from fireflyer.base.health_event import HealthEvent

__all__ = ["symptom_of_event"]

_OF_THE_KERNEL: Final = "kernel_errors"
"""The check whose causes are those of `base.kernel_faults`."""
_CHECKS: Final = {
    "mounts": "filesystem_mount", "disk_smart": "block_device", "nvme": "block_device", "memory_errors": "main_memory",
    "memory_size": "main_memory", "machine_checks": "main_memory", "memory_left": "other", "disk_space": "other",
    "services": "system_service", "time_offset": "system_service", "ethernet": "eth_link", "infiniband": "ib_link",
    "pcie": "pcie", "ipmi_log": "platform_management", "ipmi_sensors": "platform_management", "gpu_ecc": "gpu_memory",
    "gpu_rows": "gpu_memory", "gpu_nvlink": "nvlink",
}  # fmt: skip
"""Whatever their cause. Little free memory, and a full file system, are no fault of memory and disks."""
_WORDS: Final = (
    ("nvlink", "nvlink"), ("oom", "oom"), ("out of memory", "oom"), ("infiniband", "ib_link"), ("ib", "ib_link"),
    ("pcie", "pcie"), ("pci", "pcie"), ("ipmi", "platform_management"), ("mount", "filesystem_mount"),
    ("edac", "main_memory"), ("dimm", "main_memory"), ("mce", "main_memory"), ("main memory", "main_memory"),
    ("ecc", "gpu_memory"), ("row remap", "gpu_memory"), ("retired", "gpu_memory"), ("gpu memory", "gpu_memory"),
    ("gsp", "gpu_driver"), ("driver", "gpu_driver"), ("gpu", "gpu_unavailable"), ("eth", "eth_link"),
    ("nvme", "block_device"), ("block", "block_device"), ("disk", "block_device"), ("memory", "main_memory"),
    ("service", "system_service"), ("clock", "system_service"), ("nccl", "nccl_timeout"),
    ("collective", "nccl_timeout"), ("heartbeat", "node_lost"),
)  # fmt: skip
"""Of all others the first that begins a part of the name or of the cause."""


def symptom_of_event(event: HealthEvent) -> str:
    """Key in `SYMPTOMS`."""
    known = symptom_of_cause(event.cause)
    if known is None and event.check == _OF_THE_KERNEL:
        known = next((symptom for cause, symptom in SYMPTOM_OF_DEVICE.items() if cause == event.cause), "other")
    if known is not None:
        return known
    if event.check in _CHECKS:
        return _CHECKS[event.check]
    if event.cause in SYMPTOMS:
        return event.cause
    name = f" {event.check} {event.cause}".replace("_", " ")
    return next((symptom for word, symptom in _WORDS if f" {word}" in name), "other")

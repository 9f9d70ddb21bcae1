"""Symptoms, the domains of failure that they may come from, and the classes of Xid errors. Pure data.

The first twelve symptoms are table I of the reliability paper (arXiv:2410.21680, II-E); those below `TABLE_I` are ours,
for what nodes report and the table leaves out. Classes of Xid errors: table V of the Fire-Flyer paper
(arXiv:2408.14158), whose numbers are in `base.xids`.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

from fireflyer.base.kernel_faults import DeviceCause
from fireflyer.base.xids import TABLE_V, XidClass, xid_of

__all__ = [
    "DOMAINS",
    "SYMPTOMS",
    "SYMPTOM_OF_DEVICE",
    "TABLE_I",
    "XID_CLASSES",
    "Domain",
    "Symptom",
    "XidRow",
    "symptom_of_cause",
    "symptom_of_xid",
    "xid_class",
]

Domain = Literal["user program", "system software", "hardware"]
DOMAINS: Final[tuple[Domain, ...]] = ("user program", "system software", "hardware")


class Symptom(NamedTuple):
    """What is seen; `domains`: where its cause may lie, `causes`: the likely ones."""

    title: str
    domains: tuple[Domain, ...]
    causes: tuple[str, ...]


_USER, _SYSTEM, _HARDWARE = DOMAINS
_LINK_CAUSES: Final = ("electrical or material failure", "switch")
TABLE_I: Final[dict[str, Symptom]] = {
    "oom": Symptom("OOM", (_USER,), ("bug of the program",)),
    "gpu_unavailable": Symptom("GPU unavailable", (_SYSTEM, _HARDWARE), ("PCIe error", "driver or BIOS", "thermals")),
    "gpu_memory": Symptom("GPU memory error", (_HARDWARE,),
                          ("thermal noise", "cosmic rays", "defect or wear of the memory")),
    "gpu_driver": Symptom("GPU driver or firmware error", (_SYSTEM,), ("outdated software", "high load")),
    "nvlink": Symptom("GPU NVLink error", (_HARDWARE,), _LINK_CAUSES),
    "ib_link": Symptom("InfiniBand link", (_HARDWARE,), _LINK_CAUSES),
    "filesystem_mount": Symptom("Filesystem mount", (_SYSTEM,),
                                ("failed front-end network", "drivers in D state", "storage backend")),
    "main_memory": Symptom("Main memory error", (_HARDWARE,), ("wear of the circuit", "thermal noise", "cosmic rays")),
    "eth_link": Symptom("Ethernet link error", (_HARDWARE,), _LINK_CAUSES),
    "pcie": Symptom("PCIe error", (_HARDWARE,), ("failure of the GPU", "poor electrical contact")),
    "nccl_timeout": Symptom("Timeout of a collective", DOMAINS, ("crash of a program", "deadlock", "failed hardware")),
    "system_service": Symptom("System service", DOMAINS,
                              ("interference of a program", "software bug", "partition of the network")),
}  # fmt: skip
SYMPTOMS: Final[dict[str, Symptom]] = {
    **TABLE_I,
    "gpu_program": Symptom("GPU error of a program", (_USER, _HARDWARE), ("illegal access", "damaged GPU memory")),
    "block_device": Symptom("Block device error", (_HARDWARE,), ("wear of the disk", "poor electrical contact")),
    "platform_management": Symptom("Critical event of the management controller", (_HARDWARE,),
                                   ("PCIe bus error", "power", "thermals")),
    "program_error": Symptom("Program ended with an error", (_USER,), ("bug of the program",)),
    "corruption": Symptom("Replicas of the training state differ", (_HARDWARE, _USER),
                          ("silent data corruption of a GPU, a processor or memory",
                           "program whose replicas do not compute the same")),
    "node_lost": Symptom("Node stopped answering", (_SYSTEM, _HARDWARE), ("hang of the system", "power", "network")),
    "other": Symptom("Other", DOMAINS, ("not classified",)),
}  # fmt: skip
"""Table I, and what it leaves out."""


class XidRow(NamedTuple):
    """A row of table V."""

    name: XidClass
    xids: tuple[int, ...]
    cause: str
    remedy: str


XID_CLASSES: Final = (
    XidRow("software", TABLE_V["software"], "the program; damaged GPU memory where its bugs are ruled out",
           "look at the program first, and at other evidence before the GPU is blamed"),
    XidRow("nvlink", TABLE_V["nvlink"], "NVLink; on PCIe cards the bridge between two GPUs",
           "stress the pair, and take out what repeats; there is no way to avoid it"),
    XidRow("memory", TABLE_V["memory"], "ECC errors of the GPU's memory", "reset the GPU: its rows are remapped"),
    XidRow("uncorrectable", TABLE_V["uncorrectable"], "an uncorrectable error of the GPU, reported to the program",
           "reset the GPU or reboot the node"),
    XidRow("gsp", TABLE_V["gsp"], "the GPU's system processor (GSP) failed",
           "run the vendor's field diagnosis; most need a replacement"),
)  # fmt: skip
SYMPTOM_OF_DEVICE: Final[dict[DeviceCause, str]] = {
    "block_io": "block_device", "file_system": "filesystem_mount", "nvme": "block_device",
    "machine_check": "main_memory", "machine_check_log": "main_memory", "memory": "main_memory", "pcie": "pcie",
    "adapter": "ib_link", "out_of_memory": "oom", "hung_task": "system_service",
}  # fmt: skip
"""Of what the kernel says of a device, in a log and in the check that reads it."""
_SYMPTOM_OF_CLASS: Final[dict[XidClass, str]] = {
    "software": "gpu_program", "nvlink": "nvlink", "memory": "gpu_memory", "uncorrectable": "gpu_unavailable",
    "gsp": "gpu_driver", "other": "gpu_driver",
}  # fmt: skip


def xid_class(xid: int) -> XidRow | None:
    """The row of table V that names an Xid; None for all that it does not."""
    return next((one for one in XID_CLASSES if xid in one.xids), None)


def symptom_of_xid(xid: int) -> str:
    """Key in `SYMPTOMS`. Xid 48 is an uncorrectable error of memory; one that a program can cause is the program's."""
    known = xid_of(xid)
    if xid == 48:
        return "gpu_memory"
    return "gpu_program" if known.user_made else _SYMPTOM_OF_CLASS[known.kind]


def symptom_of_cause(cause: str) -> str | None:
    """Of `xid_79` and `sxid_20034`; None: it is no such cause."""
    found = re.fullmatch(r"(s?)xid_([0-9]{1,6})", cause)
    if found is None:
        return None
    return "nvlink" if found[1] else symptom_of_xid(int(found[2]))

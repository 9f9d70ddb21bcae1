"""What a record of the kernel's log says about the hardware. Pure: text in, a finding or nothing out.

Xid, SXid and errors of devices have the meaning that the health checks give them (`base.kernel_faults`); a few texts
that the checks do not look at, as they look at the device itself, are added here.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from fireflyer.analytics.reliability.taxonomy import SYMPTOM_OF_DEVICE, symptom_of_cause
from fireflyer.base.health_event import Severity
from fireflyer.base.kernel_faults import device_error, gpu_error, is_of_a_process

__all__ = ["Finding", "finding_of", "says_a_fault"]


class Finding(NamedTuple):
    symptom: str
    cause: str
    severity: Severity
    part: str
    user_made: bool


_MOST_CHARACTERS: Final = 1024
"""Of a message that are looked at: the kernel's records have fewer, and some patterns take quadratic time."""


class _Pattern(NamedTuple):
    pattern: re.Pattern[str]
    symptom: str
    cause: str
    severity: Severity
    user_made: bool = False


_PATTERNS: Final = tuple(
    _Pattern(re.compile(text), *rest)
    for text, *rest in (
        (r"NVRM: (?:GPU at PCI:|GPU )(?P<part>[0-9a-fA-F:.]{7,16}): GPU has fallen off the bus", "gpu_unavailable",
         "off_the_bus", "high"),
        (r"mlx\d_core [0-9a-f:.]{7,12} (?P<part>ib\w{1,14}): [Ll]ink down", "ib_link", "link_down", "high"),
        (r"mlx\d_\d{1,3}[/ :]{1,3}[pP]ort (?P<part>\d{1,3}).{0,80}(?:link|Link) (?:down|DOWN)", "ib_link", "link_down",
         "high"),
        (r"mlx\d_core [0-9a-f:.]{7,12} (?P<part>e\w{1,14}): [Ll]ink down", "eth_link", "link_down", "low"),
        (r"(?:[a-z]\w{1,20} [0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9]:? )?(?:\w{1,20}: ){0,2}"
         r"(?P<part>e[nt][a-z0-9]{1,13}):? (?:NIC )?Link is [Dd]own", "eth_link", "link_down", "low"),
        (r"NETDEV WATCHDOG: (?P<part>\w{1,15}) \(\w{1,20}\): transmit queue", "eth_link", "transmit_timeout", "low"),
        (r"EDAC MC(?P<part>[0-9]{1,3}): [0-9]{1,10} CE (?:.{1,200} )?on .{1,400}page:0x[0-9a-f]+ offset:0x[0-9a-f]+ "
         r"grain:", "main_memory", "corrected", "warn"),
        (r"(?:pcieport|nvidia|mlx5_core|nvme) (?P<part>[0-9a-f:.]{7,12}): PCIe Bus Error: severity=Correct", "pcie",
         "corrected", "warn"),
        (r"nvme (?P<part>nvme\d{1,4}): I/O .{1,60}timeout", "block_device", "timeout", "high"),
        (r"nfs: server (?P<part>\S{1,64}) not responding", "filesystem_mount", "not_responding", "high"),
        (r"Memory cgroup out of memory: Killed process", "oom", "out_of_memory", "warn", True),
        (r"watchdog: BUG: soft lockup - CPU", "system_service", "soft_lockup", "high"),
        (r"Kernel panic - not syncing", "node_lost", "kernel_panic", "high"),
    )
)  # fmt: skip
_WORDS: Final = re.compile(
    r"NVRM|SXid|[Ll]ink|LINK|WATCHDOG|EDAC|Hardware Error|AER|PCIe|I/O|medium|nvme|nfs|EXT4|XFS|mlx5|memory|blocked"
    r"|lockup|panic"
)
"""One of them is in every line that a pattern takes: most lines have none, and are passed over fast."""


def says_a_fault(line: str) -> bool:
    """A fast test of a whole line that few pass; whether it is so, `finding_of` its message tells."""
    return _WORDS.search(line) is not None


def finding_of(message: str) -> Finding | None:
    """Of the text of one record, which the kernel wrote. None for what says nothing about the hardware."""
    message = message[:_MOST_CHARACTERS]
    if not says_a_fault(message) or is_of_a_process(message):
        return None
    gpu = gpu_error(message)
    if gpu is not None:
        return Finding(symptom_of_cause(gpu.cause) or "other", gpu.cause, gpu.severity, gpu.part, gpu.user_made)
    device = device_error(message)
    if device is not None:
        return Finding(
            SYMPTOM_OF_DEVICE[device.cause], device.cause, device.severity, device.part[:64], device.user_made
        )
    for one in _PATTERNS:
        match = one.pattern.match(message)
        if match is not None:
            part = (match.groupdict().get("part") or "")[:64]
            return Finding(one.symptom, one.cause, one.severity, part, one.user_made)
    return None

"""What a line of the kernel's log says about the hardware. Pure: text in, a finding or nothing out."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from fireflyer.analytics.reliability.taxonomy import symptom_of_xid
from fireflyer.base.health_event import Severity

__all__ = ["Finding", "finding_of"]


class Finding(NamedTuple):
    symptom: str
    cause: str
    severity: Severity
    part: str
    user_made: bool


_XID: Final = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]{4,16})\): ([0-9]{1,4})\b")
_MOST_CHARACTERS: Final = 1024
"""Of a message that are looked at: the kernel's records have fewer, and some patterns take quadratic time."""
_WARNING_XIDS: Final = frozenset({63, 92, 94})
"""Contained, or repaired by a reset of the GPU."""


class _Pattern(NamedTuple):
    pattern: re.Pattern[str]
    symptom: str
    cause: str
    severity: Severity
    user_made: bool = False


_PATTERNS: Final = tuple(
    _Pattern(re.compile(text), *rest)
    for text, *rest in (
        (r"GPU at PCI:(?P<part>\S{4,16}): GPU has fallen off the bus", "gpu_unavailable", "off_the_bus", "high"),
        (r"mlx\d_core \S+ (?P<part>ib\w*): [Ll]ink down", "ib_link", "link_down", "high"),
        (r"mlx\d_\d+[/ :]+(?:port|Port) (?P<part>\d+).*(?:link|Link) (?:down|DOWN)", "ib_link", "link_down", "high"),
        (r"(?P<part>ib\w*): Lost [Cc]arrier", "ib_link", "lost_carrier", "high"),
        (r"mlx\d_core \S+ (?P<part>e\w+): [Ll]ink down", "eth_link", "link_down", "low"),
        (r"(?P<part>e[nt][a-z0-9]+): (?:NIC )?Link is [Dd]own", "eth_link", "link_down", "low"),
        (r"NETDEV WATCHDOG: (?P<part>\w+)", "eth_link", "transmit_timeout", "low"),
        (r"EDAC (?P<part>MC\d+).*\bUE\b", "main_memory", "uncorrected", "high"),
        (r"EDAC (?P<part>MC\d+).*\bCE\b", "main_memory", "corrected", "warn"),
        (r"mce: \[Hardware Error\]|Machine check events logged", "main_memory", "machine_check", "low"),
        (r"pcieport (?P<part>[0-9a-f:.]+): .*(?:AER: (?:Uncorrected|Multiple Uncorrected)|severity=Uncorrected)",
         "pcie", "uncorrected", "high"),
        (r"(?P<part>[0-9a-f:.]{7,12}): PCIe Bus Error: severity=Uncorrected", "pcie", "uncorrected", "high"),
        (r"PCIe Bus Error: severity=Corrected", "pcie", "corrected", "warn"),
        (r"I/O error, dev (?P<part>\w+)", "block_device", "io_error", "high"),
        (r"nvme (?P<part>nvme\d+): (?:I/O .* timeout|Device not ready|controller is down)", "block_device", "timeout",
         "high"),
        (r"nfs: server (?P<part>\S+) not responding", "filesystem_mount", "not_responding", "high"),
        (r"(?P<part>\S+): (?:EXT4-fs|XFS) .*error|EXT4-fs error|XFS \(\S+\): .*(?:Corruption|shutdown)",
         "filesystem_mount", "damaged", "high"),
        (r"(?:Memory cgroup out of memory|Out of memory): Killed process", "oom", "", "warn", True),
        (r"task (?P<part>\S+) blocked for more than \d+ seconds", "system_service", "hung_task", "low"),
        (r"watchdog: BUG: soft lockup", "system_service", "soft_lockup", "high"),
        (r"Kernel panic", "node_lost", "kernel_panic", "high"),
    )
)  # fmt: skip
_WORDS: Final = re.compile(
    r"NVRM|GPU at|[Ll]ink|LINK|carrier|Carrier|WATCHDOG|EDAC|Hardware Error|Machine check|AER|PCIe|I/O|nvme|nfs|EXT4"
    r"|XFS|memory|blocked|lockup|panic"
)
"""One of them is in every line that a pattern takes: most lines have none, and are passed over fast."""


def finding_of(message: str) -> Finding | None:
    """None for what says nothing about the hardware. An Xid of a program counts as user-made, and only as a warning."""
    message = message[:_MOST_CHARACTERS]
    if _WORDS.search(message) is None:
        return None
    match = _XID.search(message)
    if match is not None:
        return _of_xid(int(match[2]), f"gpu:{match[1]}")
    for one in _PATTERNS:
        match = one.pattern.search(message)
        if match is not None:
            part = (match.groupdict().get("part") or "")[:64]
            return Finding(one.symptom, one.cause, one.severity, part, one.user_made)
    return None


def _of_xid(xid: int, part: str) -> Finding:
    symptom = symptom_of_xid(xid)
    user_made = symptom == "gpu_program"
    severity: Severity = "warn" if user_made else "low" if xid in _WARNING_XIDS else "high"
    return Finding(symptom, f"xid_{xid}", severity, part, user_made)

"""What the numbers of errors of NVIDIA's driver (Xid) mean, and what is done about them: the one table of the checks,
the repair of nodes and the analytics.

Classes and remedies are those of table V of arXiv:2408.14158 where it has the number, else those of NVIDIA's list of
Xid errors. Severities are ours, and the policy may change each: `gpu_xid.severity = { xid_63 = "high" }`.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from fireflyer.base.health_event import Severity

__all__ = ["TABLE_V", "UNKNOWN_XID", "XIDS", "Remedy", "Xid", "XidClass", "xid_of"]

Remedy = Literal["none", "look_at_program", "stress_test", "reset_gpu", "restart_node", "replace_gpu"]
XidClass = Literal["software", "nvlink", "memory", "uncorrectable", "gsp", "other"]
"""Rows of table V; `gsp` is its last row, `other` is in none."""


class Xid(msgspec.Struct, frozen=True):
    kind: XidClass
    severity: Severity
    meaning: str
    remedy: Remedy
    user_made: bool = False
    """A program of a user can cause it."""


XIDS: Final[dict[int, Xid]] = {
    8: Xid("software", "warn", "the GPU stopped processing", "look_at_program", user_made=True),
    13: Xid("software", "warn", "exception of the graphics engine", "look_at_program", user_made=True),
    31: Xid("software", "warn", "page fault of the GPU", "look_at_program", user_made=True),
    32: Xid("software", "warn", "invalid or corrupted push buffer", "look_at_program", user_made=True),
    38: Xid("other", "low", "firmware error of the driver", "reset_gpu"),
    43: Xid("software", "warn", "the GPU stopped processing for a program", "look_at_program", user_made=True),
    44: Xid("uncorrectable", "high", "fault of the graphics engine during a context switch", "reset_gpu"),
    45: Xid("software", "warn", "a program was removed from the GPU", "look_at_program", user_made=True),
    46: Xid("other", "high", "the GPU stopped processing", "reset_gpu"),
    48: Xid("uncorrectable", "high", "double-bit memory error", "reset_gpu"),
    54: Xid("other", "high", "a power connector is not plugged in", "replace_gpu"),
    56: Xid("other", "low", "error of the display engine", "reset_gpu"),
    57: Xid("other", "low", "error in programming the video memory interface", "reset_gpu"),
    58: Xid("other", "low", "unstable video memory interface", "reset_gpu"),
    61: Xid("uncorrectable", "high", "breakpoint of an internal microcontroller", "reset_gpu"),
    62: Xid("uncorrectable", "high", "halt of an internal microcontroller", "reset_gpu"),
    63: Xid("memory", "low", "a row of memory is recorded to be replaced", "reset_gpu"),
    64: Xid("memory", "high", "a row of memory could not be recorded to be replaced", "reset_gpu"),
    65: Xid("other", "low", "exception of a video processor", "reset_gpu"),
    68: Xid("other", "warn", "exception of the video decoder", "look_at_program", user_made=True),
    69: Xid("uncorrectable", "high", "class error of the graphics engine", "reset_gpu"),
    74: Xid("nvlink", "high", "error of NVLink", "stress_test"),
    79: Xid("uncorrectable", "high", "the GPU has fallen off the bus", "restart_node"),
    92: Xid("memory", "warn", "high rate of single-bit errors", "stress_test"),
    94: Xid("memory", "low", "contained uncorrectable memory error", "reset_gpu"),
    95: Xid("memory", "high", "uncontained uncorrectable memory error", "reset_gpu"),
    109: Xid("software", "warn", "a context switch took too long", "look_at_program", user_made=True),
    110: Xid("other", "high", "security fault", "restart_node"),
    119: Xid("gsp", "high", "the GSP does not answer", "replace_gpu"),
    120: Xid("gsp", "high", "error of the GSP", "reset_gpu"),
    121: Xid("other", "warn", "corrected error of the link to the processor", "none"),
    137: Xid("software", "warn", "fault of access over NVLink", "look_at_program", user_made=True),
    140: Xid("memory", "high", "unrecovered memory error", "reset_gpu"),
    143: Xid("other", "high", "the GPU could not be initialized", "reset_gpu"),
    144: Xid("nvlink", "high", "error of NVLink (SAW)", "reset_gpu"),
    145: Xid("nvlink", "high", "error of NVLink (RLW)", "reset_gpu"),
    149: Xid("nvlink", "high", "error of NVLink (NETIR)", "reset_gpu"),
    154: Xid("other", "low", "the driver asks for a recovery of the GPU", "reset_gpu"),
}
UNKNOWN_XID: Final = Xid("other", "low", "not in our list", "stress_test")
TABLE_V: Final[dict[XidClass, tuple[int, ...]]] = {
    "software": (13, 31, 43, 45),
    "nvlink": (74,),
    "memory": (63, 64, 94, 95),
    "uncorrectable": (44, 48, 61, 62, 69, 79),
    "gsp": (119,),
}
"""The numbers that the paper itself names in each row."""


def xid_of(number: int) -> Xid:
    """`UNKNOWN_XID` for a number that the table does not have."""
    return XIDS.get(number, UNKNOWN_XID)

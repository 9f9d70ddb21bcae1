"""What stands in place of a serial number: firmware that was never given one, drivers that do not know it."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["is_placeholder"]

_SEPARATORS: Final = re.compile(r"[^0-9a-z]")
_PREFIX: Final = re.compile(r"^(?:gpu-|0x)")
_COUNTED: Final = "0123456789" * 13
_LEAST_COUNTED: Final = 6
_WORDS: Final = frozenset(
    (
        "na", "none", "null", "nil", "unknown", "unknownerror", "error", "notavailable", "notapplicable",
        "notspecified", "notpresent", "notset", "unspecified", "undefined", "invalid", "empty", "blank",
        "insufficientpermissions", "gpuislost", "tobefilledbyoem", "tobefilledbyom", "filledbyoem", "oem", "default",
        "defaultstring", "serial", "serialnumber", "systemserialnumber", "sn", "nvmecard", "nvme", "ssd", "test",
        "deadbeef", "invalidserial", "noserial", "noserialnumber",
    )
)  # fmt: skip
"""Without blanks and punctuation."""


def is_placeholder(serial: str) -> bool:
    """Whether parts of many nodes may have the same: words, one character over and over, digits in their order."""
    bare = _SEPARATORS.sub("", _PREFIX.sub("", serial.strip().lower()))
    counted = len(bare) >= _LEAST_COUNTED and bare in _COUNTED
    return len(set(bare)) <= 1 or bare in _WORDS or counted

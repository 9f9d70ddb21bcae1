"""What a check of a node found: the one line that checks write, and that the platform and the analytics read."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

__all__ = ["MAX_LINE_BYTES", "SEVERITIES", "HealthEvent", "Severity"]

Severity = Literal["ok", "warn", "low", "high"]
"""What is done about it (arXiv:2410.21680, III): *high*, the node takes no job from now on and its job is started
elsewhere; *low*, the node is taken out when its job ends; *warn*, a person is told; *ok*, nothing."""
SEVERITIES: Final[tuple[Severity, ...]] = ("ok", "warn", "low", "high")
"""Ascending."""
MAX_LINE_BYTES: Final = 4096
"""Of one event as JSON."""


class HealthEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One check of one part, at one time; as JSON in one line."""

    check: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    """Name of the check, as `gpu_xid` or `disk_space`."""
    severity: Severity
    part: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """What is at fault, as `gpu:0000:3b:00.0` or `mount:/data`; empty: the node."""
    serial: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """Serial number of the part: its history follows the part, not its place. Empty: not known."""
    cause: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Class of the fault, as `xid_79`; empty: the check has only one."""
    words: Annotated[str, msgspec.Meta(max_length=400)] = ""
    """For people: what was measured, and what is allowed."""
    seen_ns: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    """Nanoseconds since 1970."""
    at_once: bool = False
    """Acted on without being confirmed by further probes: a lost device, a lost link, an Xid."""
    once: bool = False
    """An event that happened, not a state: acted on without a probe, and not taken back by a check that passes."""
    could_not_run: bool = False
    """The check did not come to a result: its tool is missing, hung or printed what nobody understands."""
    user_made: bool = False
    """The program of a user can produce this evidence: nobody is refunded for it."""

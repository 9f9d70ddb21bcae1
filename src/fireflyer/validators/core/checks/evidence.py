"""What a check is given, and what it answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Final

import msgspec

from fireflyer.base.health_event import Severity
from fireflyer.base.units import SECOND

__all__ = [
    "MAX_COUNTERS",
    "MAX_SERIALS",
    "CannotJudge",
    "CheckCounters",
    "Counters",
    "Evidence",
    "Finding",
    "Growth",
    "KernelRecord",
    "NotNow",
    "Outcome",
    "Output",
    "number_of",
]

MAX_COUNTERS: Final = 20_000
"""That are remembered from one round to the next."""
MAX_SERIALS: Final = 1024
"""Names of parts whose serial numbers are remembered."""
_MAX_COUNT: Final = (1 << 63) - 1
_HOUR_NS: Final = 3600 * SECOND


class CannotJudge(Exception):
    """A check did not come to a result. Its text says why, for people."""


class NotNow(CannotJudge):
    """The node is in use, so the check has to wait: nothing is missed, even where it is required."""


class Output(msgspec.Struct, frozen=True):
    """What a tool printed."""

    text: str = ""
    exit_code: int = 0
    """As the shell says it."""
    problem: str = ""
    """Why there is no output to rely on, as `smartctl is not installed`; empty: there is."""
    missing: bool = False
    """With a problem: the tool is not there."""
    hung: bool = False
    """With a problem: the tool did not end in time, was killed, or could not be started. A user who loads the node can
    cause that."""


class KernelRecord(msgspec.Struct, frozen=True):
    """A line that the kernel itself wrote to its log."""

    sequence: int
    """Counts the records since the node was started; 0: not known."""
    seen_ns: int
    """Nanoseconds since 1970."""
    text: str
    journal_us: int = 0
    """When the journal took it, by the clock that starts with the node; 0: it is not from the journal."""


class CheckCounters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counters that one check has read, with which its next round compares."""

    seen_ns: Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
    values: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=256)], Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]],
        msgspec.Meta(max_length=MAX_COUNTERS),
    ] = {}


class Counters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state file: what the checks of a node have counted."""

    version: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    boot: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Which start of the node they belong to: counters begin again at each."""
    checks: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=64)], CheckCounters], msgspec.Meta(max_length=256)
    ] = {}
    serials: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=128)], Annotated[str, msgspec.Meta(max_length=128)]],
        msgspec.Meta(max_length=MAX_SERIALS),
    ] = {}
    """Serial numbers by names of parts, as rounds since the start of the node have found them."""


class Growth(msgspec.Struct, frozen=True):
    """How much a counter grew since the round before."""

    count: int
    over_ns: int

    @property
    def per_hour(self) -> float:
        return self.count * _HOUR_NS / max(self.over_ns, SECOND)


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was captured on a node in one round."""

    now_ns: int
    """Nanoseconds since 1970."""
    boot: str = ""
    outputs: Mapping[str, Output] = {}
    """By name of the source; where a tool runs once for each device, `NAME:DEVICE`."""
    files: Mapping[str, str] = {}
    """Contents by path, as `sys/class/net/eth0/carrier`."""
    unreadable: Mapping[str, str] = {}
    """Why a file that is there was not read, by path."""
    incomplete: Mapping[str, str] = {}
    """Why not all files of a pattern were looked for, by pattern: that one of them is not in `files` says nothing."""
    late: frozenset[str] = frozenset()
    """Names of sources, other than tools, that were not read in time, or were more than is read: a user who loads the
    node can cause that."""
    links: Mapping[str, str] = {}
    """Where a mount point leads that is a link: absolute paths."""
    kernel: tuple[KernelRecord, ...] = ()
    """Those that may tell of a fault, and maybe others."""
    kernel_oldest: int = 0
    kernel_sequence: int = 0
    """Of the oldest and the newest record in the log, whatever they tell; 0: not known."""
    kernel_journal_us: int = 0
    """Of the newest record of the journal, as `KernelRecord.journal_us`, whatever it tells."""
    kernel_lost: int = 0
    """Records that the kernel has overwritten before they were read."""
    kernel_problem: str = ""
    """Why the kernel's log was not read, or not all of it."""
    idle: bool = False
    """No task runs on the node, so no process of a user belongs there; False: there may be one."""
    before: CheckCounters | None = None
    """Of the check's last round; None: this is its first, or the node was started since."""

    def output(self, name: str) -> str:
        """What a tool printed. Raises `CannotJudge`."""
        found = self.outputs.get(name)
        if found is None:
            raise CannotJudge(f"{name} was not run")
        if found.problem:
            raise CannotJudge(found.problem)
        return found.text

    def outputs_of(self, name: str) -> Iterator[tuple[str, Output]]:
        """Of a tool that runs once for each device: the devices, and what it printed."""
        for key, output in self.outputs.items():
            if key.startswith(f"{name}:"):
                yield key[len(name) + 1 :], output

    def text(self, path: str) -> str:
        """Of a file; empty where there is none."""
        return self.files.get(path, "").strip()

    def number(self, path: str) -> int | None:
        return number_of(self.text(path))

    def entries(self, directory: str) -> list[str]:
        """Names in a directory of which a file was read, sorted."""
        prefix = f"{directory}/"
        return sorted({path[len(prefix) :].split("/", 1)[0] for path in self.files if path.startswith(prefix)})

    def refused(self, directory: str) -> str:
        """The first file below the directory that could not be read, and why; empty: none."""
        for path, reason in self.unreadable.items():
            if path.startswith(f"{directory}/"):
                return f"/{path} cannot be read: {reason}"
        return ""

    def growth(self, key: str, value: int) -> Growth | None:
        """None where the round before did not have the counter. One that went down was reset, and counts from 0."""
        if self.before is None or key not in self.before.values:
            return None
        earlier = self.before.values[key]
        return Growth(value - earlier if value >= earlier else value, max(self.now_ns - self.before.seen_ns, 0))


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong; the fields of a `HealthEvent`."""

    severity: Severity
    words: str
    part: str = ""
    cause: str = ""
    serial: str = ""
    at_once: bool = False
    once: bool = False
    user_made: bool = False
    seen_ns: int | None = None
    """When it happened; None: it is so now."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    findings: tuple[Finding, ...] = ()
    """None: all is well."""
    counters: Mapping[str, int] = {}
    """To be remembered until the next round."""
    words: str = ""
    """What was found to be well, as `8 GPUs`."""
    unread: str = ""
    """What the check could not look at, though it came to a result."""
    absent: str = ""
    """The node has no such device; it says which."""


def number_of(text: str) -> int | None:
    """The whole number at the start of a text, as of `93 C`; None: there is none that a counter could have."""
    found = re.match(r"\s*([0-9]{1,20})(?![0-9])", text)
    return min(int(found[1]), _MAX_COUNT) if found is not None else None

"""What the management controller (BMC) of the machine says: its event log, and its sensors."""

from __future__ import annotations

import re
from typing import Final

from fireflyer.base.health_event import Severity
from fireflyer.validators.core.checks.evidence import CannotJudge, Evidence, Finding, Outcome
from fireflyer.validators.core.checks.settings import CheckSettings, Names

__all__ = ["IpmiLogSettings", "IpmiSensorSettings", "judge_ipmi_log", "judge_ipmi_sensors"]

_LAST: Final = "ipmi_log:last"
_BAD: Final[tuple[tuple[str, str, Severity], ...]] = (
    (r"uncorrectable ecc|uncorrectable machine check|mca|multi-?bit", "uncorrectable", "high"),
    (r"pci serr|pci perr|bus fatal|bus uncorrectable|fatal nmi", "bus", "high"),
    (r"bios.*(?:corrupt|checksum)|firmware.*corrupt", "firmware", "low"),
    (r"ac lost|power supply.*(?:failure|lost)|failure detected", "power", "low"),
    (r"thermal trip|non-?recoverable|throttl", "thermal", "low"),
    (r"upper critical|lower critical", "sensor", "warn"),
    (r"correctable ecc", "correctable", "warn"),
    (r"redundancy (?:lost|degraded)|non-redundant", "redundancy", "warn"),
)
"""Texts of events, the class of each, and its severity; the first that matches counts."""
_COLUMNS: Final = 5
"""Of an event: number, date, time, sensor, what happened, and more. Records of manufacturers (OEM) have fewer."""
_PANIC: Final = "Linux kernel panic"
_PANIC_SEVERITY: Final[Severity] = "warn"
"""Software does it, too; what the hardware did is told by events of its own."""
_NOT_CRITICAL: Final = frozenset({"nc", "lnc", "unc"})
_CRITICAL: Final = frozenset({"cr", "nr", "lcr", "ucr", "lnr", "unr"})
"""Of `sdr list`, and those of `sdr elist`, which say whether the lower or the upper threshold was passed."""


class IpmiLogSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ignored: Names = ()
    """Events whose text has one of these are passed over."""


class IpmiSensorSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ignored: Names = ()
    """Sensors, by name."""


def judge_ipmi_log(evidence: Evidence, settings: IpmiLogSettings) -> Outcome:
    """From `ipmitool sel elist`. Only events since the round before are findings: the log keeps them for years."""
    rows = []
    text = evidence.output("ipmitool_sel")
    for line in text.splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) < 2 or re.fullmatch(r"[0-9a-fA-F]{1,8}", words[0]) is None:
            if "SEL has no entries" in line or not line.strip():
                continue
            raise CannotJudge(f"ipmitool printed {line[:60]!r}, which is no event")
        rows.append((int(words[0], 16), words))
    last = max((number for number, _ in rows), default=0)
    before = evidence.before.values.get(_LAST) if evidence.before is not None else None
    if before is not None and last < before:  # it was cleared
        before = 0
    findings: list[Finding] = []
    old = 0
    for number, words in rows:
        panic = words[1].startswith(_PANIC)
        if len(words) < _COLUMNS and not panic:  # a record of the manufacturer
            continue
        part, said = ("", " ".join(words[1:])) if panic else (f"bmc:{words[3]}"[:128], " ".join(words[3:]))
        if words[-1].lower() == "deasserted" or any(one in said for one in settings.ignored):
            continue
        kind = ("panic", _PANIC_SEVERITY) if panic else _kind(said)
        if kind is None:
            continue
        if before is None or number <= before:
            old += 1
            continue
        told = said if panic else f"{words[1]} {words[2]}: {said}"
        findings.append(Finding(severity=kind[1], part=part, cause=kind[0], words=told, once=True))
    note = f"; {old} bad ones are from before" if old else ""
    return Outcome(findings=tuple(findings[:50]), counters={_LAST: last}, words=f"{len(rows)} events{note}")


def _kind(said: str) -> tuple[str, Severity] | None:
    return next(((cause, grade) for bad, cause, grade in _BAD if re.search(bad, said, re.IGNORECASE)), None)


def judge_ipmi_sensors(evidence: Evidence, settings: IpmiSensorSettings) -> Outcome:
    """From `ipmitool sdr elist`: name, number, state, entity, reading. Critical (`lcr`, `ucr`) and not recoverable
    (`lnr`, `unr`) are of low severity, not critical (`lnc`, `unc`) is a warning; `ns` has no reading."""
    findings: list[Finding] = []
    count = 0
    for line in evidence.output("ipmitool_sdr").splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) < 5:
            raise CannotJudge(f"ipmitool printed {line[:60]!r}, which is no sensor")
        name, state, reading = words[0], words[2], words[4]
        count += state != "ns"
        failed = re.search(r"failure detected|power supply ac lost|redundancy lost", reading, re.IGNORECASE)
        if name in settings.ignored or (state not in _NOT_CRITICAL | _CRITICAL and failed is None):
            continue
        warn = state in _NOT_CRITICAL or (failed is not None and "redundancy" in reading.lower())
        cause = "power" if failed is not None else "sensor"
        words_told = f"{name}: {reading} ({state})"
        severity: Severity = "warn" if warn else "low"
        findings.append(Finding(severity=severity, part=f"bmc:{name}"[:128], cause=cause, words=words_told))
    if not count:
        raise CannotJudge("the management controller has no sensor with a reading")
    return Outcome(findings=tuple(findings), words=f"{count} sensors")

"""Memory: its size, its modules, and the errors that the kernel counts (EDAC)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from fireflyer.base.health_event import Severity
from fireflyer.validators.core.checks.evidence import CannotJudge, Evidence, Finding, Outcome, number_of
from fireflyer.validators.core.checks.settings import Amount, CheckSettings, Share

__all__ = [
    "EDAC_FILES",
    "MemoryErrorSettings",
    "MemorySizeSettings",
    "judge_memory_errors",
    "judge_memory_size",
]

_CONTROLLERS: Final = "sys/devices/system/edac/mc"
EDAC_FILES: Final = (
    f"{_CONTROLLERS}/mc*/ue_count",
    f"{_CONTROLLERS}/mc*/ce_count",
    f"{_CONTROLLERS}/mc*/dimm*/dimm_ue_count",
    f"{_CONTROLLERS}/mc*/dimm*/dimm_ce_count",
    f"{_CONTROLLERS}/mc*/dimm*/dimm_label",
    f"{_CONTROLLERS}/mc*/dimm*/size",
    "proc/meminfo",
)


class MemoryErrorSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    warn_corrected_per_hour: Amount = 100.0
    low_corrected_per_hour: Amount = 10_000.0
    """Of a controller, or of a module."""


class MemorySizeSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    missing_share: Share = 0.05
    """Of the inventory's memory, which the firmware and the kernel may keep for themselves."""


def judge_memory_errors(evidence: Evidence, settings: MemoryErrorSettings) -> Outcome:
    """An uncorrected error is of high severity where it is new, or nothing is known of before."""
    counts = dict(_error_counts(evidence))
    if not any("ue_count" in path for path in counts):
        raise CannotJudge(
            evidence.refused(_CONTROLLERS) or "the kernel has no EDAC driver for this machine's memory controllers"
        )
    findings: list[Finding] = []
    for path, count in counts.items():
        directory, _, name = path.rpartition("/")
        part = _part(evidence, directory)
        growth = evidence.growth(f"edac:{path}", count)
        if name.endswith("ue_count") and count and (evidence.before is None or growth is None or growth.count):
            words = f"{part} counts {count} uncorrected errors"
            findings.append(Finding(severity="high", part=part, cause="uncorrected", words=words, once=True))
        elif name.endswith("ce_count") and growth is not None:
            rate, low, warn = growth.per_hour, settings.low_corrected_per_hour, settings.warn_corrected_per_hour
            if rate > min(low, warn):
                words = f"{part} corrects {rate:.0f} errors an hour; {low if rate > low else warn:.0f} are allowed"
                severity: Severity = "low" if rate > low else "warn"
                findings.append(Finding(severity=severity, part=part, cause="corrected", words=words))
    poisoned = _meminfo(evidence, "HardwareCorrupted") or 0
    growth = evidence.growth("meminfo:HardwareCorrupted", poisoned)
    if poisoned and (growth is None or growth.count):
        words = f"the kernel has taken {poisoned} KiB of bad memory out of use"
        findings.append(Finding(severity="high", cause="poisoned", words=words, once=True))
    counters = {f"edac:{path}": count for path, count in counts.items()} | {"meminfo:HardwareCorrupted": poisoned}
    return Outcome(findings=tuple(findings), counters=counters, words="no new error")


def judge_memory_size(evidence: Evidence, settings: MemorySizeSettings, gib: float, modules: int) -> Outcome:
    """`gib` and `modules` of the inventory; 0: it does not say."""
    total_kib = _meminfo(evidence, "MemTotal")
    if total_kib is None:
        raise CannotJudge("/proc/meminfo has no MemTotal")
    found_gib = total_kib / (1 << 20)
    findings = []
    if found_gib < gib * (1 - settings.missing_share):
        words = f"the kernel has {found_gib:.0f} GiB of memory; the inventory says {gib:g} GiB"
        findings.append(Finding(severity="low", cause="size", words=words))
    count, unread = _modules(evidence)
    if modules and count is None:
        raise CannotJudge(unread)
    if modules and count is not None and count != modules:
        words = f"{count} memory modules are found; the inventory says {modules}"
        findings.append(Finding(severity="low", cause="modules", words=words))
    counted = "" if count is None else f", {count} modules"
    return Outcome(findings=tuple(findings), words=f"{found_gib:.0f} GiB{counted}", unread=unread)


def _error_counts(evidence: Evidence) -> Iterator[tuple[str, int]]:
    for path in sorted(evidence.files):
        if path.startswith(f"{_CONTROLLERS}/") and path.endswith(("ue_count", "ce_count")):
            count = evidence.number(path)
            if count is not None:
                yield path, count


def _part(evidence: Evidence, directory: str) -> str:
    label = evidence.text(f"{directory}/dimm_label")
    controller = directory.removeprefix(f"{_CONTROLLERS}/")
    return f"memory:{label or controller}"


def _meminfo(evidence: Evidence, name: str) -> int | None:
    found = re.search(rf"^{name}:\s*([0-9]+)", evidence.text("proc/meminfo"), re.MULTILINE)
    return number_of(found[1]) if found is not None else None


def _modules(evidence: Evidence) -> tuple[int | None, str]:
    """Of the firmware's table (`dmidecode -t 17`), else of EDAC; and why they are not known."""
    output = evidence.outputs.get("dmidecode")
    if output is not None and not output.problem:
        sizes = re.findall(r"^\s*Size:\s*(.+?)\s*$", output.text, re.MULTILINE)
        if sizes:
            return sum(size[0].isdigit() for size in sizes), ""
    edac = [path for path in evidence.files if path.startswith(_CONTROLLERS) and path.endswith("/size")]
    if edac:
        return sum(bool(evidence.number(path)) for path in edac), ""
    why = output.problem or "dmidecode lists no memory device" if output is not None else "dmidecode was not run"
    return None, f"memory modules are not counted: {why}"

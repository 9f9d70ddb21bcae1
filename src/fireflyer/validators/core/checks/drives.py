"""Disks and NVMe devices: what they say of themselves (`smartctl -j`), and whether the kernel still has them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from fireflyer.validators.core.checks.evidence import CannotJudge, Evidence, Finding, Outcome, Output
from fireflyer.validators.core.checks.settings import Amount, CheckSettings

__all__ = ["NVME_FILES", "NvmeSettings", "SmartSettings", "judge_nvme", "judge_smart"]

_NVME: Final = "sys/class/nvme"
NVME_FILES: Final = (f"{_NVME}/nvme*/state", f"{_NVME}/nvme*/model", f"{_NVME}/nvme*/serial")
_DEFECTS: Final = {5: "reallocated sectors", 197: "pending sectors", 198: "sectors that cannot be read"}
"""Numbers of the attributes of ATA."""
_COMMAND_LINE_WRONG: Final = 1
_OPEN_FAILED: Final = 2
"""Bits of the exit code of smartctl(8)."""


class SmartSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    defects: Amount = 0.0
    """Sectors that were replaced, wait for it, or cannot be read."""
    warn_used_percent: Amount = 80.0
    low_used_percent: Amount = 100.0
    """Of the writes that the manufacturer promises."""
    warn_temperature: Amount = 70.0
    """Degrees Celsius."""
    refuse_zeros: bool = False
    """An NVMe device that says that it was never started or never read counts no more, or is emulated."""


class NvmeSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No thresholds: a device is live, or it is not."""


def judge_smart(evidence: Evidence, settings: SmartSettings, expected: tuple[str, ...]) -> Outcome:
    """`expected`: disks of the inventory, as `sda` or `nvme0n1`."""
    findings = [
        Finding(severity="high", part=f"disk:{name}", cause="missing", words=f"the kernel has no disk {name}")
        for name in expected
        if not any(path.startswith(f"sys/block/{name}/") for path in evidence.files)
    ]
    counters: dict[str, int] = {}
    failed: list[str] = []
    judged = 0
    for name, output in evidence.outputs_of("smartctl"):
        try:
            report = _report(output)
        except CannotJudge as error:
            failed.append(f"{name}: {error}")
            continue
        judged += 1
        findings += _disk(evidence, f"disk:{name}", report, settings, counters)
    if failed and not judged and not findings:
        raise CannotJudge(failed[0])
    if not judged and not findings:
        return Outcome(absent="no disk of the node has SMART")
    return Outcome(findings=tuple(findings), counters=counters, words=f"{judged} disks", unread="; ".join(failed)[:200])


def judge_nvme(evidence: Evidence, expected: int) -> Outcome:
    """`expected`: devices of the inventory; 0: it does not say."""
    names = evidence.entries(_NVME)
    if not names and not expected:
        return Outcome(absent="no NVMe device")
    findings = []
    if len(names) < expected:
        words = f"{len(names)} NVMe devices; the inventory says {expected}"
        findings.append(Finding(severity="high", cause="missing", words=words, at_once=True))
    for name in names:
        state = evidence.text(f"{_NVME}/{name}/state")
        if state and state != "live":
            words = f"{name} is {state[:40]}, not live"
            findings.append(Finding(severity="high", part=f"nvme:{name}", cause="state", words=words))
    return Outcome(findings=tuple(findings), words=f"{len(names)} devices are live")


def _report(output: Output) -> Mapping[str, Any]:
    if output.problem:
        raise CannotJudge(output.problem)
    try:
        report = json.loads(output.text)
    except (ValueError, RecursionError):
        raise CannotJudge("smartctl printed something else than JSON") from None
    if not isinstance(report, dict):
        raise CannotJudge("smartctl printed no report")
    if output.exit_code & (_COMMAND_LINE_WRONG | _OPEN_FAILED):
        messages = _dict(report, "smartctl").get("messages")
        first = messages[0] if isinstance(messages, list) and messages and isinstance(messages[0], dict) else {}
        raise CannotJudge(str(first.get("string", "the device cannot be opened"))[:120])
    if "smart_status" not in report and "nvme_smart_health_information_log" not in report:
        raise CannotJudge("the device has no SMART")
    return report


def _disk(
    evidence: Evidence, part: str, report: Mapping[str, Any], settings: SmartSettings, counters: dict[str, int]
) -> Iterator[Finding]:
    if _dict(report, "smart_status").get("passed") is False:
        yield Finding(severity="low", part=part, cause="failing", words="the disk expects to fail soon (SMART)")
    temperature = _dict(report, "temperature").get("current")
    if isinstance(temperature, int) and temperature > settings.warn_temperature:
        words = f"{temperature} degrees Celsius; {settings.warn_temperature:g} are allowed"
        yield Finding(severity="warn", part=part, cause="temperature", words=words)
    table = _dict(report, "ata_smart_attributes").get("table")
    for row in table if isinstance(table, list) else ():
        what = _DEFECTS.get(row["id"]) if isinstance(row, dict) and isinstance(row.get("id"), int) else None
        value = _dict(row, "raw").get("value") if what is not None else None
        if isinstance(value, int) and value > settings.defects:
            words = f"{value} {what}; {settings.defects:g} are allowed"
            yield Finding(severity="warn", part=part, cause="defects", words=words)
    log = _dict(report, "nvme_smart_health_information_log")
    if log:
        yield from _nvme(evidence, part, log, settings, counters)


def _nvme(
    evidence: Evidence, part: str, log: Mapping[str, Any], settings: SmartSettings, counters: dict[str, int]
) -> Iterator[Finding]:
    if critical := _number(log, "critical_warning"):
        words = f"critical warning 0x{critical:02x}"
        yield Finding(severity="low", part=part, cause="critical_warning", words=words)
    spare, least = _number(log, "available_spare"), _number(log, "available_spare_threshold")
    if spare is not None and least is not None and spare < least:
        words = f"{spare} % of the spare blocks are left; {least} % are the least"
        yield Finding(severity="low", part=part, cause="spare", words=words)
    used = _number(log, "percentage_used") or 0
    if used > settings.warn_used_percent:
        low = used > settings.low_used_percent
        words = f"{used} % of the writes that the manufacturer promises are used"
        yield Finding(severity="low" if low else "warn", part=part, cause="worn", words=words)
    zeros = [name for name in ("power_cycles", "data_units_read", "data_units_written") if _number(log, name) == 0]
    if settings.refuse_zeros and ("power_cycles" in zeros or len(zeros) > 1):
        words = f"its counters are not plausible: {', '.join(zeros)} are 0"
        yield Finding(severity="warn", part=part, cause="zeros", words=words)
    errors = _number(log, "media_errors")
    if errors is not None:
        counters[f"{part}:media_errors"] = errors
        growth = evidence.growth(f"{part}:media_errors", errors)
        if growth is not None and growth.count:
            words = f"{growth.count} new media errors"
            yield Finding(severity="high", part=part, cause="media_errors", words=words, once=True)


def _dict(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = found.get(key)
    return value if isinstance(value, dict) else {}


def _number(found: Mapping[str, Any], key: str) -> int | None:
    value = found.get(key)
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else None

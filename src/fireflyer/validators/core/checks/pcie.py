"""Links of devices to the machine: width, speed and errors of PCI Express, from sysfs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from fireflyer.base.health_event import Severity
from fireflyer.validators.core.checks.evidence import CannotJudge, Evidence, Finding, Outcome
from fireflyer.validators.core.checks.settings import Amount, CheckSettings

__all__ = ["PCIE_FILES", "PCI_DEVICES", "PcieSettings", "judge_pcie", "link_speed"]

PCI_DEVICES: Final = "sys/bus/pci/devices"
_AER: Final = ("aer_dev_correctable", "aer_dev_nonfatal", "aer_dev_fatal")
PCIE_FILES: Final = tuple(
    f"{PCI_DEVICES}/*/{name}"
    for name in (
        "class", "vendor", "current_link_speed", "current_link_width", "max_link_speed", "max_link_width", *_AER,
    )
)  # fmt: skip
_KINDS: Final = {"0x0302": "gpu", "0x0300": "gpu", "0x0207": "infiniband", "0x0200": "ethernet", "0x0108": "nvme"}
"""By class of device. Others (bridges, consoles) are seldom as wide as they could be."""
_NVIDIA: Final = "0x10de"


class PcieSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    correctable_per_hour: Amount = 1000.0
    speed: bool = True
    """Of devices that are no GPU, which lower it when they have nothing to do, it must be the highest."""


def judge_pcie(evidence: Evidence, settings: PcieSettings, gpus: int) -> Outcome:
    """`gpus` of the inventory; a GPU that has left the bus is missing here, whatever the driver says."""
    addresses = evidence.entries(PCI_DEVICES)
    if not addresses and not gpus:
        raise CannotJudge("the kernel lists no PCI device")
    findings: list[Finding] = []
    counters: dict[str, int] = {}
    seen = 0
    found_gpus = 0
    for address in addresses:
        base = f"{PCI_DEVICES}/{address}"
        kind = _KINDS.get(evidence.text(f"{base}/class")[:6], "")
        nvidia = evidence.text(f"{base}/vendor") == _NVIDIA
        if not kind or (kind == "gpu" and not nvidia):
            continue
        found_gpus += kind == "gpu"
        seen += 1
        part = f"{kind}:{address}"
        findings += _link(evidence, base, part, counters, with_speed=settings.speed and kind != "gpu")
        findings += _errors(evidence, base, part, settings, counters)
    if found_gpus < gpus:
        words = f"{found_gpus} GPUs are on the bus; the inventory says {gpus}"
        findings.append(Finding(severity="high", cause="gpu_missing", words=words, at_once=True))
    return Outcome(findings=tuple(findings), counters=counters, words=f"{seen} devices, {found_gpus} of them GPUs")


def _link(evidence: Evidence, base: str, part: str, counters: dict[str, int], *, with_speed: bool) -> Iterator[Finding]:
    width, widest = evidence.number(f"{base}/current_link_width"), evidence.number(f"{base}/max_link_width")
    before = evidence.before.values.get(f"{part}:width", 0) if evidence.before is not None else 0
    if width is not None:
        counters[f"{part}:width"] = max(width, before)
    if width is not None and widest is not None and width < widest < 255:
        severity: Severity = "low" if width < before else "warn"  # the slot may have no more lanes
        words = f"{width} lanes of PCI Express; {widest} are possible"
        gone = width == 0
        yield Finding(severity="high" if gone else severity, part=part, cause="width", words=words, at_once=gone)
    speed, fastest = link_speed(evidence, f"{base}/current_link_speed"), link_speed(evidence, f"{base}/max_link_speed")
    if with_speed and speed is not None and fastest is not None and speed < fastest:
        words = f"{speed:g} GT/s on each lane; {fastest:g} are possible"
        yield Finding(severity="warn", part=part, cause="speed", words=words)


def _errors(
    evidence: Evidence, base: str, part: str, settings: PcieSettings, counters: dict[str, int]
) -> Iterator[Finding]:
    for name in _AER:
        found = re.search(r"^TOTAL_ERR_[A-Z]+ ([0-9]{1,18})$", evidence.text(f"{base}/{name}"), re.MULTILINE)
        if found is None:
            continue
        counters[f"{part}:{name}"] = int(found[1])
        growth = evidence.growth(f"{part}:{name}", int(found[1]))
        if growth is None or not growth.count:
            continue
        kind = name.removeprefix("aer_dev_")
        if kind != "correctable":
            words = f"{growth.count} {kind} errors of PCI Express since the round before"
            yield Finding(severity="high", part=part, cause=f"aer_{kind}", words=words, once=True)
        elif growth.per_hour > settings.correctable_per_hour:
            rate, limit = f"{growth.per_hour:.0f} corrected errors an hour", f"{settings.correctable_per_hour:g}"
            words = f"{rate}; {limit} are allowed"
            yield Finding(severity="warn", part=part, cause="aer_correctable", words=words)


def link_speed(evidence: Evidence, path: str) -> float | None:
    """GT/s of each lane, of a file of sysfs."""
    found = re.match(r"([0-9]{1,3}(?:\.[0-9]{1,2})?) GT/s", evidence.text(path))
    return float(found[1]) if found is not None else None

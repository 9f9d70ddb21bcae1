"""Processors: clocks and governors; and processes that hang."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec

from fireflyer.base.units import SECOND, counted
from fireflyer.validators.core.checks.evidence import CannotJudge, Evidence, Finding, Outcome
from fireflyer.validators.core.checks.settings import Amount, CheckSettings, Names

__all__ = [
    "CPUINFO",
    "PROCESSOR_FILES",
    "ProcessSettings",
    "ProcessorSettings",
    "judge_processes",
    "judge_processors",
]

_CPUS: Final = "sys/devices/system/cpu"
PROCESSOR_FILES: Final = (
    "sys/devices/system/clocksource/clocksource0/current_clocksource",
    f"{_CPUS}/online",
    f"{_CPUS}/cpu[0-9]*/cpufreq/scaling_governor",
    f"{_CPUS}/cpu[0-9]*/cpufreq/cpuinfo_max_freq",
    f"{_CPUS}/cpu[0-9]*/cpufreq/scaling_max_freq",
    f"{_CPUS}/cpu[0-9]*/thermal_throttle/package_throttle_count",
)
CPUINFO: Final = "proc/cpuinfo"
_STAT: Final = re.compile(r"(?s)([0-9]+) \((.*)\) ([A-Za-z]) ")
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]


class ProcessorSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    clock_sources: Names = ("tsc", "kvm-clock", "arch_sys_counter")
    governors: Names = ("performance",)
    least_mhz: Amount = 0.0
    """To which the highest frequency of no processor may be limited; 0: none."""
    least_mean_mhz: Amount = 0.0
    """That processors really reach, in the mean, also idle ones with the governor `performance`; 0: whatever it is."""
    throttles_per_hour: Amount = 60.0


class ProcessSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hung_s: Amount = 300.0
    """So long a process may wait in the kernel without interruption (state D), or for its parent (zombie)."""
    zombies: _Count = 20
    """More are told even when they are new."""


def judge_processors(evidence: Evidence, settings: ProcessorSettings, expected: int) -> Outcome:
    """`expected`: processors of the inventory; 0: it does not say."""
    online = _list_length(evidence.text(f"{_CPUS}/online"))
    if online is None:
        raise CannotJudge(f"/{_CPUS}/online is not understood")
    findings: list[Finding] = []
    if expected and online < expected:
        words = f"{online} processors are online; the inventory says {expected}"
        findings.append(Finding(severity="low", cause="missing", words=words))
    source = evidence.text(PROCESSOR_FILES[0])
    if source and source not in settings.clock_sources:
        words = f"the kernel's clock source is {source}; allowed: {', '.join(settings.clock_sources)}"
        findings.append(Finding(severity="warn", cause="clock_source", words=words))
    findings += _frequencies(evidence, settings)
    findings += _mean_frequency(evidence.text(CPUINFO), settings.least_mean_mhz)
    counters: dict[str, int] = {}
    for path in sorted(evidence.files):
        if path.endswith("/package_throttle_count") and (count := evidence.number(path)) is not None:
            cpu = path.split("/")[4]
            counters[f"throttle:{cpu}"] = count
            growth = evidence.growth(f"throttle:{cpu}", count)
            if growth is not None and growth.per_hour > settings.throttles_per_hour:
                rate, limit = f"{growth.per_hour:.0f} times an hour", f"{settings.throttles_per_hour:g} are allowed"
                findings.append(
                    Finding(severity="warn", part=f"cpu:{cpu}", cause="throttled", words=f"too hot {rate}; {limit}")
                )
                break  # the package counts in each of its processors
    return Outcome(findings=tuple(findings), counters=counters, words=f"{online} processors, clock source {source}")


def _frequencies(evidence: Evidence, settings: ProcessorSettings) -> list[Finding]:
    findings = []
    wrong: dict[str, int] = {}
    slow: list[int] = []
    for path in evidence.files:
        if path.endswith("/scaling_governor") and (governor := evidence.text(path)) not in settings.governors:
            wrong[governor] = wrong.get(governor, 0) + 1
        if path.endswith("/scaling_max_freq") and (khz := evidence.number(path)) is not None:
            slow += [khz // 1000] if khz < settings.least_mhz * 1000 else []
    for governor, count in sorted(wrong.items()):
        words = f"{counted(count, 'processor')} with governor {governor}; allowed: {', '.join(settings.governors)}"
        findings.append(Finding(severity="warn", cause="governor", words=words))
    if slow:
        words = f"{counted(len(slow), 'processor')} limited to {min(slow)} MHz; {settings.least_mhz:g} are the least"
        findings.append(Finding(severity="low", cause="frequency", words=words))
    return findings


def _mean_frequency(cpuinfo: str, least_mhz: float) -> list[Finding]:
    if not least_mhz:
        return []
    told = re.findall(r"^cpu MHz\s*: ([0-9]{1,6}(?:\.[0-9]{1,6})?)$", cpuinfo, re.MULTILINE)
    reached = [float(text) for text in told]
    if not reached:
        raise CannotJudge("/proc/cpuinfo tells no MHz")
    mean = sum(reached) / len(reached)
    if mean >= least_mhz:
        return []
    words = f"processors run at {mean:.0f} MHz in the mean; {least_mhz:g} are the least"
    return [Finding(severity="low", cause="mean_frequency", words=words)]


def judge_processes(evidence: Evidence, settings: ProcessSettings) -> Outcome:
    """A state counts from the round in which it was first seen: the kernel does not tell for how long it lasts."""
    counters: dict[str, int] = {}
    hung: dict[str, list[str]] = {"D": [], "Z": []}
    zombies = total = 0
    for path, text in evidence.files.items():
        found = _STAT.match(text) if path.startswith("proc/") and path.endswith("/stat") else None
        fields = text[found.end() :].split() if found is not None else []
        if found is None or len(fields) < 19:  # one that has ended meanwhile
            continue
        total += 1
        state = found[3]
        if state not in hung:
            continue
        zombies += state == "Z"
        key = f"process:{state}:{found[1]}:{fields[18]}"
        since_ns = evidence.before.values.get(key, evidence.now_ns) if evidence.before is not None else evidence.now_ns
        counters[key] = since_ns
        if evidence.now_ns - since_ns >= settings.hung_s * SECOND:
            hung[state].append(f"{found[2]} ({found[1]})")
    if not total:
        raise CannotJudge("/proc lists no process")
    findings = [
        Finding(
            severity="warn" if state == "Z" else "low",
            cause="zombie" if state == "Z" else "uninterruptible",
            user_made=True,
            words=f"{len(names)} of {total} processes {what} for {settings.hung_s:g} s or more: {', '.join(names[:5])}",
        )
        for state, what in (("D", "wait in the kernel"), ("Z", "wait for their parent"))
        if (names := hung[state])
    ]
    if zombies > settings.zombies and not hung["Z"]:
        words = f"{zombies} zombies; {settings.zombies} are allowed"
        findings.append(Finding(severity="warn", cause="zombies", words=words, user_made=True))
    return Outcome(findings=tuple(findings), counters=counters, words=f"{total} processes, none hangs")


def _list_length(text: str) -> int | None:
    """Of `0-3,8`, as the kernel writes sets of processors."""
    count = 0
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if found is None:
            return None
        count += int(found[2] or found[1]) - int(found[1]) + 1
    return count

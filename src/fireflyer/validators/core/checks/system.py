"""The state of the operating system: how long it runs, its modules, files that must be there, memory that is left."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.validators.core.checks.evidence import CannotJudge, Evidence, Finding, Outcome, number_of
from fireflyer.validators.core.checks.settings import Amount, CheckSettings, Names, Share

__all__ = [
    "MACHINE_CHECK_FILES",
    "MEMORY_LEFT_FILES",
    "SYSTEM_FILES",
    "MachineCheckSettings",
    "MemoryLeftSettings",
    "SystemSettings",
    "judge_machine_checks",
    "judge_memory_left",
    "judge_system",
]

_UPTIME: Final = "proc/uptime"
_MODULES: Final = "proc/modules"
SYSTEM_FILES: Final = (_UPTIME, _MODULES)
_BUDDY: Final = "proc/buddyinfo"
_MEMINFO: Final = "proc/meminfo"
MEMORY_LEFT_FILES: Final = (_BUDDY, _MEMINFO)
_INTERRUPTS: Final = "proc/interrupts"
MACHINE_CHECK_FILES: Final = (_INTERRUPTS,)
_LARGE_ORDER: Final = 8
"""Blocks of 1 MiB and more, with pages of 4 KiB."""
_HOUR_NS: Final = 3600 * SECOND
_DAY_H: Final = 24
_Path = Annotated[str, msgspec.Meta(min_length=2, max_length=128, pattern=r"^/[^*?\[\x00-\x1f]+$")]


class SystemSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    least_uptime_s: Amount = 0.0
    """A node that was started less long ago is told; 0: whenever it was."""
    modules: Names = ()
    """Of the kernel, that must be loaded."""
    paths: Annotated[tuple[_Path, ...], msgspec.Meta(max_length=256)] = ()
    """Files and directories that must be there."""

    @property
    def is_set(self) -> bool:
        return bool(self.least_uptime_s or self.modules or self.paths)


class MemoryLeftSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    least_available_gib: Amount = 0.0
    """0: however little."""
    least_swap_gib: Amount = 0.0
    """That must be set up."""
    most_swap_used_share: Share = 1.0
    least_large_blocks: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 0
    """Free blocks of 1 MiB and more in the zones `Normal`: fewer, and large pages cannot be had; 0: none."""

    @property
    def is_set(self) -> bool:
        return bool(self.least_available_gib or self.least_swap_gib or self.least_large_blocks) or (
            self.most_swap_used_share < 1
        )


class MachineCheckSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    most_per_day: Amount = 0.0
    """Interrupts by which processors report errors, also corrected ones, in 24 h; 0: however many."""

    @property
    def is_set(self) -> bool:
        return self.most_per_day > 0


def judge_system(evidence: Evidence, settings: SystemSettings) -> Outcome:
    findings: list[Finding] = []
    if settings.least_uptime_s:
        found = re.match(r"([0-9]{1,12})(?:\.[0-9]+)? ", evidence.files.get(_UPTIME, ""))
        if found is None:
            raise CannotJudge(f"/{_UPTIME} is not understood")
        if int(found[1]) < settings.least_uptime_s:
            words = f"the node was started {found[1]} s ago; {settings.least_uptime_s:g} s are the least"
            findings.append(Finding(severity="warn", cause="uptime", words=words))
    if settings.modules:
        loaded = {line.split(" ", 1)[0] for line in evidence.text(_MODULES).splitlines() if line.count(" ") > 3}
        if not loaded:
            raise CannotJudge(f"/{_MODULES} lists no module")
        missing = [name for name in settings.modules if name.replace("-", "_") not in loaded]
        findings += (
            Finding(severity="low", part=f"module:{name}", cause="module", words=f"module {name} is not loaded")
            for name in missing
        )
    findings += (
        Finding(severity="low", part=f"path:{path}"[:128], cause="path", words=f"{path} is not there")
        for path in settings.paths
        if path.lstrip("/") not in evidence.files and path.lstrip("/") not in evidence.unreadable
    )
    return Outcome(findings=tuple(findings), words="as the policy says")


def judge_memory_left(evidence: Evidence, settings: MemoryLeftSettings) -> Outcome:
    """Users fill memory, so nobody is drained for what is left of it by a run."""
    findings: list[Finding] = []
    gib = {name: _meminfo_gib(evidence, name) for name in ("MemAvailable", "SwapTotal", "SwapFree")}
    available, swap, free = (gib[name] for name in ("MemAvailable", "SwapTotal", "SwapFree"))
    if available < settings.least_available_gib:
        words = f"{available:.1f} GiB of memory are available; {settings.least_available_gib:g} GiB are the least"
        findings.append(Finding(severity="warn", cause="available", words=words, user_made=True))
    if swap < settings.least_swap_gib:
        words = f"{swap:.1f} GiB of swap are set up; {settings.least_swap_gib:g} GiB are the least"
        findings.append(Finding(severity="warn", cause="swap", words=words))
    used = 1 - free / swap if swap else 0.0
    if used > settings.most_swap_used_share:
        words = f"{used:.0%} of the swap is in use; {settings.most_swap_used_share:.0%} are allowed"
        findings.append(Finding(severity="warn", cause="swap_used", words=words, user_made=True))
    blocks = ""
    if settings.least_large_blocks:
        count = _large_blocks(evidence.text(_BUDDY))
        blocks = f", {count} large blocks"
        if count < settings.least_large_blocks:
            words = f"{count} free blocks of 1 MiB or more; {settings.least_large_blocks} are the least"
            findings.append(Finding(severity="warn", cause="fragmented", words=words, user_made=True))
    return Outcome(findings=tuple(findings), words=f"{available:.1f} GiB available{blocks}")


def judge_machine_checks(evidence: Evidence, settings: MachineCheckSettings) -> Outcome:
    """The counts of each hour are remembered for a day, and compared with the oldest of them."""
    rows = re.findall(r"^ *(MCE|THR|DFR):((?: +[0-9]{1,18})+)", evidence.files.get(_INTERRUPTS, ""), re.MULTILINE)
    if not any(name == "MCE" for name, _ in rows):
        raise CannotJudge(f"/{_INTERRUPTS} counts no machine checks")
    total = sum(int(word) for _, counts in rows for word in counts.split())
    hour = evidence.now_ns // _HOUR_NS
    before = evidence.before.values if evidence.before is not None else {}
    known = {int(key[5:]): value for key, value in before.items() if re.fullmatch(r"hour:[0-9]{1,12}", key)}
    kept = {at: count for at, count in known.items() if hour - _DAY_H <= at <= hour and count <= total}
    kept.setdefault(hour, total)
    grown = total - kept[min(kept)]
    counters = {f"hour:{at}": count for at, count in kept.items()}
    words = f"{grown} machine checks and corrected errors in {hour - min(kept)} h"
    findings: tuple[Finding, ...] = ()
    if grown > settings.most_per_day:
        said = f"{words}; {settings.most_per_day:g} are allowed in a day"
        findings = (Finding(severity="warn", part="cpu:all", cause="machine_checks", words=said),)
    return Outcome(findings=findings, counters=counters, words=words)


def _meminfo_gib(evidence: Evidence, name: str) -> float:
    found = re.search(rf"^{name}:\s*([0-9]+) kB", evidence.text(_MEMINFO), re.MULTILINE)
    kib = number_of(found[1]) if found is not None else None
    if kib is None:
        raise CannotJudge(f"/{_MEMINFO} has no {name}")
    return kib / (1 << 20)


def _large_blocks(text: str) -> int:
    """Of the zones `Normal` of all nodes, in /proc/buddyinfo: a column for each order, from 0."""
    zones = re.findall(r"^Node +[0-9]+, zone +Normal((?: +[0-9]{1,18})+) *$", text, re.MULTILINE)
    if not zones:
        raise CannotJudge(f"/{_BUDDY} has no zone Normal")
    return sum(int(word) for zone in zones for word in zone.split()[_LARGE_ORDER:])

"""Versions of what the vendors ship: kernel, driver, VBIOS, firmware of adapters, packages; against the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Final

import msgspec

from fireflyer.validators.core.checks.evidence import CannotJudge, Evidence, Finding, Outcome
from fireflyer.validators.core.checks.gpu import gpus_of, nvidia_driver_of, part_of, text_of, uuid_of
from fireflyer.validators.core.checks.settings import CheckSettings, Name, Names

__all__ = ["VERSION_FILES", "VersionSettings", "judge_versions"]

_IB: Final = "sys/class/infiniband"
_KERNEL: Final = "proc/sys/kernel/osrelease"
_NONE_INSTALLED: Final = ("\t", "not installed", "no packages found matching")
"""Of dpkg-query, whose rows may be about packages that were removed, or of rpm: what it says where it finds none."""
VERSION_FILES: Final = (_KERNEL, f"{_IB}/*/fw_ver")


class VersionSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Empty: whatever it is."""

    kernel: Names = ()
    driver: Names = ()
    """Of NVIDIA."""
    vbios: Names = ()
    """Of each GPU."""
    adapter_firmware: Names = ()
    """Of each InfiniBand or RoCE adapter."""
    packages: Annotated[
        dict[Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9+._:-]{0,127}$")], Name],
        msgspec.Meta(max_length=256),
    ] = msgspec.field(default_factory=dict)
    """Of the distribution: version by name, as `dpkg-query -W` or `rpm -q` say it."""

    @property
    def is_set(self) -> bool:
        return bool(self.kernel or self.driver or self.vbios or self.adapter_firmware or self.packages)


def judge_versions(evidence: Evidence, settings: VersionSettings) -> Outcome:
    findings: list[Finding] = []
    if settings.kernel:
        findings += _differs("", "kernel", evidence.text(_KERNEL), settings.kernel)
    if settings.driver or settings.vbios:
        findings += _of_gpus(evidence, settings)
    if settings.adapter_firmware:
        adapters = evidence.entries(_IB)
        if not adapters:
            raise CannotJudge("the kernel has no InfiniBand adapter, whose firmware the policy names")
        for name in adapters:
            firmware = evidence.text(f"{_IB}/{name}/fw_ver")
            findings += _differs(f"infiniband:{name}", "adapter_firmware", firmware, settings.adapter_firmware)
    if settings.packages:
        installed = _installed(evidence)
        for name, version in settings.packages.items():
            there = installed.get(name, ())
            told = version if version in there else ", ".join(dict.fromkeys(there))
            findings += _differs("", "package", told, (version,), of=f"package {name}")
    return Outcome(findings=tuple(findings), words="all versions are those of the policy")


def _of_gpus(evidence: Evidence, settings: VersionSettings) -> Iterator[Finding]:
    gpus = gpus_of(evidence)
    if settings.driver:
        yield from _differs("", "driver", nvidia_driver_of(evidence), settings.driver)
    for gpu in gpus if settings.vbios else ():
        for one in _differs(part_of(gpu), "vbios", text_of(gpu, "vbios_version"), settings.vbios):
            yield msgspec.structs.replace(one, serial=uuid_of(gpu))


def _differs(part: str, cause: str, found: str, allowed: tuple[str, ...], of: str = "") -> Iterator[Finding]:
    if found not in allowed:
        what = of or cause.replace("_", " ")
        words = f"{what} is {found[:100] or 'not there'}; the policy says {', '.join(allowed)}"
        yield Finding(severity="warn", part=part, cause=cause, words=words)


def _installed(evidence: Evidence) -> Mapping[str, list[str]]:
    """From `dpkg-query -W`, or where that knows none of them `rpm -q`: a name and a version in each line that is about
    an installed package. Versions by name: of some packages, as the kernel, several are installed beside each other.
    A machine may have both tools; the one that is not its own knows no package."""
    problems = []
    answered = broken = False
    for tool in ("dpkg_query", "rpm_query"):
        output = evidence.outputs.get(tool)
        if output is None or output.problem:
            problems.append(output.problem if output is not None else f"{tool} was not run")
            broken |= output is None or not output.missing
            continue
        found: dict[str, list[str]] = {}
        for row in (line.split("\t") for line in output.text.splitlines()):
            if len(row) == 3 and row[2] == "installed":
                found.setdefault(row[0], []).append(row[1])
        if found:
            return found
        if not output.text.strip() or any(words in output.text for words in _NONE_INSTALLED):
            answered = True
        else:
            problems.append(f"{tool} printed {output.text.strip()[:60]!r}, which is no list of packages")
            broken = True
    if answered and not broken:
        return {}
    raise CannotJudge("; ".join(problems))

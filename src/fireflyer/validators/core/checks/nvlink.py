"""NVLink between GPUs, from `nvidia-smi nvlink -s` (state) and `-e` (errors)."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec

from fireflyer.validators.core.checks.evidence import CannotJudge, Evidence, Finding, Outcome
from fireflyer.validators.core.checks.settings import Amount, CheckSettings

__all__ = ["NvlinkSettings", "judge_nvlink"]

_GPU: Final = re.compile(r"GPU ([0-9]{1,3}): .*?(?:UUID: ([^)\s]{1,80}))?\)?\s*$")
_LINK: Final = re.compile(r"\s+Link ([0-9]{1,3}): (.+?)\s*$")
_ERROR: Final = re.compile(r"(Replay|Recovery|CRC FLIT|CRC Data|CRC)(?: Errors?)?(?: \(Lane.*\))?: ([0-9]{1,18})")


class NvlinkSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    errors_per_hour: Amount = 100.0
    """Of each counter of a link. Errors that were recovered from are 0 on a sound link."""
    links: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Of each GPU that must be active; 0: those that were so in the round before."""


def judge_nvlink(evidence: Evidence, settings: NvlinkSettings) -> Outcome:
    states = _links(evidence.output("nvlink_status"))
    if not states:
        return Outcome(absent="no GPU with NVLink")
    findings: list[Finding] = []
    counters: dict[str, int] = {}
    active: dict[str, int] = {}
    for (gpu, link), said in states.items():
        up = re.match(r"[0-9.]+ GB/s", said) is not None
        active[gpu] = active.get(gpu, 0) + up
        key = f"nvlink:{gpu}:{link}:active"
        was_up = evidence.before is not None and evidence.before.values.get(key) == 1
        counters[key] = int(up or was_up)
        if not up and was_up:
            words = f"link {link} is {said[:60]}, and was active before"
            findings.append(_finding(gpu, "down", words))
    for gpu, count in active.items():
        if count < settings.links and not any(one.part == f"gpu:{gpu}" for one in findings):
            words = f"{count} links are active; the policy says {settings.links}"
            findings.append(_finding(gpu, "down", words))
    findings += _errors(evidence, settings, counters)
    total = sum(active.values())
    return Outcome(findings=tuple(findings), counters=counters, words=f"{total} active links of {len(active)} GPUs")


def _errors(evidence: Evidence, settings: NvlinkSettings, counters: dict[str, int]) -> list[Finding]:
    findings = []
    totals: dict[tuple[str, str, str], int] = {}
    gpu = ""
    for line in evidence.output("nvlink_errors").splitlines():
        if (header := _GPU.match(line)) is not None:
            gpu = header[2] or header[1]
        elif (link := _LINK.match(line)) is not None and (error := _ERROR.search(link[2])) is not None:
            key = (gpu, link[1], error[1])
            totals[key] = totals.get(key, 0) + int(error[2])
    for (gpu, number, kind), count in totals.items():
        key_of_counter = f"nvlink:{gpu}:{number}:{kind}"
        counters[key_of_counter] = count
        growth = evidence.growth(key_of_counter, count)
        if growth is not None and growth.per_hour > settings.errors_per_hour:
            rate, limit = f"{growth.per_hour:.0f} {kind} errors an hour", f"{settings.errors_per_hour:g} are allowed"
            words = f"link {number}: {rate}; {limit}"
            findings.append(Finding(severity="low", part=f"gpu:{gpu}", cause="errors", serial=gpu, words=words))
    return findings


def _links(text: str) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    gpu = ""
    for line in text.splitlines():
        if (header := _GPU.match(line)) is not None:
            gpu = header[2] or header[1]
        elif (link := _LINK.match(line)) is not None and gpu:
            found[gpu, link[1]] = link[2]
        elif line.strip() and not gpu:
            raise CannotJudge(f"nvidia-smi printed {line.strip()[:80]!r}, which is no state of a link")
    return found


def _finding(gpu: str, cause: str, words: str) -> Finding:
    return Finding(severity="high", part=f"gpu:{gpu}", cause=cause, serial=gpu, words=words, at_once=True)

"""Services of the system, and its time."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Final

from fireflyer.base.health_event import Severity
from fireflyer.validators.core.checks.evidence import CannotJudge, Evidence, Finding, Outcome
from fireflyer.validators.core.checks.settings import Amount, CheckSettings, Names

__all__ = ["ServiceSettings", "TimeSettings", "judge_services", "judge_time"]

_TRACKING_COLUMNS: Final = 14


class ServiceSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    units: Names = ()
    """Of systemd, that must be active."""
    restarts_per_hour: Amount = 6.0


class TimeSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    warn_offset_s: Amount = 0.05
    low_offset_s: Amount = 1.0


def judge_services(evidence: Evidence, settings: ServiceSettings) -> Outcome:
    """From `systemctl show -p Id,LoadState,ActiveState,SubState,NRestarts UNIT…`."""
    if not settings.units:
        return Outcome(absent="the policy names no unit")
    told = list(_properties(evidence.output("systemctl")))
    if len(told) != len(settings.units) or not all("ActiveState" in one for one in told):
        raise CannotJudge(f"systemctl described {len(told)} units; {len(settings.units)} were asked for")
    findings: list[Finding] = []
    counters: dict[str, int] = {}
    for unit, one in zip(settings.units, told, strict=True):
        state, part = one["ActiveState"], f"service:{unit}"
        if one.get("LoadState") == "not-found":
            findings.append(Finding(severity="low", part=part, cause="missing", words=f"{unit} is not installed"))
        elif state not in ("active", "reloading"):
            words = f"{unit} is {state} ({one.get('SubState', '')})"
            findings.append(Finding(severity="low", part=part, cause="inactive", words=words))
        restarts = one.get("NRestarts", "")
        if restarts.isdecimal() and len(restarts) < 10:
            counters[part] = int(restarts)
            growth = evidence.growth(part, int(restarts))
            if growth is not None and growth.per_hour > settings.restarts_per_hour and growth.count > 1:
                words = f"{unit} was restarted {growth.count} times since the round before"
                findings.append(Finding(severity="warn", part=part, cause="restarts", words=words))
    return Outcome(findings=tuple(findings), counters=counters, words=f"{len(told)} units are active")


def judge_time(evidence: Evidence, settings: TimeSettings) -> Outcome:
    """From `chronyc -c tracking`; where chrony does not answer, from `timedatectl show`, which has no offset."""
    try:
        return _chrony(evidence.output("chronyc"), settings)
    except CannotJudge as error:
        try:
            told = dict(line.split("=", 1) for line in evidence.output("timedatectl").splitlines() if "=" in line)
        except CannotJudge as other:
            raise CannotJudge(f"{error}; {other}") from None
    if told.get("NTPSynchronized") not in ("yes", "no"):
        raise CannotJudge("timedatectl does not say whether the time is synchronized")
    if told["NTPSynchronized"] == "no":
        finding = Finding(severity="warn", cause="not_synchronized", words="the time is not synchronized")
        return Outcome(findings=(finding,))
    return Outcome(words="synchronized; timedatectl does not say how well")


def _chrony(text: str, settings: TimeSettings) -> Outcome:
    row = next(csv.reader(text.splitlines()[:1]), [])
    if len(row) < _TRACKING_COLUMNS:
        raise CannotJudge(f"chronyc printed {text[:60]!r}, which is no tracking report")
    try:
        offset_s = abs(float(row[4]))
    except ValueError:
        raise CannotJudge(f"chronyc gives {row[4][:40]!r} as the offset") from None
    if row[-1] == "Not synchronised" or row[2] == "0":
        finding = Finding(severity="warn", cause="not_synchronized", words="chrony is not synchronized with a server")
        return Outcome(findings=(finding,))
    limit_s = settings.low_offset_s if offset_s > settings.low_offset_s else settings.warn_offset_s
    if not offset_s <= limit_s:
        words = f"the clock is {offset_s:.3f} s away from {row[1] or 'its server'}; {limit_s:g} s are allowed"
        severity: Severity = "low" if offset_s > settings.low_offset_s else "warn"
        return Outcome(findings=(Finding(severity=severity, cause="offset", words=words),))
    return Outcome(words=f"{offset_s * 1e6:.0f} us away from {row[1] or 'its server'}")


def _properties(text: str) -> Iterator[dict[str, str]]:
    for block in text.strip().split("\n\n"):
        found = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if found:
            yield found

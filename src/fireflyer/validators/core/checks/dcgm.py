"""The diagnostic of NVIDIA's DCGM: `dcgmi diag -j`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from fireflyer.base.health_event import Severity
from fireflyer.validators.core.checks.evidence import CannotJudge, Evidence, Finding, Outcome
from fireflyer.validators.core.checks.settings import CheckSettings

__all__ = ["DcgmSettings", "judge_dcgm"]


class DcgmSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: bool = False
    """It uses the GPUs, which may be a rank's."""
    level: Annotated[int, msgspec.Meta(ge=1, le=3)] = 1
    """1: software, seconds; 2: about 2 minutes; 3: about 15."""


def judge_dcgm(evidence: Evidence) -> Outcome:
    """The result of a test is at another depth in each release of DCGM: each object with a name and results is one."""
    text = evidence.output("dcgmi")
    try:
        report = json.loads(text[max(text.find("{"), 0) :])
    except (ValueError, RecursionError):
        raise CannotJudge(f"dcgmi printed {text.strip()[:80]!r}, which is no JSON") from None
    findings: list[Finding] = []
    count = 0
    for name, result in _results(report, 0):
        status = str(result.get("status", "")).lower()
        count += status in ("pass", "fail", "warn")
        if status in ("fail", "warn"):
            gpu = next((str(result[key]) for key in ("gpu_id", "gpu_ids", "entity_id") if key in result), "")
            severity: Severity = "high" if status == "fail" else "warn"
            words = f"{name}: {status}{_warnings(result)}"
            part = f"gpu:{gpu}" if gpu else ""
            findings.append(Finding(severity=severity, part=part[:128], cause=status, words=words))
    if not count:
        raise CannotJudge("the report of dcgmi has no result")
    return Outcome(findings=tuple(findings[:50]), words=f"{count} tests pass")


def _results(report: object, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if depth > 12:
        return
    if isinstance(report, dict):
        results = report.get("results")
        if isinstance(results, list) and isinstance(report.get("name"), str):
            yield from ((report["name"][:80], one) for one in results if isinstance(one, dict))
        for value in report.values():
            yield from _results(value, depth + 1)
    elif isinstance(report, list):
        for value in report:
            yield from _results(value, depth + 1)


def _warnings(result: dict[str, Any]) -> str:
    found = result.get("warnings")
    first = found[0] if isinstance(found, list) and found else found
    said = first.get("warning") if isinstance(first, dict) else first
    return f": {said[:200]}" if isinstance(said, str) and said else ""

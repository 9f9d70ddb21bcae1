"""Programs of the site: any that follows the protocol of Nagios plug-ins (exit code, one line, perfdata)."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.health_event import Severity
from fireflyer.validators.core.checks.evidence import CannotJudge, Evidence, Finding, Outcome
from fireflyer.validators.core.checks.settings import CheckSettings, Name

__all__ = ["Perfdata", "ProgramSettings", "judge_program", "parse_perfdata"]

MAX_PERFDATA: Final = 64
_VALUE: Final = re.compile(
    r"(?:'((?:[^']|''){1,128})'|([^\s='|]{1,128}))=(-?[0-9]+(?:\.[0-9]+)?)([A-Za-z%]{0,3})((?:;[^;\s]*){0,4})"
)


class ProgramSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises `UsageError`."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    """Of the check."""
    argv: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=64)]
    """The program, by its absolute path, and its arguments; no shell reads them."""
    limit_s: Annotated[float, msgspec.Meta(gt=0, le=300)] = 30.0
    critical: Severity = "low"
    """Severity of its exit code 2."""

    def __post_init__(self) -> None:
        if not self.argv[0].startswith("/"):
            raise UsageError(f"program {self.name}: {self.argv[0]!r} is not an absolute path")


class Perfdata(msgspec.Struct, frozen=True):
    """A figure behind the `|` of what a plug-in prints."""

    label: str
    value: float
    unit: str
    limits: str
    """Warning, critical, least, most, as they are written: `80;90;0;100`."""


def judge_program(evidence: Evidence, settings: ProgramSettings) -> Outcome:
    output = evidence.outputs.get(f"program:{settings.name}")
    if output is None or output.problem:
        raise CannotJudge(output.problem if output is not None else "the program was not run")
    said, _, data = (output.text.strip().splitlines() or [""])[0].partition("|")
    words = " ".join(said.split())
    figures = [f"{one.label} {one.value:g}{one.unit}" for one in parse_perfdata(data)]
    if figures:
        words = f"{words} ({', '.join(figures[:8])})"
    if output.exit_code == 0:
        return Outcome(words=words)
    if output.exit_code in (1, 2):
        severity: Severity = "warn" if output.exit_code == 1 else settings.critical
        cause = "warning" if output.exit_code == 1 else "critical"
        finding = Finding(severity=severity, cause=cause, words=words or f"exit code {output.exit_code}")
        return Outcome(findings=(finding,))
    raise CannotJudge(f"exit code {output.exit_code}{f': {words}' if words else ''}"[:300])


def parse_perfdata(text: str) -> list[Perfdata]:
    """What is not perfdata is passed over."""
    found = []
    for match in _VALUE.finditer(text):
        label = (match[1] or match[2]).replace("''", "'")
        found.append(Perfdata(label, float(match[3]), match[4], match[5].lstrip(";")))
        if len(found) == MAX_PERFDATA:
            break
    return found

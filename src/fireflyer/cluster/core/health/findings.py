"""Lines of checks, as nodes send them, become findings. What is not understood is one, too: it is never dropped."""

from __future__ import annotations

from typing import Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.health_event import MAX_LINE_BYTES, HealthEvent

__all__ = [
    "MAX_LINES",
    "PROGRAM",
    "Finding",
    "covers",
    "finding_of",
    "findings_of",
    "is_certain",
    "is_fault",
    "no_result",
]

MAX_LINES: Final = 256
"""Of one run of the checks."""
PROGRAM: Final = "health_program"
"""The check that stands for the program of the checks itself."""


class Finding(HealthEvent, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A health event as it is kept: a check of a newer release may say more than this one knows."""


def finding_of(event: HealthEvent) -> Finding:
    """As it is kept."""
    return Finding(**msgspec.structs.asdict(event))


def is_fault(event: Finding) -> bool:
    """A check that could not run is one where its severity says so: it is required, and its device exists."""
    return event.severity in ("low", "high")


def is_certain(event: Finding) -> bool:
    """Acted on without a probe."""
    return (event.at_once or event.once) and not event.user_made and not event.could_not_run


def covers(passed: Finding, fault: Finding) -> bool:
    """A check that passes says of the part of this fault that it is well; one without a part says so of all."""
    ok = passed.severity == "ok" and not passed.could_not_run
    return ok and passed.check == fault.check and passed.part in ("", fault.part)


def findings_of(lines: tuple[bytes, ...], now_ns: int) -> tuple[Finding, ...]:
    """One for each line; `now_ns`: for those that are none."""
    found: list[Finding] = []
    strange = 0
    for line in lines[:MAX_LINES]:
        try:
            if len(line) > MAX_LINE_BYTES:
                raise ValueError("too long")
            found.append(decode_json(line, Finding))
        except (*DECODE_ERRORS, ValueError):
            strange += 1
    strange += max(0, len(lines) - MAX_LINES)
    if strange:
        found.append(no_result(f"{strange} lines of its output are no health events, or are too many", now_ns))
    return tuple(found)


def no_result(words: str, now_ns: int) -> Finding:
    """The checks as a whole did not come to a result."""
    return Finding(check=PROGRAM, severity="warn", could_not_run=True, words=words[:400], seen_ns=max(0, now_ns))

"""What the kernel logs: Xid and SXid of NVIDIA's drivers, and errors of other devices.

Only what the kernel itself wrote counts. A user can write into the log, by `logger` or into /dev/kmsg: such records
have another facility than the kernel's, 0, which the kernel does not let them claim. Records that begin with the name
of a process are passed over (`base.kernel_faults`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from fireflyer.base.kernel_faults import BEGINNINGS, device_error, gpu_error, is_of_a_process
from fireflyer.base.units import SECOND
from fireflyer.validators.core.checks.evidence import (
    CannotJudge,
    CheckCounters,
    Counters,
    Evidence,
    Finding,
    KernelRecord,
    Outcome,
)
from fireflyer.validators.core.checks.settings import Amount, CheckSettings

__all__ = [
    "KernelErrorSettings",
    "XidSettings",
    "has_fault",
    "judge_kernel_errors",
    "judge_xids",
    "last_record",
    "parse_journal",
    "parse_kmsg",
    "sequence_of",
    "with_newest_record",
    "xid_findings",
]

_SEQUENCE: Final = "kernel:sequence"
_JOURNAL_US: Final = "kernel:journal"
_MARKS: Final = (_SEQUENCE, _JOURNAL_US)
"""Counters that say up to where /dev/kmsg and the journal were looked at; each has numbers of its own."""
_NS_PER_US: Final = 1000


class XidSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    recent_s: Amount = 3600.0
    """How old an Xid may be that counts in the first round after the node was started."""


class KernelErrorSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    recent_s: Amount = 3600.0


def has_fault(record: bytes) -> bool:
    """Whether a record of /dev/kmsg is worth to be parsed; a fast test that few pass."""
    return record.startswith(BEGINNINGS, record.find(b";") + 1)


def sequence_of(record: bytes) -> int | None:
    """Of a record of /dev/kmsg, whoever wrote it."""
    parts = record[:64].split(b",", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() and len(parts[1]) < 19 else None


def parse_kmsg(record: bytes, started_ns: int) -> KernelRecord | None:
    """A record of /dev/kmsg; `started_ns`: when the kernel's clock was 0. None: it is not the kernel's, or no record.
    See Documentation/ABI/testing/dev-kmsg of the kernel."""
    head, semicolon, text = record.partition(b";")
    fields = head.split(b",")
    if not semicolon or len(fields) < 4 or not all(one.isdigit() and len(one) < 19 for one in fields[:3]):
        return None
    if int(fields[0]) >> 3:  # the facility
        return None
    said = text.split(b"\n", 1)[0].decode(errors="replace")
    return KernelRecord(int(fields[1]), max(started_ns + int(fields[2]) * _NS_PER_US, 0), said)


def parse_journal(line: bytes) -> KernelRecord | None:
    """A line of `journalctl -o json`; None: it is not the kernel's, or no record. The journal itself writes the fields
    that begin with `_`: no user can have it write `_TRANSPORT=kernel`."""
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.get("_TRANSPORT") != "kernel" or entry.get("SYSLOG_FACILITY") != "0":
        return None
    said, seen_us = entry.get("MESSAGE"), entry.get("__REALTIME_TIMESTAMP")
    if not isinstance(said, str) or not isinstance(seen_us, str) or not seen_us.isdecimal() or len(seen_us) > 16:
        return None
    since_us = entry.get("__MONOTONIC_TIMESTAMP")
    if not isinstance(since_us, str) or not since_us.isdecimal() or len(since_us) > 16:
        since_us = "0"
    text = said.split("\n", 1)[0]
    return KernelRecord(0, int(seen_us) * _NS_PER_US, text, journal_us=int(since_us))


def judge_xids(evidence: Evidence, settings: XidSettings) -> Outcome:
    """An Xid is an event, not a state: `ok` says that there is no new one."""
    findings = tuple(_together(xid_findings(_new(evidence, settings.recent_s))))
    if lost := _lost(evidence):
        words = f"the kernel has overwritten {lost} records before they were read"
        findings = (*findings, Finding(severity="warn", cause="lost_records", words=words, user_made=True))
    return Outcome(
        findings=findings, counters=_last(evidence), words="no new Xid", unread=_judged(evidence, bool(findings))
    )


def judge_kernel_errors(evidence: Evidence, settings: KernelErrorSettings) -> Outcome:
    findings = tuple(_together(_other_findings(_new(evidence, settings.recent_s))))
    words = "no new error of a device"
    return Outcome(findings=findings, counters=_last(evidence), words=words, unread=_judged(evidence, bool(findings)))


def xid_findings(records: Iterable[KernelRecord]) -> Iterator[Finding]:
    for record in records:
        if (error := gpu_error(record.text)) is not None:
            yield Finding(
                severity=error.severity, part=error.part, cause=error.cause, words=error.words,
                at_once=error.severity == "high", user_made=error.user_made, once=True, seen_ns=record.seen_ns,
            )  # fmt: skip


def _other_findings(records: Iterable[KernelRecord]) -> Iterator[Finding]:
    for record in records:
        if (error := device_error(record.text)) is not None:
            yield Finding(
                severity=error.severity, part=error.part, cause=error.cause, words=record.text[:300],
                user_made=error.user_made, once=True, seen_ns=record.seen_ns,
            )  # fmt: skip


def _new(evidence: Evidence, recent_s: float) -> Iterator[KernelRecord]:
    """Of no process, since the round before: by number, or by time in the journal, which has no numbers. Where none is
    known yet, the recent ones, whatever else has been read."""
    before = evidence.before
    marks = before.values if before is not None else {}
    recent_ns = evidence.now_ns - round(recent_s * SECOND)
    for record in evidence.kernel:
        if is_of_a_process(record.text):
            continue
        number, last = record.sequence, marks.get(_SEQUENCE)
        if record.journal_us:
            number, last = record.journal_us, marks.get(_JOURNAL_US)
        if number and last is not None:
            new = number > last
        elif number or before is None:
            new = record.seen_ns > recent_ns
        else:
            new = record.seen_ns > before.seen_ns
        if new:
            yield record


def last_record(counters: Counters | None) -> int:
    """Sequence number of the last record that all checks of the log have looked at; 0: not known."""
    known = counters.checks.values() if counters is not None else ()
    return min((one.values[_SEQUENCE] for one in known if _SEQUENCE in one.values), default=0)


def with_newest_record(own: Counters | None, other: Counters | None, boot: str) -> Counters | None:
    """Counters of one of two processes that read the same log, with what the other has looked at. `boot`: which start
    of the node this is."""
    if other is None or other.boot != boot:
        return own
    if own is None or own.boot != boot:
        own = Counters()
    checks = dict(own.checks)
    for name, theirs in other.checks.items():
        mine = checks.get(name, CheckCounters(seen_ns=theirs.seen_ns))
        newer = {key: value for key in _MARKS if (value := theirs.values.get(key, 0)) > mine.values.get(key, 0)}
        if newer:
            checks[name] = msgspec.structs.replace(mine, values={**mine.values, **newer})
    return Counters(boot=boot, checks=checks, serials=own.serials)


def _lost(evidence: Evidence) -> int:
    """Records that nobody has read: while the log was read, or since the round before."""
    last = evidence.before.values.get(_SEQUENCE, 0) if evidence.before is not None else 0
    since = evidence.kernel_oldest - last - 1 if last and evidence.kernel_oldest else 0
    return evidence.kernel_lost + max(since, 0)


def _last(evidence: Evidence) -> dict[str, int]:
    before = evidence.before.values if evidence.before is not None else {}
    last = {
        _SEQUENCE: max([evidence.kernel_sequence, *(record.sequence for record in evidence.kernel)]),
        _JOURNAL_US: max([evidence.kernel_journal_us, *(record.journal_us for record in evidence.kernel)]),
    }
    newest = {key: max(value, before.get(key, 0)) for key, value in last.items()}
    return {key: value for key, value in newest.items() if value}


def _judged(evidence: Evidence, found: bool) -> str:
    """What was not read, where something was; raises `CannotJudge` where nothing was."""
    if evidence.kernel_problem and not evidence.kernel and not found:
        raise CannotJudge(evidence.kernel_problem)
    return evidence.kernel_problem


def _together(findings: Iterable[Finding]) -> Iterator[Finding]:
    """One of each part and cause, the first, with how often there was one."""
    seen: dict[tuple[str, str], tuple[Finding, int]] = {}
    for finding in findings:
        key = (finding.part, finding.cause)
        first, count = seen.get(key, (finding, 0))
        seen[key] = (first, count + 1)
    for first, count in seen.values():
        words = f"{first.words} ({count} times)" if count > 1 else first.words
        yield msgspec.structs.replace(first, words=words)

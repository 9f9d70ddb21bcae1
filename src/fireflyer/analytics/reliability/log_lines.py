"""Lines of kernel logs, journals and health events as rows of the event table. Pure: bytes in, a row or a reason out.

A line gives an `EventRow`; None where it says nothing about the hardware; or a `Rejected` that says why it cannot be
used.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from fireflyer.analytics.reliability.health_symptoms import symptom_of_event
from fireflyer.analytics.reliability.kernel_log import finding_of, says_a_fault
from fireflyer.analytics.reliability.local_times import EARLIEST_NS, Clock, since_1970_ns
from fireflyer.analytics.reliability.rows import MAX_NAME, MAX_WORDS, EventRow
from fireflyer.base.decoding import DECODE_ERRORS, json_decoder
from fireflyer.base.health_event import MAX_LINE_BYTES, HealthEvent
from fireflyer.base.units import US

__all__ = [
    "MAX_LOG_LINE_BYTES",
    "Rejected",
    "has_local_time",
    "health_row",
    "journal_row",
    "kernel_row",
    "printable",
]

MAX_LOG_LINE_BYTES: Final = 1 << 16


class Rejected(NamedTuple):
    """Why a line is not used; the same words for the same reason, so that they can be counted."""

    reason: str


_OUT_OF_RANGE: Final = "its time is out of range, before 2000 or in the future"
_NO_TRANSPORT: Final = "it does not say `_TRANSPORT`, without which any user can write as the kernel; export all fields"
_NO_FACILITY: Final = "it does not say `SYSLOG_FACILITY`, without which what was written into /dev/kmsg counts as the \
kernel's; export all fields"
_ISO: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?) (.*)", re.DOTALL)
_SYSLOG: Final = re.compile(r"([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d) (.*)", re.DOTALL)
_DMESG: Final = re.compile(r"\[[A-Z][a-z]{2} ([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})\] (.*)", re.DOTALL)
_SINCE_BOOT: Final = re.compile(r"\[ *\d+\.\d+\] (.*)", re.DOTALL)
_FORMS: Final = (_ISO, _DMESG, _SYSLOG, _SINCE_BOOT)
"""Of a time in front of the rest, which is the last group."""
_LEVEL: Final = re.compile(r"<(\d{1,3})>|([a-z0-9]{1,8}) *: *[a-z]{1,8} *: (?=\[|\d)")
"""What `dmesg -r` and `dmesg -x` write in front: the facility, by its number or its name."""
_FROM_HOST: Final = re.compile(r"(\S{1,128}) kernel: (?:\[ *\d+\.\d+\] ?)?(.*)", re.DOTALL)
_UNTIMED: Final = re.compile(r"NVRM: Xid |SXid \(|I/O error, dev |EXT4-fs error|Kernel panic - ")
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def kernel_row(line: bytes, node: str, clock: Clock) -> EventRow | Rejected | None:
    """A line of `dmesg --time-format iso`, `dmesg -T`, or syslog. `node`: whose log it is, where the line has no
    host. Only what the kernel wrote counts: in syslog what has the tag `kernel`, of `dmesg -x` what has the facility
    `kern`."""
    text = _text_of(line)
    if not says_a_fault(text):
        return None
    level = _LEVEL.match(text)
    if level is not None:
        if level[2] != "kern" if level[1] is None else int(level[1]) >> 3:
            return None
        text = text[level.end() :]
    timed = _timed(text)
    if timed is None:
        return Rejected("it has no time") if _UNTIMED.search(text) is not None else None
    rest = timed[timed.re.groups]
    match = _FROM_HOST.match(rest)
    host, message = (match[1], match[2]) if match is not None else (node, rest)
    found = finding_of(message)
    if found is None:
        return None
    time_ns = _time_ns(timed, clock)
    if isinstance(time_ns, Rejected):
        return time_ns
    return EventRow(
        time_ns, printable(host, MAX_NAME), found.symptom, found.cause, found.severity, "kernel", "",
        printable(found.part), "", found.user_made, printable(message),
    )  # fmt: skip


def has_local_time(line: bytes) -> bool:
    """Whether a line that `kernel_row` took says no zone."""
    text = _text_of(line)
    level = _LEVEL.match(text)
    timed = _timed(text if level is None else text[level.end() :])
    return timed is not None and (timed.re is not _ISO or datetime.fromisoformat(_iso(timed)).tzinfo is None)


def _text_of(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n")


def _timed(text: str) -> re.Match[str] | None:
    return next((match for form in _FORMS if (match := form.match(text)) is not None), None)


def _iso(timed: re.Match[str]) -> str:
    return timed[1].replace(",", ".")


class _JournalEntry(msgspec.Struct, frozen=True):
    """A line of `journalctl -o json`, of which these fields are used."""

    time_us: Annotated[str, msgspec.Meta(pattern="^[0-9]{1,16}$")] = msgspec.field(name="__REALTIME_TIMESTAMP")
    message: str | list[int] | None = msgspec.field(name="MESSAGE", default=None)
    """Bytes where it is not UTF-8; null where it is too long."""
    host: Any = msgspec.field(name="_HOSTNAME", default="")
    transport: Any = msgspec.field(name="_TRANSPORT", default="")
    identifier: Any = msgspec.field(name="SYSLOG_IDENTIFIER", default="")
    facility: Any = msgspec.field(name="SYSLOG_FACILITY", default="")


_journal = json_decoder(_JournalEntry)
_health = json_decoder(HealthEvent)


def journal_row(line: bytes, node: str, clock: Clock) -> EventRow | Rejected | None:
    """A line of `journalctl -o json`; only what the kernel wrote counts: `_TRANSPORT` kernel with facility 0."""
    try:
        entry = _journal.decode(line)
    except DECODE_ERRORS:
        return Rejected("no line of `journalctl -o json`")
    if not entry.transport and entry.identifier == "kernel":
        return Rejected(_NO_TRANSPORT)
    if entry.transport != "kernel" or entry.facility not in ("0", ""):
        return None
    if isinstance(entry.message, list):
        if not all(0 <= one < 256 for one in entry.message):
            return Rejected("no line of `journalctl -o json`")
        message = bytes(entry.message).decode(errors="replace")
    else:
        message = entry.message or ""
    found = finding_of(message)
    if found is None:
        return None
    if not entry.facility:
        return Rejected(_NO_FACILITY)
    time_ns = int(entry.time_us) * US
    if not EARLIEST_NS <= time_ns <= clock.latest_ns:
        return Rejected(_OUT_OF_RANGE)
    host = entry.host if isinstance(entry.host, str) and entry.host else node
    return EventRow(
        time_ns, printable(host, MAX_NAME), found.symptom, found.cause, found.severity, "journal", "",
        printable(found.part), "", found.user_made, printable(message),
    )  # fmt: skip


def health_row(line: bytes, node: str, clock: Clock) -> EventRow | Rejected | None:
    """A `HealthEvent`. A check that found nothing counts too: its first event is when the check was introduced."""
    if len(line) > MAX_LINE_BYTES:
        return Rejected("longer than a health event may be")
    try:
        event = _health.decode(line)
    except DECODE_ERRORS:
        return Rejected("no health event")
    if not EARLIEST_NS <= event.seen_ns <= clock.latest_ns:
        return Rejected(_OUT_OF_RANGE)
    severity = "ok" if event.could_not_run else event.severity
    return EventRow(
        event.seen_ns, node, symptom_of_event(event), printable(event.cause), severity, "health", event.check,
        printable(event.part), "", event.user_made, printable(event.words),
    )  # fmt: skip


def _time_ns(timed: re.Match[str], clock: Clock) -> int | Rejected:
    """Of a match of one of `_FORMS`."""
    try:
        if timed.re is _ISO:
            return _in_range(datetime.fromisoformat(_iso(timed)), clock)
        if timed.re is _DMESG:
            month, day, hour, minute, second, year, _ = timed.groups()
            return _in_range(_date(int(year), month, day, hour, minute, second), clock)
        if timed.re is _SYSLOG:
            if clock.year is None:
                return Rejected("its time has no year; give --year")
            *when, _ = timed.groups()
            return _in_range(_date(clock.year, *when), clock)
    except (ValueError, OverflowError):
        return Rejected(_OUT_OF_RANGE)
    return Rejected("its time counts from the boot; write it with `dmesg --time-format iso`")


def _date(year: int, month: str, day: str, hour: str, minute: str, second: str) -> datetime:
    number = _MONTHS.index(month) + 1
    return datetime(year, number, int(day), int(hour), int(minute), int(second))  # noqa: DTZ001 - given its zone below


def _in_range(at: datetime, clock: Clock) -> int | Rejected:
    time_ns = since_1970_ns(at, clock)
    return time_ns if EARLIEST_NS <= time_ns <= clock.latest_ns else Rejected(_OUT_OF_RANGE)


def printable(text: str, most: int = MAX_WORDS) -> str:
    """The first `most` characters, without what a terminal would obey."""
    text = text[:most]
    return text if text.isprintable() else "".join(one if one.isprintable() else " " for one in text)

"""Units: constants, and the two directions between numbers and what people read and type."""

from __future__ import annotations

import re

from fireflyer.base.errors import UsageError

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "MS",
    "SECOND",
    "US",
    "counted",
    "format_bytes",
    "format_duration",
    "format_rate",
    "parse_bytes",
    "parse_duration",
]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000

_BYTE_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40}
_BYTE_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
_TIME_UNITS = {
    "ns": 1,
    "us": US,
    "ms": MS,
    "s": SECOND,
    "m": 60 * SECOND,
    "min": 60 * SECOND,
    "h": 3600 * SECOND,
    "d": 86400 * SECOND,
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def counted(number: int, noun: str) -> str:
    """`1 target`, `2 targets`: a noun that takes an s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_bytes(count: float) -> str:
    """`186.0 MiB`: binary units, one decimal."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_rate(bytes_per_s: float) -> str:
    """`8.1 GB/s`: decimal units, as bandwidths are quoted in the field."""
    value = float(bytes_per_s)
    for unit in ("B/s", "kB/s", "MB/s"):
        if abs(value) < 1000:
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB/s"


def format_duration(ns: int) -> str:
    """`850 ms`, `12.3 s`, `4 min 05 s`, `2 h 07 min`."""
    if ns < 0:
        return "-" + format_duration(-ns)
    if ns < MS:
        return f"{ns / US:.0f} us"
    if ns < SECOND:
        return f"{ns / MS:.0f} ms"
    if ns < 60 * SECOND:
        return f"{ns / SECOND:.1f} s"
    minutes, seconds = divmod(round(ns / SECOND), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def _parse(text: str, units: dict[str, int], what: str, example: str) -> int:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise UsageError(f"{what} {text!r} is not understood; write it like {example}")
    return round(float(match[1]) * units[match[2].lower()])


def parse_bytes(text: str) -> int:
    """Bytes of `"512KiB"`, `"1.5GB"` or `"4096"`. Raises `UsageError`."""
    return _parse(text, _BYTE_UNITS, "size", "512KiB, 4MiB or 1.5GB")


def parse_duration(text: str) -> int:
    """Nanoseconds of `"30s"`, `"1.5min"` or `"500ms"`; a unit is required. Raises `UsageError`."""
    return _parse(text, _TIME_UNITS, "duration", "500ms, 30s, 5min or 7d")

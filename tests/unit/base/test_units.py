"""Numbers as people read and type them."""

from __future__ import annotations

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.base.units import (
    MIB,
    MS,
    SECOND,
    format_bytes,
    format_duration,
    format_rate,
    parse_bytes,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("512KiB", 512 * 1024), ("1.5GB", 1_500_000_000), ("4m", 4 * MIB), (" 2 TiB ", 2 << 40)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "ns"), [("500ms", 500 * MS), ("30s", 30 * SECOND), ("1.5min", 90 * SECOND), ("2h", 7200 * SECOND)]
)
def test_durations(text: str, ns: int) -> None:
    assert parse_duration(text) == ns


@pytest.mark.parametrize("text", ["", "-1s", "5", "5 parsecs", "1e3s", "nan s", "s"])
def test_a_duration_that_is_not_understood_says_how_to_write_it(text: str) -> None:
    with pytest.raises(UsageError, match="write it like 500ms"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "-1", "5 apples", "0x10", "1,5GB"])
def test_a_size_that_is_not_understood_says_how_to_write_it(text: str) -> None:
    with pytest.raises(UsageError, match="write it like 512KiB"):
        parse_bytes(text)


def test_formats() -> None:
    assert [format_bytes(n) for n in (0, 1023, 186 * MIB, 5 << 40)] == ["0 B", "1023 B", "186.0 MiB", "5.0 TiB"]
    assert [format_rate(r) for r in (12.0, 8.1e9, 6.25e6)] == ["12.0 B/s", "8.1 GB/s", "6.2 MB/s"]
    durations = [format_duration(n) for n in (0, 850 * MS, 12_340 * MS, 245 * SECOND, 7620 * SECOND, -3 * SECOND)]
    assert durations == ["0 us", "850 ms", "12.3 s", "4 min 05 s", "2 h 07 min", "-3.0 s"]


def test_rounding_never_prints_sixty_seconds() -> None:
    assert format_duration(59_960 * MS) in {"60.0 s", "1 min 00 s"}
    assert format_duration(119_600 * MS) == "2 min 00 s"

"""Times that say no zone: read in the zone that is given, with its daylight saving, else as UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND, US

__all__ = ["EARLIEST_NS", "LATEST_NS", "Clock", "offset_s", "since_1970_ns", "zone_of"]

EARLIEST_NS: Final = 946_684_800 * SECOND
"""The year 2000: what is earlier is of a clock that had not been set, as after a boot without a network."""
LATEST_NS: Final = (1 << 62) - 1
"""The year 2116: what is later is damaged."""
DAY_S: Final = 86_400
_SECONDS: Final = re.compile("[+-]?[0-9]{1,9}")


class Clock(NamedTuple):
    """How times without a zone or a year are read, and which cannot be."""

    zone: tzinfo | None = None
    """None: nobody said; they are read as UTC, which is told."""
    year: int | None = None
    latest_ns: int = LATEST_NS
    """What is later is of a clock that was wrong."""


def zone_of(text: str) -> tzinfo:
    """Of `7200`, seconds that clocks are ahead of UTC, or of `Europe/Berlin`. Raises `UsageError`."""
    if _SECONDS.fullmatch(text) is not None:
        seconds = int(text)
        if abs(seconds) >= DAY_S:
            raise UsageError(f"{text} s are more than a day; give the seconds that clocks are ahead of UTC, as 7200")
        return timezone(timedelta(seconds=seconds))
    try:
        return ZoneInfo(text)
    except (KeyError, ValueError, OSError) as error:
        raise UsageError(
            f"{text[:80]!r} is no zone that this machine knows; give its name, as Europe/Berlin, or the seconds that "
            "clocks are ahead of UTC, as 7200"
        ) from error


def since_1970_ns(at: datetime, clock: Clock) -> int:
    """A time without a zone is that of the clock; of one that the zone has twice the first, or with `fold` the
    second."""
    zoned = at if at.tzinfo is not None else at.replace(tzinfo=clock.zone or UTC)
    since = zoned - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * DAY_S + since.seconds) * SECOND + since.microseconds * US


def offset_s(at: datetime, clock: Clock) -> int:
    """Seconds that the clock is ahead of UTC at a time without a zone."""
    return round((at.replace(tzinfo=UTC) - at.replace(tzinfo=clock.zone or UTC)).total_seconds())

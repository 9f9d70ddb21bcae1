"""Numbers on the command line."""

from __future__ import annotations

import math
import re
from typing import Any

import click

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND, parse_bytes

__all__ = ["ByteSize", "Duration", "NumberOrRange", "PositiveNumber", "WholeNumber", "bytes_with_unit"]

_DURATION = re.compile(r"([0-9]{1,6})(s|m|h|d)")
_RANGE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,12})?)(?:-([0-9]{1,12}(?:\.[0-9]{0,12})?))?")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class WholeNumber(click.IntRange):
    """`click.IntRange` whose error for "two" says that it is no integer, not that it is no "integer range"."""

    name = "integer"


class PositiveNumber(click.FloatRange):
    """Finite and above 0."""

    name = "number"

    def __init__(self) -> None:
        super().__init__(min=0.0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


class NumberOrRange(click.ParamType[Any]):
    """`1.5`, or `1.0-1.5` for what lies between the two, as a pair of bounds; 0 or more."""

    name = "range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        match = _RANGE.fullmatch(value)
        low = float(match[1]) if match else 0.0
        high = float(match[2]) if match and match[2] else low
        if match is None or low > high:
            self.fail(f"{value!r} is no number and no range; write it like 1.2 or 1.0-1.5", param, ctx)
        return low, high


class ByteSize(click.ParamType[Any]):
    """`512KiB`, `4MiB` or `1.5GB`, as bytes; at least one."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, int):
            return value
        try:
            size_bytes = parse_bytes(value)
        except UsageError as error:
            self.fail(error.message, param, ctx)
        if size_bytes < 1:
            self.fail(f"{value} is nothing; give 1 byte or more", param, ctx)
        return size_bytes


def bytes_with_unit(option: str, text: str) -> int:
    """As `parse_bytes`, of an option for which a number alone is more likely a forgotten unit than bytes. Raises
    `UsageError`."""
    if not text.strip()[-1:].isalpha():
        raise UsageError(f"{option} {text} has no unit; write it like 512KiB, 4MiB or 64B")
    return parse_bytes(text)


class Duration(click.ParamType[Any]):
    """`90s`, `30m`, `2h` or `90d`, as nanoseconds; more than nothing, unless `zero`."""

    name = "duration"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, int):
            return value
        match = _DURATION.fullmatch(value)
        if match is None or not (int(match[1]) or self._zero):
            self.fail(f"{value!r} is no duration; write it like 90s, 30m, 2h or 90d", param, ctx)
        return int(match[1]) * _UNITS_S[match[2]] * SECOND

"""Tables VI to VIII of the Fire-Flyer paper (arXiv:2408.14158): Xid errors, failures of memory and network by month,
and failures of InfiniBand links by day. Pure data, and the cells of table VII that no print has.

The stored text of table VII lacks four numbers. Row and column sums leave one value for each: `solved_months`. Table
VIII adds up to table VII's "Network" in every month that both have but October 2023: `disagreements`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from fireflyer.analytics.reliability.published import PublishedFigure
from fireflyer.base.errors import UsageError

__all__ = [
    "COLUMNS",
    "ECC_XIDS",
    "LINK_FAILURES",
    "MONTHS",
    "PRINTED_MONTHS",
    "PRINTED_TOTALS",
    "XID_SHARES_PERCENT",
    "Disagreement",
    "disagreements",
    "published_networks",
    "solved_months",
]

XID_SHARES_PERCENT: Final[dict[int, float]] = {74: 42.57, 43: 33.48}
"""Of all Xid errors of a year (VII-C1; table VI has no body). `ECC_XIDS` together are about 2 %."""
ECC_XIDS: Final = (63, 64, 94, 95)

MONTHS: Final = ("2023-10", "2023-11", "2023-12", "2024-01", "2024-02", "2024-03")
COLUMNS: Final = ("main_memory", "network", "xid_63", "xid_64", "xid_79", "xid_94", "xid_95")
PRINTED_MONTHS: Final[dict[str, tuple[int | None, ...]]] = {
    "2023-10": (4, 29, 21, 0, 0, 0, 0, 54),
    "2023-11": (14, 8, 22, 0, 0, 4, 0, 48),
    "2023-12": (8, 17, 21, 0, 4, 2, 2, 54),
    "2024-01": (11, 9, 16, None, 3, None, None, 42),
    "2024-02": (8, 12, 18, 0, 2, 0, 3, 43),
    "2024-03": (9, 14, 22, 0, 6, 0, 0, 51),
}
"""Table VII: `COLUMNS` and the row's total. None: not legible."""
PRINTED_TOTALS: Final[tuple[int | None, ...]] = (54, 89, 120, None, 15, 7, 6, 292)

_LINK_FAILURES: Final = """
2023-04 19:1 21:1 26:1 27:4 30:1
2023-05 01:1 04:2 06:2 09:2 17:2 26:1 27:8 28:10 30:2
2023-06 05:1 06:1 08:1 14:2 16:0 17:2 20:3 26:1 27:2
2023-07 04:2 06:2 07:10 08:1 10:2 12:10 13:1 18:2 20:1 23:2 24:2 26:1 29:3
2023-08 06:3 08:1 09:1 16:1 17:2 18:1 20:1 23:2 25:3 26:4 28:4 31:7
2023-09 01:3 04:1 05:3 07:3 12:1 17:1 21:7 27:1
2023-10 08:2 10:1 11:1 16:1 22:1 25:1 26:3 27:2 28:1
2023-11 02:1 06:1 09:1 14:1 20:1 30:3
2023-12 07:5 09:1 10:1 14:1 22:3 24:5 31:1
2024-01 01:1 06:1 07:1 10:2 15:1 25:1 31:2
2024-02 03:5 05:1 17:1 22:1 23:3 26:1
2024-03 01:3 05:1 11:1 16:2 18:1 24:1 25:1 29:2 30:1 31:1
"""


def _days(text: str) -> dict[str, int]:
    days = {}
    for line in text.split("\n"):
        month, *cells = line.split() or [""]
        days.update({f"{month}-{day}": int(count) for day, _, count in (cell.partition(":") for cell in cells)})
    return days


LINK_FAILURES: Final[dict[str, int]] = _days(_LINK_FAILURES)
"""Table VIII: failures of InfiniBand links ("flash cuts") by day, as `2023-04-19`."""


def solved_months() -> dict[str, dict[str, int]]:
    """Table VII with its missing cells; "total" is a row and a column."""
    rows = {**PRINTED_MONTHS, "total": PRINTED_TOTALS}
    table = {name: dict(zip((*COLUMNS, "total"), row, strict=True)) for name, row in rows.items()}
    return _solved(table)


class Disagreement(NamedTuple):
    month: str
    table_vii: int
    table_viii: int


def disagreements() -> tuple[Disagreement, ...]:
    """Months in which the sum of table VIII is not what table VII has for "Network"."""
    sums = {month: sum(count for day, count in LINK_FAILURES.items() if day.startswith(month)) for month in MONTHS}
    table = solved_months()
    return tuple(
        Disagreement(month, table[month]["network"], sums[month])
        for month in MONTHS
        if table[month]["network"] != sums[month]
    )


def published_networks() -> tuple[PublishedFigure, ...]:
    """Table VII's "Network" of each month beside the days of table VIII."""
    table, wrong = solved_months(), {one.month: one.table_viii for one in disagreements()}
    rows = []
    for month in MONTHS:
        printed = table[month]["network"]
        days = wrong.get(month, printed)
        rows.append(
            PublishedFigure(
                f"Network failures of {month}, table VII", str(printed), days, "", (printed - 0.5, printed + 0.5),
                "sum of the days of table VIII",
            )
        )  # fmt: skip
    return tuple(rows)


def _solved(table: Mapping[str, Mapping[str, int | None]]) -> dict[str, dict[str, int]]:
    """Fills every cell that a row or a column determines alone, until all are known. Raises `UsageError` where the sums
    contradict the cells, or leave one open."""
    cells = {(row, column): value for row, cells in table.items() for column, value in cells.items()}
    lines = [[(row, column) for column in cells] for row, cells in table.items()]
    lines += [[(row, column) for row in table] for column in table["total"]]
    while None in cells.values():
        before = list(cells.values()).count(None)
        for line in lines:
            unknown = [place for place in line if cells[place] is None]
            if len(unknown) == 1:
                cells[unknown[0]] = _missing(line, cells)
        if list(cells.values()).count(None) == before:
            raise UsageError("the sums of the table leave cells open")
    known = {place: value for place, value in cells.items() if value is not None}
    for line in lines:
        *parts, total = (known[place] for place in line)
        if sum(parts) != total:
            raise UsageError(f"the cells of {line[-1]} add up to {sum(parts)}, not to {total}")
    return {row: {column: known[row, column] for column in table["total"]} for row in table}


def _missing(line: list[tuple[str, str]], cells: Mapping[tuple[str, str], int | None]) -> int:
    """Of a line with one unknown cell; its last one is the sum."""
    parts = sum(cells[place] or 0 for place in line[:-1])
    total = cells[line[-1]]
    return parts if total is None else total - parts

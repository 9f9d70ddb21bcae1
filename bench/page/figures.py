"""The figures that are published: read from docs/benchmarks/figures.toml, and looked for in the tables of the pages."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

__all__ = ["Amount", "Figure", "Group", "Plot", "Published", "missing", "parse_amount", "read_published", "short"]

SCALES: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_AMOUNT: Final = re.compile(r"(?P<number>\d[\d,]*(?:\.\d+)?) (?P<unit>us|ms|s|%|x|/s|GB/s)")
_LABEL: Final = re.compile(r"\*\*(?P<name>[^*]+)\*\*")


class Amount(msgspec.Struct, frozen=True):
    """A number as it is printed, and what it is worth: seconds where the unit is a time, else the number itself."""

    number: str
    unit: str
    value: float


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the summary. Amounts are written as in the page."""

    subject: str
    what: str
    page: str
    rows: tuple[str, ...]
    table: str = ""
    ours: str
    better: Literal["lower", "higher"] = "lower"
    peers: dict[str, str] = {}
    bound: tuple[str, str] | None = None
    goal: str = ""
    met: bool | None = None
    date: datetime.date
    machine: str
    readme: str = ""
    readme_peers: tuple[str, ...] = ()

    @property
    def best_peer(self) -> tuple[str, Amount] | None:
        """Name and amount."""
        amounts = {name: parse_amount(text) for name, text in self.peers.items()}
        if not amounts:
            return None
        choose = max if self.better == "higher" else min
        name = choose(amounts, key=lambda one: amounts[one].value)
        return name, amounts[name]

    @property
    def times_best_peer(self) -> float | None:
        """How many times as fast as the best peer we are: above 1 ours is better."""
        best = self.best_peer
        if best is None:
            return None
        ours = parse_amount(self.ours).value
        return ours / best[1].value if self.better == "higher" else best[1].value / ours

    def amount_of(self, name: str) -> Amount:
        """That of a peer or of the bound. Raises KeyError."""
        if self.bound is not None and self.bound[0] == name:
            return parse_amount(self.bound[1])
        return parse_amount(self.peers[name])


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bars side by side in a plot."""

    label: str
    rows: tuple[str, ...]
    values: tuple[str, ...]


class Plot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    title: str
    page: str
    table: str = ""
    logarithmic: bool = False
    series: tuple[tuple[str, Literal["ours", "peer", "bound"]], ...]
    groups: tuple[Group, ...]
    reference: str = ""
    """Name of a line at 100 (per cent); none if it is empty."""


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    machines: dict[str, str]
    figure: tuple[Figure, ...]
    plot: tuple[Plot, ...]


def read_published(folder: Path) -> Published:
    """`folder` is docs/benchmarks. Raises msgspec.ValidationError."""
    return msgspec.toml.decode((folder / "figures.toml").read_bytes(), type=Published)


def parse_amount(text: str) -> Amount:
    """`4.69 ms`, `386,961 s`, `66 %`. Raises ValueError."""
    found = _AMOUNT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no amount: write a number, a space and one of us, ms, s, %, x, /s, GB/s")
    number, unit = found["number"], found["unit"]
    return Amount(number, unit, float(number.replace(",", "")) * SCALES.get(unit, 1.0))


def short(amount: Amount) -> str:
    """Two significant digits; times in the unit that people say."""
    value, unit = amount.value, amount.unit
    if unit in SCALES:
        unit = next((one for one in ("s", "ms") if amount.value >= SCALES[one]), "us")
        value = amount.value / SCALES[unit]
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"


def missing(published: Published, folder: Path) -> list[str]:
    """A line for each amount that does not stand in its row of its page."""
    found = []
    for one in published.figure:
        amounts = [one.ours, *one.peers.values(), *(one.bound[1:] if one.bound else ())]
        # 100 % is what a share is compared with, which no table repeats
        amounts = [text for text in amounts if text != "100 %"]
        found += [f"{one.what}: {line}" for line in _absent(amounts, one.page, one.table, one.rows, folder)]
    for plot in published.plot:
        for group in plot.groups:
            lines = _absent([one for one in group.values if one], plot.page, plot.table, group.rows, folder)
            found += [f"{plot.name}, {group.label}: {line}" for line in lines]
    return found


def _absent(amounts: Sequence[str], page: str, table: str, rows: Sequence[str], folder: Path) -> list[str]:
    cells = [
        cell for name, row in _rows((folder / page).read_text()) if table in name and row[0] in rows for cell in row[1:]
    ]
    where = f"rows {', '.join(rows)} of {page}"
    return [f"{text} is not in {where}" for text in amounts if not any(_shows(cell, text) for cell in cells)]


def _rows(page: str) -> Iterator[tuple[str, list[str]]]:
    """Name of the table (the last bold line above it), and the cells of a row; of the first only its first line."""
    name = ""
    for line in page.splitlines():
        if not line.startswith("|"):
            label = _LABEL.match(line)
            name = label["name"] if label else name
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        yield name, [cells[0].split("<br>")[0], *cells[1:]]


def _shows(cell: str, text: str) -> bool:
    """Ranges in brackets do not count; a cell without any unit has that of its table."""
    amount = parse_amount(text)
    plain = re.sub(r"\([^)]*\)", "", cell)
    number = rf"(?<![\d.,]){re.escape(amount.number)}(?![\d.]|,\d)"
    if not re.search(r"\d\s*(us|ms|s|%|/s|GB/s)\b", plain):
        return re.search(number, plain) is not None
    # one unit for several: `66 % / 79 %`, `50 / 36 %`
    return re.search(rf"{number}(?: / [\d.,]+)*\s*{re.escape(amount.unit)}", plain) is not None

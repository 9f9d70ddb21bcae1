"""One result of a benchmark, as a line of JSON and as a row of a table."""

from __future__ import annotations

import fnmatch
import statistics
import sys
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
from rich.console import Console
from rich.table import Table

from fireflyer.base.units import KIB, MIB

__all__ = [
    "Bound",
    "Figure",
    "Measuring",
    "Options",
    "Result",
    "Suite",
    "figure",
    "measure",
    "print_results",
    "read_results",
    "results_path",
    "say",
    "write_results",
]

ROUNDS: Final = {"tiny": 2, "brief": 5, "full": 9}


class Options(msgspec.Struct, frozen=True):
    """What to run: `scale` is tiny, brief or full; `only` parts of cases' names, or patterns for the whole of them."""

    scale: str = "brief"
    only: tuple[str, ...] = ()
    rounds_wanted: int | None = None

    @property
    def rounds(self) -> int:
        return self.rounds_wanted or ROUNDS[self.scale]

    def selects(self, case: str) -> bool:
        return not self.only or any(only in case or fnmatch.fnmatchcase(case, only) for only in self.only)


class Figure(msgspec.Struct, frozen=True):
    """Seconds (or what the metric says): over `n` repetitions."""

    median: float
    min: float
    max: float
    n: int


class Bound(msgspec.Struct, frozen=True):
    """The physical limit, measured beside."""

    value: float
    formula: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    suite: str
    case: str
    metric: str
    """What is measured; the end says in what: `_s` seconds, `_bytes_per_s`, `_bytes`, `_share` of 1."""
    better: str
    ours: Figure
    peers: dict[str, Figure | str]
    """A figure, or why there is none."""
    bound: Bound | None
    target: str
    note: str = ""
    """What else belongs to the case, for people."""
    met: bool | None = None
    """Whether all of the target is; None where there is none, or what it is compared with is missing."""
    verdicts: dict[str, bool | None] = {}
    """The parts of the target."""
    more: dict[str, float] = {}


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of a suite found: results, and remarks that belong under the table."""

    results: tuple[Result, ...]
    remarks: tuple[str, ...] = ()


Measuring: TypeAlias = Generator[Result, None, tuple[str, ...]]
"""What `run(options)` of each suite is: gives every result as soon as it is measured, and at the end remarks that
belong under the table."""


def measure(suite: str, measuring: Measuring, options: Options) -> Suite:
    """Runs it to its end. Each result is printed, and is in the file, before the next one is measured: a long run shows
    how far it is, and who ends it keeps what was measured, and earlier results of what was not. A whole run that comes
    to its end leaves its own results alone in the file."""
    results: list[Result] = []
    path = results_path(suite)
    while True:
        try:
            results.append(next(measuring))
        except StopIteration as end:
            if results and not options.only:
                write_results(path, results)
            return Suite(results=tuple(results), remarks=end.value)
        say(_line_of(results[-1]))
        write_results(path, results, keep=True)


def say(text: str) -> None:
    """What people want to know while it runs: on stderr, where it is in nobody's way."""
    print(text, file=sys.stderr, flush=True)


def _line_of(result: Result) -> str:
    """`save/disk/8x64KiB: committed 14.2 (13.0 to 15.1) ms; torch.save 9.10 ms`."""
    measured = [f"{result.case}: {_heading(result.metric)} {_cell(result.ours, result.metric)}", result.note]
    peers = [
        f"{name} {_number(peer.median, result.metric) if isinstance(peer, Figure) else 'missing'}"
        for name, peer in result.peers.items()
    ]
    return "; ".join(part for part in (*measured, ", ".join(peers)) if part)


def figure(samples: Sequence[float]) -> Figure:
    return Figure(statistics.median(samples), min(samples), max(samples), len(samples))


def results_path(suite: str, directory: str = "build/bench") -> Path:
    return Path(directory, f"{suite}.jsonl")


def read_results(path: Path) -> list[Result]:
    """None when there is no file yet."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Result) for line in path.read_bytes().splitlines()]


def write_results(path: Path, results: Sequence[Result], *, keep: bool = False) -> None:
    """The file has these afterwards, and with `keep` what it had of other cases before them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replaced = {(result.case, result.metric) for result in results}
    kept = [one for one in read_results(path) if (one.case, one.metric) not in replaced] if keep else []
    new = path.with_suffix(".new")
    new.write_bytes(b"".join(msgspec.json.encode(result) + b"\n" for result in (*kept, *results)))
    new.rename(path)


def print_results(results: Sequence[Result], console: Console, *, markdown: bool = False) -> None:
    """A table for each group of cases (the first two words of their names), then what is missing."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((_group(result), result.metric), []).append(result)
    for (group, metric), members in groups.items():
        title = f"{members[0].suite} {group}: {metric.replace('_', ' ')}, median (min to max); peer : ours"
        _print_table(title, _headings(members), [_row(result, members) for result in members], console, markdown)
    missing = {f"{name}: {peer}" for result in results for name, peer in result.peers.items() if isinstance(peer, str)}
    for line in sorted(missing):
        console.print(f"missing {line}", markup=False, highlight=False)
    verdicts = [result.met for result in results if result.verdicts]
    if verdicts:
        counts = f"{verdicts.count(True)} met, {verdicts.count(False)} missed, {verdicts.count(None)} not decided"
        console.print(f"targets of {len(verdicts)} cases: {counts}", markup=False, highlight=False)


def _print_table(title: str, headings: list[str], rows: list[list[str]], console: Console, markdown: bool) -> None:
    if markdown:
        lines = [title, "", *(_line(row) for row in (headings, ["---"] * len(headings), *rows)), ""]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        return
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in (0, len(headings) - 1) else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("\n", "<br>") for cell in cells) + " |"


def _group(result: Result) -> str:
    return "/".join(result.case.split("/")[:2])


def _columns(results: Sequence[Result]) -> tuple[list[str], bool, list[str]]:
    """Peers that have a figure, whether there are bounds, further rates."""
    peers = dict.fromkeys(name for result in results for name, peer in result.peers.items() if isinstance(peer, Figure))
    more = dict.fromkeys(name for result in results for name in result.more)
    return list(peers), any(result.bound is not None for result in results), list(more)


def _headings(results: Sequence[Result]) -> list[str]:
    peers, bounded, more = _columns(results)
    return ["case", "ours", *peers, *(("bound",) if bounded else ()), *map(_heading, more), "target"]


def _row(result: Result, group: Sequence[Result]) -> list[str]:
    peers, bounded, more = _columns(group)
    case = result.case.removeprefix(_group(result) + "/")
    row = [f"{case}\n{result.note}" if result.note else case, _cell(result.ours, result.metric)]
    row += [_compared(result.peers.get(name), result) for name in peers]
    if bounded:
        row.append("-" if result.bound is None else _beside(result.bound.value, result))
    row += [_number(result.more[name], name) if name in result.more else "-" for name in more]
    return [*row, "\n".join(_judged(result))]


def _judged(result: Result) -> Iterable[str]:
    words = {True: "met", False: "MISSED", None: "not decided"}
    return (f"{target}: {words[met]}" for target, met in result.verdicts.items())


def _compared(peer: Figure | str | None, result: Result) -> str:
    if not isinstance(peer, Figure):
        return "-"
    ratio = f"{peer.median / result.ours.median:.1f} x" if result.ours.median > 0 else "-"
    return f"{_cell(peer, result.metric)}\n{ratio}"


def _beside(bound: float, result: Result) -> str:
    return f"{_number(bound, result.metric)}\nours {result.ours.median / bound:.2f} x"


def _heading(name: str) -> str:
    for end in ("_bytes_per_s", "_bytes", "_share", "_s"):
        name = name.removesuffix(end)
    return name.replace("_", " ")


def _cell(value: Figure, metric: str) -> str:
    scale, unit = _unit(value.median, metric)
    if value.n == 1:
        return f"{_digits(value.median * scale)} {unit}"
    least, most = _digits(value.min * scale), _digits(value.max * scale)
    return f"{_digits(value.median * scale)} ({least} to {most}) {unit}"


def _number(value: float, metric: str) -> str:
    scale, unit = _unit(value, metric)
    return f"{_digits(value * scale)} {unit}"


def _unit(value: float, metric: str) -> tuple[float, str]:
    if metric.endswith("_bytes_per_s"):
        return (1e-6, "MB/s") if value < 1e8 else (1e-9, "GB/s")
    if metric.endswith("_bytes"):
        return (1, "B") if value < KIB else (1 / MIB, "MiB")
    if metric.endswith("_share"):
        return 100, "%"
    return (1e3, "ms") if value >= 1e-3 else (1e6, "us")


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"

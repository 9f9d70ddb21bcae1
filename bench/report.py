"""One result of a benchmark, as a line of JSON and as a row of a table."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

__all__ = ["Bound", "Figure", "Result", "Suite", "figure", "print_results", "write_results"]


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
    better: str
    ours: Figure
    peers: dict[str, Figure | str]
    """A figure, or why there is none."""
    bound: Bound | None
    target: str
    more: dict[str, float] = {}


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of a suite found: results, and remarks that belong under the table."""

    results: tuple[Result, ...]
    remarks: tuple[str, ...] = ()


def figure(samples: Sequence[float]) -> Figure:
    return Figure(statistics.median(samples), min(samples), max(samples), len(samples))


def write_results(suite: str, results: Sequence[Result], directory: str = "build/bench") -> str:
    """Replaces `<directory>/<suite>.jsonl`; returns its path."""
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, f"{suite}.jsonl")
    with open(path, "wb") as file:
        file.writelines(msgspec.json.encode(result) + b"\n" for result in results)
    return path


def print_results(results: Sequence[Result], console: Console) -> None:
    peers = sorted({name for result in results for name in result.peers})
    table = Table(title=f"{results[0].suite}: medians (min to max, n)", title_justify="left")
    table.add_column("case")
    for name in ("ours", *peers, "bound"):
        table.add_column(name, justify="right")
    for name in peers:
        table.add_column(f"{name} / ours", justify="right")
    table.add_column("ours / bound", justify="right")
    for result in results:
        row = [result.case, _cell(result.ours), *(_cell(result.peers.get(name, "-")) for name in peers)]
        row.append("-" if result.bound is None else _number(result.bound.value))
        for name in peers:
            peer = result.peers.get(name)
            row.append(f"{peer.median / result.ours.median:.1f}" if isinstance(peer, Figure) else "-")
        row.append("-" if result.bound is None else f"{result.ours.median / result.bound.value:.2f}")
        table.add_row(*row)
    console.print(table)


def _cell(value: Figure | str) -> str:
    if isinstance(value, str):
        return value
    return f"{_number(value.median)} ({_number(value.min)} to {_number(value.max)}, {value.n})"


def _number(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"

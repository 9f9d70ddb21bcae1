"""What is written from the figures: the summary and the plots of docs/benchmarks.md, and the table of README."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import Final

from bench.page.figures import Figure, Published, parse_amount, short
from bench.page.plots import plot_svg

__all__ = ["contents", "replace_block"]

_IMAGES: Final = "docs/images/benchmarks"
_VERDICTS: Final = {True: "met", False: "**missed**", None: "no goal"}


def contents(published: Published, root: Path) -> dict[str, str]:
    """Path below `root` and text of each file that is written from the figures. Raises ValueError if a page has no
    place for them."""
    page, readme = (root / "docs/benchmarks.md").read_text(), (root / "README.md").read_text()
    page = replace_block(page, "summary", _summary(published))
    page = replace_block(page, "plots", _plots(published))
    files = {"docs/benchmarks.md": page, "README.md": replace_block(readme, "five figures", _readme(published))}
    return files | {f"{_IMAGES}/{one.name}.svg": plot_svg(one) for one in published.plot}


def _summary(published: Published) -> str:
    """One table, subject after subject, and what the machines are."""
    decided = [one.met for one in published.figure if one.met is not None]
    lines = [
        f"{len(published.figure)} figures: {decided.count(True)} goals met, {decided.count(False)} missed, "
        f"{len(published.figure) - len(decided)} without a goal.",
        "",
        "| what | ours | best peer | peer : ours | limit or bare program | goal | | when, where |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for subject, figures in groupby(published.figure, key=lambda one: one.subject):
        lines.append(f"| **{subject}** | | | | | | | |")
        lines += [_row(one) for one in figures]
    machines = "; ".join(f"*{letter}*: {text}" for letter, text in published.machines.items())
    return "\n".join([*lines, "", f"{machines}."])


def _row(one: Figure) -> str:
    best, times = one.best_peer, one.times_best_peer
    peer = "-" if best is None else _named(best[0], one.peers[best[0]])
    bound = "-" if one.bound is None else f"{one.bound[0]} {one.bound[1]}"
    ratio = "-" if times is None else f"{times:.2f}"
    what = f"[{one.what}](benchmarks/{one.page})"
    cells = [what, one.ours, peer, ratio, bound, one.goal or "-", _VERDICTS[one.met], f"{one.date}, {one.machine}"]
    return f"| {' | '.join(cells)} |"


def _plots(published: Published) -> str:
    return "\n\n".join(
        f"![{one.title}](images/benchmarks/{one.name}.svg)\n\n*Tables: [{one.page}](benchmarks/{one.page})*"
        for one in published.plot
    )


def _readme(published: Published) -> str:
    lines = ["| what | ours | peer |", "|---|---|---|"]
    for one in published.figure:
        if one.readme:
            peers = ", ".join(_named(name, short(one.amount_of(name))) for name in one.readme_peers)
            lines.append(f"| {one.readme} | {short(parse_amount(one.ours))} | {peers} |")
    return "\n".join(lines)


def _named(name: str, amount: str) -> str:
    """Functions are code."""
    shown = f"`{name}`" if re.fullmatch(r"\w+\.\w+", name) else name
    return f"{shown}: {amount}" if "," in name else f"{shown} {amount}"


def replace_block(page: str, name: str, text: str) -> str:
    """`page` with `text` between its lines `<!-- NAME -->` and `<!-- end of NAME -->`.

    Raises ValueError without them.
    """
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"the page has no lines {begin.strip()} and {end.strip()}")
    return f"{before}{begin}{text}{end}{after}"

"""`python -m bench`: every suite briefly. `python -m bench SUITE --full`: one of them in full."""

from __future__ import annotations

import importlib
import sys

import click
from rich.console import Console

from bench.report import Suite, print_results, write_results

SUITES = ("collectives",)


@click.command()
@click.argument("suite", type=click.Choice(SUITES), required=False)
@click.option("--full", is_flag=True, help="All cases and more repetitions.")
@click.option("--tiny", is_flag=True, help="Only to see that it runs; the figures mean nothing.")
def main(suite: str | None, full: bool, tiny: bool) -> None:
    """Measures ours, the peers and the physical limit in one run, and writes build/bench/SUITE.jsonl."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    for name in SUITES if suite is None else (suite,):
        scale = "full" if full else "tiny" if tiny else "brief"
        found: Suite = importlib.import_module(f"bench.{name}.suite").run(scale)
        print_results(found.results, console)
        for remark in found.remarks:
            console.print(remark, markup=False, highlight=False)
        console.print(f"written to {write_results(name, found.results)}", highlight=False)


if __name__ == "__main__":
    main()

"""`python -m bench`: every suite briefly. `python -m bench SUITE --full`: one of them in full."""

from __future__ import annotations

import importlib
import sys

import click
from rich.console import Console

from bench.report import Options, measure, print_results, read_results, results_path

SUITES = ("collectives", "training", "kvstore", "fs", "cluster", "checkpoint", "netsim", "operators")
_WIDTH = 240


@click.command()
@click.argument("suite", type=click.Choice(SUITES), required=False)
@click.option("--full", "scale", flag_value="full", help="All cases and more repetitions.")
@click.option(
    "--brief", "scale", flag_value="brief", default="brief", help="A few cases, few repetitions. The default."
)
@click.option(
    "--tiny",
    "scale",
    flag_value="tiny",
    help="Smallest sizes, to check that the benchmark runs; its figures have no meaning.",
)
@click.option(
    "--only",
    metavar="PATTERN",
    multiple=True,
    help="Only cases whose name contains PATTERN, or matches it where it has * or ?; may be repeated. Names of "
    "checkpoints' cases say where these are: */disk/64x32MiB*, */3FS/*.",
)
@click.option("--rounds", type=click.IntRange(1), help="Repetitions of each case.  [default: that of the scale]")
@click.option("--markdown", is_flag=True, help="Print the tables as Markdown, for docs/benchmarks.")
@click.option("--show", is_flag=True, help="Print the tables of the last results in build/bench; measure nothing.")
def main(suite: str | None, scale: str, only: tuple[str, ...], rounds: int | None, markdown: bool, show: bool) -> None:
    """Measure Fire-Flyer, its peers and the physical limit in one run, and write build/bench/SUITE.jsonl. Without SUITE
    all suites are measured.

    Each result is printed on stderr and is in the file as soon as it is measured. With --only, and until a whole run
    has come to its end, the file keeps the results of other cases: parts can be measured one after the other.
    """
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for name in SUITES if suite is None else (suite,):
        path = results_path(name)
        if show:
            options = Options(only=only)
            print_results([one for one in read_results(path) if options.selects(one.case)], console, markdown=markdown)
            continue
        options = Options(scale, only, rounds)
        found = measure(name, importlib.import_module(f"bench.{name}.suite").run(options), options)
        if not found.results:
            why = "; ".join(("", *found.remarks))
            raise click.UsageError(f"no case of {name} is selected by --only {' '.join(only)}{why}")
        print_results(found.results, console, markdown=markdown)
        for remark in found.remarks:
            console.print(remark, markup=False, highlight=False)
        console.print(f"written to {path}", highlight=False)


if __name__ == "__main__":
    main()

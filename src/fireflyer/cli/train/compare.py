"""`ff train compare`: is a technique better than a baseline, by runs in pairs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from fireflyer.cli.completion import complete_directory, complete_file
from fireflyer.cli.train.recipe_files import read_raw

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fireflyer.recipes.trainer.core.paired import PairedResult

__all__ = ["compare_command"]


@click.command(
    "compare",
    short_help="Compare a technique with a baseline by runs in pairs.",
    epilog="""\b
Examples:
  ff train compare recipe.toml --dir fp8         # [technique] of the recipe, against the rest of it
  ff train compare bf16.toml fp8.toml --dir fp8  # two recipes""",
)
@click.argument("file", metavar="FILE", shell_complete=complete_file)
@click.argument("other", metavar="[TECHNIQUE]", required=False, shell_complete=complete_file)
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    required=True,
    shell_complete=complete_directory,
    help="Where the runs are; started again with it, the comparison goes on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def compare_command(*, file: str, other: str | None, directory: str, as_json: bool) -> None:
    """Run the recipe FILE and the technique (the recipe TECHNIQUE, or what [technique] in FILE lays over it) with each
    seed of [compare], one after the other on this machine, and compare the held-out losses of each pair.

    The verdict is that of the interval of the mean relative difference: within the bound, better, worse, not decided.
    """
    import msgspec

    from fireflyer.recipes.trainer.compare import compare_runs
    from fireflyer.recipes.trainer.core.comparison import planned_runs, technique_of
    from fireflyer.recipes.trainer.core.recipe import resolved
    from fireflyer.recipes.trainer.preconditions import checked_shape

    baseline, technique = technique_of(read_raw(file), None if other is None else read_raw(other))
    baseline = resolved(baseline, os.path.dirname(os.path.abspath(file)))
    technique = resolved(technique, os.path.dirname(os.path.abspath(other or file)))
    for recipe in (baseline, technique):
        checked_shape(recipe)
    runs = planned_runs(baseline, technique, os.path.abspath(directory))
    result = compare_runs(runs, lambda line: click.echo(line, err=as_json))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
        return
    for line in _lines(result):
        click.echo(line)


def _lines(result: PairedResult) -> Iterator[str]:
    shown = ", ".join(f"{one:+.3%}" for one in result.differences)
    yield f"relative differences of the held-out loss, technique over baseline: {shown}"
    yield (
        f"mean {result.mean:+.3%}, {result.confidence:.0%} interval {result.low:+.3%} to {result.high:+.3%} "
        f"({len(result.differences)} pairs), bound {result.bound:.3%}"
    )
    yield f"verdict: {result.verdict}"

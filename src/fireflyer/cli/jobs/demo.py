"""`ff demo`: lose a node in the middle of a training run and finish anyway, provably."""

from __future__ import annotations

import os
import sys

import click

from fireflyer.base.errors import NotFound
from fireflyer.cli.numbers import WholeNumber

__all__ = ["command"]


@click.command("demo", short_help="Lose a node in mid-run and finish anyway, provably.")
@click.option(
    "--directory",
    metavar="DIR",
    default=os.path.join("build", "demo"),
    show_default=True,
    help="For the corpus, the runs and the report; runs of an earlier demonstration are replaced.",
)
@click.option("--steps", type=WholeNumber(min=3), default=120, show_default=True, help="Steps of each run.")
@click.option("--kill-step", type=WholeNumber(min=2), default=70, show_default=True, help="When a node is killed.")
@click.option(
    "--checkpoint-every", type=WholeNumber(min=1), default=20, show_default=True, help="Steps between checkpoints."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of both runs.")
@click.option("-q", "--quiet", is_flag=True, help="Print only what the ranks print, and errors.")
def command(*, directory: str, steps: int, kill_step: int, checkpoint_every: int, seed: int, quiet: bool) -> int:
    """Train a GPT on real text on two nodes of two ranks, kill a node, finish anyway.

    The same job runs undisturbed first; the demonstration fails unless the loss curve after the failure is bitwise the
    undisturbed one.
    """
    try:
        from fireflyer.recipes.demo import DemoResult, DemoSpec, run_demo
    except ModuleNotFoundError as error:
        raise NotFound(f"the demonstration needs {error.name}; install it: pip install 'fireflyer[train]'") from error
    from fireflyer.analytics.report import Fact
    from fireflyer.cli.jobs.view import JobView, printer_for
    from fireflyer.cli.output import REPORT_NAME, show_report, stdout_console
    from fireflyer.runtime import run

    spec = DemoSpec(
        directory=os.path.abspath(directory),
        steps=steps,
        kill_step=kill_step,
        checkpoint_every=checkpoint_every,
        seed=seed,
    )
    console = stdout_console()
    with JobView(printer_for(console, plain_out=sys.stdout), ranks_only=quiet) as view:
        result: DemoResult = run(run_demo(spec, on_phase=view.say, on_entry=view.on_entry, on_line=view.on_line))
    if result.disturbed_log:
        facts = [Fact(name, value, good=True) for name, value in result.facts]
        facts += [Fact("problem", problem, good=False) for problem in result.problems]
        html_path = os.path.join(spec.directory, REPORT_NAME)
        shown_on = None if quiet else console
        show_report(result.disturbed_log, html_path=html_path, console=shown_on, facts=facts, gap=True)
    for problem in result.problems:
        click.echo(f"error: {' '.join(problem.split())}", err=True)
    return 0 if result.ok else 1

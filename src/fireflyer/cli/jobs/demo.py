"""`ff demo`: kill a node in the middle of a training run, and check that the losses are bitwise the same."""

from __future__ import annotations

import os
import sys

import click

from fireflyer.base.errors import NotFound
from fireflyer.cli.completion import complete_directory
from fireflyer.cli.numbers import WholeNumber

__all__ = ["command"]


@click.command(
    "demo",
    short_help="Kill a node during training, and check that the result is the same.",
    epilog="Example: ff demo --steps 60 --kill-step 35 --checkpoint-every 10",
)
@click.option(
    "--directory",
    metavar="DIR",
    shell_complete=complete_directory,
    default=os.path.join("build", "demo"),
    show_default=True,
    help="Directory for the corpus, the runs and the report; runs of an earlier demonstration are replaced.",
)
@click.option("--steps", type=WholeNumber(min=3), default=120, show_default=True, help="Training steps of each run.")
@click.option(
    "--kill-step",
    type=WholeNumber(min=2),
    default=70,
    show_default=True,
    help="Node 1 is killed when this step is reported.",
)
@click.option(
    "--checkpoint-every", type=WholeNumber(min=1), default=20, show_default=True, help="Steps between checkpoints."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of both runs, for weights and the order of the data."
)
@click.option("-q", "--quiet", is_flag=True, help="Print only what the ranks print, and errors.")
def command(*, directory: str, steps: int, kill_step: int, checkpoint_every: int, seed: int, quiet: bool) -> int:
    """Train a small GPT on two nodes with two ranks each, kill one node, and finish from the last checkpoint.

    The same job runs first without a failure. Exit code 0: after the failure the loss of every step is bitwise the same
    as in the run without it. All processes run on this machine; it needs torch and no GPU.
    """
    try:
        from fireflyer.recipes.demo import DemoResult, DemoSpec, run_demo
    except ModuleNotFoundError as error:
        raise NotFound(f"the demonstration needs {error.name}: pip install 'fireflyer[train]'") from error
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

"""`ff demo`: kill a node in the middle of a training run, and check that the losses are bitwise the same."""

from __future__ import annotations

import importlib.util
import os
import sys

import click
from click.core import ParameterSource

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.cli.completion import complete_directory
from fireflyer.cli.numbers import WholeNumber

__all__ = ["command"]


@click.command(
    "demo",
    short_help="Kill a node during training, and check that the result is the same.",
    epilog="""\b
Examples:
  ff demo --steps 60 --kill-step 35 --checkpoint-every 10
  ff demo --whole  # platform, file system, three tasks, three disturbances""",
)
@click.option(
    "--directory",
    metavar="DIR",
    shell_complete=complete_directory,
    help="Directory for the corpus, the runs and the report; runs of an earlier demonstration are replaced.  "
    "[default: build/demo, with --whole build/whole-demo]",
)
@click.option(
    "--whole",
    is_flag=True,
    help="Show platform and file system: three tasks of two users on four nodes, through the deaths of a storage node "
    "and of a compute node and an interruption.",
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
@click.pass_context
def command(
    context: click.Context,
    *,
    directory: str | None,
    whole: bool,
    steps: int,
    kill_step: int,
    checkpoint_every: int,
    seed: int,
    quiet: bool,
) -> int:
    """Train a small GPT on two nodes with two ranks each, kill one node, and finish from the last checkpoint.

    The same job runs first without a failure. Exit code 0: after the failure the loss of every step is bitwise the same
    as in the run without it. All processes run on this machine; it needs torch and no GPU.

    With --whole tasks run on a platform with a file system of its own, both started here and ended afterwards, and
    the report shows what each disturbance cost. Its steps and disturbances are fixed.
    """
    if whole:
        return _whole(context, os.path.abspath(directory or os.path.join("build", "whole-demo")), quiet=quiet)
    try:
        from fireflyer.recipes.demo import DemoResult, DemoSpec, run_demo
    except ModuleNotFoundError as error:
        raise NotFound(f"the demonstration needs {error.name}: pip install 'fireflyer[train]'") from error
    from fireflyer.analytics.report import Fact
    from fireflyer.cli.jobs.view import JobView, printer_for
    from fireflyer.cli.output import REPORT_NAME, show_report, stdout_console
    from fireflyer.runtime import run

    spec = DemoSpec(
        directory=os.path.abspath(directory or os.path.join("build", "demo")),
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
        show_report(
            result.disturbed_log,
            html_path=html_path,
            console=shown_on,
            facts=facts,
            undisturbed=result.undisturbed_log,
            gap=True,
        )
    for problem in result.problems:
        click.echo(f"error: {' '.join(problem.split())}", err=True)
    return 0 if result.ok else 1


def _whole(context: click.Context, directory: str, *, quiet: bool) -> int:
    for name in ("steps", "kill_step", "checkpoint_every", "seed"):
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} cannot be combined with --whole, whose tasks are fixed; leave one of them out")
    missing = [name for name in ("torch", "fsspec", "litestar") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotFound(f"the whole demonstration needs {missing[0]}: pip install 'fireflyer[train,platform,fsspec]'")
    from fireflyer.cli.jobs.whole_demo import run_and_report

    return run_and_report(directory, quiet=quiet)

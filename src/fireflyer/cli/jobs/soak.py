"""`ff soak`: tasks and writers on a cluster of this machine that loses something all the time."""

from __future__ import annotations

import importlib.util
import os
import secrets

import click

from fireflyer.base.errors import NotFound
from fireflyer.cli.completion import complete_directory
from fireflyer.cli.numbers import WholeNumber

__all__ = ["command"]


@click.command(
    "soak",
    short_help="Kill, stop, cut and fill parts of a cluster for minutes, and check that nothing is lost.",
    epilog="""\b
Examples:
  ff soak  # 20 minutes
  ff soak --minutes 2 --seed 7
  ff soak --minutes 480 --directory /scratch/soak""",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, max=10_080, min_open=True),
    default=20.0,
    show_default=True,
    help="For how long faults begin; what runs then ends undisturbed, and everything is checked.",
)
@click.option(
    "--seed",
    type=WholeNumber(0, (1 << 63) - 1),
    help="Order, targets and lengths of the faults, and what is written.  [default: drawn, and printed]",
)
@click.option(
    "--directory",
    metavar="DIR",
    shell_complete=complete_directory,
    default=os.path.join("build", "soak"),
    show_default=True,
    help="Directory for cluster, logs and report; those of an earlier soak are replaced.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print the table and errors, not the progress.")
def command(*, minutes: float, seed: int | None, directory: str, quiet: bool) -> int:
    """Start a platform of four nodes with a file system of three, on this machine, and break it: processes get SIGKILL
    or stand still, links are cut, disks are full, tasks are suspended. Meanwhile tasks train with checkpoints on the
    file system, and writers note what was acknowledged to them.

    Exit code 0: every fault was recovered from, every task ended once with losses bitwise those of an undisturbed run,
    every acknowledged byte is there, and `ff fs fsck` finds nothing. Needs torch and no GPU; full disks need root."""
    missing = [name for name in ("torch", "fsspec", "litestar") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotFound(f"the soak needs {missing[0]}: pip install 'fireflyer[train,platform,fsspec]'")
    from fireflyer.cli.jobs.soak_report import run_and_report
    from fireflyer.recipes.soak.plan import SoakPlan

    plan = SoakPlan(minutes=minutes, seed=secrets.randbelow(1 << 31) if seed is None else seed)
    return run_and_report(plan, os.path.abspath(directory), quiet=quiet)

"""`ff reliability`: the group of its commands."""

from __future__ import annotations

import click

from fireflyer.cli.help_sections import OrderedGroup
from fireflyer.cli.reliability.ettr import ettr_command
from fireflyer.cli.reliability.importing import import_command
from fireflyer.cli.reliability.lemons import lemons_command
from fireflyer.cli.reliability.mttf import mttf_command
from fireflyer.cli.reliability.report import report_command
from fireflyer.cli.reliability.simulate import simulate_command
from fireflyer.cli.reliability.why import why_command

__all__ = ["command"]


@click.group(
    "reliability",
    cls=OrderedGroup,
    short_help="Failures of a cluster: rates, causes, lemon nodes, what they cost.",
    epilog="""\b
Examples:
  ff reliability mttf --gpus 1024 --gpus 16384         # how long until a job fails
  ff reliability ettr --gpus 12000 --stall 10s         # how much of its time it trains, and what 0.9 needs
  ff reliability import failures --sacct sacct.txt     # tables of jobs and of what nodes reported
  ff reliability report failures --html failures.html  # rates by symptom and size of job, goodput that was lost
  ff reliability lemons failures                       # nodes that fail far more often than the others
  ff reliability why 4711 --from failures              # what job 4711 failed of""",
)
def command() -> None:
    """Plan for failures, and learn from those that were: from kernel logs, journals, health events, event logs of runs
    and Slurm's accounting."""


for one in (mttf_command, ettr_command, import_command, report_command, lemons_command, why_command, simulate_command):
    command.add_command(one)

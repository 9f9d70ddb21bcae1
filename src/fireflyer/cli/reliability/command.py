"""`ff reliability`: the group of its commands."""

from __future__ import annotations

import click

from fireflyer.cli.reliability.ettr import ettr_command
from fireflyer.cli.reliability.mttf import mttf_command

__all__ = ["command"]


@click.group(
    "reliability",
    short_help="Failures of a cluster: rates, causes, lemon nodes, what they cost.",
    epilog="""\b
Examples:
  ff reliability mttf --gpus 1024 --gpus 16384         how long until a job fails
  ff reliability ettr --gpus 12000 --stall 10s         how much of its time it trains, and what 0.9 needs""",
)
def command() -> None:
    """Plan for failures, and learn from those that were: from kernel logs, journals, health events, event logs of runs
    and Slurm's accounting."""


for one in (mttf_command, ettr_command):
    command.add_command(one)

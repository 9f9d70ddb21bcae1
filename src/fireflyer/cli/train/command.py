"""`ff train`: the group of its commands."""

from __future__ import annotations

import click

from fireflyer.cli.train.plan import plan_command
from fireflyer.cli.train.schedule import schedule_command

__all__ = ["command"]


@click.group(
    "train",
    short_help="Plan parallel training: degrees, memory, traffic, pipeline schedules.",
    epilog="""\b
Examples:
  ff train plan plan.toml --nodes 8 --node pcie-a100                 memory, traffic and time of a plan
  ff train plan plan.toml --nodes 8 --node pcie-a100 --search        rank all plans that fit
  ff train schedule --stages 8 --micro-batches 32                    every pipeline schedule in a table
  ff train schedule zbv --stages 4 --micro-batches 8 --svg zbv.svg   a picture of one""",
)
def command() -> None:
    """Plan parallel training before it runs. Nothing is started, and no GPU is needed."""


command.add_command(plan_command)
command.add_command(schedule_command)

"""`ff train`: the group of its commands."""

from __future__ import annotations

import click

from fireflyer.cli.train.plan import plan_command

__all__ = ["command"]


@click.group(
    "train",
    short_help="Plan parallel training: degrees, memory, traffic, time per step.",
    epilog="""\b
Examples:
  ff train plan plan.toml --nodes 8 --node pcie-a100             check a plan without a GPU
  ff train plan plan.toml --nodes 8 --node pcie-a100 --search    rank all plans that fit""",
)
def command() -> None:
    """Plan parallel training before it runs. Nothing is started, and no GPU is needed."""


command.add_command(plan_command)

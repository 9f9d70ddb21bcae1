"""`ff train`: the group of its commands."""

from __future__ import annotations

import click

from fireflyer.cli.help_sections import OrderedGroup
from fireflyer.cli.train.compare import compare_command
from fireflyer.cli.train.plan import plan_command
from fireflyer.cli.train.run import run_command
from fireflyer.cli.train.schedule import schedule_command

__all__ = ["command"]


class _Commands(OrderedGroup):
    """`ff train recipe.toml` is `ff train run recipe.toml`: no command ends with .toml."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0].endswith(".toml"):
            return run_command.name, run_command, args
        return super().resolve_command(ctx, args)


@click.group(
    "train",
    cls=_Commands,
    short_help="Train from a recipe, compare techniques, plan parallel training.",
    epilog="""\b
Examples:
  ff train run recipe.toml --check                                  # what would run; nothing is started
  ff run --ranks-per-node 2 --no-python ff train recipe.toml        # train on two ranks
  ff train compare recipe.toml --dir comparison                     # [technique] against the rest of the recipe
  ff train plan plan.toml --nodes 8 --node pcie-a100                # memory, traffic and time of a plan
  ff train plan plan.toml --nodes 8 --node pcie-a100 --search       # rank all plans that fit
  ff train schedule --stages 8 --micro-batches 32                   # every pipeline schedule in a table
  ff train schedule zbv --stages 4 --micro-batches 8 --svg zbv.svg  # a picture of one""",
)
def command() -> None:
    """Train as a recipe says, and plan parallel training before it runs. `ff train FILE.toml` is `ff train run
    FILE.toml`."""


for _command in (run_command, compare_command, plan_command, schedule_command):
    command.add_command(_command)

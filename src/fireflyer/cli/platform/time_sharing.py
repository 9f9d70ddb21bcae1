"""`ff time-sharing`: when tasks interrupt each other, and which of those that wait come first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fireflyer.base.errors import UsageError
from fireflyer.base.units import format_duration
from fireflyer.cli.platform.connect import platform_option

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.core.scheduler.model import Policy

__all__ = ["command"]

_AS_IT_IS = "[default: as it is]"


@click.command("time-sharing", short_help="Show or set when tasks interrupt each other.", epilog="""\b
Examples:
  ff time-sharing                  # what is set
  ff time-sharing --guarantee 30m  # no run is interrupted before""")  # fmt: skip
@click.option("--guarantee", metavar="TIME", help=f"How long a run is not interrupted; 0s: not at all.  {_AS_IT_IS}")
@click.option("--age-step", metavar="TIME", help=f"Who has waited for so long counts one priority higher.  {_AS_IT_IS}")
@click.option("--gang-age", metavar="TIME", help=f"So much older counts a gang of twice as many nodes.  {_AS_IT_IS}")
@click.option("--usage-margin", metavar="X", type=click.FloatRange(0, 1e9), help="A user interrupts one whose usage "
              f"over share is so many times their own.  {_AS_IT_IS}")  # fmt: skip
@click.option("--usage-half-life", metavar="TIME", help=f"After so long, what was used counts half.  {_AS_IT_IS}")
@click.option("--cross-zone-nodes", metavar="N", type=click.IntRange(0, 1 << 20),
              help=f"Tasks of fewer nodes never run in two zones.  {_AS_IT_IS}")  # fmt: skip
@click.option("--cross-zone-tasks", metavar="N", type=click.IntRange(0, 1 << 20),
              help=f"So many tasks at a time run in two zones.  {_AS_IT_IS}")  # fmt: skip
@platform_option
def command(*, client: Client, **given: str | float | None) -> int:
    """Show how nodes are shared over time, or set it (operators): the settings of `[time_sharing]` in a file of `ff
    up`. Times are written like 90s, 30m or 2h. It counts at once, also for tasks that wait or run."""
    from fireflyer.cluster.core.platform.commands import SetPolicy
    from fireflyer.cluster.local.config import TimeSharing

    try:
        wanted = TimeSharing(**given)  # type: ignore[arg-type]
    except UsageError as error:
        name, *_ = error.message.replace(":", " ").split()
        raise UsageError(f"--{name.replace('_', '-')}{error.message.removeprefix(name)}") from None
    config = client.cluster().config
    policy, guaranteed_ns = wanted.changed(config.policy, config.guaranteed_ns)
    if (policy, guaranteed_ns) != (config.policy, config.guaranteed_ns):
        client.command(SetPolicy(policy=policy, guaranteed_ns=guaranteed_ns))
    click.echo(_described(policy, guaranteed_ns))
    return 0


def _described(policy: Policy, guaranteed_ns: int) -> str:
    shown = {
        "guarantee": format_duration(guaranteed_ns),
        "age-step": format_duration(policy.age_step_ns),
        "gang-age": format_duration(policy.gang_age_ns),
        "usage-margin": f"{policy.usage_margin:g}",
        "usage-half-life": format_duration(policy.usage_half_life_ns),
        "cross-zone-nodes": str(policy.cross_zone_nodes),
        "cross-zone-tasks": str(policy.cross_zone_tasks),
    }
    return "\n".join(f"{name:16}  {value}" for name, value in shown.items())

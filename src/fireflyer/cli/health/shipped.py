"""`ff health rules` and `ff health dashboard`: what Prometheus and Grafana read."""

from __future__ import annotations

from importlib.resources import files

import click

__all__ = ["dashboard_command", "rules_command", "shipped"]


def shipped(name: str) -> str:
    """A file of the directory `monitoring`."""
    return (files("fireflyer.cli.health") / "monitoring" / name).read_text(encoding="utf-8")


@click.command(
    "rules",
    short_help="Alert rules for Prometheus.",
    epilog="""\b
Example:
  ff health rules >/etc/prometheus/rules/fireflyer.yml""",
)
def rules_command() -> int:
    """Print alert rules: no leader, lost nodes, a breaker that holds, repairs that wait; faults, old rounds, hot GPUs
    and Xids of nodes. docs/how-to/metrics.md says what they are computed from."""
    click.echo(shipped("alerts.yml"), nl=False)
    return 0


@click.command(
    "dashboard",
    short_help="A dashboard for Grafana.",
    epilog="""\b
Example:
  ff health dashboard >fireflyer.json""",
)
def dashboard_command() -> int:
    """Print a dashboard as JSON, for Grafana's import: health of nodes, repairs, tasks, and checks."""
    click.echo(shipped("dashboard.json"), nl=False)
    return 0

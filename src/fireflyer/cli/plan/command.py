"""`ff plan`: the group of its commands."""

from __future__ import annotations

import click

from fireflyer.cli.help_sections import OrderedGroup
from fireflyer.cli.plan.cluster import cluster_command
from fireflyer.cli.plan.compare import compare_command
from fireflyer.cli.plan.figure import figure_command
from fireflyer.cli.plan.model import model_command
from fireflyer.cli.plan.network import network_command
from fireflyer.cli.plan.node import node_command

__all__ = ["command"]


@click.group(
    "plan",
    cls=OrderedGroup,
    short_help="Plan a cluster: networks, what they cost, what a model needs.",
    epilog="""\b
Examples:
  ff plan cluster cluster.toml                       # time, failures, storage and cost of a run on a cluster
  ff plan network fire-flyer-2                       # switches, links, distances and cuts of a network
  ff plan network network.toml --prices prices.toml  # what it costs to buy, to power and to run
  ff plan compare v3-two-layer v3-multi-plane        # networks beside each other
  ff plan node pcie-a100                             # what limits an allreduce inside a node
  ff plan model config.json                          # parameters, FLOPs, KV cache and decoding of a model
  ff plan figure v3-table-3                          # a published table beside what we compute""",
)
def command() -> None:
    """Plan a cluster before anything is bought. Nothing is started, and no GPU is needed."""


for one in (cluster_command, network_command, compare_command, node_command, model_command, figure_command):
    command.add_command(one)

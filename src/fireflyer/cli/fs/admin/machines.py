"""`ff fs admin register-node`, `add-chains`, `retire-node`: clusters of several machines, made by hand."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import click

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.cli.fs.connect import ClusterTarget, ask_all, expect, routing, where_options
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from fireflyer.fs.schema.manager import Request

__all__ = ["add_chains_command", "register_node_command", "retire_node_command"]

MAX_ID = (1 << 63) - 1
MAX_NODE = (1 << 32) - 1


@click.command(
    "register-node",
    short_help="Let a storage process on another machine join.",
    epilog="Example: ff fs admin register-node --node 4 --target 4001 --target 4002",
)
@where_options
@click.option("--node", metavar="ID", type=WholeNumber(1, MAX_NODE), required=True, help="Id of the node in its file.")
@click.option(
    "--target",
    "targets",
    metavar="ID",
    multiple=True,
    type=WholeNumber(1, MAX_ID),
    required=True,
    help="Id of a target in its file, an empty directory; repeatable.",
)
def register_node_command(*, where: ClusterTarget, node: int, targets: tuple[int, ...]) -> int:
    """Let the storage process of a new node join the cluster, with these targets. Ids are those in the configuration
    file of the process. Then start the process, and run `ff fs admin add-chains` (new cluster) or `ff fs admin
    rebalance` to use its targets."""
    from fireflyer.fs.schema.manager import AddNode, AddTargets, GetStatus, Status

    status = expect(ask_all(where, [GetStatus()])[0], Status)
    for one in status.targets:  # before the node is added, which would stay without targets
        if one.id in targets and one.node != node:
            raise UsageError(f"target {one.id} belongs to node {one.node} already; give another id")
    return _do(where, [AddNode(node), AddTargets(node, targets)])


@click.command(
    "add-chains", short_help="Make chains of new targets.", epilog="Example: ff fs admin add-chains --replicas 3"
)
@where_options
@click.option(
    "--replicas", metavar="K", type=WholeNumber(1, 8), default=2, show_default=True, help="Targets per chain."
)
@click.option(
    "--table", "table_id", metavar="ID", type=WholeNumber(1), default=1, show_default=True, help="Id of the new table."
)
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="The same seed, the same table.")
def add_chains_command(*, where: ClusterTarget, replicas: int, table_id: int, seed: int) -> int:
    """Make chains of all targets that were never in a chain, and a chain table of these chains, such that the load of a
    failed node spreads evenly over the others. Their storage processes must be running."""
    from fireflyer.fs.core.manager.move_plan import chains_of_new_targets
    from fireflyer.fs.schema.manager import MAX_PER_REQUEST, AddChains, AddTable, GetRouting, GetStatus, Status

    answers = ask_all(where, [GetStatus(), GetRouting()])
    known = routing(answers[1])
    if any(table.id == table_id for table in known.tables):
        raise UsageError(
            f"chain table {table_id} exists already, and tables cannot be changed; give another id with --table"
        )
    status = expect(answers[0], Status)
    silent = {node.id for node in status.nodes if not node.alive}
    missing = sorted(silent & {one.node for one in status.targets if not one.used and not one.unwanted})
    if missing:
        raise UsageError(
            f"node {missing[0]} has new targets and is not alive; start its storage process first, or leave it out: "
            f"ff fs admin drain --node {missing[0]}"
        )
    chains = chains_of_new_targets(status, replicas, seed=seed)
    batches = [chains[at : at + MAX_PER_REQUEST] for at in range(0, len(chains), MAX_PER_REQUEST)]
    return _do(where, [*map(AddChains, batches), AddTable(table_id, tuple(chain.id for chain in chains))])


@click.command("retire-node", short_help="Remove an empty node.", epilog="Example: ff fs admin retire-node 2")
@where_options
@click.argument("node", metavar="NODE", type=WholeNumber(1, MAX_NODE))
def retire_node_command(*, where: ClusterTarget, node: int) -> int:
    """Remove node NODE and its targets from the cluster. They must be in no chain: run `ff fs admin drain --node NODE`
    and `ff fs admin rebalance --wait SECONDS` first. If `ff fs up` runs its process, that is stopped. Its directories
    stay and may be deleted."""
    from fireflyer.fs.schema.manager import GetStatus, RetireNode, RetireTargets, Status
    from fireflyer.fs.service.local.layout import Layout, without_node
    from fireflyer.runtime.processes.run_lock import signal_holder

    status = expect(ask_all(where, [GetStatus()])[0], Status)
    if all(one.id != node for one in status.nodes):
        raise NotFound(f"there is no node {node}; `ff fs status` lists the nodes")
    targets = tuple(one.id for one in status.targets if one.node == node)
    code = _do(where, [RetireTargets(targets), RetireNode(node)])
    if where.directory:
        layout = Layout(where.directory)
        layout.save(without_node(layout.load(), node))
        signal_holder(layout.lock_file, signal.SIGHUP)
    return code


def _do(where: ClusterTarget, requests: list[Request]) -> int:
    from fireflyer.fs.schema.manager import Done

    for answer in ask_all(where, requests):
        click.echo(f"{expect(answer, Done).note}.")
    return 0

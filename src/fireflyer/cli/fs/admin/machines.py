"""`ff fs admin register-node`, `add-chains`, `retire-node`: clusters of several machines, made by hand."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import click

from fireflyer.base.errors import UsageError
from fireflyer.cli.fs.connect import ClusterTarget, ask_all, expect, routing, where_options
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from fireflyer.fs.schema.manager import Request

__all__ = ["add_chains_command", "issue_token_command", "register_node_command", "retire_node_command"]

MAX_ID = (1 << 63) - 1
MAX_NODE = (1 << 32) - 1


@click.command("register-node", short_help="Let a storage process of another machine register.")
@where_options
@click.option("--node", metavar="ID", type=WholeNumber(1, MAX_NODE), required=True, help="As its file says.")
@click.option(
    "--target",
    "targets",
    metavar="ID",
    multiple=True,
    type=WholeNumber(1, MAX_ID),
    required=True,
    help="Of its empty directories; repeatable.",
)
def register_node_command(*, where: ClusterTarget, node: int, targets: tuple[int, ...]) -> int:
    """Let the storage process of node NODE register, with these targets. `add-chains` or `rebalance` uses them."""
    from fireflyer.fs.schema.manager import AddNode, AddTargets

    return _do(where, [AddNode(node), AddTargets(node, targets)])


@click.command("add-chains", short_help="Make chains of all targets that were in none yet.")
@where_options
@click.option("--replicas", metavar="K", type=WholeNumber(1, 8), default=2, show_default=True, help="Of each chunk.")
@click.option(
    "--table", "table_id", metavar="ID", type=WholeNumber(1), default=1, show_default=True, help="Its number."
)
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="The same seed, the same table.")
def add_chains_command(*, where: ClusterTarget, replicas: int, table_id: int, seed: int) -> int:
    """Make chains of all targets that were in no chain yet, and a chain table of them, such that the loss of a node
    spreads evenly. Their storage processes must run."""
    from fireflyer.fs.core.manager.move_plan import chains_of_new_targets
    from fireflyer.fs.schema.manager import MAX_PER_REQUEST, AddChains, AddTable, GetRouting, GetStatus, Status

    answers = ask_all(where, [GetStatus(), GetRouting()])
    known = routing(answers[1])
    if any(table.id == table_id for table in known.tables):
        raise UsageError(f"there is a chain table {table_id}; tables never change, give --table another number")
    status = expect(answers[0], Status)
    silent = {node.id for node in status.nodes if not node.alive}
    missing = sorted(silent & {one.node for one in status.targets if not one.used and not one.unwanted})
    if missing:
        raise UsageError(f"node {missing[0]} does not run, and has new targets; start it, drain or retire it first")
    chains = chains_of_new_targets(status, replicas, seed=seed)
    batches = [chains[at : at + MAX_PER_REQUEST] for at in range(0, len(chains), MAX_PER_REQUEST)]
    return _do(where, [*map(AddChains, batches), AddTable(table_id, tuple(chain.id for chain in chains))])


@click.command("retire-node", short_help="Forget a node whose targets are in no chain.")
@where_options
@click.argument("node", metavar="NODE", type=WholeNumber(1, MAX_NODE))
def retire_node_command(*, where: ClusterTarget, node: int) -> int:
    """Forget node NODE and its targets, which are in no chain any more: drain it and `rebalance` first. A process of
    `ff fs up` is ended; what is in its directories stays, and may be removed."""
    from fireflyer.fs.control.local_lock import signal_holder
    from fireflyer.fs.schema.manager import GetStatus, RetireNode, RetireTargets, Status
    from fireflyer.fs.service.local.layout import Layout, without_node

    status = expect(ask_all(where, [GetStatus()])[0], Status)
    targets = tuple(one.id for one in status.targets if one.node == node)
    code = _do(where, [RetireTargets(targets), RetireNode(node)])
    if where.directory:
        layout = Layout(where.directory)
        layout.save(without_node(layout.load(), node))
        signal_holder(layout.lock_file, signal.SIGHUP)
    return code


@click.command("issue-token", short_help="Make a token for a user.")
@click.option("--tokens-file", metavar="FILE", required=True, help="As the configurations name it; made if missing.")
@click.option("--days", metavar="N", type=WholeNumber(1, 36_500), help="How long it is good for.  [default: for ever]")
@click.argument("user", metavar="USER")
def issue_token_command(*, tokens_file: str, days: int | None, user: str) -> int:
    """Make a token for USER, who is made if there is none, and print it: it is shown this once. Copy FILE to all
    machines of the cluster; running processes notice."""
    from fireflyer.identity import TokenStore

    directory = os.path.dirname(os.path.abspath(tokens_file))
    if not os.path.isdir(directory):
        raise UsageError(f"--tokens-file {tokens_file!r}: there is no directory {directory}; make it first")
    store, now_s = TokenStore(tokens_file), int(time.time())
    if user not in store.users():
        store.create_user(user, now_s)
    click.echo(store.issue(user, now_s, lifetime_s=None if days is None else days * 86_400))
    return 0


def _do(where: ClusterTarget, requests: list[Request]) -> int:
    from fireflyer.fs.schema.manager import Done

    for answer in ask_all(where, requests):
        click.echo(f"{expect(answer, Done).note}.")
    return 0

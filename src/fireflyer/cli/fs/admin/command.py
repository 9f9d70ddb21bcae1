"""`ff fs admin`: what administrators ask of a cluster that runs."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import click

from fireflyer.base.errors import UsageError
from fireflyer.cli.fs.connect import CLUSTER_HELP, ClusterTarget, ask_one, directory_of, expect, where_options
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from fireflyer.fs.schema.manager import Request

__all__ = ["COMMANDS"]

MAX_ID = (1 << 63) - 1
MAX_NODE = (1 << 32) - 1


def _drain_options(function: click.decorators.FC) -> click.decorators.FC:
    target = click.option(
        "--target", "targets", metavar="ID", multiple=True, type=WholeNumber(1, MAX_ID), help="One target; repeatable."
    )
    node = click.option("--node", metavar="ID", type=WholeNumber(1, MAX_NODE), help="All targets of a node.")
    return node(target(function))


@click.command("drain", short_help="Empty targets, or a node's: others take their places first.")
@where_options
@_drain_options
@click.option("--now", is_flag=True, help="Lay down the roles at once: for a while, chains have a replica less.")
def drain_command(*, where: ClusterTarget, targets: tuple[int, ...], node: int | None, now: bool) -> int:
    """Let targets be emptied. They serve on until `rebalance` has put others in their places, one by one, so no chain
    has a replica less for it.

    With --now they lay down their roles at once, one of a chain at a time and never its last: to take a disk or machine
    out of use for a while. They stay in their chains, and `undrain` gives them their roles back."""
    return _drain(where, targets, node, drain=True, at_once=now)


@click.command("undrain", short_help="Let drained targets have roles again.")
@where_options
@_drain_options
def undrain_command(*, where: ClusterTarget, targets: tuple[int, ...], node: int | None) -> int:
    """Let drained targets have roles again: those that laid them down are synced and then serve."""
    return _drain(where, targets, node, drain=False, at_once=True)


def _drain(where: ClusterTarget, targets: tuple[int, ...], node: int | None, *, drain: bool, at_once: bool) -> int:
    from fireflyer.fs.schema.manager import Drain

    if not targets and node is None:
        raise UsageError("nothing is named; give --target or --node")
    return _do(where, Drain(targets, node or 0, drain, at_once))


def _do(where: ClusterTarget, request: Request) -> int:
    from fireflyer.fs.schema.manager import Done

    click.echo(f"{expect(ask_one(where, request), Done).note}.")
    return 0


@click.command("override", short_help="Let a target serve although it may lack updates.")
@where_options
@click.option("--chain", metavar="ID", type=WholeNumber(1, MAX_NODE), required=True, help="That nobody serves.")
@click.option("--target", metavar="ID", type=WholeNumber(1, MAX_ID), required=True, help="That shall serve it.")
@click.option("--confirm", metavar="VERSION", type=WholeNumber(1), help="As the warning names it.")
def override_command(*, where: ClusterTarget, chain: int, target: int, confirm: int | None) -> int:
    """Let TARGET serve a chain that nobody serves, although it may lack updates that were acknowledged. Without
    --confirm it only says what may be lost."""
    from fireflyer.fs.schema.manager import Override, OverrideWarning

    answer = ask_one(where, Override(chain, target, confirm or 0))
    if isinstance(answer, OverrideWarning):
        click.echo(f"warning: {answer.warning}", err=True)
        click.echo(f"Nothing was changed. To do it: add --confirm {answer.confirm}", err=True)
        return 1
    return _say(answer)


def _say(answer: object) -> int:
    from fireflyer.fs.schema.manager import Done

    click.echo(f"{expect(answer, Done).note}.")
    return 0


@click.command("sessions", short_help="List the sessions of clients.")
@where_options
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def sessions_command(*, where: ClusterTarget, as_json: bool) -> int:
    """List the sessions of clients: whose they are, and when they were heard."""
    import msgspec

    from fireflyer.base.units import counted, format_duration
    from fireflyer.fs.schema.sessions import GetSessions, SessionList

    sessions = expect(ask_one(where, GetSessions()), SessionList).sessions
    if as_json:
        click.echo(msgspec.json.encode(sessions).decode())
        return 0
    for one in sessions:
        user = one.user or "(a service)"
        click.echo(f"client {one.client:<6} {user:<16} heard {format_duration(max(0, one.silent_ns))} ago  {one.name}")
    click.echo(f"{counted(len(sessions), 'session')}." if sessions else "No sessions.")
    return 0


@click.command("end-session", short_help="End the session of a client.")
@where_options
@click.argument("client", metavar="CLIENT", type=WholeNumber(1, MAX_ID))
def end_session_command(*, where: ClusterTarget, client: int) -> int:
    """End the session of CLIENT: nothing of it is done any more, whatever it has asked for."""
    from fireflyer.fs.schema.sessions import EndSession

    return _do(where, EndSession(client))


@click.command("rotate-keys", short_help="Sign the rights of clients with a new key.")
@where_options
@click.option("--revoke", is_flag=True, help="What was signed so far counts no more; clients ask for it again.")
def rotate_keys_command(*, where: ClusterTarget, revoke: bool) -> int:
    """Sign capabilities, the rights of clients to files, with a new key. The old one is valid until all that it has
    signed have expired, so nobody notices; with --revoke it is not, and clients ask for their rights again."""
    from fireflyer.fs.schema.manager import RotateKeys

    return _do(where, RotateKeys(revoke))


@click.command("add-node", short_help="Add a node to a cluster of `ff fs up`.")
@click.option("--dir", "directory", metavar="DIR", help=CLUSTER_HELP)
@click.option("--targets", metavar="N", type=WholeNumber(1, 256), help="Its targets.  [default: as the first node's]")
def add_node_command(*, directory: str | None, targets: int | None) -> int:
    """Add a node with empty targets to the cluster in DIR, which runs. `rebalance` moves a share of the chunks there.

    A node on another machine is added with its own configuration file: see docs/how-to/chunk-store.md.
    """
    from fireflyer.base.units import counted
    from fireflyer.cli.fs.connect import ask_all, local
    from fireflyer.fs.control.local_lock import signal_holder
    from fireflyer.fs.schema.manager import AddNode, AddTargets
    from fireflyer.fs.service.local.layout import Layout, with_new_node

    layout = Layout(directory_of(directory))
    cluster, node = with_new_node(layout.load(), targets)
    ask_all(local(layout.directory), [AddNode(node.id), AddTargets(node.id, node.targets)])
    layout.save(cluster)
    signal_holder(layout.lock_file, signal.SIGHUP)
    click.echo(
        f"Node {node.id} with {counted(len(node.targets), 'target')} is added and started; to use it: "
        f"ff fs admin rebalance --dir {os.path.relpath(layout.directory)}"
    )
    return 0


COMMANDS: tuple[click.Command, ...] = (
    add_node_command,
    drain_command,
    undrain_command,
    override_command,
    sessions_command,
    end_session_command,
    rotate_keys_command,
)

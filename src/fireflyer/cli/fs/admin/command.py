"""`ff fs admin`: drain, override, sessions, keys and new nodes of a running cluster."""

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

__all__ = [
    "add_node_command",
    "drain_command",
    "end_session_command",
    "override_command",
    "rotate_keys_command",
    "sessions_command",
    "undrain_command",
]

MAX_ID = (1 << 63) - 1
MAX_NODE = (1 << 32) - 1


def _drain_options(function: click.decorators.FC) -> click.decorators.FC:
    target = click.option(
        "--target",
        "targets",
        metavar="ID",
        multiple=True,
        type=WholeNumber(1, MAX_ID),
        help="Id of a target; repeatable.",
    )
    node = click.option("--node", metavar="ID", type=WholeNumber(1, MAX_NODE), help="Id of a node: all of its targets.")
    return node(target(function))


@click.command(
    "drain", short_help="Take targets, or all of a node, out of use.", epilog="Example: ff fs admin drain --node 2"
)
@where_options
@_drain_options
@click.option("--now", is_flag=True, help="Stop serving at once; until `undrain`, the chains have one replica less.")
def drain_command(*, where: ClusterTarget, targets: tuple[int, ...], node: int | None, now: bool) -> int:
    """Mark targets as draining. They serve until `ff fs admin rebalance` has moved their chains to other targets, one
    by one: no chain has fewer replicas meanwhile.

    With --now they stop serving at once, to take a disk or machine out of use for a short time. They stay in their
    chains, and `undrain` lets them serve again. The last serving target of a chain is never stopped."""
    return _drain(where, targets, node, drain=True, at_once=now)


@click.command("undrain", short_help="Use drained targets again.", epilog="Example: ff fs admin undrain --node 2")
@where_options
@_drain_options
def undrain_command(*, where: ClusterTarget, targets: tuple[int, ...], node: int | None) -> int:
    """Use drained targets again. Those that were drained with --now are synced first and then serve."""
    return _drain(where, targets, node, drain=False, at_once=True)


def _drain(where: ClusterTarget, targets: tuple[int, ...], node: int | None, *, drain: bool, at_once: bool) -> int:
    from fireflyer.fs.schema.manager import Drain

    if not targets and node is None:
        raise UsageError("no target is named; give --target ID or --node ID (`ff fs status --all` lists them)")
    return _do(where, Drain(targets, node or 0, drain, at_once))


def _do(where: ClusterTarget, request: Request) -> int:
    from fireflyer.fs.schema.manager import Done

    click.echo(f"{expect(ask_one(where, request), Done).note}.")
    return 0


@click.command(
    "override",
    short_help="Force a possibly stale replica to serve.",
    epilog="Example: ff fs admin override --chain 7 --target 2003",
)
@where_options
@click.option("--chain", metavar="ID", type=WholeNumber(1, MAX_NODE), required=True, help="Id of an unavailable chain.")
@click.option(
    "--target", metavar="ID", type=WholeNumber(1, MAX_ID), required=True, help="Id of the target to serve it."
)
@click.option(
    "--confirm", metavar="VERSION", type=WholeNumber(1), help="Do it; VERSION is the number that the warning shows."
)
def override_command(*, where: ClusterTarget, chain: int, target: int, confirm: int | None) -> int:
    """Force a possibly stale replica to serve a chain that is unavailable. Recent writes may be lost.

    Without --confirm nothing is changed: the command prints what may be lost, and exits with 1."""
    from fireflyer.fs.schema.manager import Override, OverrideWarning

    answer = ask_one(where, Override(chain, target, confirm or 0))
    if isinstance(answer, OverrideWarning):
        click.echo(f"warning: {answer.warning}", err=True)
        click.echo(f"Nothing was changed. To do it, run the command again with --confirm {answer.confirm}", err=True)
        return 1
    return _say(answer)


def _say(answer: object) -> int:
    from fireflyer.fs.schema.manager import Done

    click.echo(f"{expect(answer, Done).note}.")
    return 0


@click.command("sessions", short_help="List connected clients.", epilog="Example: ff fs admin sessions --dir fs")
@where_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def sessions_command(*, where: ClusterTarget, as_json: bool) -> int:
    """List the client sessions of the cluster: number, user, time since the last heartbeat, host and process."""
    import msgspec

    from fireflyer.base.units import counted, format_duration
    from fireflyer.fs.schema.sessions import GetSessions, SessionList

    sessions = expect(ask_one(where, GetSessions()), SessionList).sessions
    if as_json:
        click.echo(msgspec.json.encode(sessions).decode())
        return 0
    for one in sessions:
        user = one.user or "(a service)"
        silent = format_duration(max(0, one.silent_ns))
        click.echo(f"client {one.client:<6} {user:<16} last heartbeat {silent} ago  {one.name}")
    click.echo(f"{counted(len(sessions), 'session')}." if sessions else "No sessions.")
    return 0


@click.command("end-session", short_help="Disconnect a client.", epilog="Example: ff fs admin end-session 17")
@where_options
@click.argument("client", metavar="CLIENT", type=WholeNumber(1, MAX_ID))
def end_session_command(*, where: ClusterTarget, client: int) -> int:
    """End the session of CLIENT, a number that `ff fs admin sessions` shows. Its requests are refused from then on, and
    its locks and open files are released."""
    from fireflyer.fs.schema.sessions import EndSession

    return _do(where, EndSession(client))


@click.command(
    "rotate-keys", short_help="Sign capabilities with a new key.", epilog="Example: ff fs admin rotate-keys --dir fs"
)
@where_options
@click.option("--revoke", is_flag=True, help="Make all capabilities that were signed so far invalid at once.")
def rotate_keys_command(*, where: ClusterTarget, revoke: bool) -> int:
    """Sign capabilities, the permissions of clients to read or write chunks of files, with a new key. The old key stays
    valid until the capabilities that it signed have expired, so clients are not interrupted. With --revoke it does not,
    and clients get new capabilities."""
    from fireflyer.fs.schema.manager import RotateKeys

    return _do(where, RotateKeys(revoke))


@click.command(
    "add-node",
    short_help="Add a node to a cluster of `ff fs up`.",
    epilog="Example: ff fs admin add-node --dir fs --targets 4",
)
@click.option("--dir", "directory", metavar="DIR", help=CLUSTER_HELP)
@click.option(
    "--targets",
    metavar="N",
    type=WholeNumber(1, 256),
    help="Number of targets of the new node.  [default: as many as the first node has]",
)
def add_node_command(*, directory: str | None, targets: int | None) -> int:
    """Add a node with empty targets to the running cluster in DIR. Then `ff fs admin rebalance` moves a share of the
    chains to it.

    For a node on another machine use `ff fs admin register-node`; see docs/how-to/chunk-store.md.
    """
    from fireflyer.base.units import counted
    from fireflyer.cli.fs.connect import ask_all, local
    from fireflyer.fs.schema.manager import AddNode, AddTargets
    from fireflyer.fs.service.local.layout import Layout, with_new_node
    from fireflyer.runtime.processes.run_lock import signal_holder

    layout = Layout(directory_of(directory))
    cluster, node = with_new_node(layout.load(), targets)
    ask_all(local(layout.directory), [AddNode(node.id), AddTargets(node.id, node.targets)])
    layout.save(cluster)
    signal_holder(layout.lock_file, signal.SIGHUP)
    click.echo(
        f"Node {node.id} with {counted(len(node.targets), 'target')} is added and started. To move chains to it: ff "
        f"fs admin rebalance --dir {os.path.relpath(layout.directory)}"
    )
    return 0

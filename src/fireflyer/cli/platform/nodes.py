"""`ff nodes`, `ff node`: the nodes of the platform, and what runs that failed say of them."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

import click
import msgspec

from fireflyer.base.decoding import convert
from fireflyer.base.errors import UsageError
from fireflyer.base.units import GIB, SECOND, format_duration
from fireflyer.cli.help_sections import OrderedGroup
from fireflyer.cli.jobs.hosts import columns
from fireflyer.cli.numbers import Duration
from fireflyer.cli.platform.connect import clock, plain, platform_option
from fireflyer.cli.platform.names import checked_name

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.core.health.records import RepairTicket
    from fireflyer.cluster.core.platform.commands import Command
    from fireflyer.cluster.core.platform.views import NodeView

__all__ = ["REMEDIES", "node_command", "nodes_command", "ticket_lines"]

MAX_REASON: Final = 400
_IN_SERVICE: Final = ("healthy", "probation", "returned")
REMEDIES: Final = ("test", "reset", "reboot", "field-diagnosis", "rma")


@click.command("nodes", short_help="List nodes.", epilog="""\b
Examples:
  ff nodes         # a line for each node
  ff nodes --tree  # by zone and leaf switch""")  # fmt: skip
@click.option("--tree", is_flag=True, help="By zone and leaf switch.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each node.")
@platform_option
def nodes_command(*, client: Client, tree: bool, as_json: bool) -> int:
    """List the nodes, what each does, and how many runs that failed accuse it (`ff node show` has them)."""
    nodes = list(client.all_nodes())
    if as_json:
        for node in nodes:
            click.echo(msgspec.json.encode(node))
        return 0
    if tree:
        click.echo(_tree(nodes))
        return 0
    rows = [("NODE", "GROUP", "ZONE", "LEAF", "STATE", "TASK", "CORES", "MEMORY", "GPUS", "HEARD", "ACCUSED", "LABELS")]
    for node in nodes:
        found = node.inventory
        rows.append(
            (
                node.name,
                node.group,
                node.zone or "-",
                node.leaf or "-",
                _state(node),
                "-" if node.task is None else str(node.task),
                "-" if found is None else str(found.cores),
                "-" if found is None else f"{found.memory_bytes / GIB:.0f} GiB",
                "-" if found is None else str(len(found.gpus)),
                "never" if node.silent_ns is None else f"{format_duration(node.silent_ns)} ago",
                _accused(node),
                " ".join(node.labels),
            )
        )
    click.echo(columns(rows))
    return 0


def _state(node: NodeView) -> str:
    """With why it is drained, by people and by its checks, what these warn of, and what is reserved now or next."""
    reasons = [node.drain_reason] if node.drain_reason else []
    if node.health is not None and node.health.state not in _IN_SERVICE:
        reasons.append(f"{node.health.state}: {node.health.reason}")
    elif node.health is not None and node.health.warnings:
        more = len(node.health.warnings) - 1
        reasons.append(f"warning: {node.health.warnings[0]}" + (f"; and {more} more" if more else ""))
    drained = f": {plain('; '.join(reasons), 100)}" if reasons else ""
    return f"{node.state}{drained}{_reserved(node)}"


def _accused(node: NodeView) -> str:
    """By how many runs, of how many users, since when."""
    found = node.accused
    if found is None:
        return "-"
    runs = f"{found.runs} run{'s' * (found.runs != 1)}"
    return f"{runs} of {found.users} user{'s' * (found.users != 1)} since {clock(found.since_ns)}"


def _reserved(node: NodeView) -> str:
    if not node.reserved:
        return ""
    first = node.reserved[0]
    what = "maintenance" if first.maintenance else "reserved"
    now_ns = time.time_ns()
    when = f"until {clock(first.until_ns)}" if first.begin_ns <= now_ns else f"from {clock(first.begin_ns)}"
    more = f" and {len(node.reserved) - 1} more" if len(node.reserved) > 1 else ""
    return f" ({what} {plain(first.name, 40)} {when}{more})"


def _tree(nodes: list[NodeView]) -> str:
    lines = []
    place: tuple[str, str] = ("\0", "\0")
    for node in sorted(nodes, key=lambda node: (node.zone, node.leaf, node.name)):
        if node.zone != place[0]:
            lines.append(f"zone {node.zone or '-'}")
        if (node.zone, node.leaf) != place:
            lines.append(f"  leaf {node.leaf or '-'}")
        place = (node.zone, node.leaf)
        task = "" if node.task is None else f" task {node.task}"
        lines.append(f"    {node.name} {_state(node)}{task}")
    return "\n".join(lines)


@click.group("node", cls=OrderedGroup,
             short_help="Show, drain, resume, repair, return, label, move, add, revoke or remove a node.", epilog="""\b
Examples:
  ff node show gpu-7                                        # why it is out, and its repairs
  ff node drain gpu-7 "fan 3 is loud"                       # nothing new starts there; a run that has it goes on
  ff node resume gpu-7                                      # tasks get it again
  ff node token gpu-8 | ssh gpu-8 ff agent join head:9441   # a machine joins""")  # fmt: skip
def node_command() -> None:
    """What operators do with one node."""


@node_command.command("show", short_help="Show a node, and what accuses it.", epilog="Example: ff node show gpu-7")
@click.argument("name", metavar="NODE")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@platform_option
def show_node_command(*, client: Client, name: str, as_json: bool) -> int:
    """Show NODE, and the runs that failed by infrastructure and name it as responsible, since it was last resumed, as
    far as the manager remembers their tasks."""
    node = client.node(name)
    click.echo(msgspec.json.encode(node) if as_json else _shown(node))
    return 0


def _shown(node: NodeView) -> str:
    found = node.inventory
    facts = [
        ("node", plain(node.name)),
        ("state", _state(node)),
        ("stands", f"group {node.group}, zone {node.zone or '-'}, leaf {node.leaf or '-'}"),
        ("labels", " ".join(node.labels) or "-"),
        ("runs", "-" if node.task is None else f"task {node.task}, run {node.run}"),
        ("heard", "never" if node.silent_ns is None else f"{format_duration(node.silent_ns)} ago"),
    ]
    if found is not None:
        gpus = f", {len(found.gpus)} GPUs ({plain(found.gpus[0].name, 60)})" if found.gpus else ""
        facts.append(("has", f"{found.cores} cores, {found.memory_bytes / GIB:.0f} GiB{gpus}"))
        facts.append(("agent", f"{plain(found.version, 40)} at {plain(found.address, 80)}:{found.port}"))
    facts += _health(node)
    facts.append(("accused", "-" if node.accused is None else f"by {_accused(node)}"))
    ticket = node.health.ticket if node.health is not None else None
    lines = [f"{what:<8} {text}" for what, text in facts]
    rows = [
        ("ENDED", "TASK", "RUN", "USER", "SAYS"),
        *(
            (clock(one.at_ns), str(one.task), str(one.run), plain(one.user, 80), plain(one.reason, 120))
            for one in node.accusations
        ),
    ]
    return "\n".join([*lines, *ticket_lines(ticket), *([columns(rows)] if node.accusations else [])])


def _health(node: NodeView) -> list[tuple[str, str]]:
    found = node.health
    if found is None:
        return []
    words = f"{found.state} since {clock(found.since_ns)}" + (f": {plain(found.reason, 400)}" if found.reason else "")
    facts = [("health", words)]
    facts += [("warning", plain(one, 400)) for one in found.warnings]
    if found.until_ns is not None:
        facts.append(("until", f"{clock(found.until_ns)} at least"))
    if found.hold != "none":
        facts.append(("held", f"by {found.hold}" if found.hold in ("breaker", "leaf") else found.hold))
    if found.faults:
        facts.append(("part", f"{found.faults} fault{'s' * (found.faults != 1)} of it are remembered"))
    return facts


def ticket_lines(ticket: RepairTicket | None) -> list[str]:
    """What was done, and by whom."""
    if ticket is None:
        return []
    fault = ticket.fault
    part = (
        " ".join(word for word in (fault.part, f"serial {fault.serial}" if fault.serial else "") if word) or "the node"
    )
    rows = [
        ("AT", "BY", "WHAT", "WORDS"),
        *((clock(one.at_ns), plain(one.by, 80), plain(one.what, 40), plain(one.words, 120)) for one in ticket.actions),
    ]
    return [f"{'ticket':<8} {ticket.id}, of {plain(part, 200)}, since {clock(ticket.opened_ns)}", columns(rows)]


@node_command.command("drain", short_help="Give a node to nobody any more.",
                      epilog='Example: ff node drain gpu-7 "fan 3 is loud"')  # fmt: skip
@click.argument("name", metavar="NODE")
@click.argument("reason", metavar="REASON")
@platform_option
def drain_command(*, client: Client, name: str, reason: str) -> int:
    """Start nothing new on NODE. A run that has it goes on."""
    from fireflyer.cluster.core.platform.commands import DrainNode

    if len(reason) > MAX_REASON:
        raise UsageError(f"REASON has {len(reason)} characters; {MAX_REASON} are allowed")
    return _say(client, convert({"type": "DrainNode", "node": name, "reason": reason}, DrainNode))


@node_command.command(
    "resume", short_help="Give a drained node to tasks again.", epilog="Example: ff node resume gpu-7"
)
@click.argument("name", metavar="NODE")
@platform_option
def resume_node_command(*, client: Client, name: str) -> int:
    """Give NODE to tasks again. What accused it before is no longer shown."""
    from fireflyer.cluster.core.platform.commands import ResumeNode

    return _say(client, ResumeNode(name))


@node_command.command("repair", short_help="Record what was done to a node that its checks took out.",
                      epilog='Example: ff node repair gpu-7 rma "GPU 3 replaced"')  # fmt: skip
@click.argument("name", metavar="NODE")
@click.argument("remedy", metavar="REMEDY", type=click.Choice(REMEDIES))
@click.argument("words", metavar="[WORDS]", default="")
@platform_option
def repair_command(*, client: Client, name: str, remedy: str, words: str) -> int:
    """Record a repair of NODE in its ticket: test (nothing was repaired), reset, reboot, field-diagnosis or rma (the
    part was replaced). The node is tested then, and returns by itself when all required checks pass."""
    from fireflyer.cluster.core.platform.commands import RecordRepair

    done = {"type": "RecordRepair", "node": name, "remedy": remedy.replace("-", " "), "words": _words(words)}
    return _say(client, convert(done, RecordRepair))


@node_command.command("return", short_help="Ask for the return of a node that its checks took out.",
                      epilog='Example: ff node return gpu-7 "the cable was loose"')  # fmt: skip
@click.argument("name", metavar="NODE")
@click.argument("words", metavar="[WORDS]", default="")
@platform_option
def return_command(*, client: Client, name: str, words: str) -> int:
    """Have NODE tested without a repair. It returns when all required checks pass, and not before."""
    from fireflyer.cluster.core.platform.commands import ReturnNode

    return _say(client, convert({"type": "ReturnNode", "node": name, "words": _words(words)}, ReturnNode))


def _words(words: str) -> str:
    if len(words) > MAX_REASON:
        raise UsageError(f"WORDS has {len(words)} characters; {MAX_REASON} are allowed")
    return words


@node_command.command("label", short_help="Set the labels of a node.", epilog="Example: ff node label gpu-7 a100 fast")
@click.argument("name", metavar="NODE")
@click.argument("labels", metavar="LABEL...", nargs=-1)
@platform_option
def label_command(*, client: Client, name: str, labels: tuple[str, ...]) -> int:
    """Set the labels of NODE, in the place of those that it has; without a LABEL it has none."""
    from fireflyer.cluster.core.platform.commands import LabelNode

    return _say(client, LabelNode(name, tuple(checked_name(label, "LABEL") for label in labels)))


@node_command.command("move", short_help="Say where a node stands.",
                      epilog="Example: ff node move gpu-7 --zone A --leaf 12 --group a100")  # fmt: skip
@click.argument("name", metavar="NODE")
@click.option("--zone", metavar="ZONE", help="Its zone of the network.  [default: as it is]")
@click.option("--leaf", metavar="LEAF", help="Its leaf switch.  [default: as it is]")
@click.option("--group", metavar="GROUP", help="The group of nodes to which it belongs.  [default: as it is]")
@platform_option
def move_command(*, client: Client, name: str, zone: str | None, leaf: str | None, group: str | None) -> int:
    """Say in which zone, at which leaf switch and in which group NODE is."""
    from fireflyer.cluster.core.platform.commands import MoveNode

    if zone is None and leaf is None and group is None:
        raise UsageError(f"say where node {plain(name, 40)} stands: give --zone, --leaf or --group")
    for option, value in (("--zone", zone), ("--leaf", leaf)):
        if value:  # an empty one: in none
            checked_name(value, option)
    if group is not None:
        checked_name(group, "--group")
    node = client.node(name)
    return _say(
        client,
        MoveNode(
            node=name,
            zone=node.zone if zone is None else zone,
            leaf=node.leaf if leaf is None else leaf,
            group=node.group if group is None else group,
        ),
    )


@node_command.command("revoke", short_help="Let a machine in no more.", epilog="Example: ff node revoke gpu-7")
@click.argument("name", metavar="NODE")
@platform_option
def revoke_command(*, client: Client, name: str) -> int:
    """Take the credential of the machine NODE back, and its join token: managers let its agent in no more, and its runs
    are stopped there after a while. The node stays listed until `ff node remove`. The machine can join again with a new
    token."""
    click.echo(plain(client.revoke_machine(name)))
    return 0


@node_command.command("remove", short_help="Forget a node.", epilog="Example: ff node remove gpu-7")
@click.argument("name", metavar="NODE")
@platform_option
def remove_command(*, client: Client, name: str) -> int:
    """Forget NODE, and take its credential back. It must be silent and have no run; else nothing is changed. `ff node
    revoke` takes the credential of a node that cannot be silenced."""
    from fireflyer.base.errors import NotFound
    from fireflyer.cluster.core.platform.commands import RemoveNode

    click.echo(plain(client.command(RemoveNode(name))))
    with contextlib.suppress(NotFound):  # revoked before
        client.revoke_machine(name)
    click.echo(f"machine {plain(name)} is let in no more; it can join again with a new token")
    return 0


@node_command.command("token", short_help="Make a token with which a machine joins.",
                      epilog="Example: ff node token gpu-7 | ssh gpu-7 ff agent join head:9441")  # fmt: skip
@click.option("--expires", metavar="TIME", type=Duration(), default=600 * SECOND,
              help="How long it is valid.  [default: 10m]")  # fmt: skip
@click.argument("name", metavar="NODE")
@platform_option
def token_command(*, client: Client, expires: int, name: str) -> int:
    """Print a join token for the machine NODE; it is valid once."""
    click.echo(client.join_token(name, lifetime_s=max(1, expires // SECOND)))
    return 0


def _say(client: Client, command: Command) -> int:
    click.echo(plain(client.command(command)))
    return 0
